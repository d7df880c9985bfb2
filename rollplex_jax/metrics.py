"""Where a run's numbers go: JSON lines, TensorBoard, wandb, and samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import contextlib
import json
import math
import os
import pathlib
import time
from typing import Any

import jax

from rollplex_jax.errors import InputError

_OTHERS = ("skipped_updates.jsonl",)


class NoWriter:
  """What a process has that is not to write."""

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Writes nothing."""

  def write_samples(self, samples: Iterable[Mapping[str, Any]]) -> None:
    """Writes nothing."""

  def sizes(self) -> dict[str, int]:
    """Has no files."""
    return {}

  def close(self) -> None:
    """Closes nothing."""


class MetricsWriter(NoWriter):
  """Writes metrics.jsonl, samples.jsonl and, if asked, TensorBoard and wandb.

  Metric names follow verl's: timing_s/gen, actor/kl_loss, critic/score/mean,
  response_length/mean and so on. What was written is in the files at once; a
  file that can't be written is an OSError that names it.

  Attributes:
    wandb_id: of the run there, or empty.
  """

  def __init__(self, folder: str | os.PathLike, *, tensorboard: bool = True,
               wandb_project: str = "", config: Mapping[str, Any] | None = None,
               sizes: Mapping[str, int] | None = None, wandb_id: str = ""):
    """Opens the files in `folder`.

    Args:
      folder: of the run; made if it isn't there.
      tensorboard: write TensorBoard events too.
      wandb_project: log there too.
      config: of the run, for wandb.
      sizes: go on with files that are there, each cut back to what it was when
        `sizes` gave this; None for a folder that holds no metrics yet.
      wandb_id: of the run to go on with.

    Raises:
      InputError: if wandb is asked for and not installed, or a file is shorter
        than it was.
      FileExistsError: if there are metrics, and no sizes.
    """
    self.folder = pathlib.Path(folder)
    self._wandb = None
    if wandb_project:
      self._wandb = _start_wandb(wandb_project, config, wandb_id)
    self.wandb_id = str(self._wandb.id) if self._wandb else wandb_id
    self.folder.mkdir(parents=True, exist_ok=True)
    if sizes is not None:
      _cut_back(self.folder, sizes)
    mode = "xb" if sizes is None else "ab"
    self._metrics = _File(self.folder / "metrics.jsonl", mode)
    self._samples = _File(self.folder / "samples.jsonl", mode)
    self._board = None
    if tensorboard:
      self._board = _Board(self.folder / "tensorboard")

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Records scalars of one step."""
    values = {k: float(v) for k, v in values.items()}
    line = {"step": step, **{
        k: v if math.isfinite(v) else str(v) for k, v in values.items()}}
    self._metrics.write(json.dumps(line) + "\n")
    if self._board is not None:
      self._board.write(step, values)
    if self._wandb is not None:
      self._wandb.log(values, step=step)

  def write_samples(self, samples: Iterable[Mapping[str, Any]]) -> None:
    """Records completions, a JSON object per line."""
    self._samples.write("".join(json.dumps(s) + "\n" for s in samples))

  def sizes(self) -> dict[str, int]:
    """Bytes of each file now, by its path in the folder."""
    files = [self._metrics.path, self._samples.path]
    # What others write beside them.
    files += [path for path in map(self.folder.joinpath, _OTHERS)
              if path.exists()]
    if self._board is not None:
      files += self._board.folder.iterdir()
    return {str(path.relative_to(self.folder)): path.stat().st_size
            for path in sorted(files)}

  def close(self) -> None:
    self._metrics.close()
    self._samples.close()
    if self._board is not None:
      self._board.close()
    if self._wandb is not None:
      self._wandb.finish()


class _File:
  """A text file whose every write is whole or an error that names it."""

  def __init__(self, path: pathlib.Path, mode: str):
    self.path = path
    self._file = path.open(mode, buffering=0)

  def write(self, text: str) -> None:
    data = memoryview(text.encode())
    try:
      while data:
        data = data[self._file.write(data):]
    except OSError as error:
      raise OSError(error.errno, error.strerror, str(self.path)) from error

  def close(self) -> None:
    self._file.close()


class _Board:
  """TensorBoard events, written at once.

  The library's usual writer has a thread, in which an error ends the thread and
  then blocks the run.
  """

  def __init__(self, folder: pathlib.Path):
    # Slow to import.
    from tensorboardX import event_file_writer, summary
    from tensorboardX.proto import event_pb2

    self.folder = folder
    folder.mkdir(exist_ok=True)
    self._event, self._scalar = event_pb2.Event, summary.scalar
    with self._naming_errors():
      # Runs that go on within a second need files of different names.
      self._events = event_file_writer.EventsWriter(
          str(folder / "events"), f".{os.getpid()}.{time.monotonic_ns()}")
      self._events.flush()

  def write(self, step: int, values: Mapping[str, float]) -> None:
    with self._naming_errors():
      for name, value in values.items():
        self._events.write_event(self._event(
            wall_time=time.time(), step=step,
            summary=self._scalar(name, value)))
      self._events.flush()

  def close(self) -> None:
    with self._naming_errors():
      self._events.close()

  @contextlib.contextmanager
  def _naming_errors(self):
    try:
      yield
    except OSError as error:
      raise OSError(
          error.errno, error.strerror, str(self.folder)) from error


def _cut_back(folder: pathlib.Path, sizes: Mapping[str, int]) -> None:
  """Cuts files to the sizes that they had, and removes those made since."""
  for name, size in sizes.items():
    path = folder / name
    found = path.stat().st_size if path.exists() else 0
    if found < size:
      raise InputError(f"{path}: has {found} bytes, expected at least the "
                       f"{size} that it had at the checkpoint")
    os.truncate(path, size)
  for path in (*folder.glob("tensorboard/*"), *map(folder.joinpath, _OTHERS)):
    if path.exists() and str(path.relative_to(folder)) not in sizes:
      path.unlink()


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
  """Writes a JSON file whole or not at all; an OSError names it."""
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  work = path.with_name(f".{path.name}.{os.getpid()}")
  try:
    work.write_text(json.dumps(value, indent=2) + "\n")
    work.replace(path)
  except OSError as error:
    work.unlink(missing_ok=True)
    raise OSError(error.errno, error.strerror, str(path)) from error


def _start_wandb(project, config, run_id):
  try:
    import wandb
  except ImportError as e:
    raise InputError(
        "--wandb_project: wandb is not installed; pip install wandb") from e
  again = dict(id=run_id, resume="allow") if run_id else {}
  return wandb.init(project=project, config=config, **again)
