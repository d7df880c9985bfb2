"""A run: steps in a loop, and the files that they leave in its folder.

    begin, or go on from the folder's newest checkpoint
    until the run is over:
      a step, its metrics and its samples
      an evaluation, if one is due
      a checkpoint, if one is due
    the policy in Hugging Face's layout, and the summary

Between any two of these the run can be stopped and goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import os
import pathlib
import shutil
import time
from typing import Any

import jax

from rollplex_jax import metrics as metrics_lib
from rollplex_jax import reference as reference_lib
from rollplex_jax import reports, resume
from rollplex_jax.checkpoint import Checkpoint
from rollplex_jax.config import to_config_dict
from rollplex_jax.errors import InputError
from rollplex_jax.evaluation import Evaluation
from rollplex_jax.interrupts import Interrupts, Stopped
from rollplex_jax.placement import processes
from rollplex_jax.run_record import RunRecord
from rollplex_jax.saver import Saver
from rollplex_jax.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class Progress:
  """What a display is told after each step."""

  step: int
  total_steps: int
  metrics: dict[str, float]


class Run:
  """The steps of a trainer, evaluations between them, and their files.

  Attributes:
    folder: the run's.
    evaluations: (step, evaluation) of those that this object made, in order.
    record: what the run has done so far.
    found: what the folder held of the run, or None.
  """

  def __init__(self, trainer: Trainer, output_dir: str | os.PathLike, *,
               on_step: Callable[[Progress], None] = lambda _: None,
               tensorboard: bool = True, wandb_project: str = "",
               evaluate_ends: bool = True, allow_config_change: bool = False,
               interrupts: Interrupts | None = None):
    """Nothing is written yet.

    Args:
      trainer: takes the steps.
      output_dir: gets metrics.jsonl, samples.jsonl, tensorboard/, config.json,
        checkpoints/, policy/ (a checkpoint of `transformers`), summary.json,
        and timeline/ if steps are recorded. Where it holds a checkpoint of this
        run, the run goes on from there.
      on_step: told after each step.
      tensorboard: write TensorBoard events.
      wandb_project: log there too.
      evaluate_ends: evaluate before the first and after the last step.
      allow_config_change: go on under another configuration.
      interrupts: asks for saves and for the end; entered by the caller.

    Raises:
      InputError: if `output_dir` holds another run, or one that can't go on.
    """
    self.folder = pathlib.Path(output_dir)
    self.evaluations: list[tuple[int, Evaluation]] = []
    self.record = RunRecord()
    self._trainer = trainer
    self._config = trainer.config
    self._on_step = on_step
    self._evaluate_ends = evaluate_ends
    self._tensorboard = tensorboard
    self._wandb_project = wandb_project
    self._interrupts = interrupts or Interrupts()
    self._writes = processes.is_first()
    self._writer = metrics_lib.NoWriter()
    self._saver: Saver | None = None
    self._several = jax.process_count() > 1
    self._rows = {name: len(rows) for name, rows in (
        ("train", trainer.task.train_rows), ("eval", trainer.task.eval_rows))
                  if rows is not None}
    self.found = processes.from_first(lambda: resume.find(
        self.folder, self._config, allow_config_change=allow_config_change))
    trainer.health.folder = self.folder if self._writes else None

  def train(self) -> dict[str, Any]:
    """Runs all steps that are left.

    Returns:
      The summary, as written.

    Raises:
      Stopped: on a signal; the state is saved.
      CheckpointError: the last save of several processes failed.
      OSError: a file can't be written.
      InputError: as the trainer does.
    """
    self._started = time.perf_counter()
    self._compiled = metrics_lib.CompileCounter()
    try:
      self._begin()
      self._loop()
      self._saver.save(wait=True)
      self._trainer.save(self.folder / "policy")
    except Stopped:
      raise
    except Exception:
      if self._saver is not None and not self._several:
        # The last finished step, if the one that failed left it as it was.
        self._saver.save_beside(time.monotonic())
      raise
    finally:
      if self._saver is not None:
        self._saver.close()
      self._writer.close()
      self._compiled.close()
    summary = self._summary()
    if self._writes:
      metrics_lib.write_json(self.folder / "summary.json", summary)
    return summary

  def _loop(self) -> None:
    self._agree()
    while True:
      if self._evaluation_is_due():
        self._evaluate()
        self._agree()
      if self._is_over():
        break
      if self._saver.is_due(self.record):
        self._saver.save()
      self._step()
      self._agree()

  # -- the beginning ---------------------------------------------------------

  def _begin(self) -> None:
    """Opens the run's files; goes on from its newest checkpoint if it has one.
    """
    trainer, config = self._trainer, self._config
    config_tree = to_config_dict(config).to_dict()
    checkpoint = self.found and self.found.checkpoint
    batches = trainer.batches()
    saver = Saver(self.folder / "checkpoints", trainer, {"rows": self._rows})
    if checkpoint is not None:
      self._check_rows(checkpoint)
      self.record = RunRecord.of(checkpoint.facts["record"])
      batches.set_state(self.record.position(
          jax.process_index(), jax.process_count(), trainer.rows_per_step))
      trainer.restore(
          lambda like: saver.checkpoints.restore(checkpoint, like),
          self.record.updates)
      trainer.health.set_state(self.record.health)
      saver.saved = checkpoint.step
    if self._writes:
      saver.checkpoints.clean()
      self._tidy()
      metrics_lib.write_json(self.folder / "config.json", config_tree)
      self._writer = metrics_lib.MetricsWriter(
          self.folder, tensorboard=self._tensorboard,
          wandb_project=self._wandb_project, config=config_tree,
          sizes=None if checkpoint is None else self.record.files,
          wandb_id=self.record.wandb_id)
      self.record.wandb_id = getattr(self._writer, "wandb_id", "")
    # The order of rows is part of the run's state; what is read ahead is not.
    self._batches = batches
    self._before = dataclasses.replace(self.record)
    self._out_of_time = False
    self._saver = saver
    self._remember()
    # A save by several processes needs them all, at the end of a step.
    self._interrupts.watch(
        lambda last: saver.where(
            not self._several and saver.save_beside(last)),
        config.checkpoint.exit_seconds if self._several else None)

  def _check_rows(self, checkpoint: Checkpoint) -> None:
    """The rows are known by their numbers."""
    for name, count in checkpoint.facts["rows"].items():
      if self._rows.get(name) != count:
        raise InputError(
            f"{self.folder}: the run began with {count} rows to {name}, found "
            f"{self._rows.get(name, 'none')}: data.{'eval_' * (name == 'eval')}"
            "rows has changed")

  def _tidy(self) -> None:
    """Removes what a run that was killed left half-done."""
    for path in self.folder.glob(".policy.*"):
      shutil.rmtree(path, ignore_errors=True)
    if self.found is None:
      return
    for path in (*self.folder.glob(".*.json.*"), self.folder / "summary.json"):
      path.unlink(missing_ok=True)
    if self.found.checkpoint is None:  # It begins anew.
      for name in ("metrics.jsonl", "samples.jsonl", "skipped_updates.jsonl"):
        (self.folder / name).unlink(missing_ok=True)
      shutil.rmtree(self.folder / "tensorboard", ignore_errors=True)

  # -- steps and evaluations -------------------------------------------------

  def _step(self) -> None:
    config, record = self._config, self.record
    start, programs = time.perf_counter(), self._compiled.count
    number = record.step + 1
    timeline = reports.step_timeline(config, number)
    with timeline.event("data", "host"):
      examples = next(self._batches)
    waited = time.perf_counter() - start
    values, samples = self._trainer.step(examples, record.step, timeline)
    values["timing_s/data"] = waited
    values |= self._compiled.metrics()
    self._writer.write(number, values)
    self._writer.write_samples(samples)
    record.add_step(values, time.perf_counter() - start)
    self._remember()
    self._on_step(Progress(number, config.total_steps, values))
    self._trainer.health.check()
    if self._writes:
      reports.write_timeline(self.folder / "timeline", timeline, number,
                             self._compiled.count - programs)

  def _evaluation_is_due(self) -> bool:
    record, every = self.record, self._config.eval_every
    if self._trainer.task.eval_rows is None or record.is_evaluated:
      return False
    if record.step == 0 or self._is_over():
      return self._evaluate_ends
    return every > 0 and record.step % every == 0

  def _evaluate(self) -> None:
    record = self.record
    evaluation = self._trainer.evaluate(self._trainer.task.eval_rows)
    self.evaluations.append((record.step, evaluation))
    values = evaluation.metrics()
    self._writer.write(record.step, values)
    record.evaluations.append({
        "step": record.step, "train_seconds": record.train_seconds, **values})
    self._remember()

  def _is_over(self) -> bool:
    return self.record.is_over(self._config, self._out_of_time)

  def _agree(self) -> None:
    """What has to happen now, the same in all processes.

    Raises:
      Stopped: after a save, if any of them was told to stop.
    """
    asks, saver = self._interrupts, self._saver
    told = processes.exchange((
        asks.stop, asks.take_save(), self.record.is_out_of_time(self._config),
        saver.is_time()))
    # One clock decides for all.
    self._out_of_time, time_came = told[0][2:]
    saver.asked |= time_came or any(asked for _, asked, *_ in told)
    signals = [stop for stop, *_ in told if stop is not None]
    if signals:
      asks.reached()
      saved = saver.save(wait=True)
      raise Stopped(f"stopped by {signals[0].name} {saver.where(saved)}",
                    signals[0])

  def _remember(self) -> None:
    """Notes where the run is, for a save before anything else happens."""
    record, before, trainer = self.record, self._before, self._trainer
    record.updates = trainer.policy.version
    position = self._batches.get_state()
    record.pipeline = [position]
    # A row that is left out takes an index, and no place in a batch.
    record.skipped_rows = (
        position["next_index"] - record.step * trainer.rows_per_step)
    record.files = self._writer.sizes()
    record.health = trainer.health.get_state()
    record.wall_seconds = (
        before.wall_seconds + time.perf_counter() - self._started)
    record.compilations = before.compilations + self._compiled.count
    record.compile_seconds = before.compile_seconds + self._compiled.seconds
    self._saver.remember(record)

  # -- the end ---------------------------------------------------------------

  def _summary(self) -> dict[str, Any]:
    trainer, record = self._trainer, self.record
    self._remember()
    residency = trainer.residency
    return {
        "algorithm": str(self._config.algorithm), "steps": record.step,
        "num_parameters": trainer.num_parameters,
        "train_seconds": record.train_seconds,
        "wall_seconds": record.wall_seconds,
        "phase_seconds": record.phase_seconds,
        "tokens_per_second": record.tokens / max(record.train_seconds, 1e-9),
        "compilations": record.compilations,
        "compile_seconds": record.compile_seconds,
        "skipped_rows": sum(processes.exchange(record.skipped_rows)),
        "reference": reference_lib.summary(
            self._config, trainer.model_config, trainer.reference,
            trainer.policy.frozen, record.first_kl),
        "layout": trainer.policy.layout and trainer.policy.layout.to_dict(),
        "residency": residency and residency.summary(),
        "evaluations": record.evaluations,
    }
