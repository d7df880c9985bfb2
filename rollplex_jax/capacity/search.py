"""Which mesh, storage and saving policy to run with: by estimate, then compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import dataclasses
from typing import Any

from rollplex_jax.capacity import plan as plan_lib
from rollplex_jax.capacity.case import Case
from rollplex_jax.errors import InputError
from rollplex_jax.placement.mesh import MeshConfig
from rollplex_jax.schedule import PrefixSource
from rollplex_jax.stages.prefix import SavePolicy

_SAVES = (SavePolicy.LAYER_INPUTS, SavePolicy.OFFLOAD, SavePolicy.NOTHING)
# Shown of what was only estimated.
_SHOWN = 12


def candidates(case: Case) -> Iterator[Case]:
  """All meshes of powers of two on the case's devices, with all choices.

  Tensor parallelism stays within a host.
  """
  powers = [1 << i for i in range(case.num_devices.bit_length())]
  degrees = [n for n in powers if n <= case.spec.devices_per_host]
  for training in degrees:
    for rollout in degrees:
      for fsdp in powers:
        ways = fsdp * max(training, rollout)
        if case.num_devices % ways:
          continue
        source = (case.prefix_source if training == rollout
                  else PrefixSource.WINDOW)
        storages = ("coarser", "finer") if rollout > training else ("coarser",)
        for storage in storages:
          mesh = MeshConfig(
              data=case.num_devices // ways, fsdp=fsdp, training_tp=training,
              rollout_tp=rollout, storage=storage)
          for save in _SAVES:
            new = dataclasses.replace(
                case, mesh=mesh, prefix_source=source, save=save,
                micro_batch_size=0)
            try:
              new.check()
            except InputError:
              continue
            yield new


def search(case: Case, *, best: int, compiled: bool, depths, workers: int,
           memory_fraction: float, budget: int,
           progress: Callable = lambda items: items) -> dict[str, Any]:
  """Ranks what fits by the forecast of a rollplex step.

  Args:
    case: whose model, devices and workload are kept.
    best: how many to compile.
    compiled, depths, workers, memory_fraction, budget: as of `make_plan`.
    progress: wraps the iteration over candidates.

  Returns:
    "ranked", a list of what fits (compiled ones first); "plan", the plan of the
    first, whose other schedules are estimates, or None; "closest", the smallest
    peak where nothing fits.

  Raises:
    InputError: if no mesh suits the model and the workload.
  """
  settings = dict(depths=depths, workers=workers,
                  memory_fraction=memory_fraction, budget=budget)
  found = list(candidates(case))
  if not found:
    raise InputError(
        f"num_devices={case.num_devices}: no mesh divides the model's heads and "
        f"the {case.workload.num_prompts} prompts")
  estimates = [(candidate, plan_lib.estimated_step(
      candidate, plan_lib.budget_of(case, memory_fraction, budget)))
               for candidate in progress(found)]
  fitting = sorted((pair for pair in estimates if pair[1]["fits"]),
                   key=lambda pair: pair[1]["step_seconds"])
  smallest = min(entry["peak_bytes"] for _, entry in estimates)
  if not fitting:
    return {"ranked": [], "plan": None, "closest": smallest}
  ranked, plans = [], []
  if compiled:
    for candidate, _ in fitting[:best]:
      plan = plan_lib.make_plan(
          candidate, compiled=True, baselines=False, **settings)
      plans.append(plan)
      ranked.append(_entry(plan))
    order = sorted(range(len(ranked)), key=lambda i: (
        not ranked[i]["fits"], ranked[i]["step_seconds"]))
    ranked, plans = [ranked[i] for i in order], [plans[i] for i in order]
    ranked = [entry for entry in ranked if entry["fits"]]
    fitting = fitting[best:]
  else:
    plans = [plan_lib.make_plan(fitting[0][0], compiled=False, **settings)]
  ranked += [entry for _, entry in fitting[:_SHOWN]]
  return {"ranked": ranked, "plan": plans[0], "closest": smallest}


def _entry(plan: dict[str, Any]) -> dict[str, Any]:
  own = plan["schedules"]["rollplex"]
  return {"case": plan["case"], "how": "compiled", **{
      key: own[key] for key in ("away", "peak_bytes", "fits", "step_seconds")}}
