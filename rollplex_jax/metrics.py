"""Where a run's numbers go: JSON lines, TensorBoard, wandb, and samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import json
import math
import os
import pathlib
from typing import Any

import jax

from rollplex_jax.errors import InputError


class NoWriter:
  """What a process has that is not to write."""

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Writes nothing."""

  def write_samples(self, samples: Iterable[Mapping[str, Any]]) -> None:
    """Writes nothing."""

  def close(self) -> None:
    """Closes nothing."""


class MetricsWriter(NoWriter):
  """Writes metrics.jsonl, samples.jsonl and, if asked, TensorBoard and wandb.

  Metric names follow verl's: timing_s/gen, actor/kl_loss, critic/score/mean,
  response_length/mean and so on.
  """

  def __init__(self, folder: str | os.PathLike, *, tensorboard: bool = True,
               wandb_project: str = "", config: Mapping[str, Any] | None = None):
    """Opens the files in `folder`, which must not hold metrics yet.

    Raises:
      InputError: if wandb is asked for and not installed.
    """
    self.folder = pathlib.Path(folder)
    self._wandb = _start_wandb(wandb_project, config) if wandb_project else None
    self.folder.mkdir(parents=True, exist_ok=True)
    self._metrics = (self.folder / "metrics.jsonl").open("x")
    self._samples = (self.folder / "samples.jsonl").open("x")
    self._board = None
    if tensorboard:
      from tensorboardX import SummaryWriter  # Slow to import.
      self._board = SummaryWriter(str(self.folder / "tensorboard"))

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Records scalars of one step."""
    values = {k: float(v) for k, v in values.items()}
    line = {"step": step, **{
        k: v if math.isfinite(v) else str(v) for k, v in values.items()}}
    self._metrics.write(json.dumps(line) + "\n")
    self._metrics.flush()
    if self._board is not None:
      for name, value in values.items():
        self._board.add_scalar(name, value, step)
    if self._wandb is not None:
      self._wandb.log(values, step=step)

  def write_samples(self, samples: Iterable[Mapping[str, Any]]) -> None:
    """Records completions, a JSON object per line."""
    for sample in samples:
      self._samples.write(json.dumps(sample) + "\n")
    self._samples.flush()

  def close(self) -> None:
    self._metrics.close()
    self._samples.close()
    if self._board is not None:
      self._board.close()
    if self._wandb is not None:
      self._wandb.finish()


class CompileCounter:
  """Counts compilations and their time, over all programs of the process."""

  _EVENT = "/jax/core/compile/backend_compile_duration"

  def __init__(self):
    self.count = 0
    self.seconds = 0.0
    jax.monitoring.register_event_duration_secs_listener(self._listen)

  def _listen(self, event: str, duration: float, **_) -> None:
    if event == self._EVENT:
      self.count += 1
      self.seconds += duration

  def metrics(self) -> dict[str, float]:
    return {"compile/count": self.count, "compile/seconds": self.seconds}

  def close(self) -> None:
    jax.monitoring.unregister_event_duration_listener(self._listen)


def spread(name: str, values) -> dict[str, float]:
  """Mean, largest and smallest of a list of numbers under `name`."""
  values = [float(v) for v in values]
  return {f"{name}/mean": sum(values) / len(values),
          f"{name}/max": max(values), f"{name}/min": min(values)}


def mean_scores(scores: Sequence[Mapping[str, float]]) -> dict[str, float]:
  """Mean of each score over those completions that have it.

  A reward function may report different things about different rows.
  """
  values: dict[str, list[float]] = {}
  for score in scores:
    for name, value in score.items():
      values.setdefault(name, []).append(value)
  return {name: sum(v) / len(v) for name, v in values.items()}


def wilson_interval(successes: int, trials: int,
                    z: float = 1.96) -> tuple[float, float]:
  """95 % confidence interval of a success rate (Wilson's score interval)."""
  if trials < 1:
    raise ValueError(f"trials: expected at least 1, found {trials}")
  rate = successes / trials
  denominator = 1 + z * z / trials
  center = (rate + z * z / (2 * trials)) / denominator
  half = z / denominator * math.sqrt(
      rate * (1 - rate) / trials + z * z / (4 * trials * trials))
  return max(center - half, 0.0), min(center + half, 1.0)


def write_json(path: str | os.PathLike, value: Any) -> None:
  """Writes a JSON file whole or not at all."""
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  work = path.with_name(f".{path.name}.{os.getpid()}")
  work.write_text(json.dumps(value, indent=2) + "\n")
  work.replace(path)


def _start_wandb(project, config):
  try:
    import wandb
  except ImportError as e:
    raise InputError(
        "--wandb_project: wandb is not installed; pip install wandb") from e
  return wandb.init(project=project, config=config)
