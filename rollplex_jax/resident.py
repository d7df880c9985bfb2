"""A run's large buffers, each where its step's residency plan has it.

    residency = Residency(...)          # Before anything is loaded.
    residency.plan(shape, ...)          # Refuses what can't fit.
    residency.hold(policy, reference)
    for batch in batches:
      residency.begin(step)             # May change what the step saves.
      with residency.phase("rollout", step):
        ...
      with residency.phase("update"):
        residency.update(policy, grads)

Optimizer state and the reference's weights are given over to it; between the
phases that use them they may wait in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
from typing import Any

from absl import logging
import jax

from rollplex_jax import residency_plan
from rollplex_jax.artifacts import Model
from rollplex_jax.buffer_sizes import Setup, Workload
from rollplex_jax.config import TrainConfig
from rollplex_jax.executor import Step
from rollplex_jax.models import tensor_files, vlm
from rollplex_jax.models.config import ModelConfig
from rollplex_jax.models.weights import Params
from rollplex_jax.placement.layout import How
from rollplex_jax.placement.ledger import Ledger
from rollplex_jax.placement.mesh import Places
from rollplex_jax.placement.moves import Keeper
from rollplex_jax.placement.residency import ResidencyConfig, ResidencyPlan
from rollplex_jax.policy import Policy
from rollplex_jax.samples import PromptBatch
from rollplex_jax.schedule import Facts, ScheduleConfig
from rollplex_jax.stages.update import TrainState


class Residency:
  """Plans steps, and holds what outlives them.

  Attributes:
    ledger: of a run that is checked, once it has begun, or None.
  """

  def __init__(self, config: ResidencyConfig, setup: Setup,
               workload: Workload):
    """Allocates nothing.

    Args:
      config: the budget.
      setup: the model and how it lies on the devices.
      workload: of a step but for the sizes of its batch.
    """
    self.ledger: Ledger | None = None
    self._config = config
    self._setup = setup
    self._workload = workload
    self._plans: dict[Any, tuple[ResidencyPlan, ScheduleConfig]] = {}
    self._told: set[str] = set()
    self._keeper: Keeper | None = None
    self._trees: dict[str, tuple[Any, Any]] = {}
    self._frozen: Params | None = None
    # What is alive before the run has nothing to do with it.
    self._others = jax.live_arrays() if config.check else []

  @classmethod
  def of_run(cls, config: TrainConfig, model: ModelConfig,
             places: Places | None, max_turns: int = 1) -> Residency:
    """Of a run whose model lies on a mesh, or on one device.

    `max_turns` are its task's.
    """
    dtype = config.policy.compute_dtype
    setup = Setup(config=model, dtype=dtype, reference_bits=(
        tensor_files.compressed_bits(config.reference.path)
        if config.reference.path else {}))
    if places is not None:
      layout = places.plan_layout(vlm.weights(model)["text"], dtype)
      setup = dataclasses.replace(
          setup, mesh=config.mesh.shape, training=places.training,
          rollout=places.rollout, storage=places.storage,
          rebuilt_bytes=layout.bytes_of(How.REBUILD) if layout else 0)
    return cls(config.residency, setup, Workload(
        num_prompts=0, prompt_length=0,
        num_generations=config.rollout.num_generations,
        response_length=config.rollout.max_completion_length,
        micro_batch_size=config.micro_batch_size,
        prompts_per_update=config.prompts_per_update,
        updates=config.updates_per_step, max_turns=max_turns,
        max_episode_length=config.rollout.max_episode_length,
        parts=1 if places is None else places.parts))

  def plan(self, batch: PromptBatch, facts: Facts, schedule: ScheduleConfig,
           ) -> tuple[ResidencyPlan, ScheduleConfig]:
    """A step's plan, and its schedule with what has to be saved otherwise.

    Raises:
      BudgetError: naming the phase, its need and settings that would fit.
    """
    b, p = batch.inputs.token_ids.shape
    features = 0 if batch.vision is None else vlm.num_features(
        self._setup.config, batch.vision)
    key = b, p, features, facts, schedule
    if key not in self._plans:
      self._plans[key] = residency_plan.plan(
          self._setup, schedule, facts, dataclasses.replace(
              self._workload, num_prompts=b, prompt_length=p,
              num_features=features), self._config.budget_bytes)
    return self._plans[key]

  def hold(self, policy: Policy, reference: Model | None) -> None:
    """Takes over the optimizer's state and the reference's own weights.

    Args:
      policy: gives its state away.
      reference: its frozen part is the policy's.
    """
    self._frozen = policy.frozen
    self._lock = policy.lock
    self._hold_state(policy)
    if reference is not None:
      own = {part: tree for part, tree in reference.params.items()
             if part in policy.trained}
      self._trees["reference/weights"] = own, ()
    self._trees["policy/frozen"] = policy.frozen, ()

  def begin(self, step: Step) -> None:
    """Plans a step that has not run yet, and has it save what the plan says."""
    plan, schedule = self.plan(
        step.batch, step.facts, step.settings.schedule)
    step.settings = dataclasses.replace(step.settings, schedule=schedule)
    for setting in plan.changed:
      if setting not in self._told:
        self._told.add(setting)
        logging.warning("residency.budget_gb=%g: %s", self._config.budget_gb,
                        setting)
    if self._keeper is None:
      if self._config.check:
        self.ledger = Ledger(plan, ignore=self._others)
        self._others = []
      self._keeper = Keeper(plan, self.ledger, self._lock)
      for name, (tree, keep) in self._trees.items():
        if name.startswith("policy/"):
          self.watch(name, tree)  # The policy keeps those.
        else:
          self._keeper.hold(name, tree, keep=keep)
      self._trees.clear()
    self._keeper.plan = plan
    if self.ledger is not None:
      self.ledger.plan = plan

  @contextlib.contextmanager
  def phase(self, name: str, step: Step | None = None) -> Iterator[None]:
    """A phase of the step that has begun, or a group of phases.

    Args:
      name: such as "rollout", "score", "train" or "update".
      step: whose units run in it, if any. It reads the reference here, and
        keeps afterwards only what later phases read.

    Raises:
      LedgerError: in a checked run, if more is alive than the plan has.
    """
    if not self._keeper.plan.has(name):  # Nothing to score, for one.
      yield
      return
    with self._keeper.phase(name):
      if step is not None and step.facts.has_reference:
        step.reference = self._reference(name)
      yield
      if step is not None:
        step.keep_only(self._keeper.plan.lives_after(name))
        step.reference = None  # Nobody reads what is being put away.

  def update(self, policy: Policy, grads: Params,
             loss: jax.Array | None = None) -> dict[str, jax.Array]:
    """`Policy.update` with the optimizer's state, inside its phase."""
    with policy.lock:
      policy.state = self._keeper.take("optimizer")
      values = policy.update(grads, loss)
      self._hold_state(policy)
    return values

  def restore(self, policy: Policy, read: Callable[[TrainState], TrainState],
              version: int) -> None:
    """`Policy.restore` with the optimizer's state; outside of all phases."""
    with policy.lock:
      policy.state = (self._trees.pop("optimizer")[0] if self._keeper is None
                      else self._keeper.take("optimizer"))
      policy.restore(read, version)
      self._hold_state(policy)

  def _hold_state(self, policy: Policy) -> None:
    """Takes the state that a policy has."""
    state, policy.state = policy.state, None
    if self._keeper is None:  # Until the first step begins.
      self._trees["optimizer"] = state, policy.trained
      self._trees["policy/weights"] = policy.trained, ()
    else:
      self.watch("policy/weights", policy.trained)
      self._keeper.hold("optimizer", state, keep=policy.trained)

  def watch(self, name: str, tree: Any) -> None:
    """Names a tree for the checks of a checked run."""
    if self.ledger is not None:
      self.ledger.register(name, tree)

  @property
  def state(self) -> TrainState:
    """The optimizer's state, wherever it is."""
    return self._peek("optimizer")

  @property
  def reference(self) -> Model:
    """The reference, wherever it is."""
    return Model({**self._frozen, **self._peek("reference/weights")}, 0)

  def _peek(self, name: str) -> Any:
    if self._keeper is None:
      return self._trees[name][0]
    return self._keeper.peek(name)

  def summary(self) -> dict[str, Any] | None:
    """The largest plan of a run as plain data, None if no step was planned."""
    if not self._plans:
      return None
    plan = max((plan for plan, _ in self._plans.values()),
               key=lambda plan: plan.peak_bytes)
    return {"budget_bytes": plan.budget_bytes, "peak_bytes": plan.peak_bytes,
            "peak_phase": plan.peak_phase, "changed": list(plan.changed),
            "live_bytes": plan.live_bytes,
            "found_bytes": self.ledger.found if self.ledger else None}

  def _reference(self, phase: str) -> Model:
    """The reference where a phase reads it, else without weights."""
    own = {}
    if "reference/weights" in self._keeper.plan.wanted(phase):
      own = self._keeper.get("reference/weights")
    return Model({**self._frozen, **own}, 0)
