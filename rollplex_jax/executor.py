"""Runs a schedule's units on a step's prompts and artefacts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from rollplex_jax import prefix_budget, programs, schedule, window_trace
from rollplex_jax.artifacts import Model, Store
from rollplex_jax.data import batching
from rollplex_jax.models import vlm
from rollplex_jax.models.weights import Params
from rollplex_jax.placement import moves
from rollplex_jax.placement.host import replicate, to_host
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
from rollplex_jax.settings import Settings, facts_of
from rollplex_jax.stages import window as window_lib
from rollplex_jax.stages.objectives import (
  LossMetrics,
  Normalizers,
)
from rollplex_jax.stages.prefix import SavePolicy
from rollplex_jax.stages.rollout import Completions
from rollplex_jax.stages.sampling import sample_keys
from rollplex_jax.timeline import Timeline


class Step:
  """One step: its prompts, its artefacts, and the stages run on them.

  Attributes:
    settings: of the run, with a saving policy that fits the prefix budget.
    fallback: one line that says which policy was taken instead of the
      configured one and why, or None.
  """

  def __init__(self, settings: Settings, batch: PromptBatch, policy: Model,
               reference: Model | None, *, num_generations: int, seed: int,
               step: int, several_updates: bool = False,
               pools: Pools | None = None,
               layout: LayoutPlan | None = None,
               timeline: Timeline | None = None,
               watch: Callable[[str, Any], None] = lambda *_: None):
    """Nothing runs yet.

    Args:
      settings: of the run.
      batch: the step's prompts.
      policy: the model that samples.
      reference: the reference model, or None.
      num_generations: completions per prompt.
      seed, step: key the sampling.
      several_updates: old log-probs will be needed.
      pools: of a disaggregated run. Units of a pool run in its process only.
      layout: how the decoder's weights come to the rollout, if it does not
        read them as training does.
      timeline: records units if given.
      watch: told of each large tree, by name, as it is made.

    Raises:
      InputError: if the prefix budget can't hold the step's prefixes.
    """
    self.batch = batch
    self.policy = policy
    self.reference = reference
    self.store = Store()
    self._timeline = timeline or Timeline("", enabled=False)
    self._pools = pools
    self._layout = layout
    self._watch = watch
    self._keys = (seed, step, num_generations)
    self.facts = facts_of(
        settings, batch, has_reference=reference is not None,
        several_updates=several_updates)
    num_features = 0 if batch.vision is None else vlm.num_features(
        settings.config, batch.vision)
    fitted, self.fallback = prefix_budget.within_budget(
        settings.config, settings.schedule, self.facts,
        batch.inputs.token_ids.shape, num_features,
        policy.params["text"]["embed"].dtype)
    self.settings = dataclasses.replace(settings, schedule=fitted)

  # -- the three phases ------------------------------------------------------

  def roll_out(self) -> Completions:
    """Samples, and runs what the schedule puts beside it. On the host."""
    plan = schedule.rollout_plan(self.settings.schedule, self.facts)
    self._run(plan, schedule.kept_after_rollout(self.settings.schedule, plan))
    if self._runs(Lane.ROLLOUT):
      done = to_host(self._get("completions"))
      self.store.drop("completions")
      self._release_weights()
    else:
      done = self._no_completions()
    return done if self._pools is None else self._pools.share_completions(done)

  def score(self, groups: Groups) -> Groups:
    """Adds log-probs under the reference and, if needed, the policy."""
    micro = self.batch.cut(groups, self.settings.micro_batch_size)
    plan = schedule.scoring_plan(
        self.settings.schedule, self.facts, [(m.block, m.part) for m in micro])
    if not plan:
      return groups
    out = {}
    for unit in plan:
      for name in unit.writes:
        if name.endswith("_logprobs"):
          out[name] = np.zeros(groups.token_ids.shape, np.float32)
    self._run(plan, self.store.names(), micro, out)
    return dataclasses.replace(groups, **out)

  def gradient(self, groups: Groups, *, first: bool,
               normalizers: Normalizers | None = None,
               ) -> tuple[Params, LossMetrics, np.ndarray]:
    """Gradient of a mini-batch of groups at the current policy.

    Args:
      groups: K groups of G samples.
      first: nothing was updated since the rollout.
      normalizers: of the whole mini-batch where `groups` is this process's
        share of it; by default those of `groups`.

    Returns:
      float32 gradients of the trained parts, metrics of these groups, and
      float32 [K, G, R] log-probs before the update.
    """
    micro = self.batch.cut(groups, self.settings.micro_batch_size)
    plan = schedule.update_plan(
        self.settings.schedule, self.facts, [(m.block, m.part) for m in micro],
        first=first)
    self._normalizers = normalizers or Normalizers(
        num_tokens=np.float32(groups.lengths.sum()),
        num_sequences=np.float32(groups.num_samples))
    self._metrics = None
    self._grads = programs.zero_gradients(
        self._trained(), self.settings.config, place=self.settings.training)
    # Every unit has to add to these in place.
    self._watch("grads", dict(self._grads))
    self._groups = groups
    out = {"logprobs": np.zeros(groups.token_ids.shape, np.float32)}
    self._run(plan, self.store.names(), micro, out)
    grads, self._grads = self._grads, None
    self._watch("grads", grads)
    return grads, self._metrics, out["logprobs"]

  def release_policy(self) -> None:
    """Lets go of parameters that are about to be updated."""
    self.policy = None

  def update_policy(self, policy: Model) -> None:
    """Goes on with updated parameters; older artefacts become stale."""
    self.policy = policy

  def restore_features(self) -> None:
    """Has the policy's vision features again for passes after the last one."""
    name = "policy/features"
    if self.facts.has_media and name not in self.store.names():
      self._put(name, programs.vision(
          self.policy.params, self.settings.config, self.batch.vision,
          place=self.settings.training))

  def keep_only(self, names: Iterable[str]) -> None:
    """Drops the artefacts that nothing reads any more."""
    for name in set(self.store.names()) - set(names):
      self.store.drop(name)

  # -- running units ---------------------------------------------------------

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

  def _release_weights(self) -> None:
    """Views go before what they view is donated, copies when they are read."""
    for name in ("rollout/weights", "reference/weights"):
      if self._layout is not None and name in self.store.names():
        self._layout.release(self._get(name)["text"])
        self.store.drop(name)

  def _no_completions(self) -> Completions:
    """Completions of this step's shapes, for those made elsewhere."""
    shape = (len(self.batch.inputs.lengths), self._keys[2])
    long = (*shape, self.settings.sampling.max_completion_length)
    return Completions(
        token_ids=np.zeros(long, np.int32), logprobs=np.zeros(long, np.float32),
        lengths=np.zeros(shape, np.int32), finished=np.zeros(shape, bool))

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
        self._params(unit), self.settings.config, self.batch.vision,
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
    return self._put("completions", programs.decode(
        self._params(unit), self.settings.config, self.settings.sampling,
        self._device_inputs(), self._get(unit.reads[0]),
        self._sample_keys(), place=self._place(unit)))

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
    seed, step, num_generations = self._keys
    keys = sample_keys(seed, step, jnp.asarray(self.batch.inputs.row_ids),
                       num_generations)
    if self._everywhere is None:
      return keys
    data = replicate(np.asarray(jax.random.key_data(keys)), self._everywhere)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(keys))

  def _device_inputs(self):
    if self._everywhere is None:
      return jax.device_put(self.batch.inputs)
    return replicate(self.batch.inputs, self._everywhere)

  @property
  def _everywhere(self) -> NamedSharding | None:
    """Of what all devices of the policy's mesh have, if it is on one."""
    # Of compressed weights all leaves lie on the mesh, too.
    found = jax.tree.leaves(self.policy.params["text"]["embed"])[0].sharding
    if not isinstance(found, NamedSharding):
      return None
    return NamedSharding(found.mesh, PartitionSpec())

  def score_full(self, unit: Unit, item: MicroBatch):
    logprobs = programs.score_full(
        self._params(unit), self.settings.config, self._prompts(item),
        self._features(unit), item.responses, self._temperature,
        place=self._place(unit))
    item.place(self._out[unit.writes[0]], logprobs)

  def score_suffix(self, unit: Unit, item: MicroBatch):
    logprobs = programs.score_suffix(
        self._params(unit), self.settings.config, self._prompts(item),
        *self._prefix_of(unit, item), item.responses, self._temperature,
        place=self._place(unit))
    item.place(self._out[unit.writes[0]], logprobs)

  def gradient_full(self, unit: Unit, item: MicroBatch):
    s = self.settings
    prompts, vision = self._prompts(item), None
    if "visual" in s.trained:
      own = own_batch(s.config, self.batch, item.rows)
      prompts, vision = own.inputs, own.vision
    self._grads, metrics, logprobs = programs.gradient_full(
        self._trained(), self._frozen(), self._grads, s.config, s.objective,
        prompts, self._features(unit), vision, item.responses, item.advantages,
        item.old_logprobs, item.ref_logprobs, self._normalizers,
        self._temperature, s.remat, s.with_entropy, place=s.training)
    self._record(item, metrics, logprobs)

  def gradient_suffix(self, unit: Unit, item: MicroBatch):
    s = self.settings
    kv, rows = self._prefix_of(unit, item)
    name = next(n for n in unit.writes if n.startswith("kv_grads"))
    whole = name == "kv_grads"  # Of all prompts, not of a block.
    if name not in self.store.names():
      count = len(self.batch.inputs.lengths) if whole else len(item.rows)
      self._put(name, programs.zero_kv_gradients(kv, count, place=s.training))
    text, kv_grads, metrics, logprobs = programs.gradient_suffix(
        self._trained(), self._frozen(), self._grads["text"], self._get(name),
        item.rows if whole else None, s.config, s.objective,
        self._prompts(item), kv, rows, item.responses, item.advantages,
        item.old_logprobs, item.ref_logprobs, self._normalizers,
        self._temperature, s.remat, s.with_entropy, place=s.training)
    self._grads["text"] = text
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

  @property
  def _temperature(self) -> float:
    return self.settings.sampling.logprob_temperature

  def _record(self, item: MicroBatch, metrics: LossMetrics, logprobs) -> None:
    self._metrics = (
        metrics if self._metrics is None else self._metrics.merge(metrics))
    item.place(self._out["logprobs"], logprobs)


_STAGES = {
    Stage.TRANSFER: Step.transfer,
    Stage.VISION: Step.vision,
    Stage.PREFIX: Step.prefix,
    Stage.DECODE: Step.decode,
    Stage.WINDOW: Step.window,
    Stage.SCORE_FULL: Step.score_full,
    Stage.SCORE: Step.score_suffix,
    Stage.GRADIENT_FULL: Step.gradient_full,
    Stage.GRADIENT: Step.gradient_suffix,
    Stage.PREFIX_BACKWARD: Step.prefix_backward,
    Stage.VISION_BACKWARD: Step.vision_backward,
}


def _kept(saved, save: SavePolicy):
  """What is saved, on the device or in host memory."""
  return moves.offload(saved) if save == SavePolicy.OFFLOAD else saved
