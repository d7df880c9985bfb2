"""When each stage runs: a step's schedule as data.

A schedule is a list of units. Each says which stage runs, for which model and
micro-batch, on which lane, and which named artefacts it reads and writes. From
that follow the dependencies and the lifetimes (an artefact lives from its
producer to its last consumer), and a schedule can be printed, drawn and
checked before anything runs. `units.py` runs it.

Schedules of the same stages:
  serial, unshared  rollout; then every sample's prompt and response in full
                    for the reference, and again for training: what verl, TRL
                    and tunix do
  serial, shared    the same phases, one prefix per prompt in each
  disaggregated     those phases, shared or not, on two pools of devices: the
                    rollout's gets the weights anew in each step, and each pool
                    waits for the other
  rollplex          prefix work moves into the decode window, and the rollout's
                    own prefill is the training prefix
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
import dataclasses
import enum

from rollplex_jax.errors import InputError
from rollplex_jax.stages.prefix import SavePolicy


class ScheduleName(enum.StrEnum):
  SERIAL = "serial"
  DISAGGREGATED = "disaggregated"
  ROLLPLEX = "rollplex"


class PrefixSource(enum.StrEnum):
  """Where the training prefix of a step comes from under rollplex.

  Attributes:
    ROLLOUT: the rollout's own prefill; no extra forward pass.
    WINDOW: computed again in the decode window.
  """

  ROLLOUT = "rollout"
  WINDOW = "window"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
  """How the stages of a step are ordered.

  Attributes:
    name: serial, disaggregated or rollplex.
    share_prefix: compute each prompt's prefix once for its group in scoring and
      training (the rollout always does). Rollplex requires it.
    prefix_source: see `PrefixSource`; for rollplex.
    save: what is kept between prefix forward and backward, where prefixes are
      shared.
    prefix_budget_gb: device memory, in 10^9 bytes, that a rollplex step's
      prefixes may take: keys, values and what is saved. Where `save` exceeds it
      the next policy, which keeps less, is taken; 0 for no limit.
    window_chunk: prefix tokens of a unit of work in the decode window, of
      one prompt or, where prompts are shorter, of several.
    window_streams: on a GPU, run the reference's units on a second stream
      beside decode; elsewhere, or without, one after the other.
  """

  name: ScheduleName = ScheduleName.SERIAL
  share_prefix: bool = True
  prefix_source: PrefixSource = PrefixSource.ROLLOUT
  save: SavePolicy = SavePolicy.LAYER_INPUTS
  prefix_budget_gb: float = 0.0
  window_chunk: int = 256
  window_streams: bool = True

  def __post_init__(self):
    for key, choices in (("name", ScheduleName), ("save", SavePolicy),
                         ("prefix_source", PrefixSource)):
      value = getattr(self, key)
      if value not in list(choices):
        raise InputError(
            f"{key}={value!r}: expected one of {', '.join(choices)}")
      object.__setattr__(self, key, choices(value))
    if not self.prefix_budget_gb >= 0:
      raise InputError(
          f"prefix_budget_gb={self.prefix_budget_gb}: expected at least 0")
    if self.window_chunk < 1:
      raise InputError(
          f"window_chunk={self.window_chunk}: expected at least 1")
    if self.name == ScheduleName.ROLLPLEX and not self.share_prefix:
      raise InputError(
          "name=rollplex with share_prefix=False: rollplex computes each prefix "
          "once")
    if (self.prefix_source == PrefixSource.WINDOW
        and self.save == SavePolicy.ACTIVATIONS):
      raise InputError(
          "prefix_source=window with save=activations: the window saves layer "
          "inputs; expected layer_inputs, offload or nothing")


class Lane(enum.StrEnum):
  ROLLOUT = "rollout"
  REFERENCE = "reference"
  TRAINING = "training"


class Stage(enum.StrEnum):
  TRANSFER = "transfer"
  VISION = "vision"
  PREFIX = "prefix"
  DECODE = "decode"
  WINDOW = "window"
  EXTEND = "extend"
  SCORE_FULL = "score_full"
  SCORE = "score"
  GRADIENT_FULL = "gradient_full"
  GRADIENT = "gradient"
  PREFIX_BACKWARD = "prefix_backward"
  VISION_BACKWARD = "vision_backward"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unit:
  """One piece of work.

  Attributes:
    stage: what runs.
    lane: whose work it is.
    model: "policy", "reference" or "rollout": whose weights it reads; the last
      is the policy's copy on the rollout's own devices.
    block: number of the prompt micro-batch, or None for all prompts.
    part: number of the sample micro-batch in it, or None.
    reads: names of artefacts.
    writes: names of artefacts.
  """

  stage: Stage
  lane: Lane
  model: str = "policy"
  block: int | None = None
  part: int | None = None
  reads: tuple[str, ...] = ()
  writes: tuple[str, ...] = ()

  def __str__(self) -> str:
    where = "".join(
        f"[{i}]" for i in (self.block, self.part) if i is not None)
    return (f"{self.lane:<9} {self.stage}{where} ({self.model})  "
            f"{', '.join(self.reads)} -> {', '.join(self.writes)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
  """What a step's plans depend on beside the configuration.

  Attributes:
    has_media: the step's prompts hold pictures.
    has_reference: a reference model is scored.
    trains_tower: the vision tower learns (then the reference has its own).
    scores_policy: old log-probs are needed, for there are several updates.
    moves_weights: the rollout reads weights in another layout than training.
    has_turns: completions are followed by further turns of an episode.
  """

  has_media: bool
  has_reference: bool
  trains_tower: bool
  scores_policy: bool
  moves_weights: bool = False
  has_turns: bool = False


def rollout_plan(config: ScheduleConfig, facts: Facts) -> list[Unit]:
  """Units of the rollout and of all that runs beside it."""
  if config.name == ScheduleName.DISAGGREGATED:
    return _apart(facts)
  plan = [*_vision("policy", facts, Lane.ROLLOUT)]
  features = _features("policy", facts)
  model, weights = "policy", ()
  if facts.moves_weights:
    model, weights = "rollout", ("rollout/weights",)
    plan.append(Unit(
        stage=Stage.TRANSFER, lane=Lane.ROLLOUT, writes=weights))
  rollplex = config.name == ScheduleName.ROLLPLEX
  from_rollout = rollplex and config.prefix_source == PrefixSource.ROLLOUT
  plan.append(Unit(
      stage=Stage.PREFIX, lane=Lane.ROLLOUT, model=model,
      reads=features + weights,
      writes=("rollout/kv", *(("policy/saved",) if from_rollout else ()))))
  in_window = []
  reads = ("rollout/kv", *features, *weights)
  if rollplex and facts.has_reference:
    if facts.trains_tower:
      plan += _vision("reference", facts, Lane.REFERENCE)
    if facts.moves_weights:
      plan.append(Unit(
          stage=Stage.TRANSFER, lane=Lane.REFERENCE, model="reference",
          writes=("reference/weights",)))
      reads += ("reference/weights",)
    in_window.append("reference/kv")
  if rollplex and not from_rollout:
    in_window += ["policy/kv", "policy/saved"]
  if in_window:
    if facts.has_reference:
      reads = tuple(dict.fromkeys(reads + _features("reference", facts)))
    plan.append(Unit(stage=Stage.WINDOW, lane=Lane.ROLLOUT, model=model,
                     reads=reads, writes=("completions", *in_window)))
  else:
    plan.append(Unit(stage=Stage.DECODE, lane=Lane.ROLLOUT, model=model,
                     reads=("rollout/kv", *weights), writes=("completions",)))
  return plan


def turn_plan(facts: Facts, *, observed: bool) -> list[Unit]:
  """Units of a later turn of a rollout's episodes.

  Prefix work has been done in the first turn; `observed`: media were seen since.
  """
  model, weights = "policy", ()
  if facts.moves_weights:
    model, weights = "rollout", ("rollout/weights",)
  features = ("turn/features",) if observed else ()
  rollout = dict(lane=Lane.ROLLOUT)
  plan = [Unit(stage=Stage.VISION, writes=features, **rollout)] * observed
  return plan + [
      Unit(stage=Stage.EXTEND, model=model,
           reads=("rollout/kv", *features, *weights),
           writes=("rollout/history",), **rollout),
      Unit(stage=Stage.DECODE, model=model,
           reads=("rollout/kv", "rollout/history", *weights),
           writes=("completions",), **rollout)]


def kept_after_rollout(config: ScheduleConfig,
                       plan: Sequence[Unit]) -> set[str]:
  """Artefacts that outlive the rollout's plan: what later phases read, and
  weights in the rollout's layout, which are given back when it has ended."""
  made = {name for unit in plan for name in unit.writes}
  if config.name == ScheduleName.ROLLPLEX:
    if config.prefix_source == PrefixSource.WINDOW:
      made.discard("rollout/kv")
    return made
  return made & {"completions", "policy/features", "rollout/weights"}


