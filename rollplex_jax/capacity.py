"""Whether a run fits devices that nobody has rented yet, and how long it takes.

    plan = make_plan(case)

Every program of a step is compiled for the described devices (see
`deviceless`); `capacity_memory` adds up what is there in each phase, and
`roofline` forecasts the step. Where no compiler is installed temporaries are
estimated and the plan says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import concurrent.futures
import dataclasses
import multiprocessing
from typing import Any

import jax

from rollplex_jax import capacity_costs, capacity_estimate, deviceless, roofline
from rollplex_jax.capacity_case import Case
from rollplex_jax.capacity_memory import (
  Away,
  Need,
  Phase,
  buffers_of,
  naive_phases,
  phases_of,
  program_of,
  step_units,
)
from rollplex_jax.capacity_programs import Programs, tree_bytes
from rollplex_jax.deviceless import Collective, Compiled
from rollplex_jax.placement.mesh import MeshConfig

# What was published for Qwen2.5-VL-32B on 32 H800, beside which plans stand.
PUBLISHED = {"naive_gib": 165.0, "speedup_over_serial": (1.23, 1.30),
             "speedup_over_disaggregated": (1.57, 2.24)}
# Layers to compile with where all of them would take too long. What a program
# needs grows evenly with each layer more.
DEPTHS = (2, 4)
# What compiles longest is started first.
_SLOW = ("gradient_full", "prefix_backward", "score_full", "window", "prefill",
         "plain_prefill", "gradient")


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
              memory_fraction: float = 0.9,
              efficiency: roofline.Efficiency | None = None,
              progress: Callable = lambda items: items) -> dict[str, Any]:
  """Plans a run. The result is plain data, for JSON.

  Args:
    case: what is planned for.
    depths: numbers of layers to compile with, from which the whole depth is
      extrapolated; None to compile at full depth.
    compiled: False to estimate temporaries without compiling anything.
    workers: processes that compile.
    memory_fraction: share of a device's memory that may be used.
    efficiency: for the forecast.
    progress: wraps the iteration over compiled programs.

  Raises:
    InputError: if the case can't run.
  """
  case.check()
  pool = half_of(case)
  cases = {"all": case} | ({"pool": pool} if pool else {})
  wanted = [("all", name) for name in programs_of(case)]
  if pool:
    wanted += [("pool", name) for name in _BASELINE
               if ("all", name) in wanted]
  if compiled:
    measured = _compile(cases, wanted, depths, workers, progress)
  else:
    measured = {(key, name): Measured(
        capacity_estimate.need_of(cases[key], name), [])
        for key, name in wanted}
  need = lambda key: lambda name: measured[key, name].need
  collectives = {name: m.collectives for (key, name), m in measured.items()
                 if key == "all"}
  budget = int(case.spec.memory_bytes * memory_fraction)
  away = choose_away(case, need("all"), budget)
  times = roofline.stage_times(
      case, collectives, away, efficiency or roofline.Efficiency())
  schedules = {
      "rollplex": phases_of(case, "rollplex", need("all"), away),
      "serial": phases_of(case, "serial", need("all"), Away()),
      "naive": naive_phases(case, need("all"))}
  if pool:
    schedules["disaggregated"] = pool_phases(pool, need("pool"))
  seconds = {name: roofline.step_seconds(case, times, name) for name in (
      "rollplex", "serial", "serial_shared", "disaggregated",
      "disaggregated_shared")}
  # Naive colocation overlaps as rollplex does, but does each sample's work.
  seconds["naive"] = seconds["serial"]
  return {
      "case": describe(case),
      "memory": {"device_bytes": case.spec.memory_bytes,
                 "budget_bytes": budget},
      "how": _how(case, depths, compiled),
      "away": str(away),
      "schedules": {
          name: _schedule(schedules.get(name), seconds[name], budget, pool)
          for name in ("rollplex", "serial", "disaggregated", "naive")},
      "forecast": _forecast(case, times, seconds),
      "published": PUBLISHED,
      "programs": {f"{key}/{name}": _program(m)
                   for (key, name), m in measured.items()},
  }


_BASELINE = ("vision", "plain_prefill", "decode", "score_full",
             "gradient_full", "update", "compute_copy")


def programs_of(case: Case) -> list[str]:
  """Names of all programs of a case's schedules."""
  names = {"update", "compute_copy"}
  for schedule in ("rollplex", "serial"):
    for units in step_units(case, schedule):
      names |= {program_of(unit) for unit in units}
  names -= {None}
  if case.mesh.training_tp != case.mesh.rollout_tp:
    names.add("reshard")
  if "plain_prefill" not in names:
    names.add("plain_prefill")
  if case.workload.video is None:
    names.discard("vision")
  order = {name: i for i, name in enumerate(_SLOW)}
  return sorted(names, key=lambda name: (order.get(name, len(order)), name))


