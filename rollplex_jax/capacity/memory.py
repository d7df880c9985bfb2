"""What a device holds in each phase of a step.

Buffers, their bytes and their lives are those of `residency_plan`, by which
`train` keeps house. Added here is what only programs know: their temporaries,
and results in memory of their own that no buffer of the plan stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import functools
import re

import jax

from rollplex_jax import residency_plan
from rollplex_jax import schedule as schedule_lib
from rollplex_jax.buffer_sizes import Setup, Sizes
from rollplex_jax.buffer_sizes import Workload as StepShape
from rollplex_jax.capacity.case import Case
from rollplex_jax.capacity.programs import Programs, tree_bytes
from rollplex_jax.models.weights import is_weight
from rollplex_jax.placement import residency
from rollplex_jax.placement.buffers import Policy
from rollplex_jax.placement.layout import How
from rollplex_jax.placement.residency import BudgetError, ResidencyPlan
from rollplex_jax.schedule import (
  Facts,
  Lane,
  ScheduleConfig,
  ScheduleName,
  Stage,
  Unit,
)
from rollplex_jax.stages.prefix import SavePolicy

# Kinds of bytes, in the order of the table.
KINDS = ("weights", "rebuilt", "reference", "optimizer", "gradients", "kv",
         "prefix", "features", "inputs", "temporaries")
SCHEDULES = ("rollplex", "serial", "disaggregated", "naive")
# Buffers of the residency plan by kind, without the number of a block.
_KIND_OF = {
    "policy/weights": "weights", "policy/frozen": "weights",
    "rollout/weights": "rebuilt", "reference/rebuilt": "rebuilt",
    "reference/weights": "reference", "optimizer": "optimizer",
    "grads": "gradients", "kv_grads": "gradients",
    "rollout/kv": "kv", "policy/kv": "kv", "rollout/cache": "kv",
    "policy/saved": "prefix", "reference/kv": "prefix",
    "patches": "inputs", "completions": "inputs", "temporaries": "temporaries"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Need:
  """What a program needs beside buffers that are there before.

  Attributes:
    temp_bytes: of temporaries.
    added_bytes: of outputs in memory of their own.
    input_bytes: of small arrays that come from the host.
    compiled: from a compiled program; otherwise an estimate.
  """

  temp_bytes: int
  added_bytes: int = 0
  input_bytes: int = 0
  compiled: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
  """One phase of a step on one device.

  Attributes:
    name: of the phase.
    bytes: by kind, at the phase's peak.
  """

  name: str
  bytes: Mapping[str, int]

  @property
  def peak_bytes(self) -> int:
    return sum(self.bytes.values())

  def to_dict(self) -> dict:
    """For JSON."""
    return {"name": self.name, "peak_bytes": self.peak_bytes,
            "bytes": dict(self.bytes)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planned:
  """A schedule's phases.

  Attributes:
    phases: in order; of those that repeat, the largest.
    away: names of the buffers that wait in host memory while nothing reads
      them.
  """

  phases: tuple[Phase, ...]
  away: tuple[str, ...] = ()

  @property
  def peak_bytes(self) -> int:
    """The most bytes in any phase."""
    return max(phase.peak_bytes for phase in self.phases)


class Buffers:
  """Bytes per device of a case's buffers, those of all prompts unless said.

  Attributes:
    sizes: where they come from.
    weights: that training reads, the frozen tower among them; `text` of them
      the decoder's.
    rollout_text: the decoder as the rollout reads it; `rebuilt` of that is
      beside what is stored.
    reference: its decoder; a frozen tower is the policy's too.
    optimizer: master weights and moments.
    gradients: of the decoder.
    kv: prefix keys and values; `suffix_kv` those of all samples while they
      are drawn.
    inputs: layer inputs of the prefixes, wherever they are kept.
    features: of the videos.
  """

  def __init__(self, case: Case):
    setup, work = setup_of(case), work_of(case)
    self.sizes = sizes = Sizes(setup, work, ("text",))
    b = work.num_prompts
    self.weights = sizes.weights("text", "visual")
    self.text = sizes.weights("text")
    self.rollout_text = Sizes(
        dataclasses.replace(setup, training=setup.rollout, storage=None),
        work, ("text",)).weights("text")
    self.rebuilt = setup.rebuilt_bytes
    self.reference = sizes.reference("text") if case.has_reference else 0
    self.optimizer, self.gradients = sizes.optimizer(), sizes.gradients()
    self.kv = sizes.kv(b, rollout=True)
    self.suffix_kv = sizes.cache()
    self.inputs = sizes.saved(b, SavePolicy.LAYER_INPUTS)
    self.features = sizes.features(rollout=True)


@functools.cache
def buffers_of(case: Case) -> Buffers:
  """`Buffers`, once for each case."""
  return Buffers(case)


@functools.cache
def setup_of(case: Case) -> Setup:
  """The model and its places, as the residency plan takes them."""
  places, bits = case.places(), _reference_bits(case)
  if places is None:
    return Setup(config=case.config, reference_bits=bits)
  layout = places.plan_layout(Programs(case).declared["text"], "bfloat16")
  return Setup(
      config=case.config, mesh=case.mesh.shape, training=places.training,
      rollout=places.rollout, storage=places.storage, reference_bits=bits,
      rebuilt_bytes=layout.bytes_of(How.REBUILD) if layout else 0)


def _reference_bits(case: Case) -> dict[str, float]:
  """By name, of the matrices of all blocks but the first and the last."""
  if not case.reference_bits:
    return {}
  blocks = Programs(case).declared["text"]["layers"][1:-1]
  return {w.name: case.reference_bits
          for w in jax.tree.leaves(blocks, is_leaf=is_weight)
          if len(w.shape) == 2}


def work_of(case: Case) -> StepShape:
  """The workload, as the residency plan takes it."""
  w, (b, g) = case.workload, case.block
  return StepShape(
      num_prompts=w.num_prompts, prompt_length=case.length,
      num_generations=w.num_generations, response_length=w.response_length,
      num_features=Programs(case).num_features, micro_batch_size=b * g,
      parts=case.parts)


def facts_of(case: Case) -> Facts:
  """What a step's plans depend on; the tower is frozen."""
  places = case.places()
  return Facts(
      has_media=case.workload.video is not None,
      has_reference=case.has_reference, trains_tower=False,
      scores_policy=False,
      moves_weights=places is not None and places.moves_weights)