def _apart(facts: Facts) -> list[Unit]:
  """The rollout on devices of its own, while the trainer's have no work.

  But for the vision features, which both pools need and no completion changes.
  """
  weights, features = ("rollout/weights",), _features("rollout", facts)
  return [
      Unit(stage=Stage.TRANSFER, lane=Lane.ROLLOUT, writes=weights),
      *_vision("rollout", facts, Lane.ROLLOUT, reads=weights),
      Unit(stage=Stage.PREFIX, lane=Lane.ROLLOUT, model="rollout",
           reads=weights + features, writes=("rollout/kv",)),
      Unit(stage=Stage.DECODE, lane=Lane.ROLLOUT, model="rollout",
           reads=("rollout/kv", *weights), writes=("completions",)),
      *_vision("policy", facts, Lane.TRAINING),
  ]


def scoring_plan(config: ScheduleConfig, facts: Facts,
                 micro: Iterable[tuple[int, int]]) -> list[Unit]:
  """Units that score all samples under the reference and the old policy.

  `micro` gives (block, part) of each micro-batch.
  """
  micro = list(micro)
  plan = []
  models = [*(["reference"] if facts.has_reference else []),
            *(["policy"] if facts.scores_policy else [])]
  for model in models:
    lane = Lane.REFERENCE if model == "reference" else Lane.TRAINING
    out = "ref_logprobs" if model == "reference" else "old_logprobs"
    features = _features(model, facts)
    ready = config.name == ScheduleName.ROLLPLEX
    if model == "reference" and facts.trains_tower and not ready:
      plan += _vision("reference", facts, lane)
    for block, part in micro:
      if not config.share_prefix:
        plan.append(Unit(stage=Stage.SCORE_FULL, lane=lane, model=model,
                         block=block, part=part, reads=features,
                         writes=(out,)))
        continue
      kv = _first_kv(config, model) if ready else f"{model}/kv.{block}"
      if not ready and part == 0:
        plan.append(Unit(stage=Stage.PREFIX, lane=lane, model=model,
                         block=block, reads=features, writes=(kv,)))
      plan.append(Unit(stage=Stage.SCORE, lane=lane, model=model, block=block,
                       part=part, reads=(kv,), writes=(out,)))
  return plan


