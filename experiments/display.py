"""What a person sees while a policy trains."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import (
  BarColumn,
  MofNCompleteColumn,
  Progress,
  TextColumn,
  TimeElapsedColumn,
  TimeRemainingColumn,
)

from rollplex_jax.loop import Progress as TrainProgress

# What is worth a column, in this order, where the step reports it.
_SHOWN = (
    ("reward/success", "success", "{:.0%}"),
    ("critic/score/mean", "reward", "{:.3f}"),
    ("train/loss", "loss", "{:.3f}"),
    ("actor/entropy", "entropy", "{:.2f}"),
    ("actor/kl_loss", "KL", "{:.3f}"),
    ("response_length/mean", "length", "{:.1f}"),
    ("perf/throughput", "tokens/s", "{:,.0f}"),
)
_LINE_EVERY_S = 15.0


class TrainDisplay:
  """A live bar on a terminal; elsewhere a line now and then."""

  def __init__(self, title: str, total_steps: int):
    self._title = title
    self._last = time.perf_counter()
    self._bar = None
    if sys.stdout.isatty():
      self._bar = Progress(
          TextColumn("[bold]{task.description}"), BarColumn(bar_width=24),
          MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
          TextColumn("{task.fields[numbers]}"), console=Console())
      self._task = self._bar.add_task(title, total=total_steps, numbers="")

  def __enter__(self):
    if self._bar is not None:
      self._bar.start()
    return self

  def __exit__(self, *args):
    if self._bar is not None:
      self._bar.stop()

  def __call__(self, progress: TrainProgress) -> None:
    numbers = "  ".join(
        f"{label} {form.format(progress.metrics[name])}"
        for name, label, form in _SHOWN if name in progress.metrics)
    if self._bar is not None:
      self._bar.update(self._task, completed=progress.step, numbers=numbers)
    elif (time.perf_counter() - self._last > _LINE_EVERY_S
          or progress.step == progress.total_steps):
      self._last = time.perf_counter()
      print(f"{self._title} {progress.step}/{progress.total_steps}  {numbers}",
            flush=True)
