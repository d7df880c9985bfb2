"""Trains a policy: `python -m experiments.train --config=... --output_dir=...`.

Every key of the configuration is a flag, such as
--config.optimizer.learning_rate=1e-5. See experiments/configs/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import os
import pathlib
import shutil

from absl import flags
import ml_collections
from ml_collections import config_flags

from experiments import common, processes
from experiments.display import TrainDisplay
from rollplex_jax.config import TrainConfig, from_config_dict
from rollplex_jax.errors import InputError
from rollplex_jax.loop import Progress, Run
from rollplex_jax.models import hub
from rollplex_jax.trainer import Trainer

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Python file whose get_config() gives the configuration.")
_OUTPUT = flags.DEFINE_string("output_dir", None, "Folder for the run's files.")
_OVERWRITE = flags.DEFINE_bool(
    "overwrite", False, "Remove a run that output_dir already holds.")
_BOARD = flags.DEFINE_bool("tensorboard", True, "Write TensorBoard events.")
_WANDB = flags.DEFINE_string(
    "wandb_project", "", "Also log to this wandb project.")

# What a run writes; the first marks a folder as a run's.
_RUN_FILES = ("metrics.jsonl", "samples.jsonl", "skipped_updates.jsonl",
              "summary.json", "config.json", "tensorboard", "timeline", "policy")


def main():
  """Runs the command."""
  processes.start()
  config = read_config()
  output = pathlib.Path(common.required(_OUTPUT))
  first = processes.is_first()
  if first:
    check_folder(output, _OVERWRITE.value)
  if os.path.realpath(config.policy.path) == os.path.realpath(
      output / "policy"):
    raise InputError(f"--output_dir={output}: holds the policy that is to be "
                     "trained; choose another folder")
  if config.policy.path:
    config = dataclasses.replace(config, policy=dataclasses.replace(
        config.policy, path=hub.resolve(config.policy.path)))
  if config.reference.path:
    config = dataclasses.replace(config, reference=dataclasses.replace(
        config.reference, path=hub.resolve(config.reference.path)))
  trainer = Trainer(config)
  if not first:
    return Run(trainer, output).train()
  for line in trainer.task.report:
    print(line)
  print(f"{trainer.num_parameters / 1e6:.1f} M parameters, "
        f"{len(trainer.task.train_rows):,} rows")
  with (run_folder(output) as note,
        TrainDisplay("training", config.total_steps) as display):

    def on_step(progress):
      note(progress)
      display(progress)

    run = Run(trainer, output, on_step=on_step, tensorboard=_BOARD.value,
              wandb_project=_WANDB.value)
    summary = run.train()
  print(describe(summary))
  print(f"policy, metrics and samples are in {output}")
  return summary


def read_config() -> TrainConfig:
  """The configuration that --config and its overrides give."""
  if not _CONFIG.present:
    raise InputError("--config is not set: expected a file such as "
                     "experiments/configs/grpo.py")
  tree = _CONFIG.value
  try:
    getattr(tree, "keys", None)  # A file that can't be read says so only now.
  except OSError as error:
    reason = str(error).strip().splitlines()[-1].split("[Errno")[-1]
    raise InputError(
        f"--config can't be read: {reason.split('] ')[-1]}") from error
  if not isinstance(tree, ml_collections.ConfigDict):
    raise InputError("--config: expected get_config() to return a ConfigDict, "
                     f"found {type(tree).__name__}")
  # One limit serves rollout and loss, so nobody needs to give it twice.
  loss, rollout = tree.get("objective"), tree.get("rollout")
  if loss and rollout and loss.get("max_completion_length") is None:
    loss.max_completion_length = rollout.max_completion_length
  return from_config_dict(TrainConfig, tree)


def check_folder(output: pathlib.Path, overwrite: bool) -> None:
  """Refuses a folder in which files would be lost, or that can't be made.

  Raises:
    InputError: if `output` is no folder, holds a run and `overwrite` is not
      given, or holds files of a run's names that no run wrote.
  """
  if output.exists() and not output.is_dir():
    raise InputError(f"--output_dir={output}: is not a folder")
  held = [name for name in _RUN_FILES if (output / name).exists()]
  if held and held[0] != _RUN_FILES[0]:
    raise InputError(f"--output_dir={output}: holds {held[0]} and is not the "
                     "folder of a run; choose another one")
  if held and not overwrite:
    raise InputError(f"--output_dir={output}: holds a run already; pass "
                     "--overwrite to remove it")
  parent = next(p for p in (output, *output.absolute().parents) if p.exists())
  if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
    raise InputError(f"--output_dir={output}: can't write in {parent}")


@contextlib.contextmanager
def run_folder(output: pathlib.Path) -> Iterator[Callable[[Progress], None]]:
  """Removes an older run from the folder, and a run that fails at its start.

  A run that fails later keeps its metrics and samples.

  Yields:
    A function to be told of each step.
  """
  missing = [p for p in (output, *output.parents) if not p.exists()]
  steps = []
  _remove_run(output)
  try:
    yield lambda progress: steps.append(progress.step)
  except InputError as error:
    if steps:
      raise InputError(
          f"{error} (metrics and samples of {steps[-1]} steps are in "
          f"{output})") from error
    _remove_run(output)
    for folder in missing:
      if folder.exists():
        folder.rmdir()
    raise


def _remove_run(output: pathlib.Path) -> None:
  """Removes a run's files, and nothing else that lies beside them."""
  for name in _RUN_FILES:
    path = output / name
    if path.is_dir() and not path.is_symlink():
      shutil.rmtree(path)
    else:
      path.unlink(missing_ok=True)


def describe(summary) -> str:
  """A few lines about a finished run."""
  seconds = summary["train_seconds"]
  lines = [f"{summary['steps']} steps in {seconds:.0f} s, "
           f"{summary['tokens_per_second']:,.0f} tokens/s, "
           f"{summary['compilations']} programs compiled"]
  for evaluation in summary["evaluations"]:
    line = (f"  step {evaluation['step']}: held-out reward "
            f"{evaluation['val/reward']:.3f}")
    if "val/success" in evaluation:
      line += (f", success {evaluation['val/success']:.1%} "
               f"({evaluation['val/success_low']:.1%} to "
               f"{evaluation['val/success_high']:.1%})")
    lines.append(line)
  reference = summary["reference"]
  if reference and reference["compressed"]:
    lines.append(
        f"  compressed reference: {reference['bytes'] / 1e6:,.1f} MB in place "
        f"of {reference['plain_bytes'] / 1e6:,.1f} MB, KL of the first step "
        f"{reference['first_kl']:.2e}")
  phases = summary["phase_seconds"]
  total = max(phases.get("step", 0.0), 1e-9)
  parts = [f"{name} {s / total:.0%}" for name, s in phases.items()
           if name not in ("step", "data")]
  return "\n".join([*lines, "  time: " + ", ".join(parts)])


if __name__ == "__main__":
  common.run(main, config=TrainConfig)
