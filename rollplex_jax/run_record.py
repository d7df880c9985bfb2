"""What a run has done so far, as its checkpoints and its summary tell it."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from typing import Any

from rollplex_jax.config import TrainConfig
from rollplex_jax.errors import InputError


@dataclasses.dataclass(kw_only=True)
class RunRecord:
  """Counts over all steps, those before an interruption included.

  Attributes:
    step: steps done.
    updates: of the policy.
    tokens: that were processed.
    train_seconds: of steps, without evaluations.
    wall_seconds: of everything.
    phase_seconds: by phase of a step.
    first_kl: mean KL estimate of the first step, if there is a reference.
    compilations, compile_seconds: over all processes that the run had in turn.
    evaluations: "step", "train_seconds" and metrics of each.
    skipped_rows: rows that this process left out; in a checkpoint the sum over
      all processes, in which a row that several read counts for each.
    pipeline: position in the order of rows, of each process.
    health: state of what watches the run's numbers.
    files: bytes of the files that grow, by path in the run's folder.
    wandb_id: of the run there, or empty.
  """

  step: int = 0
  updates: int = 0
  tokens: int = 0
  train_seconds: float = 0.0
  wall_seconds: float = 0.0
  phase_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
  first_kl: float | None = None
  compilations: int = 0
  compile_seconds: float = 0.0
  evaluations: list[dict[str, float]] = dataclasses.field(default_factory=list)
  skipped_rows: int = 0
  pipeline: list[dict[str, Any]] = dataclasses.field(default_factory=list)
  health: dict[str, Any] = dataclasses.field(default_factory=dict)
  files: dict[str, int] = dataclasses.field(default_factory=dict)
  wandb_id: str = ""

  @classmethod
  def of(cls, facts: Mapping[str, Any]) -> RunRecord:
    """Of `to_dict`'s result."""
    return cls(**facts)

  def to_dict(self) -> dict[str, Any]:
    """A copy as plain data."""
    return dataclasses.asdict(self)

  @property
  def is_evaluated(self) -> bool:
    """Whether the policy was evaluated after the last step."""
    return bool(self.evaluations) and (
        self.evaluations[-1]["step"] == self.step)

  def add_step(self, values: Mapping[str, float], seconds: float) -> None:
    """Counts a step that took so long and has these metrics."""
    self.step += 1
    self.train_seconds += seconds
    self.tokens += int(values["perf/total_num_tokens"])
    if self.step == 1:
      self.first_kl = values.get("actor/kl_loss")
    for name, value in values.items():
      if name.startswith("timing_s/"):
        name = name.removeprefix("timing_s/")
        self.phase_seconds[name] = self.phase_seconds.get(name, 0.0) + value

  def is_out_of_time(self, config: TrainConfig) -> bool:
    """Whether the run has had the seconds that it may take."""
    return bool(config.max_seconds
                and self.train_seconds >= config.max_seconds)

  def is_over(self, config: TrainConfig, out_of_time: bool) -> bool:
    """Whether no step is left to do."""
    if self.step >= config.total_steps or out_of_time:
      return True
    return bool(config.stop_at_success and self.is_evaluated
                and self.evaluations[-1].get("val/success", -1.0)
                >= config.stop_at_success)

  def best_steps(self, count: int) -> list[int]:
    """Steps of the best evaluations, by success or else by reward.

    The later of equals is the better: it has learned the same from more.
    """
    score = lambda e: (e.get("val/success", e["val/reward"]), e["step"])
    ranked = sorted((e for e in self.evaluations if e["step"] > 0),
                    key=score, reverse=True)
    return [int(e["step"]) for e in ranked[:count]]

  def position(self, process: int, count: int, rows: int) -> dict[str, Any]:
    """Where a process's input pipeline goes on.

    Args:
      process: its number.
      count: of processes, which may have been others before.
      rows: that this process reads in a step.

    Raises:
      InputError: if others shared the rows and left some out, for then nobody
        knows which come next.
    """
    if not self.skipped_rows:  # Also where a mesh shares rows out otherwise.
      return {"next_index": self.step * rows}
    if len(self.pipeline) != count:
      raise InputError(
          f"the run left out {self.skipped_rows} rows in "
          f"{len(self.pipeline)} processes: expected as many to go on with, "
          f"found {count}")
    return self.pipeline[process]