def update_plan(config: ScheduleConfig, facts: Facts,
                micro: Iterable[tuple[int, int]], *,
                first: bool) -> list[Unit]:
  """Units of one mini-batch's gradient.

  Args:
    config: the schedule.
    facts: of the step.
    micro: (block, part) of each micro-batch, in order.
    first: no update came between the rollout and this one, so its artefacts
      of the policy are valid; otherwise they are computed again.
  """
  micro = list(micro)
  features = _features("policy", facts)
  train = dict(lane=Lane.TRAINING)
  if not config.share_prefix:
    # A trained tower runs inside each pass, on its own patches.
    reads = () if facts.trains_tower else features
    return [Unit(stage=Stage.GRADIENT_FULL, block=b, part=p, reads=reads,
                 writes=("grads",), **train) for b, p in micro]
  plan = []
  if facts.trains_tower and not first:
    plan += _vision("policy", facts, Lane.TRAINING)
  ready = first and config.name == ScheduleName.ROLLPLEX
  # What a derivative reads can't be cut by prompts: saved for all of them, it
  # is read for all of them at once.
  whole = ready and config.save == SavePolicy.ACTIVATIONS
  tower = ("feature_grads",) if facts.trains_tower and facts.has_media else ()
  last_part = dict(micro)
  for block, part in micro:
    kv, saved = f"policy/kv.{block}", f"policy/saved.{block}"
    kv_grads = "kv_grads" if whole else f"kv_grads.{block}"
    if ready:
      kv, saved = _first_kv(config, "policy"), "policy/saved"
    elif part == 0:
      plan.append(Unit(stage=Stage.PREFIX, block=block, reads=features,
                       writes=(kv, saved), **train))
    plan.append(Unit(stage=Stage.GRADIENT, block=block, part=part, reads=(kv,),
                     writes=("grads", kv_grads), **train))
    if part == last_part[block] and not whole:
      plan.append(Unit(
          stage=Stage.PREFIX_BACKWARD, block=block,
          reads=(saved, kv_grads, *features),
          writes=("grads", *tower), **train))
  if whole:
    plan.append(Unit(
        stage=Stage.PREFIX_BACKWARD, reads=("policy/saved", kv_grads, *features),
        writes=("grads", *tower), **train))
  if facts.trains_tower and facts.has_media:
    plan.append(Unit(stage=Stage.VISION_BACKWARD, reads=("feature_grads",),
                     writes=("grads",), **train))
  return plan


