"""Kills a run again and again, and compares what is left with an unhurt one.

`python -m experiments.kill_runs --kills=20`

A small run of `experiments.train` is killed at random moments, some of them
while a checkpoint is being written, some by SIGTERM, and started again each
time. Its metrics (but for times), samples, weights and optimizer state must be
those of a run that nobody disturbed, bit for bit. Exit status 1 if they are not.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

from absl import flags
import jax
from rich.console import Console
from rich.table import Table

from experiments import common
from rollplex_jax.checkpoint import Checkpoints
from rollplex_jax.data.tokenizer import build_tokenizer
from rollplex_jax.errors import InputError
from rollplex_jax.metrics import write_json
from rollplex_jax.models import hf, vlm
from rollplex_jax.models.config import ModelConfig, TextConfig
from rollplex_jax.run_comparison import compare

_KILLS = flags.DEFINE_integer(
    "kills", 20, "How often the run is killed.", lower_bound=1)
_STEPS = flags.DEFINE_integer(
    "steps", 0, "Steps of the run; by default 10 for each kill and 10 more.",
    lower_bound=0)
_SEED = flags.DEFINE_integer("seed", 0, "Of the moments.")

# Which kinds of kill follow one another.
_KINDS = ("SIGKILL", "SIGKILL", "SIGKILL while saving", "SIGKILL", "SIGTERM")
_WORDS = ("go", "turn", "left", "right", "pick", "up", "the", "red", "ball")
# A kill in the run's last steps could come too late.
_LAST_STEPS = 9
# Longest times for a run to begin, and to end after SIGTERM.
_START_SECONDS, _END_SECONDS = 300.0, 30.0
_REWARD = '''\
def reward(completion, row):
  return sum(c in "aeiou" for c in completion) / 4 + len(completion) % 3
'''


@dataclasses.dataclass(frozen=True)
class Kill:
  """One kill.

  Attributes:
    kind: of `_KINDS`.
    step: steps that were done by then.
    kept: steps from which the run went on.
    seconds: from the signal to the process's end.
  """

  kind: str
  step: int
  kept: int
  seconds: float


def main():
  """Runs the command."""
  kills = _KILLS.value
  steps = _STEPS.value or 10 * (kills + 1)
  if steps <= kills + _LAST_STEPS:
    raise InputError(f"--steps={steps}: expected more than --kills={kills} and "
                     f"{_LAST_STEPS}")
  with tempfile.TemporaryDirectory() as folder:
    runs = Runs(pathlib.Path(folder), steps)
    runs.finish(runs.start("whole"))
    found = runs.kill("killed", kills, random.Random(_SEED.value))
    differences = compare(runs.folder / "whole", runs.folder / "killed")
  _print_table(found)
  for difference in differences:
    print(f"different: {difference}")
  print(f"{kills} kills in {steps} steps: metrics, samples, weights and "
        f"optimizer state are {'NOT ' * bool(differences)}those of an "
        "undisturbed run")
  result = {"kills": [dataclasses.asdict(kill) for kill in found],
            "steps": steps, "differences": differences}
  if differences:
    if flags.FLAGS.json:
      write_json(flags.FLAGS.json, result)
    sys.exit(1)
  return result


class Runs:
  """Runs of `experiments.train` on a small policy, rows and reward."""

  def __init__(self, folder: pathlib.Path, steps: int):
    """Writes what they need into `folder`."""
    self.folder = folder
    self._steps = steps
    _write_policy(folder / "policy")
    rng = random.Random(0)
    rows = [{"prompt": " ".join(rng.choices(_WORDS, k=6))} for _ in range(32)]
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows))
    (folder / "held_out.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows[:4]))
    (folder / "my_reward.py").write_text(_REWARD)

  def start(self, name: str) -> subprocess.Popen:
    """Starts a run, or goes on with it."""
    settings = {
        "policy.path": self.folder / "policy",
        "data.rows": self.folder / "rows.jsonl",
        "data.eval_rows": self.folder / "held_out.jsonl",
        "data.reward": f"{self.folder}/my_reward.py:reward",
        "rollout.num_generations": 4, "rollout.max_completion_length": 8,
        "objective.beta": 0.05, "optimizer.learning_rate": 1e-3,
        "train_batch_size": 4, "micro_batch_size": 4, "eval_batch_size": 4,
        "eval_every": 7, "total_steps": self._steps, "checkpoint.every": 2}
    config = pathlib.Path(__file__).with_name("configs") / "grpo.py"
    with (self.folder / "output.txt").open("a") as out:
      return subprocess.Popen(
          [sys.executable, "-m", "experiments.train", f"--config={config}",
           f"--output_dir={self.folder / name}",
           f"--compilation_cache_dir={self.folder / 'cache'}",
           *(f"--config.{key}={value}" for key, value in settings.items())],
          cwd=config.parents[2], stdout=out, stderr=subprocess.STDOUT)

  def finish(self, process: subprocess.Popen) -> None:
    """Waits for a run that nobody kills."""
    if process.wait():
      self._fail(process)

  def kill(self, name: str, count: int, rng: random.Random) -> list[Kill]:
    """Kills a run `count` times, each time further on, and lets it finish."""
    targets = sorted(rng.sample(range(1, self._steps - _LAST_STEPS), count))
    out = []
    for i, target in enumerate(targets):
      kind = _KINDS[i % len(_KINDS)]
      process = self.start(name)
      try:
        out.append(self._kill(process, name, kind, target, rng))
      finally:
        process.kill()  # Whatever went wrong here.
        process.wait()
      print(f"{i + 1}/{count}  {kind} after step {out[-1].step}", flush=True)
    self.finish(self.start(name))
    return out

  def _kill(self, process, name, kind, target, rng) -> Kill:
    folder = self.folder / name
    # What the process wrote: it may first have cut back what was there.
    grows = _Growth(folder / "metrics.jsonl")
    self._wait(process, lambda: grows() and _steps_done(folder) >= target)
    if kind.endswith("saving"):
      self._wait(process, lambda: any(
          (folder / "checkpoints").glob("*.orbax-checkpoint-tmp*")))
    time.sleep(rng.uniform(0.0, 0.05))
    number = signal.SIGTERM if kind == "SIGTERM" else signal.SIGKILL
    if process.poll() is not None:
      self._fail(process)
    start = time.monotonic()
    process.send_signal(number)
    process.wait(timeout=2 * _END_SECONDS)
    seconds = time.monotonic() - start
    expected = 128 + number if kind == "SIGTERM" else -number
    if process.returncode != expected or seconds > _END_SECONDS:
      self._fail(process)
    steps = Checkpoints(folder / "checkpoints").steps()
    return Kill(kind, _steps_done(folder), steps[-1] if steps else 0, seconds)

  def _wait(self, process, condition) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not condition():
      if process.poll() is not None or time.monotonic() > deadline:
        self._fail(process)
      time.sleep(0.001)

  def _fail(self, process) -> None:
    lines = (self.folder / "output.txt").read_text().splitlines()
    raise InputError(f"a run ended with status {process.returncode} or did not "
                     f"go on; its last line: {lines[-1] if lines else 'none'}")


class _Growth:
  """Tells whether a file has grown since the first call."""

  def __init__(self, path: pathlib.Path):
    self._path = path
    self._size = self._now()
    self._grown = False

  def _now(self) -> int:
    return self._path.stat().st_size if self._path.exists() else 0

  def __call__(self) -> bool:
    size = self._now()
    self._grown = self._grown or size > self._size
    self._size = size
    return self._grown


def _steps_done(folder: pathlib.Path) -> int:
  """The last step in a run's metrics; a line may be half-written."""
  path = folder / "metrics.jsonl"
  if not path.exists():
    return 0
  lines = path.read_bytes().split(b"\n")[:-1]
  return json.loads(lines[-1])["step"] if lines else 0


def _write_policy(folder: pathlib.Path) -> None:
  """A decoder of two layers, and its tokenizer."""
  assets = folder.with_name("tokenizer")
  tokens = build_tokenizer(
      ["user", "assistant", *_WORDS] * 2, 300, str(assets))
  config = ModelConfig(
      text=TextConfig(
          vocab_size=tokens["vocab_size"], hidden_size=32, intermediate_size=48,
          num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
          rope_theta=100.0, initializer_range=0.2),
      eos_token_ids=(tokens["<|im_end|>"],))
  hf.save_checkpoint(
      folder, config, vlm.init_params(config, jax.random.key(0)),
      assets_from=assets)


def _print_table(kills: list[Kill]) -> None:
  table = Table("kill", "after step", "goes on from", "steps lost", "seconds",
                title="What was lost")
  for kill in kills:
    table.add_row(kill.kind, str(kill.step), str(kill.kept),
                  str(kill.step - kill.kept), f"{kill.seconds:.2f}")
  Console().print(table)


if __name__ == "__main__":
  common.run(main)