def schedule_of(case: Case, name: str) -> ScheduleConfig:
  """The configuration of a schedule by its name in the planner.

  Serial and disaggregated are the baselines of most trainers, which run each
  sample's prompt and response in full.
  """
  if name == "rollplex":
    return ScheduleConfig(
        name=ScheduleName.ROLLPLEX, save=case.save,
        prefix_source=case.prefix_source, window_chunk=case.window_chunk)
  return ScheduleConfig(name=ScheduleName(name), share_prefix=False)


def reshards(case: Case) -> bool:
  """Whether the window's results lie otherwise than training reads them."""
  return case.mesh.training_tp != case.mesh.rollout_tp


def programs_of(case: Case, name: str) -> dict[str, Unit | None]:
  """Programs of a schedule, by their names in `Programs`, with a unit of each.
  """
  config, facts = schedule_of(case, name), facts_of(case)
  units = [*schedule_lib.rollout_plan(config, facts),
           *schedule_lib.scoring_plan(config, facts, [(0, 0)]),
           *schedule_lib.update_plan(config, facts, [(0, 0)], first=True)]
  out: dict[str, Unit | None] = {}
  for unit in units:
    program = str(unit.stage)
    if unit.stage == Stage.PREFIX:
      saves = any("/saved" in name for name in unit.writes)
      program = "prefill" if saves else "plain_prefill"
    if unit.stage == Stage.WINDOW and reshards(case):
      out["reshard"] = unit
    if unit.stage != Stage.TRANSFER:
      out[program] = unit
  return out | {"update": None, "compute_copy": None}


def phases_of(case: Case, name: str, need: Callable[[str], Need],
              budget: int | None = None) -> Planned:
  """The phases of a step, with what has to wait in host memory for a budget.

  Args:
    case: what is planned for; of "disaggregated", one pool of the two.
    name: of the schedule: "rollplex", "serial" or "disaggregated".
    need: of a program, by its name.
    budget: bytes per device. Where it can't be met, all that may go is away.
  """
  pools = (Lane.ROLLOUT, Lane.TRAINING) if name == "disaggregated" else (None,)
  phases, away = [], []
  for pool in pools:
    found = _plan(case, name, need, budget, pool)
    away += [b.name for b in found.buffers
             if b.policy == Policy.OFFLOAD and b.name != "policy/saved"]
    phases += _phases(found, pool)
  return Planned(phases=tuple(phases), away=tuple(dict.fromkeys(away)))


