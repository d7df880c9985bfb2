"""The training loop on a task that a tiny policy learns in seconds."""

import dataclasses
import json
import pathlib
import tempfile

from absl.testing import absltest, parameterized
import jax
import numpy as np

from rollplex_jax.config import Algorithm, PolicyConfig, RolloutConfig
from rollplex_jax.errors import InputError
from rollplex_jax.loop import Run
from rollplex_jax.models import hf
from rollplex_jax.schedule import ScheduleConfig
from rollplex_jax.stages.objectives import ObjectiveConfig
from rollplex_jax.stages.update import OptimizerConfig
from rollplex_jax.timeline import Timeline
from rollplex_jax.trainer import Trainer
from tests.helpers import tiny_checkpoint, tiny_task
from tests.helpers.tiny_task import VowelTask

_config = tiny_task.config


class TrainerTest(parameterized.TestCase):

  run_steps = staticmethod(tiny_task.run_steps)

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = pathlib.Path(cls.enterClassContext(
        tempfile.TemporaryDirectory()))
    cls.path = tiny_checkpoint.write(cls.folder)

  def test_rl_learns_and_writes_its_files(self):
    config = _config(self.path, total_steps=25)
    trainer = Trainer(config, task=VowelTask())
    seen = []
    out = self.folder / "run"
    summary = Run(trainer, out, on_step=seen.append).train()
    first, last = (e["val/reward"] for e in summary["evaluations"])
    self.assertGreater(last, first + 0.3)
    self.assertLen(seen, 25)
    metrics = [json.loads(line) for line in
               (out / "metrics.jsonl").read_text().splitlines()]
    self.assertLen(metrics, 27)
    samples = [json.loads(line) for line in
               (out / "samples.jsonl").read_text().splitlines()]
    self.assertLen(samples, 25 * 16)
    self.assertEqual(json.loads((out / "summary.json").read_text()), summary)
    self.assertTrue(any((out / "tensorboard").iterdir()))
    _, saved = hf.load_checkpoint(out / "policy")
    for a, b in zip(jax.tree.leaves(saved), jax.tree.leaves(trainer.params)):
      np.testing.assert_array_equal(a, b)
    # Another run does not go on there.
    other = Trainer(dataclasses.replace(config, seed=1), task=VowelTask())
    with self.assertRaisesRegex(InputError, "seed"):
      Run(other, out)

  @parameterized.parameters(True, False)
  def test_same_numbers_in_rollout_and_training(self, freeze):
    # At temperature 0.6 and with top-p, before and after updates.
    config = _config(
        self.path, policy=PolicyConfig(
            path=self.path, freeze_vision_tower=freeze),
        rollout=RolloutConfig(num_generations=4, max_completion_length=4,
                              temperature=0.6, top_p=0.9))
    trainer, values = self.run_steps(config, 3)
    for v in values:
      self.assertLess(v["training/rollout_logprobs_diff_max"], 1e-4)
      self.assertEqual(v["actor/ratio_mean"], 1.0)
    self.assertEqual("visual" in trainer.state.params, not freeze)

  def test_reference_stays_where_it_was(self):
    config = _config(
        self.path, objective=ObjectiveConfig(loss_type="grpo", beta=0.01))
    trainer, values = self.run_steps(config, 3)
    self.assertLess(abs(values[0]["actor/kl_loss"]), 1e-6)
    self.assertGreater(values[2]["actor/kl_loss"], 1e-4)
    _, initial = hf.load_checkpoint(self.path)
    for a, b in zip(jax.tree.leaves(initial["text"]),
                    jax.tree.leaves(trainer.reference.params["text"])):
      np.testing.assert_array_equal(a, b)
    self.assertIsNone(self.run_steps(_config(self.path), 0)[0].reference)

  def test_micro_batches_change_nothing(self):
    """The same trajectory whatever the micro-batch, tower trained."""
    def final(size):
      config = _config(self.path, micro_batch_size=size, policy=PolicyConfig(
          path=self.path, freeze_vision_tower=False),
          optimizer=OptimizerConfig(learning_rate=1e-3))
      trainer, _ = self.run_steps(config, 2)
      return jax.device_get(trainer.params)

    whole, cut = final(0), final(3)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(cut)):
      # Adam turns a rounding error of a tiny gradient into one of the rate.
      np.testing.assert_allclose(a, b, atol=2e-4)

  def test_several_updates_per_rollout(self):
    config = _config(self.path, num_iterations=2, mini_batch_size=2)
    trainer, values = self.run_steps(config, 1)
    self.assertEqual(int(trainer.state.step), 4)
    # Later updates see a policy that has moved away from the one that sampled.
    self.assertGreater(abs(values[0]["actor/ratio_mean"] - 1), 1e-6)
    self.assertIn("timing_s/old_log_prob", values[0])

  def test_second_iteration_uses_the_first_ones_logprobs(self):
    """With a rate of almost nothing the second update's ratio is one too."""
    config = _config(self.path, num_iterations=2,
                     optimizer=OptimizerConfig(learning_rate=1e-12))
    _, values = self.run_steps(config, 1)
    self.assertAlmostEqual(values[0]["actor/ratio_mean"], 1.0, places=4)

  def test_dynamic_sampling(self):
    config = _config(self.path, gen_batch_size=6, train_batch_size=2)
    _, values = self.run_steps(config, 1)
    self.assertLessEqual(values[0]["train/groups"], 2)
    task = VowelTask()
    task.constant = True
    trainer, values = self.run_steps(config, 1, task)
    self.assertEqual(values[0]["train/groups"], 0)
    self.assertEqual(int(trainer.state.step), 0)

  def test_supervised_learning(self):
    config = _config(self.path, algorithm=Algorithm.SUPERVISED,
                     total_steps=15)
    trainer = Trainer(config, task=VowelTask())
    summary = Run(trainer, self.folder / "supervised").train()
    lines = (self.folder / "supervised" / "metrics.jsonl").read_text()
    losses = [json.loads(line)["train/loss"] for line in lines.splitlines()
              if "train/loss" in line]
    self.assertLess(losses[-1], 0.3 * losses[0])
    # "aa" is what was taught, and the EOS that was appended ends it.
    texts = trainer.evaluate(trainer.task.eval_rows).completions
    self.assertEqual(texts, ["aa"] * 3)
    self.assertLen(summary["evaluations"], 2)

  def test_bfloat16_compute_keeps_float32_masters(self):
    config = _config(self.path, policy=PolicyConfig(
        path=self.path, compute_dtype="bfloat16"))
    trainer, values = self.run_steps(config, 2)
    self.assertEqual(trainer.params["text"]["embed"].dtype, "bfloat16")
    self.assertEqual(trainer.params["visual"]["patch_embed"].dtype, "bfloat16")
    self.assertEqual(trainer.state.params["text"]["embed"].dtype, "float32")
    self.assertLess(values[0]["training/rollout_logprobs_diff_mean"], 0.1)

  def test_prefixes_beyond_their_budget_are_not_saved(self):
    """The next policy is taken, said once, and changes nothing."""
    schedule = dict(name="rollplex", save="activations")
    _, expected = tiny_task.run_steps(tiny_task.config(
        self.path, schedule=ScheduleConfig(**schedule)), 2)
    with self.assertLogs("absl", "WARNING") as logged:
      _, got = tiny_task.run_steps(tiny_task.config(self.path, schedule=ScheduleConfig(
          **schedule, prefix_budget_gb=1e-4)), 2)
    told = [line for line in logged.output if "prefix_budget_gb" in line]
    self.assertLen(told, 1)
    self.assertIn("saving layer_inputs instead", told[0])
    for a, b in zip(expected, got):
      for name in ("actor/loss", "actor/grad_norm"):
        np.testing.assert_allclose(a[name], b[name], rtol=1e-3, atol=1e-6)

  def test_prefixes_that_cannot_fit_are_refused(self):
    with self.assertRaisesRegex(InputError, "prefix_budget_gb=1e-06"):
      tiny_task.run_steps(tiny_task.config(self.path, schedule=ScheduleConfig(
          name="rollplex", prefix_budget_gb=1e-6)), 1)

  def test_records_steps(self):
    """Every second step, none of them the first, which compiles."""
    config = tiny_task.config(
        self.path, timeline_every=2, total_steps=5, micro_batch_size=8,
        objective=ObjectiveConfig(loss_type="dapo", beta=0.05))
    folder = self.folder / "recorded"
    Run(Trainer(config, task=tiny_task.VowelTask()), folder,
        evaluate_ends=False, tensorboard=False).train()
    files = sorted(path.name for path in (folder / "timeline").iterdir())
    self.assertEqual(files, ["step_000002.json", "step_000002.png",
                             "step_000004.json", "step_000004.png"])
    events = json.loads(
        (folder / "timeline" / files[-2]).read_text())["traceEvents"]
    self.assertEqual(
        [e["args"]["name"] for e in events if e["name"] == "process_name"],
        ["rollplex, step 4"])
    found = {(e["cat"], e["name"], e["args"].get("index"))
             for e in events if e["ph"] == "X"}
    self.assertLessEqual({
        ("host", "data", None), ("host", "batch", None),
        ("host", "reward", None), ("host", "adv", None),
        ("rollout", "window", None), ("rollout", "decode", None),
        ("reference", "prefix", None),
        ("reference", "score", 0), ("reference", "score", 1),
        ("training", "gradient", 0), ("training", "gradient", 1),
        ("training", "prefix_backward", 1), ("training", "update", None),
    }, found)
    measured = [e["args"]["bytes"] for e in events if e["ph"] == "C"]
    self.assertGreater(min(measured), 0)

  def test_recording_changes_nothing(self):
    config = tiny_task.config(self.path)
    trainer, (expected,) = tiny_task.run_steps(config, 1)
    timeline = Timeline("rollplex")
    got, _ = (other := Trainer(config, task=tiny_task.VowelTask())).step(
        next(other.batches()), 0, timeline)
    for name in ("actor/loss", "actor/grad_norm", "critic/score/mean"):
      self.assertEqual(got[name], expected[name])
    for a, b in zip(jax.tree.leaves(trainer.params),
                    jax.tree.leaves(other.params)):
      np.testing.assert_array_equal(a, b)
    self.assertLessEqual(timeline.seconds, got["timing_s/step"])

  def test_records_the_only_step_of_supervised_learning(self):
    config = tiny_task.config(self.path, algorithm=Algorithm.SUPERVISED,
                     timeline_every=1, total_steps=1, mini_batch_size=2)
    folder = self.folder / "supervised_recorded"
    Run(Trainer(config, task=tiny_task.VowelTask()), folder,
        evaluate_ends=False, tensorboard=False).train()
    events = json.loads((folder / "timeline" / "step_000001.json").read_text())
    self.assertEqual(
        ["gradient_full", "update"] * 2,
        [e["name"] for e in events["traceEvents"]
         if e["ph"] == "X" and e["cat"] == "training"])

  def test_time_limit(self):
    config = _config(self.path, total_steps=50, max_seconds=1e-3)
    trainer = Trainer(config, task=VowelTask())
    summary = Run(trainer, self.folder / "short", evaluate_ends=False).train()
    self.assertEqual(summary["steps"], 1)

  def test_same_seed_same_run(self):
    _, first = self.run_steps(_config(self.path), 2)
    _, again = self.run_steps(_config(self.path), 2)
    _, other = self.run_steps(
        dataclasses.replace(_config(self.path), seed=1), 2)
    loss = lambda values: [v["actor/pg_loss"] for v in values]
    self.assertEqual(loss(first), loss(again))
    self.assertNotEqual(loss(first), loss(other))


if __name__ == "__main__":
  absltest.main()
