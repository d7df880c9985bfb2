"""Checkpoints of a run: everything that it needs to go on.

    checkpoints = Checkpoints(folder)
    checkpoints.save(step, state, facts)       # Returns when state may change.
    ...
    found = checkpoints.read()                 # The newest, but for arrays.
    state = checkpoints.restore(found, like)

A checkpoint is a folder with the step's number as its name:

    params/     master weights            } orbax's format, written by all
    optimizer/  moments and counters      } processes, each its own parts
    run/        facts as JSON: format, tensors, and what the run adds
    files.json  bytes of each file, to know a copy that isn't whole

It appears under its name when it is whole. Arrays are read into the shardings
of whoever asks, whatever mesh or number of processes wrote them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
import dataclasses
import errno
import json
import os
import pathlib
import re
import shutil
import threading
from typing import Any

from absl import logging
import jax

from rollplex_jax.errors import InputError
from rollplex_jax.metrics import write_json
from rollplex_jax.placement import processes
from rollplex_jax.stages.update import TrainState

FORMAT = 1
_DIGITS = 6
_PARTS = ("params", "optimizer")
_FILES = "files.json"
# How orbax names a folder that it is writing, and we one that is to go.
_WRITING, _GOING = ".orbax-checkpoint-tmp", ".removed"


class CheckpointError(InputError):
  """A checkpoint could not be written; those before it are as they were."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """A checkpoint but for its arrays.

  Attributes:
    path: of its folder.
    step: steps that led to it.
    facts: what `save` was given.
    tensors: dtype and shape, such as "float32[2, 3]", by part and name.
  """

  path: pathlib.Path
  step: int
  facts: Mapping[str, Any]
  tensors: Mapping[str, Mapping[str, str]]


class Checkpoints:
  """The checkpoints in a folder. Of several processes all make all calls.

  Attributes:
    folder: made by the first save.
  """

  def __init__(self, folder: str | os.PathLike):
    self.folder = pathlib.Path(folder).absolute()
    self._saving: int | None = None
    self._writer = None
    self._lock = threading.Lock()
    self._left_over = False

  # -- writing ---------------------------------------------------------------

  def save(self, step: int, state: TrainState, facts: Mapping[str, Any], *,
           wait: bool = False) -> None:
    """Saves a state; what is there of the step already stays.

    Returns when the state may be donated or moved: a copy of it in host memory
    is written meanwhile. A save before it is waited for.

    Args:
      step: steps that led to the state.
      state: arrays, on devices or in pinned host memory.
      facts: JSON-able.
      wait: return when it is on the disk.

    Raises:
      CheckpointError: this save or the one before failed.
    """
    import orbax.checkpoint as ocp  # Not in runs that don't save.

    with self._lock:
      self._finish()
      self._clean_up()
      path = self._path(step)
      if path.exists():
        return
      parts = {part: named(tree) for part, tree in _parts(state).items()}
      facts = {"format": FORMAT, "step": step, "facts": dict(facts),
               "tensors": {part: {n: _describe(a) for n, a in arrays.items()}
                           for part, arrays in parts.items()}}
      if self._writer is None:
        self._writer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
      self._saving = step
      try:
        if processes.is_first():
          self.folder.mkdir(parents=True, exist_ok=True)
        self._check_room(jax.tree.leaves(parts))
        self._writer.save(path, args=ocp.args.Composite(
            run=ocp.args.JsonSave(facts), **{
                part: ocp.args.StandardSave(_host_copies(arrays))
                for part, arrays in parts.items()}))
      except Exception as error:
        self._failed(error)
      if wait:
        self._finish()

  def finish(self) -> None:
    """Waits for the last save. Raises CheckpointError if it failed."""
    with self._lock:
      self._finish()

  def poll(self) -> bool:
    """Whether a save is under way. Raises CheckpointError if it failed."""
    if self._saving is None:
      return False
    if not self._path(self._saving).exists():
      try:
        self._writer.check_for_errors()
      except Exception as error:
        self._failed(error)
      return True
    self.finish()
    return False

  def close(self) -> None:
    """Waits for the last save, and ends the writer's threads."""
    try:
      self.finish()
    finally:
      if self._writer is not None:
        self._writer.close()
        self._writer = None
      self._clean_up()

  def prune(self, keep: int, best: Collection[int] = ()) -> None:
    """Removes all but the newest `keep` and those of the steps `best`.

    One that can't be removed stays, with a warning.
    """
    if not processes.is_first():
      return
    steps = self.steps()
    for step in set(steps[:-keep]) - set(best):
      # Under another name first: a checkpoint is whole or isn't one.
      path, going = self._path(step), self.folder / f"{step}{_GOING}"
      try:
        path.rename(going)
      except OSError as error:
        logging.warning("%s: can't be removed: %s", path, _reason(error))
      else:
        shutil.rmtree(going, ignore_errors=True)

  def clean(self) -> None:
    """Removes what a process that was killed left half-written or half-gone."""
    if processes.is_first() and self.folder.is_dir():
      for path in self.folder.iterdir():
        if _WRITING in path.name or path.name.endswith(_GOING):
          shutil.rmtree(path, ignore_errors=True)

  def _clean_up(self) -> None:
    if self._left_over:
      self.clean()
      self._left_over = False

  def _check_room(self, arrays: Sequence[jax.Array]) -> None:
    """Asks beforehand: of the space that lacks, the writers tell at length."""
    if jax.process_count() > 1:
      return  # They could not agree to leave it.
    need = sum(a.nbytes for a in arrays)
    free = shutil.disk_usage(self.folder).free
    if free < need:
      raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (it takes "
                    f"{need / 1e9:.3g} GB, {free / 1e9:.3g} are free)")

  def _finish(self) -> None:
    if self._saving is None:
      return
    try:
      self._writer.wait_until_finished()
    except Exception as error:
      self._failed(error)
    path, self._saving = self._path(self._saving), None
    if not processes.is_first():
      return
    try:
      write_json(path / _FILES, {
          str(file.relative_to(path)): file.stat().st_size
          for file in sorted(path.rglob("*")) if file.is_file()})
    except OSError as error:  # The checkpoint is whole without it.
      raise CheckpointError(
          f"{path / _FILES}: can't be written: {_reason(error)}") from error

  def _failed(self, error: Exception):
    step, self._saving = self._saving, None
    # Other threads of the writer may still be at it: the rest goes later.
    self._left_over = jax.process_count() == 1
    if self._left_over:
      self.clean()  # A full disk needs the room.
    raise CheckpointError(
        f"{self._path(step)}: can't be written: {_reason(error)}") from error

  def _path(self, step: int) -> pathlib.Path:
    return self.folder / f"{step:0{_DIGITS}d}"

  # -- reading ---------------------------------------------------------------

  def steps(self) -> list[int]:
    """Steps of which there are checkpoints, in order."""
    if not self.folder.is_dir():
      return []
    return sorted(int(p.name) for p in self.folder.iterdir()
                  if re.fullmatch(r"\d{6,}", p.name))

  def read(self, step: int | None = None) -> Checkpoint | None:
    """The newest checkpoint or that of a step, but for its arrays.

    Returns:
      None if there is none at all.

    Raises:
      InputError: there is none of the step, or it isn't whole, or is of a
        format that is not known here.
    """
    steps = self.steps()
    if not steps:
      return None
    if step is None:
      step = steps[-1]
    elif step not in steps:
      raise InputError(f"{self.folder}: holds no checkpoint of step {step}; "
                       f"there are {', '.join(map(str, steps))}")
    path = self._path(step)
    self._check_files(path)
    try:
      raw = json.loads((path / "run/metadata").read_text())
      version = raw["format"]
      found = Checkpoint(path, raw["step"], raw["facts"], raw["tensors"])
    except (OSError, ValueError, KeyError, TypeError) as error:
      raise self._damaged(path, f"run/metadata: {error!r}") from error
    if version != FORMAT:
      raise InputError(f"{path}: is of format {version}, expected {FORMAT}: "
                       "another version of the program wrote it")
    return found

  def _check_files(self, path: pathlib.Path) -> None:
    """Whether a checkpoint's files are there and as long as they were."""
    sizes = dict.fromkeys(("_CHECKPOINT_METADATA", "run/metadata", *(
        f"{part}/_METADATA" for part in _PARTS)))
    # Not there if the process ended just after the checkpoint was whole.
    if (path / _FILES).exists():
      try:
        sizes |= json.loads((path / _FILES).read_text())
      except (OSError, ValueError, TypeError) as error:
        raise self._damaged(path, f"{_FILES}: {error!r}") from error
    for name, size in sizes.items():
      found = (path / name).stat().st_size if (path / name).exists() else None
      if found is None:
        raise self._damaged(path, f"{name} is missing")
      if size is not None and found != size:
        raise self._damaged(
            path, f"{name} has {found} bytes, expected {size}")

  def restore(self, checkpoint: Checkpoint, like: TrainState) -> TrainState:
    """The state of a checkpoint.

    Args:
      checkpoint: of `read`.
      like: `jax.ShapeDtypeStruct`s with the shardings to read into.

    Raises:
      InputError: naming the first tensor that is another one in `like`, or if
        the checkpoint is damaged.
    """
    parts = _parts(like)
    for part, tree in parts.items():
      _check(checkpoint, part, named(tree))
    found = {}
    for part, tree in parts.items():
      arrays = self.restore_part(checkpoint, part, named(tree))
      found[part] = jax.tree.structure(tree).unflatten(
          [arrays[name] for name in named(tree)])
    return like.replace(params=found["params"], **found["optimizer"])

  def restore_part(self, checkpoint: Checkpoint, part: str,
                   like: Mapping[str, jax.ShapeDtypeStruct],
                   ) -> dict[str, jax.Array]:
    """"params" or "optimizer" by name; see `restore`."""
    import orbax.checkpoint as ocp

    _check(checkpoint, part, like)
    reader = ocp.Checkpointer(ocp.CompositeCheckpointHandler())
    try:
      return reader.restore(checkpoint.path, args=ocp.args.Composite(**{
          part: ocp.args.StandardRestore(dict(like))}))[part]
    except Exception as error:
      raise self._damaged(checkpoint.path, _reason(error)) from error
    finally:
      reader.close()

  def _damaged(self, path: pathlib.Path, what: str) -> InputError:
    others = [step for step in self.steps() if self._path(step) != path]
    hint = (f"remove it to use that of step {others[-1]}" if others
            else "there is no other")
    return InputError(f"{path}: is not a whole checkpoint ({what}); {hint}")