def choose_away(case: Case, need: Callable[[str], Need], budget: int) -> Away:
  """The least that must wait in host memory for rollplex to fit, or all."""
  choices = [Away(), Away(optimizer=True)]
  if case.has_reference:
    choices.append(Away(optimizer=True, reference=True))
  for away in choices:
    if peak_of(phases_of(case, "rollplex", need, away)) <= budget:
      return away
  return choices[-1]


def peak_of(phases: Sequence[Phase]) -> int:
  """The most bytes in any phase."""
  return max(phase.peak_bytes for phase in phases)


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


def pool_phases(pool: Case, need: Callable[[str], Need]) -> list[Phase]:
  """Phases of the trainer's and of the rollout's half.

  The trainer's has no rollout and the rollout's neither optimizer, gradients
  nor a reference.
  """
  have = buffers_of(pool)
  out = []
  for phase in phases_of(pool, "serial", need, Away()):
    bytes_, label = dict(phase.bytes), f"trainer, {phase.name}"
    if phase.name.startswith("rollout"):
      label = f"sampler, {phase.name}"
      bytes_ |= {"optimizer": 0, "gradients": 0, "reference": 0}
      bytes_["weights"] = have.weights
    out.append(Phase(name=label, program=phase.program, bytes=bytes_))
  return out


def describe(case: Case) -> dict[str, Any]:
  """A case as plain data."""
  w = case.workload
  return {
      "device": case.device, "num_devices": case.num_devices,
      "parameters": capacity_costs.parameter_count(case.model),
      "mesh": dataclasses.asdict(case.mesh),
      "workload": dataclasses.asdict(w),
      "samples_per_pass": case.block[0] * case.block[1],
      "save": str(case.save), "prefix_source": str(case.prefix_source),
      "storage": case.storage, "window_chunk": case.window_chunk,
      "has_reference": case.has_reference}


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
    # Compilers started by a fork of a process that runs jax may hang.
    with concurrent.futures.ProcessPoolExecutor(
        workers, mp_context=multiprocessing.get_context("spawn")) as pool:
      futures = {pool.submit(compile_one, run(key, depth), name):
                 (key, name, depth) for key, name, depth in jobs}
      try:
        for future in progress(concurrent.futures.as_completed(futures)):
          done[futures[future]] = future.result()
      except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
  out = {}
  for key, name in wanted:
    points = {d: done[key, name, d] for d in depths if (key, name, d) in done}
    out[key, name] = _at_depth(cases[key], name, points, full)
  return out


def compile_one(case: Case, name: str) -> Compiled:
  """Compiles one program; a process of its own may do it."""
  jax.config.update("jax_platforms", "cpu")  # Nothing runs on a device.
  function, args, kwargs = Programs(case).program(name)
  return deviceless.compile_program(function, args, kwargs, case.spec)


def _at_depth(case, name, points: Mapping[int, Compiled], depth) -> Measured:
  """A straight line through what was compiled, at `depth`."""
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
  """Of arrays from the host, which programs split by the batch."""
  _, args, kwargs = Programs(dataclasses.replace(case, depth=1)).program(name)
  leaves = [a for a in jax.tree.leaves((args, kwargs))
            if isinstance(a, jax.ShapeDtypeStruct) and a.sharding is None]
  return tree_bytes(leaves) // case.parts


# -- the result ---------------------------------------------------------------


def _how(case: Case, depths, compiled: bool) -> str:
  layers = case.model.text.num_hidden_layers
  if not compiled:
    return "estimate: temporaries from shapes, nothing compiled"
  if depths is None or layers <= max(depths):
    return f"compiled at all {layers} layers"
  shown = " and ".join(map(str, sorted(depths)))
  return (f"compiled at {shown} layers and extrapolated to {layers}, "
          "layer by layer")


def _schedule(phases, seconds, budget, pool) -> dict[str, Any]:
  if phases is None:
    return {"peak_bytes": None, "fits": False, "phases": [],
            "step_seconds": None, "seconds": {},
            "why": "the mesh does not divide into two pools"}
  peak = peak_of(phases)
  return {"peak_bytes": peak, "fits": peak <= budget,
          "phases": [phase.to_dict() for phase in phases],
          "step_seconds": sum(seconds.values()), "seconds": seconds}


def _forecast(case, times, seconds) -> dict[str, Any]:
  total = {name: sum(parts.values()) for name, parts in seconds.items()}
  return {
      "stages": {name: dataclasses.asdict(t) | {"total": t.total}
                 for name, t in times.items()},
      "step_seconds": total,
      "speedups": {name: total[name] / total["rollplex"] for name in total
                   if name not in ("rollplex", "naive")},
      "window_hides": roofline.hidden_share(case, times),
      "efficiency": dataclasses.asdict(roofline.Efficiency())}


def _program(m: Measured) -> dict[str, Any]:
  return dataclasses.asdict(m.need) | {
      "collectives": [dataclasses.asdict(c) for c in m.collectives],
      "compile_seconds": m.seconds}
