"""Runs as processes of their own: killed, told to save and told to end."""

import json
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

from absl.testing import absltest
import pytest

from rollplex_jax.checkpoint import Checkpoints
from rollplex_jax.models import hf
from rollplex_jax.run_comparison import compare
from tests.experiments import commands
from tests.helpers import devices, tiny_checkpoint

_REWARD = """\
import os, time

def reward(completion, row):
  folder = os.path.dirname(__file__)
  if os.path.exists(f"{folder}/slow"):
    open(f"{folder}/waiting", "w").close()
    time.sleep(300)
  return float(len(completion) % 3)
"""


def setUpModule():
  devices.use_virtual_devices()


class RunsTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(
        self.enterContext(tempfile.TemporaryDirectory()))
    self.model = tiny_checkpoint.write(
        self.folder / "model", with_vision=False, eos=tiny_checkpoint.EOS)
    (self.folder / "my_reward.py").write_text(_REWARD)
    self.rows = tiny_checkpoint.write_rows(
        self.folder / "rows.jsonl", [{"prompt": "go to"}] * 8)
    self.run = self.folder / "run"

  def flags(self, *settings, out="run"):
    settings = (
        f"policy.path={self.model}", f"data.rows={self.rows}",
        f"data.reward={self.folder}/my_reward.py:reward", "objective.beta=0",
        "rollout.max_completion_length=4", "rollout.num_generations=2",
        "train_batch_size=2", "micro_batch_size=4",
        "optimizer.learning_rate=1e-3", *settings)
    return (f"--config={commands.ROOT}/experiments/configs/grpo.py",
            f"--output_dir={self.folder / out}",
            *(f"--config.{s}" for s in settings))

  def train(self, *settings, out="run", flags=()):
    return commands.run("train", *self.flags(*settings, out=out), *flags)

  def wait(self, process, condition):
    deadline = time.monotonic() + 120
    while not condition():
      self.assertIsNone(process.poll(), "the run ended")
      self.assertLess(time.monotonic(), deadline)
      time.sleep(0.05)

  @pytest.mark.slow
  def test_signals(self):
    """A save on demand and an export; then a step that would take minutes."""
    process = subprocess.Popen(
        [sys.executable, "-m", "experiments.train", *self.flags(
            "total_steps=100000", "checkpoint.exit_seconds=9")],
        cwd=commands.ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=commands.process_environment())
    self.addCleanup(process.communicate)
    self.addCleanup(process.kill)
    metrics = self.run / "metrics.jsonl"
    self.wait(process, lambda: metrics.exists()
              and metrics.read_text().count("\n") >= 2)
    process.send_signal(signal.SIGUSR1)
    checkpoints = Checkpoints(self.run / "checkpoints")
    self.wait(process, checkpoints.steps)
    result = commands.run(
        "export", f"--output_dir={self.run}",
        f"--output_path={self.folder / 'out'}")
    self.assertEqual(result.status, 0, result.err)
    self.assertStartsWith(result.out, f"step {checkpoints.steps()[0]} of ")
    hf.load_checkpoint(self.folder / "out")
    second = commands.run("train", *self.flags("total_steps=100000"))
    self.assertIn("another process is running in this folder", second.err)
    (self.folder / "slow").touch()
    self.wait(process, (self.folder / "waiting").exists)
    done = metrics.read_text().count("\n")
    start = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=20)
    self.assertLess(time.monotonic() - start, 9)
    self.assertEqual(process.returncode, 143)
    told = [line for line in errors.splitlines()
            if not line.startswith("warning: step ")]
    self.assertEqual(
        told, [f"stopped by SIGTERM after step {done} of 100000, which is "
               "saved: the same command goes on from there"])
    self.assertEqual(checkpoints.steps()[-1], done)

  @pytest.mark.slow
  def test_kills(self):
    """`make test` has no time for more than a few."""
    out = self.folder / "kills.json"
    done = subprocess.run(
        [sys.executable, "-m", "experiments.kill_runs", "--kills=2",
         "--steps=24", f"--json={out}"], cwd=commands.ROOT, capture_output=True,
        text=True, check=False, env=commands.process_environment())
    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
    self.assertIn("are those of an undisturbed run", done.stdout)
    self.assertLen(json.loads(out.read_text())["kills"], 2)

  @pytest.mark.slow
  def test_commands_that_go_on(self):
    settings = ("checkpoint.every=2", "objective.beta=0.1")
    self.assertEqual(self.train(*settings, "total_steps=3").status, 0)
    tree = commands.tree(self.run)
    result = self.train(*settings, "total_steps=3", flags=(
        f"--json={self.folder / 'r.json'}",))
    self.assertEqual((result.status, result.err), (0, ""))
    self.assertIn("finished after 3 steps; a larger", result.out)
    self.assertEqual(commands.tree(self.run), tree)
    self.assertEqual(json.loads((self.folder / "r.json").read_text()),
                     json.loads((self.run / "summary.json").read_text()))
    result = self.train(*settings, "total_steps=5", "seed=3")
    self.assertRegex(
        result.err, f"^error: --output_dir={self.run}: holds a run whose "
        "result these would change: seed was 0, is 3; pass --allow_config")
    self.assertEqual(commands.tree(self.run), tree)
    result = self.train(*settings, "total_steps=5")
    self.assertEqual((result.status, result.err), (0, ""))
    self.assertIn(f"goes on from step 3, the newest checkpoint in {self.run}",
                  result.out)
    self.train(*settings, "total_steps=5", out="whole")
    self.assertEqual(compare(self.folder / "whole", self.run), [])
    events = list((self.run / "tensorboard").iterdir())
    self.assertLen(events, 2)
    result = self.train(*settings, "total_steps=6", "seed=3", flags=(
        "--allow_config_change",))
    self.assertEqual(result.status, 0)
    self.assertIn("changed: seed was 0, is 3\n", result.out)
    result = self.train(*settings, "total_steps=1", flags=("--overwrite",))
    self.assertEqual(Checkpoints(self.run / "checkpoints").steps(), [1])

  def test_export_refuses(self):
    result = commands.run("export", f"--output_dir={self.folder}",
                          f"--output_path={self.folder / 'out'}")
    self.assertEqual(result.err, f"error: {self.folder}: holds no checkpoint "
                     "of a run\n")
    self.assertFalse((self.folder / "out").exists())


if __name__ == "__main__":
  absltest.main()