def naive_phases(case: Case, need: Callable[[str], Need]) -> Planned:
  """Everything at once: naive colocation.

  A rollout copy of the actor beside the trained one; prefixes per sample, so
  that keys, values and saved layer inputs are there for each of a group; no
  buffer is ever given up. A phase differs from another in its program only.
  """
  have, g = buffers_of(case), case.workload.num_generations
  reference_kv = have.kv * g if case.has_reference else 0
  resident = {
      "weights": have.weights, "rebuilt": have.rollout_text,
      "reference": have.reference, "optimizer": have.optimizer,
      "gradients": have.gradients, "kv": have.kv * g + have.suffix_kv,
      "prefix": have.inputs * g + reference_kv, "features": have.features}
  temporaries = _temporaries(case, "serial", need)
  return Planned(phases=tuple(
      Phase(name=label, bytes={kind: resident.get(kind, 0) for kind in KINDS}
            | {"temporaries": temporaries[stage]})
      for label, stage in (
          ("rollout/decode", "decode"), ("score/score_full", "score_full"),
          ("train/gradient_full", "gradient_full"), ("update", "update"))
      if stage in temporaries))


def _plan(case: Case, name: str, need, budget: int | None,
          pool: Lane | None) -> ResidencyPlan:
  """A schedule's plan under a budget, or the nearest to it."""
  setup, work = setup_of(case), work_of(case)
  config, facts = schedule_of(case, name), facts_of(case)
  setup = dataclasses.replace(
      setup, temporaries=_temporaries(case, name, need))
  if pool == Lane.ROLLOUT:  # It has weights in its own layout only.
    setup = dataclasses.replace(setup, training=setup.rollout, storage=None)
  buffers = residency_plan.buffers(setup, config, facts, work, pool=pool)
  # Saving less is the user's to choose: it runs other programs.
  buffers = [b if b.group != "saved" else dataclasses.replace(b, fallbacks=())
             for b in buffers]
  try:
    return residency.plan(
        buffers, residency_plan.phases(config, facts, work), budget)
  except BudgetError as error:
    return error.plan


def _phases(plan: ResidencyPlan, pool: Lane | None) -> Iterator[Phase]:
  """Phases of a plan, of those that differ in their block the largest."""
  found: dict[str, Phase] = {}
  for phase in plan.phases:
    group, label = residency.group_of(phase), re.sub(r"\[\d+\]", "", phase)
    if pool is not None:
      in_rollout = group == "rollout" and label != "rollout/vision"
      if in_rollout != (pool == Lane.ROLLOUT) or group in ("rebuild", "reward"):
        continue
      label = {Lane.ROLLOUT: "sampler", Lane.TRAINING: "trainer"}[pool] + (
          f", {label}")
    label = label.removesuffix(":rollout")  # Its weights, laid out for it.
    bytes_ = dict.fromkeys(KINDS, 0)
    for name, size in plan.during(phase).items():
      bytes_[_kind(name, pool)] += size
    new = Phase(name=label, bytes=bytes_)
    if label not in found or new.peak_bytes > found[label].peak_bytes:
      found[label] = new
  return iter(found.values())


def _kind(name: str, pool: Lane | None) -> str:
  base = name.partition(".")[0]
  if base.endswith("/features"):
    return "features"
  if base == "rollout/weights" and pool is not None:
    return "weights"  # The only ones there.
  return _KIND_OF[base]


def _temporaries(case: Case, name: str, need) -> dict[str, int]:
  """Bytes per phase that no buffer of the plan stands for, by stage."""
  out = {"update": max(_alone(need(p)) for p in ("update", "compute_copy"))}
  sizes = buffers_of(case).sizes
  places, artifacts = case.places(), Programs(case).artifacts
  for program, unit in programs_of(case, name).items():
    if unit is None:
      continue
    more, stage = _alone(need(program)), unit.stage
    added = need(program).added_bytes
    if program == "vision":
      added -= sizes.features(rollout=True)
    elif program in ("prefill", "plain_prefill"):
      added -= sizes.kv(sizes.work.num_prompts, rollout=True)
      if program == "prefill":
        added -= sizes.saved(sizes.work.num_prompts, case.save)
    elif stage in (Stage.DECODE, Stage.WINDOW):
      # The loop's caches and its completions are buffers of the plan. Results
      # of a window lie as the rollout has them until they are moved, when the
      # caches are gone.
      more -= sizes.cache()
      if program != "reshard":
        added -= sizes.completions()
      if stage == Stage.WINDOW:
        added += tree_bytes(artifacts(places.rollout)) - tree_bytes(
            artifacts(places.training)) if places else 0
    out[stage] = max(out.get(stage, 0), more + max(added, 0), 0)
  return out


def _alone(need: Need) -> int:
  return need.temp_bytes + need.input_bytes
