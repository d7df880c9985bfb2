"""When a run is saved, and what becomes of a save that fails."""

from __future__ import annotations

from collections.abc import Mapping
import os
import time
from typing import Any

from absl import logging
import jax

from rollplex_jax import resume
from rollplex_jax.checkpoint import CheckpointError, Checkpoints
from rollplex_jax.placement import processes
from rollplex_jax.run_record import RunRecord
from rollplex_jax.trainer import Trainer


class Saver:
  """Saves a run's state at the ends of its steps, or what it was there later.

  Attributes:
    checkpoints: the run's.
    saved: step of the last save, or None.
    asked: something asks for a save at the end of this step.
  """

  def __init__(self, folder: str | os.PathLike, trainer: Trainer,
               facts: Mapping[str, Any]):
    """Writes nothing yet.

    Args:
      folder: of the checkpoints.
      trainer: whose state is saved.
      facts: for the checkpoints, beside the record and what `resume` compares.
    """
    self.checkpoints = Checkpoints(folder)
    self.saved: int | None = None
    self.asked = False
    self._trainer = trainer
    self._config = trainer.config.checkpoint
    self._facts = dict(facts)
    if self._config.enabled:
      self._facts |= resume.facts(trainer.config)
    self._time = time.perf_counter()
    self._several = jax.process_count() > 1
    self._last: dict[str, Any] = {}
    self._ranked: list[int] = []
    self._may_prune = False

  def remember(self, record: RunRecord) -> None:
    """Notes where the run is; the state is as it was after the last step."""
    self._ranked = record.best_steps(len(record.evaluations))
    self._last = record.to_dict()

  def is_time(self) -> bool:
    """Whether the clock asks for a save. Looks after the one under way."""
    if self._is_saving():
      return False
    waited = time.perf_counter() - self._time
    return 0 < self._config.every_minutes * 60 <= waited

  def is_due(self, record: RunRecord) -> bool:
    """Whether the state after the last step is to be saved."""
    every = self._config.every
    return (self.asked or bool(every and record.step % every == 0)
            or (record.is_evaluated
                and record.step in self._ranked[:self._config.keep_best]))

  def save(self, *, wait: bool = False) -> bool:
    """Saves the state after the last step, unless it is saved already.

    The save under way is waited for. One that fails is told, and tried again
    when the next one is due: the disk may have room then.

    Args:
      wait: until it is on the disk.

    Returns:
      Whether it is saved, or on its way.

    Raises:
      CheckpointError: it failed, in one of several processes.
    """
    self.asked = False
    self._time = time.perf_counter()
    step, config = self._last["step"], self._trainer.config
    if not self._config.enabled or step == 0:
      return False
    if wait or self.saved != step:
      self._settle()
    try:
      if self.saved != step:
        told = processes.exchange(
            (self._last["pipeline"], self._last["skipped_rows"]))
        self._write(self._last | {
            "pipeline": [position for (position,), _ in told],
            "skipped_rows": sum(skipped for _, skipped in told)},
                    # What a checked step compares must not be the writer's.
                    wait=wait or config.residency.check)
    except CheckpointError as error:
      self._failed(error)
    if wait:
      self._settle()
    return self.saved == step

  def save_beside(self, last: float) -> bool:
    """Saves the state before the step that is running, from another thread.

    It is there until the step updates it; if that has begun, the end of the
    step is waited for. For one process.

    Args:
      last: when to give up, in `time.monotonic`'s seconds.

    Returns:
      Whether it is saved.
    """
    if not self._config.enabled or not self._last["step"]:
      return False
    policy = self._trainer.policy
    while True:
      with policy.lock:
        if policy.version == self._last["updates"] and not any(
            a.is_deleted() for a in jax.tree.leaves(self._trainer.state)):
          try:
            self._settle(prune=False)  # The run's own thread may be at it.
            self._write(self._last, wait=True)
            return True
          except CheckpointError as error:
            logging.warning("%s", error)
            return False
      if time.monotonic() >= last:
        return False
      time.sleep(0.05)

  def close(self) -> None:
    """Waits for the save under way."""
    try:
      self.checkpoints.close()
    except CheckpointError as error:
      logging.warning("%s", error)

  def where(self, saved: bool) -> str:
    """How far the run came, for a line about its end."""
    done = (f"after step {self._last['step']} of "
            f"{self._trainer.config.total_steps}")
    if saved:
      return f"{done}, which is saved: the same command goes on from there"
    steps = self.checkpoints.steps()
    return f"{done}; " + (
        f"the last checkpoint is of step {steps[-1]}" if steps else
        "there is no checkpoint yet")

  def _write(self, record: Mapping[str, Any], *, wait: bool) -> None:
    self.checkpoints.save(
        record["step"], self._trainer.state,
        self._facts | {"record": dict(record)}, wait=wait)
    self.saved = record["step"]
    self._may_prune = True

  def _is_saving(self) -> bool:
    try:
      if self.checkpoints.poll():
        return True
    except CheckpointError as error:
      self._failed(error)
    self._prune()
    return False

  def _settle(self, *, prune: bool = True) -> None:
    """Waits for the save under way; that it fails hinders no other."""
    try:
      self.checkpoints.finish()
    except CheckpointError as error:
      self._failed(error)
    if prune:
      self._prune()

  def _prune(self) -> None:
    """Makes room once after each save, while none is under way."""
    if not self._may_prune:
      return
    self._may_prune = False
    # A best one that is not on the disk yet, or never, replaces none that is.
    there = set(self.checkpoints.steps())
    best = [step for step in self._ranked if step in there]
    self.checkpoints.prune(self._config.keep, best[:self._config.keep_best])

  def _failed(self, error: CheckpointError) -> None:
    self.saved = None
    if self._several:  # Others may wait for this one.
      raise error
    logging.warning("%s; the run goes on, and saves again when the next "
                    "checkpoint is due", error)
