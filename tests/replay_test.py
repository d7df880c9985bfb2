"""Thirty steps under every schedule, on the tokens and rewards of one run.

Free runs part ways in the end: rounding flips a near-tie between two tokens,
and from then on they see different data. So a serial run is recorded, and the
others take its completions and scores in place of their own.
"""

import atexit
from collections.abc import Sequence
import dataclasses
import functools
import itertools
import tempfile
from typing import Any
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollplex_jax import executor, programs
from rollplex_jax.schedule import ScheduleConfig
from rollplex_jax.stages.objectives import ObjectiveConfig
from rollplex_jax.stages.rollout import Completions
from rollplex_jax.stages.update import OptimizerConfig
from tests.helpers import tiny_checkpoint, tiny_task

_NUM_STEPS = 30
_COMPARED = ("actor/loss", "actor/kl_loss", "actor/grad_norm")
# Float32's own: between two serial runs whose micro-batches differ, which sum
# the same numbers in another order, loss, KL and gradient norm were seen to
# differ by up to a tenth of this after thirty steps.
_RTOL, _ATOL = 2e-5, 1e-6
# With Adam's usual 1e-8, an element whose gradient is nothing but rounding
# moves by the whole learning rate, up or down, and the runs part at once.
_OPTIMIZER = OptimizerConfig(learning_rate=3e-3, adam_epsilon=1e-6)
# Items of `ScheduleConfig`s.
_SERIAL = (("share_prefix", False),)
_SHARED = ()
_ROLLOUT = (("name", "rollplex"),)
_APART = (("name", "disaggregated"),)
_WINDOW = (*_ROLLOUT, ("prefix_source", "window"), ("window_chunk", 32))
# Four updates per rollout.
_SEVERAL = dict(num_iterations=2, mini_batch_size=2)


@dataclasses.dataclass(eq=False)
class Recording:
  """What each step of a run sampled, how that was scored, and its metrics."""

  completions: list[Completions] = dataclasses.field(default_factory=list)
  scores: list[Sequence[dict[str, Any]]] = dataclasses.field(
      default_factory=list)
  metrics: list[dict[str, float]] = dataclasses.field(default_factory=list)


class RecordedTask(tiny_task.VowelTask):
  """Text, pictures and videos; records its scores, or gives recorded ones.

  A little of the reward tells any two completions apart. Where a group's are
  all alike and nothing was learned yet, the gradient is rounding and no more.
  """

  def __init__(self, recording: Recording, replay: Recording | None):
    super().__init__(with_video=True, count=4)
    self._recording = recording
    self._replay = iter(replay.scores) if replay else None

  def score(self, completions, rows, row_indices):
    scores = [
        {"overall": score["overall"] + 0.01 * (sum(map(ord, text)) % 7)}
        for text, score in zip(completions, super().score(
            completions, rows, row_indices))]
    self._recording.scores.append(scores)
    return next(self._replay) if self._replay else scores


@functools.cache
def _checkpoint() -> str:
  folder = tempfile.TemporaryDirectory()
  atexit.register(folder.cleanup)
  return tiny_checkpoint.write(folder.name, eos=tiny_checkpoint.EOS)


def _run(schedule, replay: Recording | None = None, **kwargs) -> Recording:
  """A run of `_NUM_STEPS`.

  Args:
    schedule: items of a `ScheduleConfig`.
    replay: a run whose tokens and rewards it takes.
    **kwargs: fields of a `TrainConfig`.
  """
  recording = Recording()
  roll_out = executor.Step.roll_out

  def replace(step):
    completions = roll_out(step)
    if replay is not None:
      completions = replay.completions[len(recording.completions)]
    recording.completions.append(completions)
    return completions

  config = tiny_task.config(
      _checkpoint(), schedule=ScheduleConfig(**dict(schedule)),
      objective=ObjectiveConfig(loss_type="dapo", beta=0.05),
      optimizer=_OPTIMIZER, **kwargs)
  with mock.patch.object(executor.Step, "roll_out", replace):
    _, recording.metrics = tiny_task.run_steps(
        config, _NUM_STEPS, RecordedTask(recording, replay))
  return recording


