"""Whether a run fits, before anything is rented.

    python -m experiments.plan --model=qwen2.5-vl-32b --device=h800 \
      --num_devices=32 --schedule=rollplex
"""

from __future__ import annotations

import re

from absl import flags
import jax
from rich.console import Console

from experiments import common, plan_tables
from rollplex_jax.capacity import deviceless, devices
from rollplex_jax.capacity import plan as plan_lib
from rollplex_jax.capacity import search as search_lib
from rollplex_jax.capacity.case import Case, Workload
from rollplex_jax.capacity.memory import SCHEDULES
from rollplex_jax.errors import InputError
from rollplex_jax.models import published
from rollplex_jax.placement.mesh import MeshConfig
from rollplex_jax.schedule import PrefixSource
from rollplex_jax.stages.prefix import SavePolicy

_MODEL = flags.DEFINE_string(
    "model", None, "A published size, such as qwen2.5-vl-32b, or a folder with "
    "a config.json.")
_DEVICE = flags.DEFINE_string(
    "device", None, f"Accelerator: {', '.join(devices.names())}.")
_NUM_DEVICES = flags.DEFINE_integer("num_devices", None, "How many of them.")
_SCHEDULE = flags.DEFINE_enum(
    "schedule", "rollplex", SCHEDULES, "Whose phases to print.")
_MESH = {name: flags.DEFINE_integer(name, 0, text) for name, text in dict(
    data="Parts of the batch that hold all weights; 0 for what is left.",
    fsdp="Further parts, over which training splits the weights; 0 for 1.",
    training_tp="Tensor parallelism of training; 0 for a host's devices or "
                "the most that divides.",
    rollout_tp="Of the rollout; 0 for training's.").items()}
_STORAGE = flags.DEFINE_enum(
    "storage", "coarser", ("coarser", "finer"), "How weights lie where "
    "rollout_tp is above training_tp: as training has them, viewed by the "
    "rollout, or as the rollout has them, gathered by training.")
_SAVE = flags.DEFINE_enum(
    "save", str(SavePolicy.LAYER_INPUTS), [str(s) for s in SavePolicy],
    "What is kept between prefix forward and backward.")
_SOURCE = flags.DEFINE_enum(
    "prefix_source", None, [str(s) for s in PrefixSource],
    "Where the training prefix comes from; by default the rollout where "
    "layouts agree.")
_MICRO = flags.DEFINE_integer(
    "micro_batch_size", 0, "Samples per pass on all devices together; 0 for a "
    "group of each part of the batch.", lower_bound=0)
_CHUNK = flags.DEFINE_integer(
    "window_chunk", 512, "Prefix tokens of a unit in the decode window.",
    lower_bound=1)
_PROMPTS = flags.DEFINE_integer("num_prompts", 64, "Prompts per step.")
_GENERATIONS = flags.DEFINE_integer("num_generations", 8, "Samples of each.")
_PREFIX = flags.DEFINE_integer(
    "prefix_length", 8192, "Tokens of a prompt, its video included.")
_RESPONSE = flags.DEFINE_integer("response_length", 1024, "Of a response.")
_VIDEO = flags.DEFINE_string(
    "video", None, "Patches of each prompt's video: pairs of frames, rows, "
    "columns; empty for none. By default frames of 480 tokens (40x48 for the "
    "published models), 16 pairs or what the prefix has room for.")
_REFERENCE = flags.DEFINE_bool("reference", True, "Score a reference model.")
_REFERENCE_BITS = flags.DEFINE_float(
    "reference_bits", 0.0, "Bits of a weight of a compressed reference's blocks, "
    "as compress prints them; 0 for a plain one. Dense copies in a loop are not "
    "counted.", lower_bound=0.0,
    upper_bound=16.0)
_FRACTION = flags.DEFINE_float(
    "memory_fraction", 0.9, "Share of a device's memory that may be used.",
    lower_bound=0.0, upper_bound=1.0)
_BUDGET = flags.DEFINE_float(
    "budget_gb", 0.0, "GB (1e9 bytes) of it that may be used instead; 0 for "
    "the share.", lower_bound=0.0)
_FULL = flags.DEFINE_bool(
    "full_depth", False, "Compile all layers; otherwise few, from which the "
    "rest is extrapolated.")
_ESTIMATE = flags.DEFINE_bool(
    "estimate", False, "Compile nothing; estimate temporaries from shapes.")
_SEARCH = flags.DEFINE_bool(
    "search", False, "Try degrees, storage and saving policies by estimate, "
    "compile the best few and rank what fits.")
