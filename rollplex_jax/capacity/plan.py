"""Whether a run fits devices that nobody has rented yet, and how long it takes.

    plan = make_plan(case)

Every program of a step is compiled for the described devices (see
`deviceless`); `memory` adds up what is there in each phase, and `roofline`
forecasts the step. Where no compiler is installed temporaries are estimated and
the plan says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import concurrent.futures
import dataclasses
import multiprocessing
import os
from typing import Any

import jax

from rollplex_jax.capacity import costs, deviceless, estimate, roofline
from rollplex_jax.capacity.case import Case
from rollplex_jax.capacity.deviceless import Collective, Compiled
from rollplex_jax.capacity.memory import (
  Need,
  Planned,
  naive_phases,
  phases_of,
  programs_of,
)
from rollplex_jax.capacity.programs import Programs, whole_bytes
from rollplex_jax.errors import InputError
from rollplex_jax.placement.mesh import MeshConfig
from rollplex_jax.stages.prefix import SavePolicy

# What was published for Qwen2.5-VL-32B on 32 H800, beside which plans stand.
PUBLISHED = {"naive_gib": 165.0, "speedup_over_serial": (1.23, 1.30),
             "speedup_over_disaggregated": (1.57, 2.24)}
# Layers to compile with where all of them would take too long. What a program
# needs grows evenly with each layer more.
DEPTHS = (2, 4)
# What compiles longest is started first.
_SLOW = {name: i for i, name in enumerate((
    "gradient_full", "prefix_backward", "score_full", "window", "prefill",
    "plain_prefill", "gradient"))}


@dataclasses.dataclass(frozen=True)
class Measured:
  """What is known of one program at full depth.

  Attributes:
    need: bytes.
    collectives: of one run; bytes and counts at full depth.
    seconds: that compiling took.
  """

  need: Need
  collectives: list[Collective]
  seconds: float = 0.0


def make_plan(case: Case, *, depths: Sequence[int] | None = DEPTHS,
              compiled: bool = True, workers: int = 2,
              baselines: bool = True, memory_fraction: float = 0.9,
              budget: int = 0,
              efficiency: roofline.Efficiency | None = None,
              progress: Callable = lambda items: items) -> dict[str, Any]:
  """Plans a run. The result is plain data, for JSON.

  Args:
    case: what is planned for.
    depths: numbers of layers to compile with, from which the whole depth is
      extrapolated; None to compile at full depth.
    compiled: False to estimate temporaries without compiling anything.
    workers: processes that compile.
    baselines: compile what only other schedules than rollplex run, too;
      otherwise that is estimated.
    memory_fraction: share of a device's memory that may be used.
    budget: bytes of it that may be used instead, or 0.
    efficiency: for the forecast.
    progress: wraps the iteration over compiled programs.

  Raises:
    InputError: if the case can't run.
  """
  case.check()
  efficiency = efficiency or roofline.Efficiency()
  pool = half_of(case)
  cases = {"all": case} | ({"pool": pool} if pool else {})
  wanted = [("all", name) for name in wanted_programs(case)]
  if pool:
    wanted += [("pool", name) for name in programs_of(pool, "disaggregated")]
  wanted.sort(key=lambda pair: _SLOW.get(pair[1], len(_SLOW)))
  measured = {(key, name): Measured(
      estimate.need_of(cases[key], name),
      estimate.collectives_of(cases[key], name)) for key, name in wanted}
  if compiled:
    own = programs_of(case, "rollplex")
    measured |= _compile(
        cases, [(key, name) for key, name in wanted if baselines
                or (key == "all" and name in own)], depths, workers, progress)
  need = lambda key: lambda name: measured[key, name].need
  collectives = {name: m.collectives for (key, name), m in measured.items()
                 if key == "all"}
  budget = budget_of(case, memory_fraction, budget)
  planned = {
      "rollplex": phases_of(case, "rollplex", need("all"), budget),
      "serial": phases_of(case, "serial", need("all"), budget),
      "disaggregated": pool and phases_of(
          pool, "disaggregated", need("pool"), budget),
      "naive": naive_phases(case, need("all"))}
  times = roofline.stage_times(case, collectives, efficiency)
  seconds = {name: roofline.step_seconds(
      case, times, name, roofline.host_seconds(case, found.away, efficiency))
      for name, found in (
          ("rollplex", planned["rollplex"]), ("serial", planned["serial"]),
          ("serial_shared", planned["serial"]),
          ("disaggregated", planned["disaggregated"] or Planned(phases=())),
          ("disaggregated_shared",
           planned["disaggregated"] or Planned(phases=())))}
  # Naive colocation runs serial's phases; nothing of it has to be moved.
  seconds["naive"] = seconds["serial"] | {"host": 0.0}
  peak = planned["rollplex"].peak_bytes
  return {
      "case": describe(case),
      "memory": {"device_bytes": case.spec.memory_bytes,
                 "budget_bytes": budget},
      "how": _how(case, depths, compiled, baselines),
      "schedules": {name: _schedule(found, seconds[name], budget)
                    for name, found in planned.items()},
      "nearest": [] if peak <= budget else list(nearest(case, peak, budget)),
      "forecast": _forecast(case, times, seconds, efficiency),
      "published": PUBLISHED,
      "programs": {f"{key}/{name}": _program(m)
                   for (key, name), m in measured.items()},
  }


def wanted_programs(case: Case) -> list[str]:
  """Names of the programs that plan and forecast of all schedules ask for."""
  names = programs_of(case, "rollplex") | programs_of(case, "serial")
  return list(names)


def nearest(case: Case, peak: int, budget: int) -> Iterator[dict[str, Any]]:
  """Settings near a case that would fit a budget, by estimate.

  Args:
    case: what does not fit.
    peak: bytes of its rollplex step.
    budget: bytes per device.

  Yields:
    "setting" and its "peak_bytes", to which what the case's own estimate is
    off by is added.
  """
  own = estimated_step(case, budget)["peak_bytes"]
  for options in _neighbors(case):
    for setting, changes in options:
      other = dataclasses.replace(case, **changes)
      try:
        other.check()
      except InputError:
        continue
      found = estimated_step(other, budget)["peak_bytes"]
      found += max(peak - own, 0)
      if found <= budget:
        yield {"setting": setting, "peak_bytes": found}
        break


def budget_of(case: Case, memory_fraction: float, budget: int = 0) -> int:
  """Bytes of a device that may be used: those given, or a share of all."""
  return budget or int(case.spec.memory_bytes * memory_fraction)


def estimated_step(case: Case, budget: int) -> dict[str, Any]:
  """A rollplex step by estimate, nothing compiled: as an entry of a search."""
  found = phases_of(
      case, "rollplex", lambda name: estimate.need_of(case, name), budget)
  efficiency = roofline.Efficiency()
  collectives = {name: estimate.collectives_of(case, name)
                 for name in wanted_programs(case)}
  seconds = roofline.step_seconds(
      case, roofline.stage_times(case, collectives, efficiency), "rollplex",
      roofline.host_seconds(case, found.away, efficiency))
  return {"case": describe(case), "how": "estimate", "away": list(found.away),
          "peak_bytes": found.peak_bytes, "fits": found.peak_bytes <= budget,
          "step_seconds": sum(seconds.values())}


def _neighbors(case: Case) -> Iterator[list[tuple[str, dict[str, Any]]]]:
  """Changes of one kind each, the smallest first."""
  saves = [SavePolicy.LAYER_INPUTS, SavePolicy.OFFLOAD, SavePolicy.NOTHING]
  if case.save in saves:
    saves = saves[saves.index(case.save) + 1:]
  yield [(f"--save={save}", dict(save=save)) for save in saves]
  b, g = case.block
  yield [(f"--micro_batch_size={size}", dict(micro_batch_size=size))
         for size in _halves(b * g)]
  # Not the smallest step, but the smallest change of the workload.
  yield [(f"--num_prompts={count}", dict(workload=dataclasses.replace(
      case.workload, num_prompts=count)))
      for count in _halves(case.workload.num_prompts)]
  mesh = case.mesh
  if mesh.training_tp == mesh.rollout_tp:
    yield [(f"--training_tp={n}", dict(mesh=dataclasses.replace(
        mesh, data=mesh.data * mesh.training_tp // n, training_tp=n,
        rollout_tp=n))) for n in (2 * mesh.training_tp, 4 * mesh.training_tp)
        if mesh.data * mesh.training_tp % n == 0]
  yield [(f"--fsdp={mesh.fsdp * n}", dict(mesh=dataclasses.replace(
      mesh, data=mesh.data // n, fsdp=mesh.fsdp * n)))
      for n in (2, 4, 8) if mesh.data % n == 0]
  yield [(f"--num_devices={case.num_devices * n} --data={mesh.data * n}", dict(
      num_devices=case.num_devices * n,
      mesh=dataclasses.replace(mesh, data=mesh.data * n))) for n in (2, 4, 8)]


def _halves(size: int) -> Iterator[int]:
  while size % 2 == 0:
    size //= 2
    yield size


def half_of(case: Case) -> Case | None:
  """One pool of a disaggregated run: half of the devices, or None."""
  mesh = dataclasses.asdict(case.mesh)
  axis = next((a for a in ("data", "fsdp") if mesh[a] % 2 == 0), None)
  if axis is None:
    return None
  mesh[axis] //= 2
  half = dataclasses.replace(
      case, num_devices=case.num_devices // 2, mesh=MeshConfig(**mesh),
      micro_batch_size=case.micro_batch_size // 2)
  return half if half.num_devices % min(
      half.num_devices, case.spec.devices_per_host) == 0 else None


def describe(case: Case) -> dict[str, Any]:
  """A case as plain data."""
  w = case.workload
  return {
      "device": case.device, "num_devices": case.num_devices,
      "parameters": costs.parameter_count(case.model),
      "mesh": dataclasses.asdict(case.mesh),
      "workload": dataclasses.asdict(w),
      "samples_per_pass": case.block[0] * case.block[1],
      "save": str(case.save), "prefix_source": str(case.prefix_source),
      "window_chunk": case.window_chunk,
      "has_reference": case.has_reference,
      "reference_bits": case.reference_bits}


# -- compiling ----------------------------------------------------------------


def _compile(cases, wanted, depths, workers, progress):
  """Compiles all programs at all depths and joins what they need."""
  full = next(iter(cases.values())).model.text.num_hidden_layers
  if depths is None or full <= max(depths):
    depths = (full,)
  jobs = [(key, name, depth) for key, name in wanted
          for depth in sorted(depths, reverse=True)
          if name != "vision" or depth == max(depths)]
  done: dict[tuple, Compiled] = {}
  run = lambda key, depth: dataclasses.replace(cases[key], depth=depth)
  if workers <= 1:
    for key, name, depth in progress(jobs):
      done[key, name, depth] = compile_one(run(key, depth), name)
  else:
    # XLA tells at length what took long or had better been asked otherwise;
    # what fails is raised.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # Compilers started by a fork of a process that runs jax may hang.
    with concurrent.futures.ProcessPoolExecutor(
        workers, mp_context=multiprocessing.get_context("spawn")) as pool:
      futures = {pool.submit(compile_one, run(key, depth), name):
                 (key, name, depth) for key, name, depth in jobs}
      try:
        for future in progress(concurrent.futures.as_completed(futures)):
          done[futures[future]] = future.result()
      except concurrent.futures.BrokenExecutor as error:
        raise InputError(
            f"workers={workers}: a process that compiles was ended, most likely "
            "for want of memory; expected fewer, such as --workers=1") from error
      except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
  out = {}
  for key, name in wanted:
    points = {d: done[key, name, d] for d in depths if (key, name, d) in done}
    out[key, name] = at_depth(cases[key], name, points, full)
  return out


def compile_one(case: Case, name: str) -> Compiled:
  """Compiles one program; a process of its own may do it."""
  jax.config.update("jax_platforms", "cpu")  # Nothing runs on a device.
  function, args, kwargs = Programs(case).program(name)
  return deviceless.compile_program(function, args, kwargs, case.spec)


def at_depth(case: Case, name: str, points: Mapping[int, Compiled],
             depth: int) -> Measured:
  """A straight line through what was compiled, at `depth`.

  Args:
    case: at full depth.
    name: of the program.
    points: by number of layers.
    depth: number of layers asked for.
  """
  (low, first), *rest = sorted(points.items())
  high, last = rest[-1] if rest else (low + 1, first)

  def line(a, b):
    return int(max(a + (b - a) * (depth - low) / (high - low), 0))

  if low == depth or not rest:
    line = lambda a, b: int(a)
  key = lambda c: (c.kind, c.group, c.far, c.loop)
  before = {key(c): c for c in first.collectives}
  collectives = []
  for c in last.collectives:
    old = before.get(key(c), dataclasses.replace(c, bytes=0, count=0))
    collectives.append(dataclasses.replace(
        c, bytes=line(old.bytes, c.bytes), count=line(old.count, c.count)))
  return Measured(
      Need(temp_bytes=line(first.temp_bytes, last.temp_bytes),
           added_bytes=line(first.added_bytes, last.added_bytes),
           input_bytes=input_bytes(case, name)),
      collectives, first.seconds + (last.seconds if rest else 0.0))


def input_bytes(case: Case, name: str) -> int:
  """Of arrays that come from the host: tokens, positions and such, whole.

  Patches are a buffer of the plan.
  """
  if name == "vision":
    return 0
  _, args, kwargs = Programs(dataclasses.replace(case, depth=1)).program(name)
  return whole_bytes([
      a for a in jax.tree.leaves((args, kwargs))
      if isinstance(a, jax.ShapeDtypeStruct) and a.sharding is None])


# -- the result ---------------------------------------------------------------


def _how(case: Case, depths, compiled: bool, baselines: bool) -> str:
  layers = case.model.text.num_hidden_layers
  if not compiled:
    return "estimate: temporaries and collectives from shapes, nothing compiled"
  others = "" if baselines else "; of other schedules an estimate"
  if depths is None or layers <= max(depths):
    return f"compiled at all {layers} layers{others}"
  shown = " and ".join(map(str, sorted(depths)))
  return (f"compiled at {shown} layers and extrapolated to {layers}, "
          f"layer by layer{others}")


def _schedule(found: Planned | None, seconds, budget) -> dict[str, Any]:
  if not found:
    return {"peak_bytes": None, "fits": False, "phases": [], "away": [],
            "step_seconds": None, "seconds": {},
            "why": "the mesh does not divide into two pools"}
  return {"peak_bytes": found.peak_bytes, "fits": found.peak_bytes <= budget,
          "phases": [phase.to_dict() for phase in found.phases],
          "away": list(found.away),
          "step_seconds": sum(seconds.values()), "seconds": seconds}


def _forecast(case, times, seconds, efficiency) -> dict[str, Any]:
  total = {name: sum(parts.values()) for name, parts in seconds.items()}
  return {
      "stages": {name: dataclasses.asdict(t) | {"total": t.total}
                 for name, t in times.items()},
      "step_seconds": total,
      "speedups": {name: total[name] / total["rollplex"] for name in total
                   if name not in ("rollplex", "naive")},
      "window_hides": roofline.hidden_share(case, times),
      "efficiency": dataclasses.asdict(efficiency)}


def _program(m: Measured) -> dict[str, Any]:
  return dataclasses.asdict(m.need) | {
      "collectives": [dataclasses.asdict(c) for c in m.collectives],
      "compile_seconds": m.seconds}
