"""A miniature of the quick start: all of its parts, files and numbers."""

import json
import pathlib
import statistics
from unittest import mock

from absl import flags
from absl.testing import absltest, flagsaver
from ml_collections import config_flags
from PIL import Image
import pytest

from experiments import quickstart
from rollplex_jax.data.processor import Processor
from rollplex_jax.errors import InputError
from rollplex_jax.models import hf, tensor_files
from tests.helpers import devices

_RATES = ("success_before", "success_after", "success_blind",
          "success_supervised_only", "success_other_words")
_EPISODES = 16
_SETTINGS = {
    "environment.level": "BabyAI-GoToLocalS5N2-v0",
    "environment.image_size": 12,
    "environment.max_actions": 3,
    "environment.eval_episodes": _EPISODES,
    "shape.hidden_size": 64,
    "shape.num_layers": 1,
    "shape.vision_hidden_size": 32,
    "shape.vision_layers": 1,
    "shape.patch_size": 4,
    "shape.merge_size": 1,
    "demonstrations": 32,
    "warm_start.rollout.max_completion_length": 4,
    "warm_start.total_steps": 3,
    "warm_start.train_batch_size": 4,
    "warm_start.eval_every": 0,
    "warm_start.eval_batch_size": _EPISODES,
    "rl.rollout.num_generations": 4,
    "rl.rollout.max_completion_length": 4,
    "rl.gen_batch_size": 4,
    "rl.train_batch_size": 4,
    "rl.micro_batch_size": 8,
    "rl.total_steps": 2,
    "rl.eval_every": 1,
    "rl.eval_batch_size": _EPISODES,
    "gif_episodes": 2,
}


def setUpModule():
  devices.use_virtual_devices()
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()


class QuickstartTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path) / "run"
    self.enter_context(flagsaver.flagsaver(
        output_dir=str(self.folder), seed=3, tensorboard=True))
    config = flags.FLAGS.config
    before = config.to_dict()
    self.addCleanup(config.update, before)
    config.update_from_flattened_dict(_SETTINGS)

  @pytest.mark.slow
  def test_everything_is_there(self):
    summary = quickstart.main()
    written = json.loads((self.folder / "summary.json").read_text())
    self.assertEqual(json.loads(json.dumps(summary)), written)
    self.assertCountEqual(written["intervals"], _RATES)
    for name in _RATES:
      low, high = written["intervals"][name]
      self.assertBetween(written[name], low, high)
      self.assertEqual(written[name] * _EPISODES % 1, 0)
    self.assertEqual(written["steps"], 2)
    self.assertEqual(written["seed"], 3)
    self.assertGreater(written["tokens_per_second"], 0)
    phases = written["phase_seconds"]
    self.assertLessEqual(
        {"build", "warm_start", "rl", "supervised_only", "evaluation",
         "compression", "schedules"},
        set(phases))
    self.assertLessEqual({"gen", "reward", "step"}, set(phases["rl_parts"]))
    parts = sum(s for s in phases.values() if not isinstance(s, dict))
    self.assertBetween(parts, 0, written["wall_seconds"])
    # More supervised learning gets the time that RL took, and not much more.
    self.assertGreaterEqual(
        written["supervised_only_seconds"], written["rl_seconds"])
    self.check_schedules(written["schedules"])
    self.check_compression(written["compression"])
    self.check_files()

    with self.assertRaisesRegex(InputError, "holds a run already"):
      quickstart.main()

  @pytest.mark.slow
  def test_step_by_step(self):
    settings = {
        name: value for name, value in _SETTINGS.items()
        if name != "environment.max_actions"} | {
            "environment.max_turns": 2,
            "warm_start.rollout.max_completion_length": 2,
            "rl.rollout.max_completion_length": 2}
    with (flagsaver.flagsaver(step_by_step=True), mock.patch.object(
        config_flags, "get_override_values", lambda _: settings)):
      summary = quickstart.main()
    self.assertEqual((summary["max_turns"], summary["actions_per_turn"]), (2, 1))
    self.check_schedules(summary["schedules"])
    lines = (self.folder / "samples.jsonl").read_text().splitlines()
    turns = {json.loads(line)["scores"]["turns"] for line in lines}
    self.assertLessEqual(turns, {1.0, 2.0})
    with Image.open(self.folder / "episode.gif") as image:
      self.assertGreater(image.n_frames, 1)

  def test_step_by_step_settings_give_way_to_flags(self):
    with flagsaver.flagsaver(step_by_step=True):
      config = quickstart.read_config()
      self.assertEqual(config.environment.max_turns, 8)
      self.assertFalse(config.environment.must_stop)
      with mock.patch.object(
          config_flags, "get_override_values",
          lambda _: {"rl.total_steps": 7, "environment.max_turns": 3}):
        config = quickstart.read_config()
    self.assertEqual(config.environment.max_turns, 3)
    self.assertEqual(config.rl.total_steps, 7)
    self.assertEqual(config.rl.rollout.max_completion_length, 2)

  def check_schedules(self, found):
    """Same work, and every lane of every schedule did some of it."""
    names = ["serial_unshared", "serial_shared", "rollplex"]
    self.assertEqual(list(found["rows"]), names)
    self.assertEqual((found["prompts"], found["num_generations"]), (4, 4))
    self.assertTrue(found["added_reference"])
    self.assertTrue(found["same_completions"])
    self.assertLess(found["gradient_norm_spread"] or 0, 1e-5)
    self.assertGreaterEqual(found["turns"], 5)
    for name, row in found["rows"].items():
      self.assertLen(row["all_seconds"], found["turns"])
      self.assertEqual(
          row["seconds"], statistics.median(row["all_seconds"]))
      self.assertGreater(row["window_seconds"], 0)
      self.assertGreater(row["peak_bytes_live"], 0)
      if name != "rollplex":
        self.assertAlmostEqual(
            found["ratios"][name],
            row["seconds"] / found["rows"]["rollplex"]["seconds"])
    stages = {name: set(row["stage_seconds"])
              for name, row in found["rows"].items()}
    for name, own in zip(names, (
        {"score_full", "gradient_full"}, {"score", "gradient"}, {"window"})):
      self.assertLessEqual(own | {"reward", "update"}, stages[name])
    with Image.open(self.folder / "timeline.png") as image:
      self.assertEqual(image.width, 1200)
    trace = json.loads((self.folder / "timeline.json").read_text())
    self.assertEqual(
        {(e["pid"], e["cat"]) for e in trace["traceEvents"] if e["ph"] == "X"},
        {(pid, lane) for pid in (1, 2, 3)
         for lane in ("rollout", "reference", "training", "host")})
    self.assertEqual(
        {e["pid"] for e in trace["traceEvents"] if e["ph"] == "C"}, {1, 2, 3})

  def check_compression(self, found):
    """Of the only block; what was written is what was played."""
    self.assertBetween(found["success"], *found["interval"])
    self.assertBetween(found["same_plans"], 0, 1)
    self.assertBetween(found["compressed_share"], 0.01, 1)
    self.assertBetween(found["bits_per_compressed_weight"], 6, 8)
    self.assertGreater(found["true_ratio"], 1)
    folder = str(self.folder / "compressed_policy")
    self.assertTrue(tensor_files.is_compressed(folder))
    self.assertTrue(Processor.from_checkpoint(folder))

  def check_files(self):
    lines = [json.loads(line) for line in
             (self.folder / "metrics.jsonl").read_text().splitlines()]
    self.assertEqual(
        [line["step"] for line in lines if "val/success" in line], [0, 1, 2])
    self.assertIn("timing_s/gen", lines[1])
    samples = (self.folder / "samples.jsonl").read_text().splitlines()
    self.assertLen(samples, 2 * 4 * 4)
    self.assertTrue(list((self.folder / "tensorboard").glob("events.*")))
    with Image.open(self.folder / "learning_curve.png") as image:
      self.assertGreater(min(image.size), 400)
    with Image.open(self.folder / "episode.gif") as image:
      # Each episode has a first and at least one more picture, or its policy
      # wrote no plan.
      self.assertGreaterEqual(image.n_frames, 2)
    config, params = hf.load_checkpoint(self.folder / "policy")
    self.assertIn("visual", params)
    self.assertEqual(config.text.hidden_size, 64)
    Processor.from_checkpoint(self.folder / "policy")

  def test_unknown_level(self):
    flags.FLAGS.config.environment.level = "BabyAI-NoSuchLevel-v0"
    with self.assertRaisesRegex(InputError, "NoSuchLevel"):
      quickstart.main()
    self.assertFalse(self.folder.exists())


if __name__ == "__main__":
  absltest.main()
