"""The residency plan of a training step: its buffers from its schedule.

Lifetimes come from the schedule, whose units say which artefacts they read and
write. Each unit is a phase ("train/gradient[0][1]"), and so is what runs
outside of units: "rebuild", "reward" and "update". Bytes come from
`buffer_sizes`. Nothing is allocated.

In the order in which something has to give way under a budget:
  1. optimizer state and master weights wait in host memory but for the update
  2. reference weights wait there where no phase scores or prefills with them
  3. of prefixes less is saved, then in host memory, then nothing
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import functools
import math

import jax.numpy as jnp

from rollplex_jax import schedule
from rollplex_jax.buffer_sizes import Setup, Sizes, Workload
from rollplex_jax.placement import residency
from rollplex_jax.placement.buffers import Buffer, Policy
from rollplex_jax.placement.residency import (
  Alternative,
  BudgetError,
  ResidencyPlan,
)
from rollplex_jax.prefix_budget import SAVE_ORDER
from rollplex_jax.schedule import (
  Facts,
  Lane,
  ScheduleConfig,
  ScheduleName,
  Stage,
  Unit,
)
from rollplex_jax.stages.prefix import SavePolicy

# A phase, its unit, and the artefacts that it reads and writes.
_Spot = tuple[str, Unit | None, tuple[str, ...], tuple[str, ...]]
# An artefact's life: each phase that touches it, and whether it writes it.
_Life = list[tuple[str, bool]]


def plan(setup: Setup, config: ScheduleConfig, facts: Facts, work: Workload,
         budget_bytes: int | None = None, *, pool: Lane | None = None,
         ) -> tuple[ResidencyPlan, ScheduleConfig]:
  """Plans a step under a budget.

  Args: as of `buffers`, and bytes per device, or None for no limit.

  Returns:
    The plan, and the schedule with the saving policy that it fell back to.

  Raises:
    BudgetError: naming the phase, its need and settings that would fit.
  """
  def make(setup=setup, config=config, work=work):
    return (buffers(setup, config, facts, work, pool=pool),
            phases(config, facts, work))

  try:
    found = residency.plan(*make(), budget_bytes, alternatives=_alternatives(
        setup, config, work, make))
  except BudgetError:
    if config.save != SavePolicy.ACTIVATIONS or not config.share_prefix:
      raise
    # Units are cut otherwise where all activations are saved: plan anew.
    found, chosen = plan(
        setup, dataclasses.replace(config, save=SavePolicy.LAYER_INPUTS),
        facts, work, budget_bytes, pool=pool)
    changed = dict.fromkeys((*found.changed, f"schedule.save={chosen.save}"))
    return dataclasses.replace(found, changed=tuple(changed)), chosen
  for setting in found.changed:
    key, _, value = setting.partition("=")
    if key == "schedule.save":
      config = dataclasses.replace(config, save=SavePolicy(value))
  return found, config


def phases(config: ScheduleConfig, facts: Facts, work: Workload) -> list[str]:
  """The phases of a step, in order."""
  return [phase for phase, *_ in _spots(config, facts, work)]


def phase_of(group: str, unit: Unit) -> str:
  """The phase of a unit; groups are "rollout", "score", "train", "train2"..."""
  where = "".join(f"[{i}]" for i in (unit.block, unit.part) if i is not None)
  whose = "" if unit.model == "policy" else f":{unit.model}"
  return f"{group}/{unit.stage}{whose}{where}"


def buffers(setup: Setup, config: ScheduleConfig, facts: Facts,
            work: Workload, *, pool: Lane | None = None) -> list[Buffer]:
  """All large buffers of a step, those that give way first in front.

  Args:
    setup: the model and how it lies on the devices.
    config: the schedule.
    facts: of the step.
    work: its shapes.
    pool: of a disaggregated run, ROLLOUT or TRAINING: whose devices.
  """
  spots = _spots(config, facts, work)
  # What runs outside of units, an update, is the trainer's.
  lanes = {spot: Lane.TRAINING if spot[1] is None else spot[1].lane
           for spot in spots}
  mine = [spot for spot in spots if pool is None
          or (lanes[spot] == Lane.ROLLOUT) == (pool == Lane.ROLLOUT)]
  trained = ("text", "visual") if facts.trains_tower else ("text",)
  sizes = Sizes(setup, work, trained)
  if pool == Lane.ROLLOUT:
    # Kept until the next are sent.
    held = [Buffer(name="rollout/weights", policy=Policy.KEEP,
                   bytes_per_device=sizes.weights("text", "visual"))]
  else:
    held = _weights(sizes, trained, facts, mine)
  within = [b for life in _lives(mine) for b in _artifact(
      sizes, config, *life)]
  within += [b for phase, unit, *_ in mine
             for b in _inside(sizes, phase, unit)]
  return [b for b in (*held, *within) if b.bytes_per_device]


def _spots(config: ScheduleConfig, facts: Facts, work: Workload) -> list[_Spot]:
  """All phases of a step with what they read and write."""
  out: list[_Spot] = [("rebuild", None, (), ())]

  def add(group, units):
    out.extend((phase_of(group, u), u, u.reads, u.writes) for u in units)

  add("rollout", schedule.rollout_plan(config, facts))
  out.append(("reward", None, (), ()))
  add("score", schedule.scoring_plan(config, facts, work.scoring_passes[0]))
  for i in range(work.updates):
    number = str(i + 1) if i else ""
    start = len(out)
    add(f"train{number}", schedule.update_plan(
        config, facts, work.training_passes[0], first=i == 0))
    phase, unit, reads, writes = out[start]
    # Gradients are zeros before the first unit adds to them.
    out[start] = phase, unit, reads, tuple(dict.fromkeys((*writes, "grads")))
    out.append((f"update{number}", None, ("grads",), ()))
  return out


def _lives(spots: list[_Spot]) -> Iterator[tuple[str, _Life]]:
  """Each artefact from producer to last consumer, in the order of producers."""
  lives: list[tuple[str, _Life]] = []
  opened: dict[str, _Life] = {}
  seen = set()
  for phase, _, reads, writes in spots:
    group = residency.group_of(phase)
    for name in dict.fromkeys((*reads, *writes)):
      # Written first in a group, it is made anew, whatever came before.
      anew = name not in reads and (group, name) not in seen
      if anew or name not in opened:
        opened[name] = []
        lives.append((name, opened[name]))
      seen.add((group, name))
      opened[name].append((phase, name in writes))
  return iter(lives)


def _weights(sizes: Sizes, trained: tuple[str, ...], facts: Facts,
             spots: list[_Spot]) -> list[Buffer]:
  """What outlives a step, and the rollout's rebuilt weights."""
  updates = tuple(p for p, *_ in spots if p.startswith("update"))
  optimizer = Buffer(
      name="optimizer", bytes_per_device=sizes.optimizer(),
      policy=Policy.DONATE, uses=updates, rewritten_in=updates)
  out = [_may_offload(optimizer, "optimizer state offloaded")]
  if facts.has_reference:
    # A frozen tower is the policy's.
    out.append(_may_offload(Buffer(
        name="reference/weights", bytes_per_device=sizes.reference(*trained),
        policy=Policy.KEEP, uses=tuple(
            phase for phase, unit, _, writes in spots if unit is not None
            and (unit.model == "reference" or "reference/kv" in writes))),
        "reference weights offloaded"))
  out.append(Buffer(
      name="policy/weights", bytes_per_device=sizes.weights(*trained),
      policy=Policy.DONATE, rewritten_in=updates))
  if not facts.trains_tower:
    out.append(Buffer(name="policy/frozen", policy=Policy.KEEP,
                      bytes_per_device=sizes.weights("visual")))
  last = [phase for phase, unit, *_ in spots
          if unit is not None and unit.stage in (Stage.DECODE, Stage.WINDOW)]
  # A reference whose prefixes the window computes is rebuilt as well.
  rebuilds = [("rollout/weights", "rebuild"), *(
      ("reference/rebuilt", phase) for phase, _, _, writes in spots
      if "reference/weights" in writes)]
  if sizes.setup.rebuilt_bytes and last:
    out += [Buffer(
        name=name, bytes_per_device=sizes.setup.rebuilt_bytes, producer=phase,
        last_consumer=last[-1]) for name, phase in rebuilds]
  return out


