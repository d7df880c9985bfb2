"""Numbers that go wrong: skipped updates, whose fault it was, and warnings."""

import dataclasses
import json
import pathlib
import shutil
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import numpy as np
import pytest
from safetensors import numpy as safetensors

from rollplex_jax import nonfinite, programs
from rollplex_jax.config import Algorithm, PolicyConfig, ReferenceConfig
from rollplex_jax.data.processor import Processor
from rollplex_jax.errors import InputError
from rollplex_jax.health import Health, HealthConfig
from rollplex_jax.loop import Run
from rollplex_jax.models.inputs import PromptInputs
from rollplex_jax.placement.residency import ResidencyConfig
from rollplex_jax.stages.objectives import ObjectiveConfig
from rollplex_jax.stages.response import GroupResponses
from rollplex_jax.trainer import Trainer
from tests.helpers import tiny_checkpoint, tiny_task

HEALTHY = {
    "training/rollout_logprobs_diff_mean": 1e-5, "actor/kl_loss": 0.1,
    "actor/ppo_kl": -0.01, "actor/entropy": 0.5, "actor/pg_clipfrac": 0.01,
    "response_length/clip_ratio": 0.1, "train/frac_reward_zero_std": 0.5,
    "actor/grad_norm": 1.0,
}


class WatchTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.health = Health(HealthConfig())

  @parameterized.parameters(
      ("training/rollout_logprobs_diff_mean", 0.06, "max_logprob_gap is 0.05"),
      ("actor/kl_loss", 2.0, "max_kl is 1"),
      ("actor/ppo_kl", 0.2, "max_ppo_kl is 0.1"),
      ("actor/ppo_kl", -0.2, "max_ppo_kl is 0.1"),
      ("actor/entropy", 0.001, "min_entropy is 0.01"),
      ("actor/entropy", 5.0, "max_entropy is 4"),
      ("actor/pg_clipfrac", 0.4, "max_clip_fraction is 0.3"),
      ("response_length/clip_ratio", 0.6, "max_truncation is 0.5"),
      ("train/frac_reward_zero_std", 1.0, "max_zero_variance is 0.9"),
      ("actor/grad_norm", 1e4, "max_gradient_norm is 100"),
      ("actor/kl_loss", float("nan"), "max_kl is 1"),
      ("actor/grad_norm", float("inf"), "max_gradient_norm is 100"))
  def test_warns_once_until_it_is_healthy_again(self, name, value, told):
    with self.assertNoLogs("absl", "WARNING"):
      self.health.watch(1, HEALTHY)
    for first in (2, 30):
      with self.assertLogs("absl", "WARNING") as logged:
        self.health.watch(first, HEALTHY | {name: value})
      (line,) = logged.output
      self.assertIn(f"step {first}: {name} is {value:.3g}, health.{told}: ",
                    line)
      with self.assertNoLogs("absl", "WARNING"):
        self.health.watch(first + 1, HEALTHY | {name: value})
        self.health.watch(first + 1, {})  # Not measured: nothing is known.
        self.health.watch(first + 1, HEALTHY | {name: value})
        # It swings about its bound.
        for step in range(first + 2, first + 20):
          swings = step < first + 10 and step % 2
          self.health.watch(
              step, HEALTHY | ({name: value} if swings else {}))

  def test_both_entropy_bounds_see_what_is_no_number(self):
    with self.assertLogs("absl", "WARNING") as logged:
      self.health.watch(1, {"actor/entropy": float("nan")})
    self.assertLen(logged.output, 2)

  def test_zero_switches_a_bound_off(self):
    off = {field.name: 0 for field in dataclasses.fields(HealthConfig)}
    with self.assertNoLogs("absl", "WARNING"):
      Health(HealthConfig(**off)).watch(
          1, dict.fromkeys(HEALTHY, float("nan")))

  @parameterized.parameters(-1.0, float("nan"), float("inf"))
  def test_bounds_are_checked(self, value):
    with self.assertRaisesRegex(InputError, "max_kl=.*: expected 0"):
      HealthConfig(max_kl=value)


class CountTest(parameterized.TestCase):

  @parameterized.parameters((1, False), (2, True))
  def test_counts_anew_after_it_ended_the_run(self, before, goes_on):
    health = Health(HealthConfig(max_skipped_updates=2))
    health.set_state({"skipped": 5, "in_a_row": before, "beyond": {}})
    found = health.after_update(
        9, 1, {"actor/update_skipped": 1.0, "actor/grad_norm": np.nan}, 0.0,
        lambda passes: {"reason": "it is so", "hint": "look"})
    self.assertEqual(found, goes_on)
    self.assertEqual(health.skipped, 6)