_BEST = flags.DEFINE_integer(
    "best", 2, "How many of a search are compiled.", lower_bound=1)
_WORKERS = flags.DEFINE_integer(
    "workers", 2, "Processes that compile.", lower_bound=1)


def main():
  """Runs the command."""
  jax.config.update("jax_platforms", "cpu")  # Nothing runs on a device.
  case = _case()
  case.check()
  compiled = not _ESTIMATE.value
  if compiled and not deviceless.has_plugin(case.spec.kind):
    compiled = False
    print(_no_compiler(case))
  settings = dict(
      depths=None if _FULL.value else plan_lib.DEPTHS, compiled=compiled,
      workers=_WORKERS.value, memory_fraction=_FRACTION.value,
      budget=int(_BUDGET.value * 1e9))
  console = Console(width=plan_tables.WIDTH)
  if _SEARCH.value:
    result = search_lib.search(
        case, best=_BEST.value,
        progress=lambda cases: common.progress("searching", len(cases))(cases),
        **settings)
    console.print(plan_tables.ranking(result))
    if result["plan"] is None:
      return result
    plan = result["plan"]
  else:
    plan = result = plan_lib.make_plan(
        case, progress=common.progress("compiling"), **settings)
  for part in plan_tables.report(plan, _SCHEDULE.value):
    console.print(part)
  return result


def _no_compiler(case: Case) -> str:
  if case.spec.kind != "cuda":
    return (f"{case.device}: programs are compiled for NVIDIA GPUs only; these "
            "are estimates")
  return ("jax's CUDA plugin is not installed, so these are estimates; to "
          f"compile for {case.device}: {deviceless.PIP_COMMAND}")


def _case() -> Case:
  model = published.config_of(common.required(_MODEL))
  spec = devices.device_of(common.required(_DEVICE))
  count = _NUM_DEVICES.value
  if count is None:
    raise InputError("--num_devices is not set")
  if count < 1:
    raise InputError(f"num_devices={count}: expected at least 1")
  mesh = _mesh(model, spec, count)
  differ = mesh.training_tp != mesh.rollout_tp
  source = _SOURCE.value or (
      PrefixSource.WINDOW if differ else PrefixSource.ROLLOUT)
  video = None
  if model.vision is not None:
    video = (_video() if _VIDEO.value is not None else
             _default_video(model.vision.spatial_merge_size))
  return Case(
      model=model, device=spec.name, num_devices=count, mesh=mesh,
      workload=Workload(
          num_prompts=_PROMPTS.value, num_generations=_GENERATIONS.value,
          prefix_length=_PREFIX.value, response_length=_RESPONSE.value,
          video=video),
      micro_batch_size=_MICRO.value, save=SavePolicy(_SAVE.value),
      prefix_source=PrefixSource(source),
      window_chunk=_CHUNK.value, has_reference=_REFERENCE.value,
      reference_bits=_REFERENCE_BITS.value)


def _mesh(model, spec, count: int) -> MeshConfig:
  """The flags, and what divides for those that are not set."""
  given = {name: flag.value for name, flag in _MESH.items()}
  for name, value in given.items():
    if value < 0:
      raise InputError(f"{name}={value}: expected at least 1, or 0")
  training = given["training_tp"] or given["rollout_tp"] or next(
      ways for ways in range(min(count, spec.devices_per_host), 0, -1)
      if count % ways == 0 and model.text.num_attention_heads % ways == 0
      and model.text.intermediate_size % ways == 0)
  rollout = given["rollout_tp"] or training
  fsdp = given["fsdp"] or 1
  ways = fsdp * max(training, rollout)
  data = given["data"] or max(count // ways, 1)
  return MeshConfig(
      data=data, fsdp=fsdp, training_tp=training, rollout_tp=rollout,
      storage=_STORAGE.value)


def _default_video(merge: int) -> tuple[int, int, int] | None:
  """Fifteen sixteenths of the prefix at most; None where that is no frame."""
  rows, columns = 20, 24  # Merged features of a frame.
  frames = min(_PREFIX.value * 15 // 16 // (rows * columns), 16)
  return (frames, rows * merge, columns * merge) if frames else None


def _video() -> tuple[int, int, int] | None:
  if not _VIDEO.value:
    return None
  found = re.fullmatch(r"(\d+)x(\d+)x(\d+)", _VIDEO.value)
  if not found:
    raise InputError(
        f"--video={_VIDEO.value}: expected three numbers, such as 16x40x48")
  return tuple(int(n) for n in found.groups())


if __name__ == "__main__":
  common.run(main)
