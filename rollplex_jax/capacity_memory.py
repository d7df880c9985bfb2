"""What a device holds in each phase of a step.

A step is walked through unit by unit, as `schedule.py` orders them: an artefact
is there from the unit that writes it to the last that reads it. To what is
there a phase adds what its program makes: outputs and temporaries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import functools

from rollplex_jax import schedule as schedule_lib
from rollplex_jax.capacity_case import Case
from rollplex_jax.capacity_programs import Programs, tree_bytes
from rollplex_jax.placement.layout import How, plan_layout
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Need:
  """What a program needs beside buffers that are there before.

  Attributes:
    temp_bytes: of temporaries.
    added_bytes: of outputs in memory of their own.
    input_bytes: of arrays that come from the host.
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
    program: name of its program in `Programs`, or None.
    bytes: by kind, at the phase's peak.
  """

  name: str
  program: str | None
  bytes: Mapping[str, int]

  @property
  def peak_bytes(self) -> int:
    return sum(self.bytes.values())

  def to_dict(self) -> dict:
    """For JSON."""
    return {"name": self.name, "program": self.program,
            "peak_bytes": self.peak_bytes, "bytes": dict(self.bytes)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Away:
  """What waits in host memory while nothing reads it.

  Attributes:
    optimizer: master weights and moments, but for the update.
    reference: the reference's weights, but for the window and scoring.
  """

  optimizer: bool = False
  reference: bool = False

  def __str__(self) -> str:
    names = [n for n in ("optimizer", "reference") if getattr(self, n)]
    return " and ".join(names) or "nothing"


class Buffers:
  """Bytes per device of a case's buffers, those of all prompts unless said.

  Attributes:
    weights: that training reads, the frozen tower among them; `text` of them
      the decoder's.
    rollout_text: the decoder as the rollout reads it; `rebuilt` of that is
      beside what is stored.
    reference: its decoder; a frozen tower is the policy's too.
    optimizer: master weights and moments.
    gradients: of the decoder.
    kv: prefix keys and values; `block_kv` of one pass, `kv_grads` their
      gradients, `suffix_kv` those of all samples while they are drawn.
    inputs: layer inputs; `saved` of them what the policy keeps on the device.
    features: of the videos.
  """

  def __init__(self, case: Case):
    self.case = case
    depth = case.config.text.num_hidden_layers
    sizes = _buffer_bytes(dataclasses.replace(case, depth=1))
    if depth > 1:  # Layers are all alike.
      two = _buffer_bytes(dataclasses.replace(case, depth=2))
      sizes = {name: size + (two[name] - size) * (depth - 1)
               for name, size in sizes.items()}
    (self.weights, self.text, self.rollout_text, self.rebuilt, self.optimizer,
     self.gradients, self.kv, self.block_kv, self.kv_grads, self.inputs,
     self.features) = sizes.values()
    self.reference = self.text if case.has_reference else 0
    self.suffix_kv = self.kv * case.workload.num_generations * (
        case.workload.response_length) // case.length
    self.saved = self.inputs if case.save == SavePolicy.LAYER_INPUTS else 0

  def artefact(self, name: str) -> tuple[str, int]:
    """Kind and bytes of an artefact of a schedule by its name."""
    base, _, number = name.partition(".")
    if base == "kv_grads":
      return "gradients", self.kv_grads
    what = base.partition("/")[2]
    if what == "features":
      return "features", self.features
    if what == "weights":
      return "rebuilt", self.rebuilt
    if what == "kv":
      kind = "prefix" if base.startswith("reference") else "kv"
      return kind, self.block_kv if number else self.kv
    if what == "saved":
      return "prefix", self.saved
    return "inputs", 0  # Completions and log-probs are on the host.


@functools.cache
def buffers_of(case: Case) -> Buffers:
  """`Buffers`, once for each case."""
  return Buffers(case)


def _buffer_bytes(case: Case) -> dict[str, int]:
  """Sizes in the order in which `Buffers` reads them."""
  programs = Programs(case)
  b, block = case.workload.num_prompts, case.block[0]
  places = (programs.rollout, programs.training)
  most = lambda make: max(tree_bytes(make(place)) for place in places)
  rebuilt = 0
  if programs.places is not None and programs.places.differ:
    stored = programs.training if case.storage == "coarser" else (
        programs.rollout)
    rebuilt = plan_layout(
        programs.declared["text"], stored, programs.rollout, "bfloat16",
        training=programs.training).bytes_of(How.REBUILD)
  return {
      "weights": tree_bytes(programs.weights),
      "text": tree_bytes(programs.weights["text"]),
      "rollout_text": tree_bytes(programs.rollout_weights),
      "rebuilt": rebuilt,
      "optimizer": tree_bytes(programs.state),
      "gradients": tree_bytes(programs.grads),
      "kv": most(lambda place: programs.kv(b, place)),
      "block_kv": tree_bytes(programs.kv(block, programs.training)),
      "kv_grads": tree_bytes(programs.kv_grads()),
      "inputs": most(lambda place: programs.saved(b, place)),
      "features": most(programs.features)}


def facts_of(case: Case) -> Facts:
  """What a step's plans depend on; the tower is frozen."""
  mesh = case.mesh
  return Facts(
      has_media=case.workload.video is not None,
      has_reference=case.has_reference, trains_tower=False,
      scores_policy=False, moves_weights=mesh.training_tp != mesh.rollout_tp)


