"""`train` on rows: RL and supervised, its files, and how it refuses."""

import importlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import numpy as np
import pytest

from rollplex_jax import scoring
from rollplex_jax.config import TrainConfig, from_config_dict
from rollplex_jax.data.processor import Processor
from rollplex_jax.errors import InputError
from rollplex_jax.models import hf
from tests.experiments import commands
from tests.helpers import devices, tiny_checkpoint

_REWARD = """\
def reward(completion, row):
  if row.get("answer") == "stop":
    return {"overall": 0.0}
  return {"overall": float(len(completion) % 3), "longer": len(completion) > 6}

def one(completion, row):
  return 1.0

def breaks(completion, row):
  return "good"

def no_row(completion):
  return 1.0
"""
_BASE = ("rollout.max_completion_length=6", "rollout.num_generations=2",
         "train_batch_size=4", "micro_batch_size=4", "total_steps=2",
         "optimizer.learning_rate=1e-3", "optimizer.warmup_steps=0",
         "eval_every=0", "eval_batch_size=4")


def setUpModule():
  devices.use_virtual_devices()


class _Case(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = pathlib.Path(
        cls.enterClassContext(tempfile.TemporaryDirectory()))
    cls.model = tiny_checkpoint.write(
        cls.folder / "model", eos=tiny_checkpoint.EOS)
    for seed, name in enumerate("ab"):
      tiny_checkpoint.write_image(cls.folder / f"{name}.png", 56, 56, seed)
    (cls.folder / "my_reward.py").write_text(_REWARD)
    message, image = tiny_checkpoint.message, tiny_checkpoint.image
    clip = tiny_checkpoint.video(["a.png", "b.png", "a.png"], fps=4.0)
    prompts = ["go to the red ball", message(image("a.png"), "What?"),
               message(clip, "Where does it go?"),
               message(image("b.png"), "or", image("a.png"))]
    cls.rows = tiny_checkpoint.write_rows(cls.folder / "rows.jsonl", [
        {"prompt": prompt, "response": f" the {word}", "answer": word}
        for prompt, word in zip(prompts, ("ball", "stop", "key", "stop"))])
    cls.eval_rows = tiny_checkpoint.write_rows(
        cls.folder / "eval.jsonl",
        [{"prompt": prompt, "answer": "key"} for prompt in prompts[:2]])

  def setUp(self):
    super().setUp()
    self.out = pathlib.Path(
        self.enterContext(tempfile.TemporaryDirectory())) / "a" / "run"

  def run_command(self, *settings, config="grpo", base=_BASE, reward="reward",
                  flags=()):
    settings = (
        f"policy.path={self.model}", f"data.rows={self.rows}",
        f"data.reward={self.folder}/my_reward.py:{reward}", *base, *settings)
    return commands.run(
        "train", f"--config={commands.ROOT}/experiments/configs/{config}.py",
        f"--output_dir={self.out}", *[f"--config.{s}" for s in settings],
        *flags)

  def train(self, *args, flags=("--notensorboard",), **kwargs):
    result = self.run_command(*args, flags=flags, **kwargs)
    self.assertEqual((result.status, result.err), (0, ""))
    return result

  def metrics(self):
    """Lines of training steps; those of evaluations have other keys."""
    lines = commands.read_lines(self.out / "metrics.jsonl")
    return [line for line in lines if "training/global_step" in line]

  def assert_refused(self, message, *args, **kwargs):
    before = commands.tree(self.folder)
    result = self.run_command(*args, **kwargs)
    self.assertEqual(result.status, 1)
    self.assertRegex(result.err, f"^error: {message}")
    self.assertEqual(result.err.count("\n"), 1)
    self.assertFalse(self.out.parent.exists())
    self.assertEqual(commands.tree(self.folder), before)


class RLTest(_Case):

  def test_frozen_tower_reference_mini_batches_and_files(self):
    result = self.train(
        f"data.eval_rows={self.eval_rows}", "objective.beta=0.1",
        "num_iterations=2", "mini_batch_size=2", "micro_batch_size=2",
        "eval_every=1", flags=(f"--json={self.out.parents[1] / 'r.json'}",))
    self.assertCountEqual(os.listdir(self.out), [
        "checkpoints", "config.json", "metrics.jsonl", "policy",
        "samples.jsonl", "summary.json", "tensorboard"])
    first, second = self.metrics()
    for name in ("timing_s/gen", "timing_s/ref", "timing_s/update_actor",
                 "actor/kl_loss", "actor/grad_norm", "actor/entropy",
                 "critic/score/mean", "response_length/mean",
                 "prompt_length/max", "perf/throughput", "compile/count"):
      self.assertIn(name, first)
    for line in (first, second):
      self.assertGreater(line["actor/kl_loss"], 0.0)
      self.assertLess(line["training/rollout_logprobs_diff_max"], 1e-4)
    self.assert_samples(first, second)
    self.assert_policy(frozen=True)
    summary = json.loads((self.out / "summary.json").read_text())
    self.assertEqual(
        json.loads((self.out.parents[1] / "r.json").read_text()), summary)
    self.assertEqual(
        [e["step"] for e in summary["evaluations"]], [0, 1, 2])
    self.assertEqual(summary["evaluations"][0]["val/rows"], 2)
    self.assertIn("step 2: held-out reward", result.out)
    config = json.loads((self.out / "config.json").read_text())
    self.assertEqual(config["objective"]["beta"], 0.1)
    self.assertEqual(config["policy"]["path"], self.model)

  def assert_samples(self, first, second):
    """Every sample with its prompt, and the reward function's own values."""
    samples = commands.read_lines(self.out / "samples.jsonl")
    self.assertLen(samples, 2 * 4 * 2)
    words = {0: "go to the red ball", 1: "<image> What?",
             2: "<video> Where does it go?", 3: "<image> or <image>"}
    for sample in samples:
      self.assertEqual(sample["prompt"], words[sample["row"]])
      length = len(sample["completion"])
      expected = {"overall": length % 3, "longer": length > 6}
      if sample["row"] in (1, 3):
        expected = {"overall": 0.0}
      self.assertEqual(sample["scores"], expected)
      self.assertEqual(sample["reward"], expected["overall"])
    for line in (first, second):
      rewards = [s["reward"] for s in samples if s["step"] == line["step"]]
      self.assertAlmostEqual(
          line["critic/score/mean"], np.mean(rewards), places=5)
      self.assertIn("reward/longer", line)

  def assert_policy(self, frozen):
    """It differs from the start, the tower only if it was trained, and runs."""
    _, before = hf.load_checkpoint(self.model)
    _, after = hf.load_checkpoint(self.out / "policy")
    same = lambda part: all(jax.tree.leaves(jax.tree.map(
        np.array_equal, before[part], after[part])))
    self.assertFalse(same("text"))
    self.assertEqual(same("visual"), frozen)
    processor = Processor.from_checkpoint(self.out / "policy")
    self.assertEqual(processor.encode("go to"),
                     Processor.from_checkpoint(self.model).encode("go to"))

  @pytest.mark.slow
  def test_trained_tower_bfloat16_without_reference(self):
    self.train("policy.freeze_vision_tower=False", "objective.beta=0",
               "policy.compute_dtype=bfloat16", "gen_batch_size=4",
               "train_batch_size=2", "objective.loss_type=dr_grpo",
               "total_steps=1")
    (line,) = self.metrics()
    self.assertNotIn("actor/kl_loss", line)
    self.assertNotIn("timing_s/ref", line)
    self.assertBetween(line["train/groups"], 1, 2)
    self.assertAlmostEqual(line["actor/ratio_mean"], 1.0, places=5)
    # Groups of equal rewards, of which there are two here, are not trained on.
    groups = {}
    for s in commands.read_lines(self.out / "samples.jsonl"):
      groups.setdefault((s["step"], s["row"]), []).append(s)
    self.assertLen(groups, 4)
    for group in groups.values():
      a, b = (s["reward"] for s in group)
      self.assertEqual([s["trained"] for s in group], [a != b] * 2)
    _, params = hf.load_checkpoint(self.out / "policy")
    self.assertEqual(params["text"]["embed"].dtype, "bfloat16")
    self.assert_policy(frozen=False)

  def test_two_runs_are_equal(self):
    runs = []
    for _ in range(2):
      self.train("objective.beta=0", "seed=5", flags=(
          "--notensorboard", *(["--overwrite"] if runs else [])))
      runs.append(commands.tree(self.out))
    for name in ("samples.jsonl", "policy/model.safetensors"):
      self.assertEqual(runs[0][name], runs[1][name])


class SupervisedTest(_Case):

  def test_learns_the_responses(self):
    base = ("train_batch_size=4", "micro_batch_size=3", "total_steps=12",
            "optimizer.learning_rate=1e-2", "rollout.max_completion_length=6",
            "optimizer.warmup_steps=0", "eval_batch_size=4")
    self.train(f"data.eval_rows={self.eval_rows}", config="supervised",
               base=base)
    losses = [line["train/loss"] for line in self.metrics()]
    self.assertLen(losses, 12)
    self.assertLess(losses[-1], 0.3 * losses[0])
    self.assertEmpty(commands.read_lines(self.out / "samples.jsonl"))

  def test_rows_need_responses(self):
    rows = tiny_checkpoint.write_rows(
        self.folder / "no.jsonl", [{"prompt": "a", "response": "b"},
                                   {"prompt": "a"}])
    self.assert_refused(f"{rows}:2: expected a response, found none",
                        f"data.rows={rows}", config="supervised", base=())
    self.assert_refused("data.eval_rows=.*: expected data.reward to score",
                        f"data.eval_rows={self.eval_rows}", "data.reward=",
                        config="supervised", base=())


class BadInputTest(_Case):

  @parameterized.parameters(
      ("totl_steps=3",
       "--config.totl_steps: no such key; did you mean total_steps?"),
      ("optimizer.lr=1", "--config.optimizer.lr: no such key"),
      ("rolout.num_generations=1", "--config.rolout.num_generations: no such "
       "key; did you mean --config.rollout.num_generations?"),
      ("optimizer.learning_rate=fast", ".*learning_rate=fast"),
      ("total_steps=1.5", ".*total_steps=1.5"),
      ("objective.loss_type=ppo", "config.objective.loss_type='ppo': expected"),
      ("micro_batch_size=9",
       "config.micro_batch_size=9: expected at most the 8 samples"),
      ("rollout.temperature=0", "config.rollout.temperature=0.0: expected"),
      ("policy.path=", "policy.path is not set"),
      ("policy.path=/no/model", "/no/model: no such checkpoint folder"),
      ("data.rows=", "data.rows is not set"),
      ("data.rows=/no/rows.jsonl", "/no/rows.jsonl: can't read rows"),
      ("data.eval_rows=/no/rows.jsonl", "/no/rows.jsonl: can't read rows"),
      ("data.max_prompt_length=3", ".*/rows.jsonl:1: expected a prompt of at"),
      ("data.reward=", "data.reward is not set"),
      ("data.reward=no_such_module:f", "reward no_such_module:f: importing"),
      ("data.reward=/no/file.py:f", "reward /no/file.py:f: file /no/file.py"))
  def test_settings(self, setting, message):
    self.assert_refused(message, setting)

  def test_rewards(self):
    self.assert_refused(".*:none: .* has no function none", reward="none")
    self.assert_refused(r"reward .*expected a function of \(completion, row\)",
                        reward="no_row")

  def test_reward_that_breaks_leaves_nothing(self):
    self.assert_refused(
        r"reward .*:breaks: dry run on .*rows.jsonl:1 with completion '': its "
        "value: expected a number or a dict of numbers, found str",
        reward="breaks")

  def fail_from(self, step):
    """Has scoring fail, as nothing that a reward does makes it."""
    score, steps = scoring.score, []

    def late(*args):
      steps.append(None)
      if len(steps) >= step:
        raise InputError("it broke")
      return score(*args)

    self.enter_context(mock.patch.object(scoring, "score", late))

  def test_a_run_that_fails_later_leaves_what_was_done(self):
    self.fail_from(2)
    result = self.run_command("objective.beta=0", flags=("--notensorboard",))
    self.assertEqual(result.status, 1)
    self.assertRegex(result.err, r"it broke \(metrics and samples of 1 "
                     f"steps, checkpoints up to step 1 are in {self.out}")
    self.assertCountEqual(os.listdir(self.out), [
        "checkpoints", "config.json", "metrics.jsonl", "samples.jsonl"])
    self.assertLen(self.metrics(), 1)

  def test_folders(self):
    self.out.mkdir(parents=True)
    for name, message in (("metrics.jsonl", "holds a run already, and no c"),
                          ("config.json", "holds config.json and is not the f")):
      (self.out / name).write_text("mine")
      result = self.run_command()
      self.assertRegex(result.err, f"^error: --output_dir={self.out}: {message}")
      self.assertEqual(commands.tree(self.out), {name: b"mine"})
      (self.out / name).unlink()
    self.out = self.folder / "rows.jsonl"
    self.assertIn("is not a folder", self.run_command().err)
    self.out /= "run"
    self.assertIn("can't write in", self.run_command().err)

  def test_overwrite_waits_for_a_run_that_starts(self):
    self.out.mkdir(parents=True)
    files = {"metrics.jsonl": b"old", "notes.txt": b"mine"}
    for name, content in files.items():
      (self.out / name).write_bytes(content)
    result = self.run_command("data.rows=/no", flags=("--overwrite",))
    self.assertEqual(result.status, 1)
    self.assertEqual(commands.tree(self.out), files)
    # What goes is the run and not what lies beside it.
    self.fail_from(1)
    result = self.run_command("objective.beta=0", flags=(
        "--overwrite", "--notensorboard"))
    self.assertEqual(result.status, 1)
    self.assertEqual(commands.tree(self.out), {"notes.txt": b"mine"})

  @parameterized.parameters(
      (None, "--config can't be read: No such file or directory"),
      ("total_steps: 3", "--config: expected a Python file with a function "),
      ("def get_config()\n  pass\n", ".*config.py:1: expected ':'"),
      ("import no_such_module\n", "--config: ModuleNotFoundError: No module"),
      ("def get_config():\n  pass\n", "--config: expected get_config.. to ret"),
      ("def get_config():\n  return {'a': 1}\n", ".*a ConfigDict, found dict"),
      ("import ml_collections\ndef get_config():\n"
       "  return ml_collections.ConfigDict({'steps': 1})\n",
       "config.steps: no such key; did you mean total_steps?"),
      ("import ml_collections\ndef get_config():\n"
       "  return ml_collections.ConfigDict({'total_steps': '1'})\n",
       "config.total_steps='1': expected int"),
      ("from rollplex_jax.config import TrainConfig, to_config_dict\n"
       "def get_config():\n  c = to_config_dict(TrainConfig())\n"
       "  c.total_steps = 'many'\n  return c\n",
       "flag --config=.*config.py: TypeError: .*'total_steps'"))
  def test_config_files(self, content, message):
    path = pathlib.Path(
        self.enterContext(tempfile.TemporaryDirectory())) / "config.py"
    if content:
      path.write_text(content)
    result = commands.run("train", f"--config={path}",
                          f"--output_dir={self.out}")
    self.assertEqual(result.status, 1)
    self.assertRegex(result.err, f"^error: {message}")
    self.assertEqual(result.err.count("\n"), 1)

  def test_key_that_the_file_lacks(self):
    path = pathlib.Path(
        self.enterContext(tempfile.TemporaryDirectory())) / "config.py"
    path.write_text("import ml_collections\ndef get_config():\n"
                    "  return ml_collections.ConfigDict({'total_steps': 1})\n")
    result = commands.run("train", f"--config={path}", "--config.seed=1",
                          f"--output_dir={self.out}")
    self.assertEqual(
        (result.status, result.err), (1, "error: --config.seed: the "
        "configuration file does not have this key; set it there\n"))

  @parameterized.parameters("dapo", "grpo", "supervised")
  def test_config_files_of_the_project(self, name):
    module = importlib.import_module(f"experiments.configs.{name}")
    from_config_dict(TrainConfig, module.get_config())

  def test_nothing_given(self):
    self.assertEqual(commands.run("train").err,
                     "error: --config is not set: expected a file such as "
                     "experiments/configs/grpo.py\n")


class ProcessTest(_Case):
  """The same in a process of its own."""

  @pytest.mark.slow
  def test_skipped_rows_are_counted(self):
    rows = tiny_checkpoint.write_rows(self.folder / "mixed.jsonl", [
        {"prompt": "go"}, {"prompt": "<|image_pad|>"}, {"prompt": "to"}, {}])
    done = subprocess.run(
        [sys.executable, "-m", "experiments.train",
         f"--config={commands.ROOT}/experiments/configs/grpo.py",
         f"--output_dir={self.out}", "--compilation_cache_dir=",
         f"--config.policy.path={self.model}", f"--config.data.rows={rows}",
         f"--config.data.reward={self.folder}/my_reward.py:breaks",
         "--config.data.skip_bad_rows", "--config.train_batch_size=2",
         "--config.data.reward_dry_run=False", "--config.objective.beta=0",
         *[f"--config.{s}" for s in (*_BASE, "total_steps=1")
           if "train_batch" not in s]],
        capture_output=True, text=True, check=False, cwd=commands.ROOT,
        env=commands.process_environment())
    self.assertEqual(done.returncode, 0)
    self.assertIn("skipped 2 of 4 rows\n", done.stdout)
    self.assertRegex(done.stdout, "1 placeholder count; first: .*:2: ")
    # One line, whatever number of rewards broke.
    told = [line for line in done.stderr.splitlines() if ":breaks" in line]
    self.assertLen(told, 1)
    self.assertRegex(told[0], "^.*reward .*:breaks, row .*found str; it sco"
                     ".*reward/errors/wrong_type$")
    (line,) = self.metrics()
    self.assertEqual(line["reward/errors/wrong_type"], 1.0)


if __name__ == "__main__":
  absltest.main()
