"""A step of training; `loop.py` runs many.

One step of RL, with parameters W:
  1. roll out G completions of each prompt under W
  2. score them and take group-relative advantages
  3. log-probs under the reference (and, for several updates, under W)
  4. loss and gradient at W, summed over micro-batches
  5. one optimizer update, W -> W'
Steps 4 and 5 repeat for further mini-batches and iterations. A supervised step
is 4 and 5 on given responses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import contextlib
import dataclasses
import functools
import os
import time

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np

from rollplex_jax import inference, nonfinite, reports, supervised, turns
from rollplex_jax import reference as reference_lib
from rollplex_jax import scoring as scoring_lib
from rollplex_jax.artifacts import Model
from rollplex_jax.config import (
  Algorithm,
  TrainConfig,
  check_mesh,
  check_turns,
)
from rollplex_jax.data.episodes import EpisodePlayer
from rollplex_jax.data.pipeline import Example, input_pipeline
from rollplex_jax.data.processor import Processor
from rollplex_jax.errors import InputError
from rollplex_jax.evaluation import Evaluation, evaluate
from rollplex_jax.executor import Step
from rollplex_jax.health import Health
from rollplex_jax.models import hf, vlm, weights
from rollplex_jax.models.weights import Params
from rollplex_jax.placement import processes
from rollplex_jax.placement.host import to_host
from rollplex_jax.placement.mesh import Places, make_places
from rollplex_jax.placement.pools import Pools
from rollplex_jax.policy import Policy
from rollplex_jax.resident import Residency
from rollplex_jax.samples import (
    Groups,
    PromptBatch,
    kept_groups,
    make_batch,
    mini_batches,
)
from rollplex_jax.schedule import ScheduleName
from rollplex_jax.settings import Settings, facts_of
from rollplex_jax.stages import objectives, update
from rollplex_jax.stages.rollout import Completions
from rollplex_jax.stages.sampling import SamplingConfig
from rollplex_jax.tasks import Task, make_task
from rollplex_jax.timeline import Timeline


class Trainer:
  """Trains a policy by RL or by supervised learning.

  Attributes:
    config: the run's configuration.
    model_config: the policy's.
    processor: its tokenizer and preprocessors.
    task: what is learned.
    policy: what is trained.
    params: current compute parameters.
    state: master weights and optimizer state.
    residency: plans its steps; None for supervised and disaggregated runs.
    skipped_rows: rows that were left out while training.
    health: warns of metrics, and ends a run whose updates are skipped.
  """

  def __init__(self, config: TrainConfig, *, task: Task | None = None):
    """Loads the policy and checks rows, reward and settings.

    Args:
      config: the run.
      task: in place of the one that `config.data` describes.

    Raises:
      InputError: naming the setting, file, row or tensor that is wrong.
    """
    if not config.policy.path:
      raise InputError("policy.path is not set: expected a checkpoint folder")
    reference_lib.check(config)
    self.config = config
    self.supervised = config.algorithm == Algorithm.SUPERVISED
    self.processor = Processor.from_checkpoint(
        config.policy.path,
        max_prompt_length=config.data.max_prompt_length or None)
    self.task = task or make_task(
        config.data, self.processor, supervised=self.supervised)
    if len(self.task.train_rows) < 1:
      raise InputError("data: there are no rows to train on")
    self.model_config = hf.load_config(config.policy.path)
    places = make_places(config.mesh, vlm.axis_sizes(self.model_config))
    self._parts = 1 if places is None else places.parts
    self._spread = places and places.spread
    check_mesh(config, self._parts)
    check_turns(config, self.task.max_turns)
    # dr_grpo divides by the rollout's length limit.
    self.objective = dataclasses.replace(
        config.objective, max_completion_length=(
            config.rollout.max_completion_length * self.task.max_turns))
    rollout = config.rollout
    self.sampling = SamplingConfig(
        max_completion_length=rollout.max_completion_length,
        temperature=rollout.temperature, top_k=rollout.top_k,
        top_p=rollout.top_p, eos_token_ids=inference.eos_token_ids(
            self.model_config, self.processor),
        banned_token_ids=self.model_config.vision_token_ids)
    self.settings = Settings(
        config=self.model_config, schedule=config.schedule,
        sampling=self.sampling, objective=self.objective,
        micro_batch_size=config.micro_batch_size, remat=config.policy.remat,
        with_entropy=config.with_entropy, trained=self._trained_parts(),
        max_turns=1 if self.supervised else self.task.max_turns,
        training=places and places.training, rollout=places and places.rollout)
    self._pools = None
    if config.schedule.name == ScheduleName.DISAGGREGATED:
      self._pools = Pools(jax.local_devices())
    self._warned: set[str] = set()
    self.residency = None
    if not self.supervised and self._pools is None:
      self.residency = self._plan_residency(places)
    self.skipped_rows = 0
    self.health = Health(config.health, logs=processes.is_first())
    self.policy = Policy(
        config.policy.path, self.model_config, places,
        optimizer=config.optimizer, dtype=config.policy.compute_dtype,
        freeze_vision_tower=config.policy.freeze_vision_tower)
    self._reference = None
    if config.has_reference:
      self._reference = reference_lib.make(config, self.policy)
    if self.residency is not None:
      self.residency.hold(self.policy, self._reference)
      # Its weights are where the plan of a phase has them.
      self._reference = self._reference and Model({}, 0)

  @property
  def params(self) -> Params:
    """{"text": ..., "visual": ...} in the compute dtype."""
    return self.policy.params

  @property
  def state(self) -> update.TrainState:
    """Master weights and optimizer state."""
    return self.policy.state or self.residency.state

  @property
  def reference(self) -> Model | None:
    """The reference model, if there is one."""
    if self.residency is None or self._reference is None:
      return self._reference
    return self.residency.reference

  @property
  def num_parameters(self) -> int:
    return weights.num_parameters(self.params)

  def _trained_parts(self) -> tuple[str, ...]:
    has_tower = self.model_config.vision is not None
    frozen = self.config.policy.freeze_vision_tower
    return ("text", "visual") if has_tower and not frozen else ("text",)

  def _plan_residency(self, places: Places | None) -> Residency:
    """The plans of the run's steps. Refuses a budget before anything is loaded.
    """
    residency = Residency.of_run(self.config, self.model_config, places,
                                 self.task.max_turns)
    if self.config.residency.budget_gb:
      # Batches differ in length: this one stands for all, and each is planned
      # again before it runs.
      batch = self._batch(next(self.batches()))
      residency.plan(batch, facts_of(
          self.settings, batch, has_reference=self.config.has_reference,
          several_updates=self.config.updates_per_step > 1),
                     self.settings.schedule)
    return residency

  def _phase(self, name: str, step: Step | None = None):
    """A phase of the step under its residency plan, if there is one."""
    if self.residency is None:
      return contextlib.nullcontext()
    return self.residency.phase(name, step)

  def save(self, path: str | os.PathLike) -> None:
    """Writes the policy as a checkpoint that `transformers` loads.

    Of several processes all must call this; the first one writes.
    """
    hf.save_checkpoint(path, self.model_config, self.params,
                       assets_from=self.config.policy.path)

  def restore(self, read: Callable[[update.TrainState], update.TrainState],
              version: int) -> None:
    """Goes on from another state of this policy, such as a checkpoint's.

    Args:
      read: see `Policy.restore`.
      version: updates that led to it.
    """
    if self.residency is None:
      self.policy.restore(read, version)
    else:
      self.residency.restore(self.policy, read, version)

  def evaluate(self, rows: Sequence, *, params: Params | None = None,
               **kwargs) -> Evaluation:
    """Greedy completions of held-out rows, scored by the first process.

    `params` are in place of the policy's.
    """
    score = lambda *args: processes.from_first(lambda: self.task.score(*args))
    params = self.params if params is None else params
    if self.task.max_turns > 1:
      kwargs |= dict(player=self._player, max_turns=self.task.max_turns,
                     max_length=self.config.rollout.max_episode_length or None)
    return evaluate(
        params, self.model_config, self.processor, rows, score,
        dataclasses.replace(self.sampling, temperature=0.0, top_k=0, top_p=1.0),
        batch_size=self.config.eval_batch_size, **kwargs)

  @functools.cached_property
  def _player(self) -> EpisodePlayer:
    """Plays the episodes of steps and evaluations."""
    return self.task.player()

  def batches(self):
    """An endless iterator over batches of examples, in a seeded order."""
    config = self.config

    def skip(error):
      del error
      self.skipped_rows += 1

    process = self.processor.prompt
    if self.supervised:
      process = functools.partial(supervised.example, self.processor)
    rows = self.task.train_rows
    size = self._batch_size
    dataset = input_pipeline(
        rows, process, seed=config.seed, batch_size=size,
        on_bad_row=skip if self.task.may_skip else None,
        slots=self._spread and self._spread.rows(size))
    return iter(dataset)

  @property
  def rows_per_step(self) -> int:
    """Rows of a step that this process reads."""
    size = self._batch_size
    return size if self._spread is None else len(self._spread.rows(size))

  @property
  def _batch_size(self) -> int:
    """Rows of a step."""
    config = self.config
    if self.supervised:
      return config.train_batch_size
    return config.gen_batch_size or config.train_batch_size

  def step(self, examples: list[Example], step: int,
           timeline: Timeline | None = None):
    """One step. Returns its metrics and the samples to record.

    Args:
      examples: of the step, those of this process's parts of the batch.
      step: its number, from 0.
      timeline: records it; the step then waits after each of its units.
    """
    timer = reports.PhaseTimer(timeline)
    start = time.perf_counter()
    run = self._supervised_step if self.supervised else self._rl_step
    values, samples = run(examples, step, timer)
    seconds = time.perf_counter() - start
    values |= timer.metrics()
    values["timing_s/step"] = values["perf/time_per_step"] = seconds
    values["perf/throughput"] = values["perf/total_num_tokens"] / seconds
    values["training/global_step"] = step + 1
    self.health.watch(step + 1, values)
    return values, samples

  # -- RL --------------------------------------------------------------------

  def _rl_step(self, examples: list[Example], step: int, timer):
    config, rollout = self.config, self.config.rollout
    with timer.timeline.event("batch", "host"):
      batch = self._batch(examples)
    residency = self.residency
    work = Step(
        self.settings, batch, self.policy.model(), self._reference,
        num_generations=rollout.num_generations, seed=config.seed, step=step,
        several_updates=config.updates_per_step > 1, pools=self._pools,
        layout=self.policy.layout, timeline=timer.timeline,
        watch=residency.watch if residency else lambda *_: None)
    if work.fallback and work.fallback not in self._warned:
      self._warned.add(work.fallback)
      logging.warning("%s", work.fallback)
    if residency is not None:
      residency.begin(work)
    with timer.phase("gen"), self._phase("rollout", work):
      if self.task.max_turns > 1:
        episodes = turns.play(
            work, self._player, self.processor, [e.row for e in examples],
            [self.task.train_rows.where(e.index) for e in examples],
            max_length=rollout.max_episode_length or None)
      else:
        episodes = turns.Episodes(work.roll_out())
    completions = episodes.completions
    with timer.phase("reward", "host"):
      if episodes.scores is not None:
        scores, texts = episodes.scores, episodes.texts
        lines = [scoring_lib.marked(line) for line in reports.sample_lines(
            step + 1, examples, texts, scores, rollout.num_generations)]
      else:
        scores, lines = scoring_lib.score(
            self.task.score, self.processor, examples, completions, step + 1,
            self._spread)
      rewards = np.array([s["overall"] for s in scores], np.float32).reshape(
          completions.lengths.shape)
    with timer.phase("adv", "host"):
      advantages = np.asarray(objectives.group_advantages(
          jnp.asarray(rewards), self.objective))
      kept = kept_groups(self.config, rewards)
    values = reports.rollout_metrics(
        batch, completions, rewards, scores,
        episodes.suffix and episodes.suffix.lengths)
    values["train/groups"] = float(len(kept))
    if len(kept):
      groups = Groups.of(kept, completions, advantages, episodes.suffix,
                         episodes.media)
      values |= self._updates(
          work, groups, completions, rewards, step, timer)
    kept = set(kept.tolist())
    return values, [line | {"trained": i // rollout.num_generations in kept}
                    for i, line in enumerate(lines)]

  def _batch(self, examples: list[Example]) -> PromptBatch:
    prompts = [(e.prompt, e.index) for e in examples]
    if self._spread is not None:
      prompts = self._spread.share(prompts, lambda item: (
          dataclasses.replace(item[0], patches=None), item[1]))
    return make_batch(
        self.model_config, *zip(*prompts), parts=self._parts,
        spread=self._spread)

  def _updates(self, work: Step, groups: Groups, completions: Completions,
               rewards: np.ndarray, step: int, timer):
    """Scores under reference and old policy, then updates the policy."""
    scores = "ref" if self.config.has_reference else "old_log_prob"
    with timer.phase(scores), self._phase("score", work):
      groups = work.score(groups)
    values, total, gap, skipped = {}, None, {}, 0.0
    with timer.phase("update_actor"):
      for i, order in enumerate(mini_batches(self.config, len(groups), step)):
        part = groups.take(order)
        if i == 0:
          # Before anything is updated the ratio is exactly one; the loss
          # needs no old log-probs and gives those of this policy.
          part = dataclasses.replace(part, old_logprobs=None)
        number = str(i + 1) if i else ""
        with self._phase(f"train{number}", work):
          grads, metrics, logprobs = work.gradient(part, first=i == 0)
        if i == 0:
          gap = reports.logprob_gap(completions, part, logprobs)
        # The old parameters go before the new ones come.
        work.release_policy()
        with timer.timeline.event("update", "training") as wait, (
            self._phase(f"update{number}")):
          new = wait(self._update(grads, metrics.loss))
        del grads
        work.update_policy(self.policy.model())
        total = metrics if total is None else total.merge(metrics)
        new, loss = to_host((new, metrics.loss))
        values |= {k: float(v) for k, v in new.items()}
        skipped += values["actor/update_skipped"]
        diagnose = functools.partial(
            nonfinite.of_step, work, part, work.batch.inputs.row_ids, {
                "rewards": rewards[part.rows], "logprobs": logprobs,
                "rollout_logprobs": completions.logprobs[part.rows]})
        if not self.health.after_update(step + 1, i + 1, values, loss,
                                        diagnose):
          break
      values |= {k: float(v) for k, v in to_host(total.finalize()).items()}
    return values | gap | {"actor/update_skipped": skipped}

  def _update(self, grads: Params, loss: jax.Array) -> dict[str, jax.Array]:
    if self.residency is None:
      return self.policy.update(grads, loss)
    return self.residency.update(self.policy, grads, loss)

  # -- supervised ------------------------------------------------------------

  def _supervised_step(self, examples: list[Example], step: int, timer):
    with timer.phase("data", "host"):
      batch, groups = supervised.collect(
          self.model_config, examples, self._parts, self._spread)
    with timer.phase("update_actor"):
      values = supervised.update(
          self.policy, self.settings, batch, groups,
          self.config.prompts_per_update, timer.timeline,
          after_update=lambda number, part, new, loss: self.health.after_update(
              step + 1, number, new, loss, functools.partial(
                  nonfinite.of_supervised, self.policy, self.settings, batch,
                  part)))
    after = groups.lengths if groups.suffix is None else groups.suffix.lengths
    values["perf/total_num_tokens"] = float(
        after.sum() + batch.inputs.lengths.sum())
    return values, []