class SearchTest(parameterized.TestCase):

  @parameterized.parameters(
      ([(2, 3)], 9), ([(0, 0), (2, 3)], 15), ([(1, 1), (1, 2)], 13))
  def test_finds_them(self, bad, most):
    asked = []

    def is_finite(chosen):
      asked.append(chosen)
      return not any(chosen[at] for at in bad)

    found, note = nonfinite.search(is_finite, (4, 4), 100)
    self.assertEqual((sorted(found), note), (bad, ""))
    self.assertLessEqual(len(asked), most)
    self.assertEqual({chosen.shape for chosen in asked}, {(4, 4)})

  def test_cost_is_bounded(self):
    asked = []

    def is_finite(chosen):
      asked.append(chosen)
      return not chosen[2, 3]

    found, note = nonfinite.search(is_finite, (4, 4), 5)
    self.assertLen(asked, 5)
    self.assertEqual(found, [(2, 0), (2, 1), (2, 2), (2, 3)])
    self.assertEqual(note, "(at least one of the last 4)")

  def test_only_their_sum_overflows(self):
    found, note = nonfinite.search(lambda c: c.sum() < 4, (2, 2), 16)
    self.assertLen(found, 4)
    self.assertEqual(note, "(at least one of the last 4)")

  def test_finite_when_computed_again(self):
    found, note = nonfinite.search(lambda c: True, (2, 2), 16)
    self.assertEqual(found, [])
    self.assertIn("finite when it was computed again", note)
    found, note = nonfinite.search(self.fail, (2, 2), 0)
    self.assertEqual(found, [])
    self.assertIn("not looked for", note)


class _BadRewards(tiny_task.VowelTask):
  """One reward of the first `steps` steps is no number."""

  def __init__(self, steps: int, **kwargs):
    super().__init__(**kwargs)
    self.calls, self._steps = [], steps

  def score(self, completions, rows, row_indices):
    scores = super().score(completions, rows, row_indices)
    self.calls.append(list(row_indices))
    if len(self.calls) <= self._steps:
      scores[6]["overall"] = float("nan")
    return scores


class SkippedUpdatesTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = pathlib.Path(cls.enterClassContext(
        tempfile.TemporaryDirectory()))
    cls.path = tiny_checkpoint.write(cls.folder / "model")

  def setUp(self):
    super().setUp()
    self.out = self.folder / self._testMethodName

  def broken(self, change) -> str:
    """A copy of the checkpoint in which `change` was made to the tensors."""
    folder = self.folder / f"broken_{self._testMethodName}"
    shutil.copytree(self.path, folder)
    (file,) = folder.glob("*.safetensors")
    tensors = safetensors.load_file(file)
    change(tensors)
    safetensors.save_file(tensors, file)
    return str(folder)

  def task_with_own_tokens(self):
    """A task of four rows, and a token of each that no other row has."""
    task = tiny_task.VowelTask(count=4)
    processor = Processor.from_checkpoint(self.path)
    ids = [set(processor.prompt(row, "").token_ids.tolist())
           for row in task.train_rows]
    return task, [
        min(own.difference(*(other for other in ids if other is not own)))
        for own in ids]

  def run_steps(self, config, task=None):
    trainer = Trainer(config, task=task or tiny_task.VowelTask())
    run = Run(trainer, self.out, tensorboard=False, evaluate_ends=False)
    return trainer, run

  def records(self):
    lines = (self.out / "skipped_updates.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]

  def metrics(self):
    lines = (self.out / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]

  def expect_stop(self, run, pattern):
    with self.assertRaisesRegex(InputError, pattern) as caught:
      run.train()
    self.assertNotIn("\n", str(caught.exception))

  def test_recovers_from_a_bad_reward(self):
    task = _BadRewards(1)
    config = tiny_task.config(self.path, total_steps=2)
    trainer, _ = self.run_steps(config, task)
    before = jax.device_get(trainer.state)
    examples = next(trainer.batches())
    bad, _ = trainer.step(examples, 0)
    after = jax.device_get(trainer.state)
    jax.tree.map(np.testing.assert_array_equal, before,
                 after.replace(skipped_steps=before.skipped_steps))
    self.assertEqual(int(after.skipped_steps), 1)
    good, _ = trainer.step(examples, 1)
    # The step goes on as one that starts from the same weights.
    other = Trainer(config, task=tiny_task.VowelTask())
    other.step(examples, 1)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(
        trainer.state.params), jax.device_get(other.state.params))
    (record,) = self.records()
    row = task.calls[0][6]
    self.assertEqual(record["rows"], [row])
    self.assertEqual(record["samples"], [
        {"row": row, "sample": 2, "values": {"rewards": "nan"}}])
    self.assertEqual((record["step"], record["update"]), (1, 1))
    self.assertEqual(record["reason"],
                     f"the rewards are not finite in row {row} sample 2")
    self.assertEqual([v["actor/update_skipped"] for v in (bad, good)], [1, 0])

  def test_stops_after_so_many_in_a_row(self):
    config = tiny_task.config(
        self.path, total_steps=9, health=HealthConfig(max_skipped_updates=3))
    _, run = self.run_steps(config, _BadRewards(9))
    self.expect_stop(run, r"step 3: 3 updates in a row were skipped "
                     r"\(health.max_skipped_updates=3\), the last because the "
                     r"rewards are not finite in row \d sample 2; have the "
                     r"reward return finite numbers \(.*skipped_updates.jsonl")
    # Metrics and samples of the step that ended it are there.
    self.assertEqual([m["actor/update_skipped"] for m in self.metrics()],
                     [1.0] * 3)
    self.assertLen((self.out / "samples.jsonl").read_text().splitlines(), 48)
    self.assertEqual([r["in_a_row"] for r in self.records()], [1, 2, 3])

  def test_each_update_of_a_step_counts(self):
    # The first of two mini-batches is bad: never two in a row.
    config = tiny_task.config(
        self.path, total_steps=2, mini_batch_size=2,
        health=HealthConfig(max_skipped_updates=2))
    task = _BadRewards(9)
    trainer, run = self.run_steps(config, task)
    run.train()
    self.assertEqual([m["actor/update_skipped"] for m in self.metrics()],
                     [1.0] * 2)
    self.assertEqual([(r["step"], r["update"], r["in_a_row"], r["rows"])
                      for r in self.records()],
                     [(1, 1, 1, task.calls[0][6:7]),
                      (2, 1, 1, task.calls[1][6:7])])
    self.assertEqual(int(trainer.state.step), 2)
    self.assertEqual(int(trainer.state.skipped_steps), 2)
    self.assertEqual(trainer.policy.version, 4)

  @parameterized.parameters(Algorithm.RL, Algorithm.SUPERVISED)
  def test_weights_that_are_not_finite(self, algorithm):
    def change(tensors):
      tensors["model.layers.1.mlp.down_proj.weight"][3, 4] = np.nan

    path = self.broken(change)
    _, run = self.run_steps(tiny_task.config(
        path, algorithm=algorithm, health=HealthConfig(max_skipped_updates=2)))
    self.expect_stop(run, "weights are not finite: text.layers.1.*; no update "
                     "can mend them")
    self.assertLen(self.records()[0]["tensors"], 1)
    self.assertEqual(self.metrics()[-1]["actor/update_skipped"], 1.0)

  def test_reference_that_is_not_finite_on_a_row(self):
    """The embedding of one row's own token is NaN in the reference only."""
    task, own = self.task_with_own_tokens()

    def change(tensors):
      tensors["model.embed_tokens.weight"][own[2]] = np.nan

    config = tiny_task.config(
        self.path, total_steps=1,
        reference=ReferenceConfig(path=self.broken(change)),
        objective=ObjectiveConfig(loss_type="dapo", beta=0.1))
    _, run = self.run_steps(config, task)
    run.train()
    (record,) = self.records()
    self.assertEqual(record["rows"], [2])
    self.assertEqual([s["sample"] for s in record["samples"]], [0, 1, 2, 3])
    self.assertEqual(record["samples"][0]["values"],
                     {"ref_logprobs": {"token": 0, "value": "nan"}})
    self.assertIn("the log-probs under the reference are not finite in row 2 "
                  "sample 0, row 2 sample 1", record["reason"])

  @pytest.mark.slow
  def test_layer_that_overflows_in_bfloat16(self):
    def change(tensors):
      for name in ("gate", "up"):
        tensors[f"model.layers.0.mlp.{name}_proj.weight"] *= np.float32(3e19)

    config = tiny_task.config("", total_steps=1, policy=PolicyConfig(
        path=self.broken(change), compute_dtype="bfloat16"))
    _, run = self.run_steps(config)
    run.train()
    (record,) = self.records()
    self.assertLen(record["samples"], 16)
    self.assertIn("not finite in all 16 samples", record["reason"])
    self.assertIn("policy.compute_dtype", record["hint"])

  @parameterized.parameters(
      (Algorithm.RL, "gradient_suffix", 2), (Algorithm.SUPERVISED,
                                             "gradient_supervised", 0))
  def test_gradient_alone_is_not_finite(self, algorithm, name, sample):
    """No number on the host shows it; gradients of parts find the sample."""
    task, own = self.task_with_own_tokens()
    program = getattr(programs, name)

    def overflow(*args, **kwargs):
      out = program(*args, **kwargs)
      prompts = next(a for a in args if isinstance(a, PromptInputs))
      responses = next(a for a in args if isinstance(a, GroupResponses))
      rows = (np.asarray(prompts.token_ids) == own[1]).any(axis=-1)
      if not responses.lengths[rows, sample].any():
        return out
      return jax.tree.map(lambda a: a * np.float32(np.inf), out[0]), *out[1:]

    config = tiny_task.config(
        self.path, total_steps=2, algorithm=algorithm,
        residency=ResidencyConfig(check=algorithm == Algorithm.RL))
    _, run = self.run_steps(config, task)
    with mock.patch.object(programs, name, overflow):
      run.train()
    for record in self.records():
      self.assertEqual(record["samples"],
                       [{"row": 1, "sample": sample, "values": {}}])
      self.assertEqual(
          record["reason"], "loss or gradient is not finite, though all "
          "log-probs, rewards and advantages are, in row 1 sample "
          f"{sample}")
    self.assertLen(self.records(), 2)


if __name__ == "__main__":
  absltest.main()