def schedule_of(case: Case, name: str) -> ScheduleConfig:
  """The configuration of a schedule by its name in the planner.

  Serial and disaggregated are the baselines of most trainers, which run each
  sample's prompt and response in full.
  """
  if name == "rollplex":
    return ScheduleConfig(
        name=ScheduleName.ROLLPLEX, save=case.save,
        prefix_source=case.prefix_source, window_chunk=case.window_chunk)
  return ScheduleConfig(name=ScheduleName.SERIAL, share_prefix=False)


def program_of(unit: Unit) -> str | None:
  """Name in `Programs` of what a unit runs, if it is one program."""
  if unit.stage == Stage.PREFIX:
    saves = any("/saved" in name for name in unit.writes)
    if unit.lane == Lane.ROLLOUT:
      return "prefill" if saves else "plain_prefill"
    return "prefix_block"
  return None if unit.stage == Stage.TRANSFER else str(unit.stage)


def step_units(case: Case, name: str) -> list[list[Unit]]:
  """Units of the rollout, of scoring and of the gradient, two blocks of each.

  Two suffice: what a block leaves behind is there in the second.
  """
  config, facts = schedule_of(case, name), facts_of(case)
  micro = [(0, 0), (1, 0)] if case.num_passes[0] > 1 else [(0, 0)]
  return [schedule_lib.rollout_plan(config, facts),
          schedule_lib.scoring_plan(config, facts, micro),
          schedule_lib.update_plan(config, facts, micro, first=True)]


