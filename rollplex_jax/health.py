"""Whether a run's numbers are sound: bounds on metrics, skipped updates.

    health = Health(config.health)
    health.folder = output_dir          # Gets skipped_updates.jsonl.
    for step in ...:
      for update in ...:
        if not health.after_update(step, update, values, loss, diagnose):
          break                         # The last that the run may skip.
      health.watch(step, metrics)       # Warns.
      write(metrics)
      health.check()                    # Ends the run with a diagnosis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import json
import math
import os
import pathlib
from typing import Any

from absl import logging

from rollplex_jax.errors import InputError

_FILE = "skipped_updates.jsonl"


# So many steps a bound has to hold until leaving it is worth another line: a
# metric may swing about its bound.
CALM_STEPS = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class HealthConfig:
  """When a run warns, and when it stops by itself.

  A metric beyond its bound, or one that is no number, is warned of in one line:
  once, and again only after `CALM_STEPS` within its bound. 0 switches it off.

  Attributes:
    max_skipped_updates: so many updates skipped one after the other, for loss
      or gradient was not finite, end the run; 0 for never. One or two come of a
      rare sample; three rarely leave by themselves, for an update that is
      skipped changes nothing that could help the next.
    diagnosis_passes: gradients over a mini-batch that a skipped update may cost
      where no log-prob, reward or advantage shows whose fault it was; 16 tell
      one of 128 samples. 0 for none.
    max_logprob_gap: of training/rollout_logprobs_diff_mean, in nats per token.
      float32 stays below 1e-4 and bfloat16 rounds to some 0.01; from 0.05 on a
      token's probability is off by 5 %, which is also what NeMo RL's own runs
      are checked against (a mean exp of the gap of 1.05).
    max_kl: of actor/kl_loss, to the reference, in nats per token. Runs that do
      well end at 0.01 to 0.3; at 1, tokens are e times as likely as under the
      reference, and beta holds nothing back.
    max_ppo_kl: of actor/ppo_kl in absolute value, to the policy that sampled,
      in nats per token: ten times the 0.01 at which Spinning Up's PPO stops its
      iterations over a batch.
    min_entropy: of actor/entropy, in nats per token. At 0.01, completions of
      100 tokens differ by one nat in all: a group has nothing to compare.
    max_entropy: the same from above; text of a sane model has 0.1 to 2.
    max_clip_fraction: of actor/pg_clipfrac. PPO's usual range is up to 0.2, and
      GSPO, which clips whole sequences, reports 0.15.
    max_truncation: of response_length/clip_ratio: beyond a half, most rewards
      judge completions that were cut off.
    max_zero_variance: of train/frac_reward_zero_std: groups whose rewards are
      all equal have no gradient; at 0.9 a batch teaches with a tenth of itself.
    max_gradient_norm: of actor/grad_norm, before clipping: a hundred times the
      usual clipping bound of 1.
  """

  max_skipped_updates: int = 3
  diagnosis_passes: int = 16
  max_logprob_gap: float = 0.05
  max_kl: float = 1.0
  max_ppo_kl: float = 0.1
  min_entropy: float = 0.01
  max_entropy: float = 4.0
  max_clip_fraction: float = 0.3
  max_truncation: float = 0.5
  max_zero_variance: float = 0.9
  max_gradient_norm: float = 100.0

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if not 0 <= value < math.inf:
        raise InputError(
            f"{field.name}={value}: expected 0 (off) or a positive number")


@dataclasses.dataclass(frozen=True)
class _Bound:
  """A bound of a metric, and what it usually means to be beyond it."""

  key: str
  metric: str
  meaning: str

  def allows(self, value: float, bound: float) -> bool:
    if self.key.startswith("min_"):
      return value >= bound  # False for NaN, as below.
    return abs(value) <= bound


_BOUNDS = (
    _Bound("max_logprob_gap", "training/rollout_logprobs_diff_mean",
           "rollout and training compute different probabilities: too coarse a "
           "compute_dtype, or weights that overflow"),
    _Bound("max_kl", "actor/kl_loss",
           "the policy has left the reference: raise objective.beta or lower "
           "optimizer.learning_rate"),
    _Bound("max_ppo_kl", "actor/ppo_kl",
           "updates move too far from the policy that sampled: lower "
           "optimizer.learning_rate or num_iterations"),
    _Bound("min_entropy", "actor/entropy",
           "the policy has collapsed to one completion: lower "
           "optimizer.learning_rate, raise objective.beta or epsilon_high"),
    _Bound("max_entropy", "actor/entropy",
           "the policy samples at random: lower optimizer.learning_rate or "
           "rollout.temperature, or check the checkpoint"),
    _Bound("max_clip_fraction", "actor/pg_clipfrac",
           "much of the batch is clipped and teaches nothing: lower "
           "optimizer.learning_rate or num_iterations"),
    _Bound("max_truncation", "response_length/clip_ratio",
           "completions are cut off before they end: raise "
           "rollout.max_completion_length"),
    _Bound("max_zero_variance", "train/frac_reward_zero_std",
           "the rewards of most groups are all equal, so they teach nothing: "
           "rows too easy or too hard, or a reward too coarse"),
    _Bound("max_gradient_norm", "actor/grad_norm",
           "the gradient explodes: lower optimizer.learning_rate, or look at "
           "the samples of this step"),
)


class Health:
  """What a run knows of the health of its numbers.

  Attributes:
    folder: of the run, or None where nothing is to be written.
    skipped: updates skipped so far.
  """

  def __init__(self, config: HealthConfig, *, logs: bool = True):
    """Nothing is out of bounds yet.

    Args:
      config: the bounds.
      logs: whether this process warns. All processes of a run count.
    """
    self.folder: str | os.PathLike | None = None
    self.skipped = 0
    self._config = config
    self._logs = logs
    # Bounds that were left, and for how many steps they have held again.
    self._beyond: dict[str, int] = {}
    self._in_a_row = 0
    self._error: str | None = None

  def get_state(self) -> dict[str, Any]:
    """What a run that goes on has to know, as plain data."""
    return {"skipped": self.skipped, "in_a_row": self._in_a_row,
            "beyond": dict(sorted(self._beyond.items()))}

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Goes on from `get_state`'s result."""
    self.skipped, self._in_a_row = state["skipped"], state["in_a_row"]
    if 0 < self._config.max_skipped_updates <= self._in_a_row:
      self._in_a_row = 0  # They ended the run; whoever goes on tries anew.
    self._beyond = dict(state["beyond"])

  def watch(self, step: int, values: Mapping[str, float]) -> None:
    """Warns of metrics that have left their bounds.

    Args:
      step: number of the step, from 1.
      values: its metrics; those that it lacks are left as they were.
    """
    for bound in _BOUNDS:
      limit = getattr(self._config, bound.key)
      if not limit or bound.metric not in values:
        continue
      if bound.key == "max_gradient_norm" and values.get(
          "actor/update_skipped"):
        continue  # What was wrong with it is diagnosed, and told.
      value = values[bound.metric]
      if bound.allows(value, limit):
        calm = self._beyond.pop(bound.key, CALM_STEPS) + 1
        if calm < CALM_STEPS:
          self._beyond[bound.key] = calm
      else:
        known = bound.key in self._beyond
        self._beyond[bound.key] = 0
        if self._logs and not known:
          logging.warning(
              "step %d: %s is %.3g, health.%s is %g: %s", step, bound.metric,
              value, bound.key, limit, bound.meaning)

  def after_update(self, step: int, update: int, values: Mapping[str, float],
                   loss: float, diagnose: Callable[[int], dict[str, Any]],
                   ) -> bool:
    """Counts an update; writes down and says why it was skipped, if it was.

    Args:
      step: number of the step, from 1.
      update: number of the update in it, from 1.
      values: its metrics, on the host, with actor/update_skipped.
      loss: of its mini-batch.
      diagnose: from how many gradients it may take to a record as of
        `nonfinite.diagnose`; runs in every process.

    Returns:
      Whether the run may go on.
    """
    if not values["actor/update_skipped"]:
      self._in_a_row = 0
      return True
    self.skipped += 1
    self._in_a_row += 1
    most = self._config.max_skipped_updates
    # An endless series of them isn't worth as many searches.
    searched = self._in_a_row <= max(most, 1)
    record = diagnose(self._config.diagnosis_passes if searched else 0)
    record = {"step": step, "update": update, "in_a_row": self._in_a_row,
              "loss": readable(loss),
              "grad_norm": readable(values["actor/grad_norm"]), **record}
    where = ""
    if self.folder is not None:
      path = pathlib.Path(self.folder, _FILE)
      path.parent.mkdir(parents=True, exist_ok=True)
      where = f" ({path} has the samples)"
      with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
    if self._logs:
      logging.warning("step %d, update %d skipped: %s", step, update,
                      record["reason"])
    if not most or self._in_a_row < most:
      return True
    self._error = (
        f"step {step}: {most} updates in a row were skipped "
        f"(health.max_skipped_updates={most}), the last because "
        f"{record['reason']}; {record['hint']}{where}")
    return False

  def check(self) -> None:
    """Ends a run that has skipped too many updates in a row.

    Raises:
      InputError: saying what was not finite, in which rows, and what to try.
    """
    if self._error:
      raise InputError(self._error)


def readable(value: float) -> float | str:
  """A number as JSON has it: one that is not finite as a word."""
  value = float(value)
  return value if math.isfinite(value) else str(value)
