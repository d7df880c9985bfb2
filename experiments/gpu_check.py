"""Checks and times the kernels on a GPU: `python -m experiments.gpu_check`.

Numerics on memory full of NaN, views of buffers, speed beside cuBLAS and
`jax.nn.dot_product_attention`, tunings, and the schedules on a model of 1B
parameters; see docs/gpu_check.md. Without a GPU the same runs on the CPU with
interpreted kernels, at tiny sizes, and claims nothing about speed.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import datetime
import importlib
import pathlib
import subprocess
import time
from typing import Any

from absl import flags
import jax
import numpy as np

from experiments import common, gpu_check_report
from rollplex_jax.errors import InputError
from rollplex_jax.metrics import write_json

_OUTPUT = flags.DEFINE_string(
    "output_dir", "runs/gpu_check",
    "Folder for gpu_check.json and gpu_check.md, written after each section.")
_MINUTES = flags.DEFINE_float(
    "minutes", 4.0, "About how long it may take; what doesn't fit is left out, "
    "and told.", lower_bound=0.1)
_SEED = flags.DEFINE_integer(
    "seed", None, "Of the random inputs; by default a new one, which is "
    "printed.", lower_bound=0)
_INTERPRET = flags.DEFINE_bool(
    "interpret", False, "Interpret the kernels, at tiny sizes; so it is without a "
    "GPU.")
# Shares of the time, in the order they run; what one leaves, the next may use.
_SHARES = {"numerics": 0.22, "views": 0.02, "speed": 0.24, "autotune": 0.14,
           "schedule": 0.38}
_SECTIONS = flags.DEFINE_list(
    "sections", list(_SHARES), "Which of them to run.")


@dataclasses.dataclass
class Run:
  """What sections share.

  Attributes:
    seed: of the inputs.
    interpret: whether kernels are interpreted.
    timer: made by the first section that times.
  """

  seed: int
  interpret: bool
  timer: Any = None

  def rng(self, section: str) -> np.random.Generator:
    """Numbers for a section, whichever others run."""
    return np.random.default_rng([self.seed, list(_SHARES).index(section)])

  def implementations(self) -> list[str]:
    """Those of the codebook functions that can run."""
    found, _ = _module("gpu_check_numerics").implementations()
    return ["pallas"] if self.interpret else found

  def timing(self):
    """The timer."""
    if self.timer is None:
      self.timer = _module("gpu_timing").Timer(is_gpu=not self.interpret)
    return self.timer


def main() -> dict[str, Any]:
  """Runs the command."""
  unknown = [name for name in _SECTIONS.value if name not in _SHARES]
  if unknown:
    raise InputError(f"--sections={unknown[0]}: expected some of "
                     f"{', '.join(_SHARES)}")
  folder = pathlib.Path(_OUTPUT.value)
  common.check_output(
      "output_dir", str(folder / "gpu_check.json"), make_folder=True)
  begin = time.monotonic()
  device = jax.devices()[0]
  interpret = _INTERPRET.value or device.platform != "gpu"
  if interpret:
    print("no GPU: " if device.platform != "gpu" else "--interpret: ", end="")
    print("kernels are interpreted, at tiny sizes; no time is a measurement")
  seed = _SEED.value
  if seed is None:
    seed = time.time_ns() % (1 << 32)
  run = Run(seed, interpret)
  result = {
      "device": device.device_kind, "jax": jax.__version__, "seed": seed,
      "commit": _commit(), "machine": common.machine(),
      "started": datetime.datetime.now(datetime.UTC).isoformat(
          timespec="seconds"),
      "claim": ("none: not a GPU" if interpret else "measured on this device"),
      "seconds": 0.0, "sections": {}}
  print(f"{device.device_kind}, jax {jax.__version__}, --seed={seed}")
  share = 0.0
  for name in _SHARES:
    share += _SHARES[name]
    if name not in _SECTIONS.value:
      continue
    deadline = begin + 60 * _MINUTES.value * share
    result["sections"][name] = section = _section(name, run, deadline)
    result["seconds"] = time.monotonic() - begin
    print(f"{name}: {section['status']} in {section['seconds']:.1f} s"
          + (f" ({section['reason']})" if section["reason"] else ""))
    _write(folder, result)
  print(gpu_check_report.markdown(result))
  wrong = result["sections"].get("numerics", {}).get("failed", []) + (
      result["sections"].get("autotune", {}).get("wrong", []))
  if wrong:
    _write(folder, result)
    common.fail(f"{len(wrong)} wrong: {wrong[0]}")
  return result


def _section(name: str, run: Run, deadline: float) -> dict[str, Any]:
  """Runs one; what it raises is its result."""
  start, base = time.monotonic(), {
      "finished": False, "failed": [], "skipped": [], "left_out": [],
      "is_measurement": not run.interpret}
  try:
    found = base | _RUN[name](run, deadline) | {"finished": True}
  except Exception as error:  # Of any kind: the others shall run.
    message = " ".join(str(error).split())[:500]
    found = base | {"failed": [f"{type(error).__name__}: {message}"]}
  found["seconds"] = time.monotonic() - start
  did = any(found.get(key) for key in ("checks", "rows", "groups"))
  found["status"] = ("failed" if found["failed"] else
                     "passed" if did else "skipped")
  reasons = [f"{len(found[key])} {word}: {found[key][0]}" for key, word in (
      ("failed", "failed"), ("skipped", "skipped"), ("left_out", "left out"))
      if found[key]]
  return found | {"reason": "; ".join(reasons)}


def _numerics(run: Run, deadline: float) -> dict[str, Any]:
  return _module("gpu_check_numerics").run(
      run.seed, interpret=run.interpret, deadline=deadline)


def _views(run: Run, deadline: float) -> dict[str, Any]:
  del deadline
  return _module("gpu_check_views").run(run.seed % (1 << 31))


def _speed(run: Run, deadline: float) -> dict[str, Any]:
  speed, timer = _module("gpu_check_speed"), run.timing()
  names = run.implementations()
  result = {"copy_bandwidth": timer.copy_bandwidth, "method": timer.method,
            "method_reason": timer.reason, "few_rows": speed.FEW_ROWS,
            "goal_of_copy": speed.GOAL_OF_COPY,
            "goal_over_dense": speed.GOAL_OVER_DENSE, "rows": [], "failed": [],
            "left_out": []}
  for job in speed.jobs(run.rng("speed"), names, interpret=run.interpret):
    if time.monotonic() > deadline:
      result["left_out"].append(job.name)
      continue
    try:
      result["rows"] += job.run(timer)
    except Exception as error:  # Of one job; the others can run still.
      result["failed"].append(
          f"{job.name}: {type(error).__name__}: {str(error)[:300]}")
  result["failed"] += [
      f"{row['kernel']} by {row['implementation']}, {row['case']}: "
      f"{row['error']}" for row in result["rows"] if "error" in row]
  return result


def _autotune(run: Run, deadline: float) -> dict[str, Any]:
  return _module("gpu_autotune").run(
      run.rng("autotune"), run.timing(), run.implementations(),
      interpret=run.interpret, deadline=deadline)


def _schedule(run: Run, deadline: float) -> dict[str, Any]:
  return _module("gpu_check_schedule").run(
      interpret=run.interpret, deadline=deadline, log=print)


_RUN: dict[str, Callable[[Run, float], dict[str, Any]]] = {
    "numerics": _numerics, "views": _views, "speed": _speed,
    "autotune": _autotune, "schedule": _schedule}


def _module(name: str):
  """Imported when its section runs: what it lacks is that section's failure."""
  return importlib.import_module(f"experiments.{name}")


def _write(folder: pathlib.Path, result: dict[str, Any]) -> None:
  write_json(folder / "gpu_check.json", result)
  if flags.FLAGS.json:
    write_json(flags.FLAGS.json, result)
  with common.whole_file(str(folder / "gpu_check.md")) as file:
    file.write(gpu_check_report.markdown(result))


def _commit() -> str | None:
  """Of the working tree this file is in, if it is one and git is there."""
  try:
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=pathlib.Path(__file__).parent, capture_output=True, text=True,
        check=True, timeout=10)
  except (OSError, subprocess.SubprocessError):
    return None
  return found.stdout.strip() or None


if __name__ == "__main__":
  common.run(main)