def _parts(state: TrainState) -> dict[str, Any]:
  return {"params": state.params, "optimizer": {
      "step": state.step, "skipped_steps": state.skipped_steps,
      "opt_state": state.opt_state}}


def named(tree: Any) -> dict[str, Any]:
  """A tree's leaves by path, such as "text/layers/0/q"."""
  return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf
          for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _describe(array: Any) -> str:
  return f"{array.dtype}{list(array.shape)}"


def _check(checkpoint: Checkpoint, part: str, like: Mapping[str, Any]) -> None:
  """Names the first tensor that differs."""
  stored = checkpoint.tensors.get(part, {})
  wanted = {name: _describe(a) for name, a in like.items()}
  for name in [*wanted, *stored]:
    if stored.get(name) != wanted.get(name):
      raise InputError(
          f"{checkpoint.path}: is of another model or optimizer: {part} tensor "
          f"{name} is {stored.get(name, 'missing')}, expected "
          f"{wanted.get(name, 'none')}")


def _host_copies(arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
  """Copies in pinned host memory, whole when this returns.

  Nothing of the writer then holds a buffer of the state: one that is held would
  be copied by the update that donates it.
  """
  places = [a.sharding.with_memory_kind("pinned_host") for a in arrays.values()]
  copies = jax.block_until_ready(jax.device_put(
      list(arrays.values()), places, may_alias=False))
  return dict(zip(arrays, copies))


def _reason(error: BaseException) -> str:
  """Why, in one line; the libraries' messages are pages long."""
  if isinstance(error, OSError) and error.strerror:
    return error.strerror
  text = " ".join(str(error).split()) or type(error).__name__
  known = re.search(r"No space left on device|File too large|"
                    r"Permission denied|Input/output error", text)
  return known[0] if known else text[:200]