def phases_of(case: Case, name: str, need: Callable[[str], Need],
              away: Away) -> list[Phase]:
  """The phases of a step.

  Args:
    case: what is planned for.
    name: "rollplex" or "serial", which disaggregated pools run too.
    need: of a program, by its name.
    away: what waits in host memory.
  """
  have = buffers_of(case)
  rollout, scoring, gradient = step_units(case, name)
  phases: list[Phase] = []

  def add(label, program, bytes_):
    needs = need(program) if program else Need(temp_bytes=0)
    bytes_ = dict(bytes_, inputs=needs.input_bytes,
                  temporaries=needs.temp_bytes)
    if program == "reshard":  # Both layouts are there for a moment.
      bytes_["prefix"] += needs.added_bytes
    phases.append(Phase(name=label, program=program, bytes={
        kind: bytes_.get(kind, 0) for kind in KINDS}))

  alive: dict[str, tuple[str, int]] = {}

  def resident(**more):
    out = dict.fromkeys(KINDS, 0)
    out["weights"] = have.weights
    for kind, count in alive.values():
      out[kind] += count
    for kind, count in more.items():
      out[kind] += count
    return out

  optimizer = 0 if away.optimizer else have.optimizer
  idle_reference = 0 if away.reference else have.reference

  def walk(units, keep, label, **more):
    drops = schedule_lib.last_reads(units, keep)
    for i, unit in enumerate(units):
      for written in unit.writes:
        if written not in ("grads", "completions"):
          alive[written] = have.artefact(written)
      program = program_of(unit)
      held = dict(more)
      if unit.model == "reference" or any(
          "reference/" in n for n in unit.writes):
        held["reference"] = have.reference
      add(f"{label}: {unit.stage}", program, resident(**held))
      if unit.stage == Stage.WINDOW and facts_of(case).moves_weights:
        add(f"{label}: reshard", "reshard", resident(**held))
      for written in drops.get(i, ()):
        alive.pop(written, None)

  config = schedule_of(case, name)
  keep = schedule_lib.kept_after_rollout(config, rollout)
  walk(rollout, keep, "rollout", optimizer=optimizer, reference=idle_reference)
  alive.pop("rollout/weights", None)
  alive.pop("reference/weights", None)
  read_later = {n for unit in gradient for n in unit.reads}
  for n in list(alive):
    if n not in read_later and not scoring:
      alive.pop(n)
  walk(scoring, read_later, "scoring", optimizer=optimizer,
       reference=idle_reference)
  walk(gradient, (), "gradient", optimizer=optimizer,
       reference=idle_reference, gradients=have.gradients)
  alive.clear()
  # The compute copy of the trained part goes before the new one comes.
  base = resident(optimizer=have.optimizer, reference=idle_reference,
                  gradients=have.gradients)
  base["weights"] -= have.text
  add("update", "update", base)
  # The caller still holds the gradient.
  add("new weights", "compute_copy", resident(
      optimizer=have.optimizer, reference=idle_reference,
      gradients=have.gradients))
  return _distinct(phases)


def naive_phases(case: Case, need: Callable[[str], Need]) -> list[Phase]:
  """Everything at once: naive colocation.

  A rollout copy of the actor beside the trained one; prefixes per sample, so
  that keys, values and saved layer inputs are there for each of a group; no
  buffer is ever given up. A phase differs from another in its program only.
  """
  have = buffers_of(case)
  g = case.workload.num_generations
  reference_kv = have.kv * g if case.has_reference else 0
  resident = {
      "weights": have.weights, "rebuilt": have.rollout_text,
      "reference": have.reference, "optimizer": have.optimizer,
      "gradients": have.gradients, "kv": have.kv * g,
      "prefix": have.inputs * g + reference_kv, "features": have.features}
  phases = []
  for label, program in (
      ("rollout: decode", "decode"), ("scoring: score_full", "score_full"),
      ("gradient: gradient_full", "gradient_full"), ("update", "update")):
    needs = need(program)
    # A decode step's program holds the suffix caches among its temporaries;
    # elsewhere they are there all the same.
    suffix = 0 if program == "decode" else have.suffix_kv
    bytes_ = dict(resident, kv=resident["kv"] + suffix,
                  inputs=needs.input_bytes, temporaries=needs.temp_bytes)
    phases.append(Phase(name=label, program=program, bytes={
        kind: bytes_.get(kind, 0) for kind in KINDS}))
  return phases


def _distinct(phases: list[Phase]) -> list[Phase]:
  """One phase of each name, the largest: blocks differ in what is left."""
  out: dict[str, Phase] = {}
  for phase in phases:
    known = out.get(phase.name)
    if known is None or phase.peak_bytes > known.peak_bytes:
      out[phase.name] = phase
  return list(out.values())
