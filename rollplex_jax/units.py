"""Runs the units of a schedule on a step's prompts and artefacts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from rollplex_jax import programs, schedule, window_trace
from rollplex_jax.artifacts import Model, Store
from rollplex_jax.data import batching
from rollplex_jax.models import vlm
from rollplex_jax.models.inputs import VisionInputs
from rollplex_jax.models.weights import Params
from rollplex_jax.placement import moves
from rollplex_jax.placement.host import replicate
from rollplex_jax.placement.layout import LayoutPlan
from rollplex_jax.placement.pools import Pools
from rollplex_jax.placement.sharding import Placement
from rollplex_jax.samples import (
  Groups,
  MicroBatch,
  PromptBatch,
  own_batch,
)
from rollplex_jax.schedule import Lane, Stage, Unit
from rollplex_jax.settings import Settings
from rollplex_jax.stages import window as window_lib
from rollplex_jax.stages.extend import Chunk
from rollplex_jax.stages.objectives import (
  LossMetrics,
  Normalizers,
)
from rollplex_jax.stages.prefix import SavePolicy
from rollplex_jax.stages.rollout import Turn
from rollplex_jax.stages.sampling import sample_keys
from rollplex_jax.timeline import Timeline


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostTurn:
  """A later turn of a step's episodes, on the host.

  Attributes:
    chunk: what the turn before added, [B, G, C].
    vision: patches of its observations, or None.
    position: where samples stand; without a history.
    start: where the chunk goes in the history.
    history_length: entries that the history is to have.
  """

  chunk: Chunk
  vision: VisionInputs | None
  position: Turn
  start: int
  history_length: int


class Units:
  """The stages of one step, each a method by its name in `Stage`, and the
  artefacts that they leave to one another.

  Attributes:
    settings, batch, num_generations: of the step.
    policy, reference: models as they are now.
    store: artefacts.
  """

  def __init__(self, settings: Settings, batch: PromptBatch, policy: Model,
               reference: Model | None, *, num_generations: int, seed: int,
               step: int, pools: Pools | None, layout: LayoutPlan | None,
               timeline: Timeline, watch: Callable[[str, Any], None]):
    """Nothing runs yet; see `Step`."""
    self.settings = settings
    self.batch = batch
    self.policy = policy
    self.reference = reference
    self.num_generations = num_generations
    self.store = Store()
    self._timeline = timeline
    self._pools = pools
    self._layout = layout
    self._watch = watch
    self._keys = seed, step
    # What the units at hand read and add to beside artefacts.
    self._turn: HostTurn | None = None
    self._normalizers: Normalizers | None = None
    self._metrics: LossMetrics | None = None
    self._grads: Params | None = None
    self._groups: Groups | None = None
    self._out: dict[str, np.ndarray] | None = None

  def _run(self, plan: Sequence[Unit], keep: Iterable[str],
           micro: Sequence[MicroBatch] = (), out=None) -> None:
    plan = [unit for unit in plan
            if self._runs(unit.lane) or unit.stage == Stage.TRANSFER]
    schedule.check(plan, self.store.names())
    drops = schedule.last_reads(plan, keep)
    where = {(m.block, m.part): m for m in micro}
    self._out = out
    for i, unit in enumerate(plan):
      item = where.get((unit.block, unit.part or 0))  # None for whole batches.
      with self._timeline.event(
          str(unit.stage), str(unit.lane), unit.block) as wait:
        wait(_STAGES[unit.stage](self, unit, item))
      for name in drops.get(i, ()):
        self.store.drop(name)

  def _runs(self, lane: Lane) -> bool:
    """Whether this process runs the units of a lane."""
    if self._pools is None:
      return True
    return (self._pools.rolls_out_here() if lane == Lane.ROLLOUT
            else self._pools.trains_here())

  def _params(self, unit: Unit) -> Params:
    if unit.model == "rollout":
      return self._get("rollout/weights")
    return (self.policy if unit.model == "policy" else self.reference).params

  def _place(self, unit: Unit) -> Placement | None:
    return (self.settings.rollout if unit.lane == Lane.ROLLOUT
            else self.settings.training)

  def _version(self, name: str) -> Any:
    """The version at which an artefact has to have been made."""
    if name.endswith("/features"):
      model = (self.reference if name.startswith("reference") else self.policy)
      return ("tower", model.tower_version)
    if name.startswith("reference/"):
      return ("reference", self.reference.version)
    return ("policy", self.policy.version)

  def _get(self, name: str) -> Any:
    return self.store.get(name, self._version(name))

  def _put(self, name: str, value: Any) -> Any:
    self.store.put(name, value, self._version(name))
    self._watch(name, value)
    return value

  def _features(self, unit: Unit):
    names = [n for n in unit.reads if n.endswith("/features")]
    return self._get(names[0]) if names else None

  def _trained(self) -> Params:
    return {k: self.policy.params[k] for k in self.settings.trained}

  def _frozen(self) -> Params:
    return {k: v for k, v in self.policy.params.items()
            if k not in self.settings.trained}

  def _prompts(self, item: MicroBatch | None):
    inputs = self.batch.inputs
    return inputs if item is None else batching.take_rows(inputs, item.rows)

  def _prefix_of(self, unit: Unit, item: MicroBatch):
    """A micro-batch's keys and values, and which rows of them are its own."""
    (name,) = (n for n in unit.reads if "/kv" in n)
    own = name.rpartition(".")[2].isdigit()
    return self._get(name), None if own else item.rows

  # -- stages ----------------------------------------------------------------

  def transfer(self, unit: Unit, item):
    """A model as it is now, to the rollout's devices or in its layout."""
    del item
    (name,) = unit.writes
    if self._pools is None:
      return self._put(name, {
          "text": self._layout.rollout_weights(self._params(unit)["text"])})
    policy = self.policy
    versions = {"text": policy.version, "visual": policy.tower_version}
    return self._put(name, {
        part: self._pools.send_weights(part, tree, versions[part])
        for part, tree in policy.params.items()})

  def vision(self, unit: Unit, item):
    del item
    return self._put(unit.writes[0], programs.vision(
        self._params(unit), self.settings.config,
        self.batch.vision if self._turn is None else self._turn.vision,
        place=self._place(unit)))

  def prefix(self, unit: Unit, item):
    """One block's prefixes, or the whole batch's; saved for backward or not."""
    save = SavePolicy.NOTHING
    if any("/saved" in name for name in unit.writes):
      save = self.settings.schedule.save
    kv, saved = programs.prefix_forward(
        self._params(unit)["text"], self.settings.config,
        self._prompts(item), self._features(unit), save,
        place=self._place(unit))
    for name, value in zip(unit.writes, (kv, _kept(saved, save))):
      self._put(name, value)
    return kv

  def decode(self, unit: Unit, item):
    del item
    turn = None
    if "rollout/history" in unit.reads:
      history, exists = self._get("rollout/history")
      turn = self._everywhere_of(self._turn.position).replace(
          history=history, exists=exists)
    return self._put("completions", programs.decode(
        self._params(unit), self.settings.config, self.settings.sampling,
        self._device_inputs(), self._get(unit.reads[0]),
        self._sample_keys(), turn, place=self._place(unit)))

  def extend(self, unit: Unit, item):
    """The last turn and what came of it, into the history."""
    del item
    turn = self._turn
    history, exists = self._get("rollout/history")
    return self._put("rollout/history", programs.extend(
        self._params(unit)["text"], self.settings.config.text,
        self._everywhere_of(turn.chunk), self._features(unit),
        self._get("rollout/kv"), self._device_inputs().lengths - 1, history,
        exists, np.int32(turn.start), place=self._place(unit)))

  def window(self, unit: Unit, item):
    """Decoding with prefix work beside it; see `stages/window.py`."""
    del item
    s = self.settings
    wants = lambda model: f"{model}/kv" in unit.writes
    text, reference = self._params(unit)["text"], None
    if wants("reference"):
      reference = self.reference.params["text"]
      if "reference/weights" in unit.reads:
        reference = self._get("reference/weights")["text"]
    b, p = self.batch.inputs.token_ids.shape
    artifacts = programs.allocate_window(
        s.config.text, b, p, text["embed"].dtype, policy=wants("policy"),
        layer_inputs=s.schedule.save != SavePolicy.NOTHING,
        reference=wants("reference"), place=s.rollout)
    features = {name: self._get(name) for name in unit.reads
                if name.endswith("/features")}
    own = features.get("policy/features")
    theirs = features.get("reference/features", own)
    on_gpu = jax.default_backend() == "gpu"
    unit_shape = window_lib.UnitShape.of_tokens(s.schedule.window_chunk, p)
    if on_gpu:  # Where a choice of lengths asks the host once per layer.
      unit_shape = dataclasses.replace(unit_shape, key_extents=1)
    start = self._timeline.now()
    done, artifacts, turns = programs.decode_window(
        text, reference, s.config, s.sampling,
        window_lib.WindowConfig(unit=unit_shape, streams=(
            on_gpu and s.schedule.window_streams)),
        self._device_inputs(), self._get("rollout/kv"), own,
        theirs, self._sample_keys(), artifacts, place=s.rollout)
    self._put("completions", done)
    if self._layout is not None:
      artifacts = programs.reshard_artifacts(artifacts, place=s.training)
    if artifacts.reference is not None:
      self._put("reference/kv", artifacts.reference.kv)
    if artifacts.policy is not None:
      self._put("policy/kv", artifacts.policy.kv)
      self._put("policy/saved", _kept(
          artifacts.policy.layer_inputs, s.schedule.save))
    window_trace.record(self._timeline, start, done, turns,
                        unit_tokens=unit_shape.rows * unit_shape.chunk)
    return done

  def _sample_keys(self) -> jax.Array:
    keys = sample_keys(*self._keys, jnp.asarray(self.batch.inputs.row_ids),
                       self.num_generations)
    if self._everywhere is None:
      return keys
    data = replicate(np.asarray(jax.random.key_data(keys)), self._everywhere)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(keys))

  def _device_inputs(self):
    return self._everywhere_of(self.batch.inputs)

  def _everywhere_of(self, tree):
    """A tree of the host on all devices of the policy."""
    if self._everywhere is None:
      return jax.device_put(tree)
    return replicate(tree, self._everywhere)

  @property
  def _everywhere(self) -> NamedSharding | None:
    """Of what all devices of the policy's mesh have, if it is on one."""
    # Of compressed weights all leaves lie on the mesh, too.
    found = jax.tree.leaves(self.policy.params["text"]["embed"])[0].sharding
    if not isinstance(found, NamedSharding):
      return None
    return NamedSharding(found.mesh, PartitionSpec())

  def score_full(self, unit: Unit, item: MicroBatch):
    responses, observed = self._observed(item)
    logprobs = programs.score_full(
        self._params(unit), self.settings.config, self._prompts(item),
        self._features(unit), responses, self._temperature, observed,
        place=self._place(unit))
    item.place(self._out[unit.writes[0]], logprobs)

  def score_suffix(self, unit: Unit, item: MicroBatch):
    responses, observed = self._observed(item)
    logprobs = programs.score_suffix(
        self._params(unit), self.settings.config, self._prompts(item),
        *self._prefix_of(unit, item), responses, self._temperature, observed,
        place=self._place(unit))
    item.place(self._out[unit.writes[0]], logprobs)

  def gradient_full(self, unit: Unit, item: MicroBatch):
    s = self.settings
    prompts, vision = self._prompts(item), None
    responses, observed = self._observed(item)
    if "visual" in s.trained:
      own = own_batch(s.config, self.batch, item.rows)
      prompts, vision = own.inputs, own.vision
    self._grads, metrics, logprobs = programs.gradient_full(
        self._trained(), self._frozen(), self._grads, s.config, s.objective,
        prompts, self._features(unit), vision, responses, item.advantages,
        item.old_logprobs, item.ref_logprobs, self._normalizers,
        self._temperature, s.remat, s.with_entropy, observed,
        place=s.training)
    self._record(item, metrics, logprobs)

  def gradient_suffix(self, unit: Unit, item: MicroBatch):
    s = self.settings
    kv, rows = self._prefix_of(unit, item)
    name = next(n for n in unit.writes if n.startswith("kv_grads"))
    whole = name == "kv_grads"  # Of all prompts, not of a block.
    if name not in self.store.names():
      count = len(self.batch.inputs.lengths) if whole else len(item.rows)
      self._put(name, programs.zero_kv_gradients(kv, count, place=s.training))
    responses, observed = self._observed(item)
    parts = s.trained if observed is not None else ("text",)
    grads, kv_grads, metrics, logprobs = programs.gradient_suffix(
        self._trained(), self._frozen(),
        {part: self._grads[part] for part in parts}, self._get(name),
        item.rows if whole else None, s.config, s.objective,
        self._prompts(item), kv, rows, responses, item.advantages,
        item.old_logprobs, item.ref_logprobs, self._normalizers,
        self._temperature, s.remat, s.with_entropy, observed,
        place=s.training)
    self._grads |= grads
    self._put(name, kv_grads)
    self._record(item, metrics, logprobs)

  def prefix_backward(self, unit: Unit, item: MicroBatch | None):
    s = self.settings
    saved_name, grads_name = unit.reads[:2]
    # Rows are picked where a block reads what was saved for all prompts.
    picks = unit.block is not None and "." not in saved_name
    save = s.schedule.save
    saved = self._get(saved_name)
    if save == SavePolicy.OFFLOAD:
      saved = moves.onload(saved, delete=False)
    feature_grads = None
    if "feature_grads" in unit.writes:
      if "feature_grads" not in self.store.names():
        self._put("feature_grads", programs.zero_feature_gradients(
            self._features(unit), place=s.training))
      feature_grads = self._get("feature_grads")
    self._grads["text"], feature_grads = programs.prefix_backward(
        self.policy.params["text"], self._grads["text"], feature_grads,
        s.config, self._prompts(item), self._features(unit), save, saved,
        self._get(grads_name), item.rows if picks else None, place=s.training)
    if feature_grads is not None:
      self._put("feature_grads", feature_grads)
    return self._grads["text"]

  def vision_backward(self, unit: Unit, item):
    """The tower's gradient, on the patches of just the mini-batch's prompts.

    A batch that is split over devices stays whole: mini-batches would be cut
    out of it unevenly, and gradients of other prompts' features are zero.
    """
    del item
    s = self.settings
    vision = self.batch.vision
    index = np.arange(vlm.num_features(s.config, vision), dtype=np.int32)
    if self.batch.parts == 1:
      rows = self._groups.rows
      used = self.batch.inputs.feature_index[rows]
      vision = own_batch(s.config, self.batch, rows).vision
      if vision is None:  # The mini-batch's prompts are all text.
        return self._grads["visual"]
      index = np.full(vlm.num_features(s.config, vision), -1, np.int32)
      index[:(used >= 0).sum()] = used[used >= 0]
    self._grads["visual"] = programs.vision_backward(
        self.policy.params["visual"], self._grads["visual"], s.config, vision,
        self._get("feature_grads"), index, place=s.training)
    return self._grads["visual"]

  def _observed(self, item: MicroBatch):
    return item.observed(self.settings.config, self.batch.parts)

  @property
  def _temperature(self) -> float:
    return self.settings.sampling.logprob_temperature

  def _record(self, item: MicroBatch, metrics: LossMetrics, logprobs) -> None:
    self._metrics = (
        metrics if self._metrics is None else self._metrics.merge(metrics))
    item.place(self._out["logprobs"], logprobs)


_STAGES = {
    Stage.TRANSFER: Units.transfer,
    Stage.VISION: Units.vision,
    Stage.PREFIX: Units.prefix,
    Stage.DECODE: Units.decode,
    Stage.WINDOW: Units.window,
    Stage.EXTEND: Units.extend,
    Stage.SCORE_FULL: Units.score_full,
    Stage.SCORE: Units.score_suffix,
    Stage.GRADIENT_FULL: Units.gradient_full,
    Stage.GRADIENT: Units.gradient_suffix,
    Stage.PREFIX_BACKWARD: Units.prefix_backward,
    Stage.VISION_BACKWARD: Units.vision_backward,
}


def _kept(saved, save: SavePolicy):
  """What is saved, on the device or in host memory."""
  return moves.offload(saved) if save == SavePolicy.OFFLOAD else saved
