"""`train` in several processes: the run of one, and how it ends."""

import json
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time

from absl.testing import absltest, parameterized
import jax
import numpy as np
import pytest

from rollplex_jax.checkpoint import Checkpoints
from rollplex_jax.models import hf
from tests.experiments import commands
from tests.helpers import tiny_checkpoint

_DEVICES = 4
# Fewer programs to compile, where it matters only that the run goes on.
_FEW = ("schedule.name=serial", "schedule.prefix_source=rollout",
        "objective.beta=0", "eval_batch_size=8", "total_steps=100000")
# Longest time for the others to end after one process has.
_END_SECONDS = 60
_REWARD = """\
import os
import time

def reward(completion, row):
  return float(len(completion) % 3)

def removes(completion, row):
  picture = os.path.join(os.path.dirname(__file__), "own", "gone.png")
  if os.path.exists(picture):
    os.remove(picture)
  return 1.0

def slow(completion, row):
  time.sleep(0.2)
  return float(len(completion) % 3)
"""


class ProcessesTest(parameterized.TestCase):

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
    prompts = ["go to the red ball", message(image("a.png"), "What?"),
               "turn left", message(image("b.png"), "or", image("a.png"))]
    cls.rows = tiny_checkpoint.write_rows(
        cls.folder / "rows.jsonl", [{"prompt": p} for p in prompts * 2])

  def setUp(self):
    super().setUp()
    self.out = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

  def start(self, count, *settings, name="run", reward="reward", flags=()):
    """Starts the processes of a run; the tests' own devices stay unused."""
    settings = (
        f"policy.path={self.model}", f"data.rows={self.rows}",
        f"data.eval_rows={self.rows}", f"mesh.data={_DEVICES // 2}",
        "mesh.training_tp=1", "mesh.rollout_tp=2",
        "schedule.prefix_source=window", "objective.beta=0.05",
        f"data.reward={self.folder}/my_reward.py:{reward}",
        "rollout.max_completion_length=6", "rollout.num_generations=2",
        "train_batch_size=4", "micro_batch_size=4", "total_steps=2",
        "optimizer.learning_rate=1e-3", "optimizer.warmup_steps=0",
        "optimizer.adam_epsilon=1e-6", "eval_every=0", "eval_batch_size=4",
        "residency.check=True", *settings)
    with socket.socket() as s:
      s.bind(("localhost", 0))
      port = s.getsockname()[1]
    env = commands.process_environment(
        JAX_NUM_CPU_DEVICES=str(_DEVICES // count),
        XLA_FLAGS="--xla_cpu_collective_call_terminate_timeout_seconds=600")
    workers = []
    for i in range(count):
      where = (f"--coordinator_address=localhost:{port}", f"--process_id={i}",
               f"--num_processes={count}") if count > 1 else ()
      worker = subprocess.Popen(
          [sys.executable, "-m", "experiments.train",
           f"--config={commands.ROOT}/experiments/configs/grpo.py",
           f"--output_dir={self.out / name}", "--notensorboard",
           "--compilation_cache_dir=",
           *[f"--config.{s}" for s in settings], *where, *flags],
          env=env, cwd=commands.ROOT, text=True, stdout=subprocess.PIPE,
          stderr=subprocess.PIPE)
      self.addCleanup(_end, worker)
      workers.append(worker)
    return workers

  def finish(self, workers, seconds=600):
    """(status, output, errors) of each process."""
    out = []
    deadline = time.monotonic() + seconds
    for worker in workers:
      text, errors = worker.communicate(timeout=deadline - time.monotonic())
      out.append((worker.returncode, text, errors))
    return out

  def run_of(self, count):
    for status, _, errors in self.finish(self.start(count, name=f"{count}")):
      self.assertEqual(status, 0, errors)
    return self.out / f"{count}"

  @pytest.mark.slow
  def test_same_run(self):
    """Metrics, samples, evaluations and weights of one process's run."""
    self.assert_same(self.run_of(1), self.run_of(4))

  def assert_same(self, one, several):
    expected = commands.read_lines(one / "metrics.jsonl")
    found = commands.read_lines(several / "metrics.jsonl")
    self.assertEqual(len(expected), len(found))
    for a, b in zip(expected, found):
      for key in ("actor/loss", "actor/kl_loss", "actor/grad_norm",
                  "critic/score/mean", "val/reward"):
        self.assertEqual(key in a, key in b)
        if key in a:
          np.testing.assert_allclose(a[key], b[key], rtol=1e-4, atol=1e-6)
    lines = lambda run: [
        {k: v for k, v in line.items() if k != "timing"}
        for line in commands.read_lines(run / "samples.jsonl")]
    self.assertEqual(lines(one), lines(several))
    weights = lambda run: jax.tree.leaves(
        hf.load_checkpoint(run / "policy")[1])
    for a, b in zip(weights(one), weights(several), strict=True):
      np.testing.assert_allclose(a, b, atol=2e-5)
    summary = json.loads((several / "summary.json").read_text())
    self.assertEqual(summary["steps"], 2)

  @pytest.mark.slow
  def test_a_failure_ends_all_with_its_reason(self):
    """A picture that is gone when its row is read again."""
    own = self.folder / "own"
    own.mkdir()
    picture = tiny_checkpoint.image("gone.png")
    tiny_checkpoint.write_image(own / "gone.png", 56, 56, 3)
    rows = tiny_checkpoint.write_rows(own / "rows.jsonl", [
        {"prompt": tiny_checkpoint.message(picture, text)}
        for text in ("left", "right", "up", "down")])
    results = self.finish(self.start(
        2, f"data.rows={rows}", "total_steps=100", reward="removes"))
    for status, _, errors in results:
      self.assertEqual(status, 1, errors)
      self.assertRegex(errors, "error: process [01]: .*gone.png")

  @parameterized.parameters(0, 1)
  @pytest.mark.slow
  def test_a_killed_process_ends_the_other(self, killed):
    workers = self.start(2, *_FEW, reward="slow")
    metrics = self.out / "run" / "metrics.jsonl"
    self.wait_for(workers, lambda: metrics.exists()
                  and metrics.read_text().count("\n") >= 2)
    workers[killed].send_signal(signal.SIGKILL)
    other = workers[1 - killed]
    _, errors = other.communicate(timeout=_END_SECONDS)
    self.assertNotEqual(other.returncode, 0)
    self.assertRegex(errors, "(?i)error|fatal|terminat")

  @pytest.mark.slow
  def test_a_signal_to_one_saves_in_all_and_one_process_goes_on(self):
    workers = self.start(2, *_FEW, reward="slow")
    metrics = self.out / "run" / "metrics.jsonl"
    self.wait_for(workers, lambda: metrics.exists()
                  and metrics.read_text().count("\n") >= 2)
    workers[1].send_signal(signal.SIGTERM)
    results = self.finish(workers, _END_SECONDS)
    self.assertEqual([status for status, *_ in results], [143, 143], results)
    self.assertRegex(results[0][2], "stopped by SIGTERM after step .* is saved")
    self.assertNotIn("stopped", results[1][2])
    (step,) = Checkpoints(self.out / "run" / "checkpoints").steps()
    before = metrics.read_text()
    (result,) = self.finish(self.start(
        1, *_FEW, f"total_steps={step + 1}", reward="slow"))
    self.assertEqual(result[0], 0, result)
    self.assertIn(f"goes on from step {step}, ", result[1])
    lines = commands.read_lines(metrics)
    self.assertStartsWith(metrics.read_text(), before)
    steps = [line["step"] for line in lines if "actor/loss" in line]
    self.assertEqual(steps, list(range(1, step + 2)))

  def wait_for(self, workers, condition):
    deadline = time.monotonic() + 300
    while not condition():
      self.assertLess(time.monotonic(), deadline, "the run did not start")
      for worker in workers:
        self.assertIsNone(worker.poll())
      time.sleep(0.1)

  @parameterized.parameters(
      (("--num_processes=2",), "--coordinator_address is not set: a run in"),
      (("--coordinator_address=localhost:1", "--num_processes=2",
        "--process_id=2"), "--process_id=2: expected less than"),
      (("--distributed", "--process_id=0"), "--distributed: expected none of"))
  def test_refuses(self, flags, message):
    result = commands.run(
        "train", f"--config={commands.ROOT}/experiments/configs/grpo.py",
        f"--output_dir={self.out / 'run'}", *flags)
    self.assertEqual(result.status, 1)
    self.assertRegex(result.err, f"^error: {message}")
    self.assertEqual(result.err.count("\n"), 1)


def _end(worker):
  worker.kill()
  worker.communicate()


if __name__ == "__main__":
  absltest.main()
