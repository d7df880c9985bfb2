"""Trains a policy: `python -m experiments.train --config=... --output_dir=...`.

Every key of the configuration is a flag, such as
--config.optimizer.learning_rate=1e-5. See experiments/configs/.
"""

from __future__ import annotations

import pathlib
import shutil

from absl import flags
from ml_collections import config_flags

from experiments import common
from experiments.display import TrainDisplay
from rollplex_jax.config import TrainConfig, from_config_dict
from rollplex_jax.errors import InputError
from rollplex_jax.trainer import Trainer

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Python file whose get_config() gives the configuration.")
_OUTPUT = flags.DEFINE_string("output_dir", None, "Folder for the run's files.")
_OVERWRITE = flags.DEFINE_bool(
    "overwrite", False, "Remove a run that output_dir already holds.")
_BOARD = flags.DEFINE_bool("tensorboard", True, "Write TensorBoard events.")
_WANDB = flags.DEFINE_string(
    "wandb_project", "", "Also log to this wandb project.")


def main():
  """Runs the command."""
  config = read_config()
  output = pathlib.Path(common.required(_OUTPUT))
  prepare_folder(output, _OVERWRITE.value)
  trainer = Trainer(config)
  for line in trainer.task.report:
    print(line)
  print(f"{trainer.num_parameters / 1e6:.1f} M parameters, "
        f"{len(trainer.task.train_rows):,} rows")
  with TrainDisplay("training", config.total_steps) as display:
    summary = trainer.train(output, on_step=display, tensorboard=_BOARD.value,
                            wandb_project=_WANDB.value)
  print(describe(summary))
  print(f"policy, metrics and samples are in {output}")
  return summary


def read_config() -> TrainConfig:
  """The configuration that --config and its overrides give."""
  tree = _CONFIG.value
  if tree is None:
    raise InputError("--config is not set: expected a file such as "
                     "experiments/configs/grpo.py")
  try:
    return from_config_dict(TrainConfig, tree)
  except OSError as error:  # The file failed to load; this is its first use.
    reason = str(error).strip().splitlines()[-1].strip()
    raise InputError(f"--config cannot be read: {reason}") from error


def prepare_folder(output: pathlib.Path, overwrite: bool) -> None:
  """Refuses a folder that holds a run, or removes the run if asked.

  Raises:
    InputError: if `output` is no folder, or holds a run.
  """
  if output.exists() and not output.is_dir():
    raise InputError(f"--output_dir={output}: is not a folder")
  if (output / "metrics.jsonl").exists():
    if not overwrite:
      raise InputError(f"--output_dir={output}: holds a run already; pass "
                       "--overwrite to remove it")
    shutil.rmtree(output)


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
  phases = summary["phase_seconds"]
  total = max(phases.get("step", 0.0), 1e-9)
  parts = [f"{name} {s / total:.0%}" for name, s in phases.items()
           if name not in ("step", "data")]
  return "\n".join([*lines, "  time: " + ", ".join(parts)])


if __name__ == "__main__":
  common.run(main)
