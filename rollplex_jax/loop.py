"""A run: steps in a loop, and the files that they leave in its folder."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import os
import pathlib
import time
from typing import Any

from rollplex_jax import metrics as metrics_lib
from rollplex_jax import reference as reference_lib
from rollplex_jax import reports
from rollplex_jax.config import to_config_dict
from rollplex_jax.errors import InputError
from rollplex_jax.evaluation import Evaluation
from rollplex_jax.placement import processes
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
    evaluations: (step, evaluation), in order.
  """

  def __init__(self, trainer: Trainer, output_dir: str | os.PathLike, *,
               on_step: Callable[[Progress], None] = lambda _: None,
               tensorboard: bool = True, wandb_project: str = "",
               evaluate_ends: bool = True):
    """Nothing is written yet.

    Args:
      trainer: takes the steps.
      output_dir: gets metrics.jsonl, samples.jsonl, tensorboard/, config.json,
        policy/ (a checkpoint), summary.json, and timeline/ if steps are
        recorded.
      on_step: told after each step.
      tensorboard: write TensorBoard events.
      wandb_project: log there too.
      evaluate_ends: evaluate before the first and after the last step.

    Raises:
      InputError: if `output_dir` already holds a run.
    """
    self.folder = pathlib.Path(output_dir)
    self.evaluations: list[tuple[int, Evaluation]] = []
    self._trainer = trainer
    self._config = trainer.config
    self._on_step = on_step
    self._evaluate_ends = evaluate_ends
    self._tensorboard = tensorboard
    self._wandb_project = wandb_project
    self._evaluated: list[dict[str, float]] = []
    self._writes = processes.is_first()
    trainer.health.folder = self.folder if self._writes else None
    if self._writes and (self.folder / "metrics.jsonl").exists():
      raise InputError(
          f"{self.folder}: already holds a run; choose another folder")

  def train(self) -> dict[str, Any]:
    """Runs all steps.

    Returns:
      The summary, as written.
    """
    trainer, config = self._trainer, self._config
    config_tree = to_config_dict(config).to_dict()
    start = time.perf_counter()
    compiled = metrics_lib.CompileCounter()
    self._writer = metrics_lib.NoWriter()
    if self._writes:
      self._writer = metrics_lib.MetricsWriter(
          self.folder, tensorboard=self._tensorboard,
          wandb_project=self._wandb_project, config=config_tree)
      metrics_lib.write_json(self.folder / "config.json", config_tree)
    phases: dict[str, float] = {}
    steps = tokens = 0
    first_kl = None
    train_seconds = 0.0  # Without evaluations.
    try:
      if self._evaluate_ends:
        self._evaluate(0, 0.0)
      batches = trainer.batches()
      while steps < config.total_steps:
        step_start = time.perf_counter()
        programs = compiled.count
        timeline = reports.step_timeline(config, steps + 1)
        with timeline.event("data", "host"):
          examples = next(batches)
        waited = time.perf_counter() - step_start
        values, samples = trainer.step(examples, steps, timeline)
        values["timing_s/data"] = waited
        steps += 1
        if steps == 1:
          first_kl = values.get("actor/kl_loss")
        for name, value in values.items():
          if name.startswith("timing_s/"):
            phases[name[9:]] = phases.get(name[9:], 0.0) + value
        tokens += int(values["perf/total_num_tokens"])
        values |= compiled.metrics()
        self._writer.write(steps, values)
        self._writer.write_samples(samples)
        self._on_step(Progress(steps, config.total_steps, values))
        trainer.health.check()
        train_seconds += time.perf_counter() - step_start
        if self._writes:
          reports.write_timeline(self.folder / "timeline", timeline, steps,
                                 compiled.count - programs)
        if config.max_seconds and processes.from_first(
            lambda spent=train_seconds: spent >= config.max_seconds):
          break
        if config.eval_every and steps % config.eval_every == 0:
          if steps < config.total_steps:
            self._evaluate(steps, train_seconds)
            if self._is_good_enough():
              break
      if self._evaluate_ends and (
          not self._evaluated or self._evaluated[-1]["step"] != steps):
        self._evaluate(steps, train_seconds)
      trainer.save(self.folder / "policy")
    finally:
      self._writer.close()
      compiled.close()
    residency = trainer.residency
    summary = {
        "algorithm": str(config.algorithm), "steps": steps,
        "num_parameters": trainer.num_parameters,
        "train_seconds": train_seconds,
        "wall_seconds": time.perf_counter() - start,
        "phase_seconds": phases,
        "tokens_per_second": tokens / max(train_seconds, 1e-9),
        "compilations": compiled.count, "compile_seconds": compiled.seconds,
        "skipped_rows": trainer.skipped_rows,
        "reference": reference_lib.summary(
            config, trainer.model_config, trainer.reference,
            trainer.policy.frozen, first_kl),
        "layout": trainer.policy.layout and trainer.policy.layout.to_dict(),
        "residency": residency and residency.summary(),
        "evaluations": self._evaluated,
    }
    if self._writes:
      metrics_lib.write_json(self.folder / "summary.json", summary)
    return summary

  def _evaluate(self, step: int, elapsed: float) -> None:
    """Evaluates on the task's held-out rows, if it has any."""
    if self._trainer.task.eval_rows is None:
      return
    evaluation = self._trainer.evaluate(self._trainer.task.eval_rows)
    self.evaluations.append((step, evaluation))
    values = evaluation.metrics()
    self._writer.write(step, values)
    self._evaluated.append({"step": step, "train_seconds": elapsed, **values})

  def _is_good_enough(self) -> bool:
    """Whether the last evaluation reached the success asked for."""
    wanted = self._config.stop_at_success
    if not wanted or not self.evaluations:
      return False
    success = self.evaluations[-1][1].success
    return success is not None and success[0] >= wanted
