"""Runs commands as a user does, in this process: importing jax is slow."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import dataclasses
import importlib
import io
import json
import os
import pathlib
import sys
import types
from unittest import mock
import warnings

from absl import flags
from absl.testing import flagsaver

from experiments import common
from rollplex_jax.config import TrainConfig

ROOT = pathlib.Path(__file__).parents[2]
# The modules that define a command's flags, beside `experiments.common`.
_FLAG_MODULES = {
    "compress": ("experiments.compress",),
    "decompress": ("experiments.decompress",),
    "evaluate": ("experiments.evaluate", "experiments.compressed_weights"),
    "export": ("experiments.export",),
    "generate": ("experiments.generate", "experiments.row_inputs",
                 "experiments.compressed_weights"),
    "gpu_check": ("experiments.gpu_check",),
    "kill_runs": ("experiments.kill_runs",),
    "library_texts": ("experiments.library_texts",),
    "make_policy": ("experiments.make_policy",),
    "plan": ("experiments.plan",),
    "score": ("experiments.score", "experiments.row_inputs",
              "experiments.compressed_weights"),
    "study": ("experiments.study",),
    "train": ("experiments.train", "experiments.processes"),
}
# Whose keys are a command's flags.
_CONFIGS = {"train": TrainConfig}
_set_aside: dict[str, list[flags.Flag]] = {}


@dataclasses.dataclass(frozen=True)
class Result:
  """What a command leaves: exit status, standard output and error."""

  status: int
  out: str
  err: str


def run(command: str, *args: str) -> Result:
  """Runs `python -m experiments.COMMAND ARGS`; every call has fresh flags."""
  argv = [command, "--compilation_cache_dir=", *args]
  out, err = io.StringIO(), io.StringIO()
  status = 0
  with (_module(command) as module, flagsaver.flagsaver(),
        mock.patch.object(sys, "argv", argv), warnings.catch_warnings(),
        contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)):
    # How ml_collections reads a configuration file: by a method of old, and
    # into the module that an earlier file has left.
    sys.modules.pop("config_config", None)
    warnings.filterwarnings("ignore", r"the load_module\(\) method is")
    try:
      common.run(module.main, config=_CONFIGS.get(command))
    except SystemExit as end:
      status = end.code or 0
  return Result(status, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def _module(command: str) -> Iterator[types.ModuleType]:
  """A command's module, alone with its flags.

  Each command is a program of its own, and several have flags of one name.
  """
  others = _take_flags()
  try:
    for name in _FLAG_MODULES[command]:
      for flag in _set_aside.pop(name, ()) or others.pop(name, ()):
        flags.DEFINE_flag(flag, module_name=name)
    yield importlib.import_module(f"experiments.{command}")
  finally:
    _set_aside.update(_take_flags())
    for name, found in others.items():
      for flag in found:
        flags.DEFINE_flag(flag, module_name=name)


def _take_flags() -> dict[str, list[flags.Flag]]:
  """Removes and returns the flags of all commands."""
  taken = {
      name: list(found)
      for name, found in flags.FLAGS.flags_by_module_dict().items()
      if found and name.startswith("experiments.")
      and name != common.__name__}
  for found in taken.values():
    for flag in found:
      delattr(flags.FLAGS, flag.name)
  return taken


def process_environment(**variables: str) -> dict[str, str]:
  """Variables for a command in a process of its own, on the CPU."""
  return os.environ | {
      "PYTHONPATH": os.fspath(ROOT), "JAX_PLATFORMS": "cpu", **variables}


def read_lines(path: str | os.PathLike) -> list[dict]:
  """The objects of a JSONL file."""
  return [json.loads(line)
          for line in pathlib.Path(path).read_text().splitlines()]


def tree(folder: str | os.PathLike) -> dict[str, bytes]:
  """Every file under a folder, with its content, and the folders."""
  return {
      os.fspath(path.relative_to(folder)):
          b"" if path.is_dir() else path.read_bytes()
      for path in sorted(pathlib.Path(folder).rglob("*"))}
