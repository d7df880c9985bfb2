"""A step of training: its phases, each a plan of units that `Units` runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
import dataclasses
from typing import Any

import numpy as np

from rollplex_jax import prefix_budget, programs, schedule
from rollplex_jax.artifacts import Model
from rollplex_jax.models import vlm
from rollplex_jax.models.weights import Params
from rollplex_jax.placement.host import to_host
from rollplex_jax.placement.layout import LayoutPlan
from rollplex_jax.placement.pools import Pools
from rollplex_jax.samples import (
  Groups,
  PromptBatch,
)
from rollplex_jax.schedule import Lane
from rollplex_jax.settings import Settings, facts_of
from rollplex_jax.stages.objectives import (
  LossMetrics,
  Normalizers,
)
from rollplex_jax.stages.rollout import Completions
from rollplex_jax.timeline import Timeline
from rollplex_jax.units import HostTurn, Units


class Step(Units):
  """One step: its prompts, its artefacts, and the stages run on them.

  Attributes:
    settings: of the run, with a saving policy that fits the prefix budget.
    num_generations: completions of each prompt.
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
    super().__init__(
        settings, batch, policy, reference, num_generations=num_generations,
        seed=seed, step=step, pools=pools, layout=layout,
        timeline=timeline or Timeline("", enabled=False), watch=watch)
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
    self._kept = schedule.kept_after_rollout(self.settings.schedule, plan)
    further = {"rollout/kv"} if self.facts.has_turns else set()
    self._run(plan, self._kept | further)
    if self._runs(Lane.ROLLOUT):
      done = self._completions()
      if not self.facts.has_turns:
        self._release_weights()
    else:
      done = self._no_completions()
    return done if self._pools is None else self._pools.share_completions(done)

  def roll_out_turn(self, turn: HostTurn) -> Completions:
    """Samples a later turn of all episodes; on the host."""
    self._turn = turn
    history, place = None, self.settings.rollout
    if "rollout/history" in self.store.names():
      history = self._get("rollout/history")
    if history is None:
      history = programs.empty_history(
          self.settings.config.text, turn.position.over.size,
          turn.history_length, self.policy.params["text"]["embed"].dtype,
          place=place)
    elif history[1].shape[-1] < turn.history_length:
      history = programs.grow_history(
          *history, turn.history_length, place=place)
    self._put("rollout/history", history)
    plan = schedule.turn_plan(self.facts, observed=turn.vision is not None)
    self._run(plan, [*self.store.names(), "completions"])
    self._turn = None
    return self._completions()

  def end_turns(self) -> None:
    """Ends the rollout of episodes: no turn comes after this."""
    self.store.drop("rollout/history")
    if "rollout/kv" not in self._kept:
      self.store.drop("rollout/kv")
    self._release_weights()

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

  def _release_weights(self) -> None:
    """Views go before what they view is donated, copies when they are read."""
    for name in ("rollout/weights", "reference/weights"):
      if self._layout is not None and name in self.store.names():
        self._layout.release(self._get(name)["text"])
        self.store.drop(name)

  def _completions(self) -> Completions:
    done = to_host(self._get("completions"))
    self.store.drop("completions")
    return done

  def _no_completions(self) -> Completions:
    """Completions of this step's shapes, for those made elsewhere."""
    shape = (len(self.batch.inputs.lengths), self.num_generations)
    long = (*shape, self.settings.sampling.max_completion_length)
    return Completions(
        token_ids=np.zeros(long, np.int32), logprobs=np.zeros(long, np.float32),
        lengths=np.zeros(shape, np.int32), finished=np.zeros(shape, bool))