def last_reads(plan: Sequence[Unit], keep: Iterable[str]) -> dict[int, list[str]]:
  """Artefacts to drop after each unit: those that no later unit reads.

  `keep` names artefacts that outlive the plan.
  """
  last = {}
  for i, unit in enumerate(plan):
    for name in (*unit.reads, *unit.writes):
      last[name] = i
  out: dict[int, list[str]] = {}
  for name, i in last.items():
    if name not in set(keep):
      out.setdefault(i, []).append(name)
  return out


def check(plan: Sequence[Unit], given: Iterable[str] = ()) -> None:
  """Checks that every artefact is written before it is read.

  Raises:
    ValueError: naming the unit and the artefact.
  """
  known = set(given)
  for unit in plan:
    for name in unit.reads:
      if name not in known:
        raise ValueError(f"{unit}: reads {name}, which nothing wrote")
    known.update(unit.writes)


def describe(plan: Sequence[Unit]) -> str:
  """The units, a line each."""
  return "\n".join(f"{i:3d} {unit}" for i, unit in enumerate(plan))


def _features(model: str, facts: Facts) -> tuple[str, ...]:
  """Name of the vision features that a model reads.

  A frozen tower is the same in policy and reference: one set of features.
  """
  if not facts.has_media:
    return ()
  if model == "reference" and not facts.trains_tower:
    model = "policy"
  return (f"{model}/features",)


def _vision(model: str, facts: Facts, lane: Lane,
            reads: tuple[str, ...] = ()) -> list[Unit]:
  names = _features(model, facts)
  return [Unit(stage=Stage.VISION, lane=lane, model=model, reads=reads,
               writes=names)] if names else []


def _first_kv(config: ScheduleConfig, model: str) -> str:
  """The artefact that holds a model's prefixes after a rollplex rollout."""
  if model == "policy" and config.prefix_source == PrefixSource.ROLLOUT:
    return "rollout/kv"
  return f"{model}/kv"