# Free runs serve several tests.
_free_run = functools.cache(_run)


class ReplayTest(parameterized.TestCase):

  def differences(self, got: Recording, want: Recording):
    """Largest |got - want| / (atol + rtol * |want|) over steps, by metric."""
    out = {}
    for name in _COMPARED:
      a, b = (np.array([v[name] for v in run.metrics]) for run in (got, want))
      self.assertLen(a, _NUM_STEPS)
      out[name] = float(np.max(np.abs(a - b) / (_ATOL + _RTOL * np.abs(b))))
    return out

  def test_run_is_worth_replaying(self):
    """It learns, with samples of many lengths, far from the reference."""
    serial = _free_run(_SERIAL)
    rewards = [v["critic/score/mean"] for v in serial.metrics]
    self.assertGreater(np.mean(rewards[-5:]), np.mean(rewards[:5]) + 0.3)
    self.assertGreater(serial.metrics[-1]["actor/kl_loss"], 1)
    self.assertGreater(min(v["actor/grad_norm"] for v in serial.metrics), 1e-2)
    self.assertLen(np.unique([c.lengths for c in serial.completions]), 4)

  @parameterized.parameters(
      # The tolerance is that of the serial schedule itself.
      (_SERIAL, 4, {}), (_SHARED, 3, {}), (_APART, 0, {}), (_ROLLOUT, 0, {}), (_WINDOW, 3, {}),
      (_SERIAL, 4, _SEVERAL), (_ROLLOUT, 4, _SEVERAL), (_WINDOW, 0, _SEVERAL),
      ((*_ROLLOUT, ("save", "activations")), 3, _SEVERAL))
  @pytest.mark.slow
  def test_replays_serial(self, schedule, micro, kwargs):
    serial = _free_run(_SERIAL, **kwargs)
    replayed = _run(schedule, serial, micro_batch_size=micro, **kwargs)
    differences = self.differences(replayed, serial)
    self.assertLess(max(differences.values()), 1, msg=differences)

  def test_finds_a_lost_gradient(self):
    """Of four passes, the last gives nothing to its prompt's prefix."""
    gradient, passes = programs.gradient_suffix, itertools.count(1)

    def broken(*args, **kwargs):
      grads, kv_grads, *rest = gradient(*args, **kwargs)
      if next(passes) % 4 == 0:
        kv_grads = jax.tree.map(jnp.zeros_like, kv_grads)
      return grads, kv_grads, *rest

    serial = _free_run(_SERIAL)
    with mock.patch.object(programs, "gradient_suffix", broken):
      replayed = _run(_ROLLOUT, serial, micro_batch_size=4)
    differences = self.differences(replayed, serial)
    self.assertGreater(min(differences.values()), 10, msg=differences)

  @pytest.mark.slow
  def test_free_runs_learn_alike(self):
    """Mean rewards over steps, of three seeds: within the serial spread."""
    curves = {}
    for name, schedule in (("serial", _SERIAL), ("rollplex", _ROLLOUT)):
      rewards = np.array([
          [v["critic/score/mean"] for v in
           _free_run(schedule, seed=seed).metrics] for seed in range(3)])
      curves[name] = rewards.reshape(3, -1, 5).mean(axis=2)
    rms = lambda a: float(np.sqrt(np.mean(np.square(a))))
    mean = curves["serial"].mean(axis=0)
    spread = rms(curves["serial"] - mean)
    self.assertLess(rms(curves["rollplex"].mean(axis=0) - mean), spread)
    for rewards in curves["rollplex"]:
      self.assertGreater(rewards[-1], rewards[0] + 0.3)


if __name__ == "__main__":
  absltest.main()