def _may_offload(b: Buffer, setting: str) -> Buffer:
  return dataclasses.replace(b, fallbacks=(
      dataclasses.replace(b, policy=Policy.OFFLOAD, setting=setting),))


def _artifact(sizes: Sizes, config: ScheduleConfig, name: str,
              life: _Life) -> list[Buffer]:
  """An artefact as a buffer; none for what stays on the host."""
  work = sizes.work
  whole, _, block = name.partition(".")
  rows = work.num_prompts
  if block:
    scores = life[0][0].startswith("score")
    rows = (work.scoring_passes if scores else work.training_passes)[1]
  rollout = name.startswith("rollout/")
  kind = whole.rpartition("/")[2]
  facts = dict(
      name=name, producer=life[0][0], last_consumer=life[-1][0],
      uses=tuple(phase for phase, _ in life),
      rewritten_in=tuple(phase for phase, writes in life[1:] if writes))
  if kind == "saved":
    return _saved(sizes, config, facts, rows)
  size = {
      "kv": lambda: sizes.kv(rows, rollout=rollout),
      "kv_grads": lambda: sizes.kv(rows, dtype=jnp.float32),
      # They stay as the rollout has made them.
      "features": lambda: sizes.features(
          rollout=life[0][0].startswith("rollout/")),
      "feature_grads": lambda: sizes.features(dtype=jnp.float32),
      "completions": sizes.completions,
      "grads": sizes.gradients,
  }.get(kind)
  if size is None:
    return []
  # Accumulators are added to in place.
  policy = Policy.DONATE if facts["rewritten_in"] else Policy.DROP
  return [Buffer(bytes_per_device=size(), policy=policy, **facts)]


