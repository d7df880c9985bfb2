"""Trains a policy: `python -m experiments.train --config=... --output_dir=...`.

Every key of the configuration is a flag, such as
--config.optimizer.learning_rate=1e-5. See experiments/configs/. The same
command again goes on with a run that was interrupted; see docs/runs.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import fcntl
import os
import pathlib
import shutil
import sys
import threading
from typing import NoReturn

from absl import flags
import ml_collections
from ml_collections import config_flags

from experiments import common, processes
from experiments.display import TrainDisplay
from rollplex_jax import resume
from rollplex_jax.checkpoint import Checkpoints
from rollplex_jax.config import TrainConfig, from_config_dict
from rollplex_jax.errors import InputError
from rollplex_jax.interrupts import Interrupts, Stopped, leave
from rollplex_jax.loop import Progress, Run
from rollplex_jax.models import hub
from rollplex_jax.placement.processes import from_first
from rollplex_jax.trainer import Trainer

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Python file whose get_config() gives the configuration.")
_OUTPUT = flags.DEFINE_string("output_dir", None, "Folder for the run's files.")
_OVERWRITE = flags.DEFINE_bool(
    "overwrite", False, "Remove a run that output_dir already holds.")
_CHANGE = flags.DEFINE_bool(
    "allow_config_change", False, "Go on with a run under a configuration that "
    "changes its result.")
_BOARD = flags.DEFINE_bool("tensorboard", True, "Write TensorBoard events.")
_WANDB = flags.DEFINE_string(
    "wandb_project", "", "Also log to this wandb project.")

# What marks a folder as a run's, and all that a run writes.
_MARKS = ("checkpoints", "metrics.jsonl")
_RUN_FILES = (*_MARKS, "samples.jsonl", "skipped_updates.jsonl",
              "summary.json", "config.json", "tensorboard", "timeline",
              "policy")


def main():
  """Runs the command."""
  processes.start()
  config = read_config()
  output = pathlib.Path(common.required(_OUTPUT))
  first = processes.is_first()
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
  found = check_folder(output, config) if first else None
  summary = from_first(
      lambda: found and resume.finished(output, found, config))
  if summary:
    if first:
      print(f"{output} holds this run, finished after {summary['steps']} steps;"
            " a larger --config.total_steps goes on with it, --overwrite "
            "begins anew")
    return summary
  trainer = Trainer(config)
  if first:
    report(trainer, output, found)
  with contextlib.ExitStack() as stack:
    note = display = lambda progress: None
    if first:
      note = stack.enter_context(run_folder(output, keep=found is not None))
      display = stack.enter_context(
          TrainDisplay("training", config.total_steps))
    interrupts = Interrupts(config.checkpoint.exit_seconds, leave=_leave)
    # A launcher may run this in another thread, and then takes the signals.
    if threading.current_thread() is threading.main_thread():
      stack.enter_context(interrupts)

    def on_step(progress):
      note(progress)
      display(progress)

    run = Run(trainer, output, on_step=on_step, tensorboard=_BOARD.value,
              wandb_project=_WANDB.value, allow_config_change=_CHANGE.value,
              interrupts=interrupts)
    try:
      summary = run.train()
    except Stopped as stopped:
      stack.close()  # The display's last line comes first.
      if first:
        print(stopped, file=sys.stderr, flush=True)
      sys.exit(stopped.status)
  if first:
    print(describe(summary))
    print(f"policy, metrics and samples are in {output}")
  return summary


def _leave(message: str, status: int) -> NoReturn:
  """Ends the process from a thread, and the run's others with it."""
  if sys.stderr.isatty():
    print("\x1b[?25h", end="", file=sys.stderr)  # The bar hides the cursor.
  if processes.several():
    processes.end(message, status)
  leave(message, status)


def report(trainer: Trainer, output: pathlib.Path,
           found: resume.Found | None) -> None:
  """Prints what is trained, and where a run goes on."""
  for line in trainer.task.report:
    print(line)
  print(f"{trainer.num_parameters / 1e6:.1f} M parameters, "
        f"{len(trainer.task.train_rows):,} rows")
  if found is None:
    return
  for change in found.changed:
    print(f"changed: {change}")
  if found.checkpoint is None:
    print(f"{output} holds this run, which ended before its first checkpoint: "
          "it begins again", flush=True)
  else:
    print(f"goes on from step {found.step}, the newest checkpoint in {output}",
          flush=True)


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


def check_folder(output: pathlib.Path, config: TrainConfig,
                 ) -> resume.Found | None:
  """What a folder holds of this run; --overwrite looks for none.

  Raises:
    InputError: if `output` is no folder, can't be made, holds another run or
      one that can't go on, or holds files of a run's names that no run wrote.
  """
  flag = f"--output_dir={output}"
  if output.exists() and not output.is_dir():
    raise InputError(f"{flag}: is not a folder")
  held = [name for name in _RUN_FILES if (output / name).exists()]
  found = None
  if not _OVERWRITE.value:
    try:
      found = resume.find(output, config, allow_config_change=_CHANGE.value)
    except InputError as error:
      raise InputError(f"--output_dir={error}") from error
  if held and held[0] not in _MARKS and found is None:
    raise InputError(f"{flag}: holds {held[0]} and is not the folder of a run; "
                     "choose another one")
  parent = next(p for p in (output, *output.absolute().parents) if p.exists())
  if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
    raise InputError(f"{flag}: can't write in {parent}")
  return found


@contextlib.contextmanager
def run_folder(output: pathlib.Path, *, keep: bool,
               ) -> Iterator[Callable[[Progress], None]]:
  """Has the folder for this process alone.

  An older run is removed from it, and a run that fails at its start. One that
  fails later keeps its files.

  Args:
    output: the folder; made if it isn't there.
    keep: the run in it goes on.

  Yields:
    A function to be told of each step.

  Raises:
    InputError: if another process has the folder.
  """
  missing = [p for p in (output, *output.parents) if not p.exists()]
  steps = []
  output.mkdir(parents=True, exist_ok=True)
  with _alone(output):
    if not keep:
      _remove_run(output)
    try:
      yield lambda progress: steps.append(progress.step)
    except InputError as error:
      if steps:
        saved = Checkpoints(output / "checkpoints").steps()
        hint = f", checkpoints up to step {saved[-1]}" if saved else ""
        raise InputError(
            f"{error} (metrics and samples of {steps[-1]} steps{hint} are in "
            f"{output})") from error
      if not keep:
        _remove_run(output)
        for folder in missing:
          if folder.exists():
            folder.rmdir()
      raise


@contextlib.contextmanager
def _alone(folder: pathlib.Path) -> Iterator[None]:
  """Two processes that write one run would ruin it."""
  handle = os.open(folder, os.O_RDONLY)
  try:
    try:
      fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      raise InputError(f"--output_dir={folder}: another process is running in "
                       "this folder") from error
    except OSError:  # A file system without locks.
      pass
    yield
  finally:
    os.close(handle)


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
    if "val/success_low" in evaluation:
      some = evaluation.get("val/success_rows")
      of = f"of {some} rows " if some else ""
      line += (f", success {evaluation['val/success']:.1%} {of}"
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
