"""`train` with rewards that misbehave in every way: it finishes, and says so."""

import collections
import json
import pathlib
import tempfile

from absl.testing import absltest
import pytest

from rollplex_jax.data.fallbacks import KINDS
from tests.experiments import commands
from tests.helpers import devices, tiny_checkpoint

_ROOT = pathlib.Path(__file__).parents[2]
_REWARD = """\
from tests.data import misbehavior as other

def reward(completion, row):
  if row["do"] == "nan":
    return float("nan")
  if row["do"] == "string":
    return "good"
  value = 1.0
  if row["do"] != "fine":
    value += getattr(other, row["do"])(row["argument"]) * 0
  return {"overall": value, "success": True}

def no_row(completion):
  return 1.0
"""
# What the rows have the reward do, and the kind that it is counted as.
_ROWS = (
    ("fine", 0, None), ("forever", 0, "timeout"), ("raises", 1, "exception"),
    ("nan", 0, "not_finite"), ("string", 0, "wrong_type"),
    ("exits_hard", 5, "exit"), ("exits", 0, "exit"),
    ("allocates", 2, "memory"), ("prints", 0, None),
    ("starts_a_child", 0, None), ("closes_files", 0, "exit"),
    ("crashes", 0, "exit"))


def setUpModule():
  devices.use_virtual_devices()


@pytest.mark.slow
class MisbehaviorTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    folder = pathlib.Path(
        self.enterContext(tempfile.TemporaryDirectory()))
    self.out = folder / "run"
    model = tiny_checkpoint.write(folder / "model", eos=tiny_checkpoint.EOS)
    (folder / "my_reward.py").write_text(_REWARD)
    rows = tiny_checkpoint.write_rows(folder / "rows.jsonl", [
        {"prompt": "go to", "do": name, "argument": argument}
        for name, argument, _ in _ROWS])
    self.settings = [
        f"policy.path={model}", f"data.rows={rows}", "objective.beta=0",
        "rollout.max_completion_length=4", "rollout.num_generations=2",
        f"train_batch_size={len(_ROWS)}", "total_steps=1",
        "data.reward_timeout=1.0", "data.reward_fallback=-1.0",
        "data.reward_num_workers=2"]
    self.reward = f"data.reward={folder}/my_reward.py"

  def train(self, *settings):
    result = commands.run(
        "train", f"--config={_ROOT}/experiments/configs/grpo.py",
        f"--output_dir={self.out}", "--notensorboard",
        *[f"--config.{s}" for s in (*self.settings, *settings)])
    self.assertEqual(result.status, 0, result.err)
    (metrics,) = commands.read_lines(self.out / "metrics.jsonl")
    return metrics, commands.read_lines(self.out / "samples.jsonl")

  def test_the_run_finishes_and_names_each(self):
    metrics, samples = self.train(f"{self.reward}:reward")
    counts = collections.Counter(kind for *_, kind in _ROWS)
    for kind in KINDS:
      self.assertAlmostEqual(
          metrics[f"reward/errors/{kind}"], counts[kind] / len(_ROWS))
    self.assertAlmostEqual(metrics["reward/success"], counts[None] / len(_ROWS))
    self.assertLen(samples, 2 * len(_ROWS))
    for sample in samples:
      _, _, kind = _ROWS[sample["row"]]
      self.assertEqual(sample.get("error"), kind)
      self.assertEqual(sample["reward"], 1.0 if kind is None else -1.0)
      self.assertEqual(set(sample["scores"]), {"overall", "success"})
    self.assertIn("steps", json.loads((self.out / "summary.json").read_text()))

  def test_wrong_arguments_are_counted_where_nothing_is_tried_out(self):
    metrics, samples = self.train(
        f"{self.reward}:no_row", "data.reward_dry_run=False")
    self.assertEqual(metrics["reward/errors/wrong_arguments"], 1.0)
    self.assertEqual({s["reward"] for s in samples}, {-1.0})


if __name__ == "__main__":
  absltest.main()