def _saved(sizes: Sizes, config: ScheduleConfig, facts: dict,
           rows: int) -> list[Buffer]:
  """What is saved of prefixes, under the schedule's policy or one that saves
  less."""
  choices = []
  order = SAVE_ORDER[SAVE_ORDER.index(config.save):]
  if config.save == SavePolicy.ACTIVATIONS:
    order = order[:1]  # With less, units are others too: see `plan`.
  for save in order:
    b = Buffer(bytes_per_device=sizes.saved(rows, save), group="saved",
               setting=f"schedule.save={save}", **facts)
    if save == SavePolicy.OFFLOAD:
      b = dataclasses.replace(b, policy=Policy.OFFLOAD)
    elif save == SavePolicy.NOTHING:
      # A backward unit makes its own block's again.
      b = dataclasses.replace(
          b, policy=Policy.RECOMPUTE, bytes_in_use=sizes.saved(
              sizes.work.training_passes[1], save))
    choices.append(b)
  return [dataclasses.replace(choices[0], fallbacks=tuple(choices[1:]))]


def _inside(sizes: Sizes, phase: str, unit: Unit | None) -> list[Buffer]:
  """What lives in one phase only, inside its program."""
  found = {}
  stage = phase.rstrip("0123456789") if unit is None else unit.stage
  if stage in (Stage.DECODE, Stage.WINDOW):
    found["rollout/cache"] = sizes.cache()
    found["rollout/history"] = sizes.history()
  if stage in (Stage.VISION, Stage.VISION_BACKWARD):
    found["patches"] = sizes.patches(rollout=unit.lane == Lane.ROLLOUT)
  if stage in sizes.setup.temporaries:
    found["temporaries"] = sizes.setup.temporaries[stage]
  return [Buffer(name=name, bytes_per_device=size, producer=phase,
                 last_consumer=phase) for name, size in found.items()]


def _alternatives(setup: Setup, config: ScheduleConfig, work: Workload,
                  make) -> Iterator[Alternative]:
  """Settings near those at hand that need less memory, the nearest first."""
  size = work.micro_batch_size or work.num_generations * (
      work.prompts_per_update or work.num_prompts)
  while size > 1:
    size //= 2
    yield f"micro_batch_size={size}", functools.partial(
        make, work=dataclasses.replace(work, micro_batch_size=size))
  if config.name == ScheduleName.ROLLPLEX:
    yield "schedule.name=serial", functools.partial(
        make, config=dataclasses.replace(config, name=ScheduleName.SERIAL))
  prompts = work.num_prompts
  while prompts % 2 == 0:
    prompts //= 2
    features = math.ceil(work.num_features * prompts / work.num_prompts)
    yield f"train_batch_size={prompts}", functools.partial(
        make, work=dataclasses.replace(
            work, num_prompts=prompts, num_features=features,
            prompts_per_update=min(work.prompts_per_update, prompts)))
  for times in (2, 4, 8):
    mesh = dataclasses.replace(setup.mesh, fsdp=setup.mesh.fsdp * times)
    yield f"mesh.fsdp={mesh.fsdp}", functools.partial(
        make, setup=dataclasses.replace(setup, mesh=mesh))
