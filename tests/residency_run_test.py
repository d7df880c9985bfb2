"""Real steps, each phase checked against the plan made before they ran."""

import functools
import gc
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollplex_jax import programs, residency_plan, samples, units
from rollplex_jax.artifacts import Model
from rollplex_jax.buffer_sizes import Setup, Workload
from rollplex_jax.executor import Step
from rollplex_jax.models import vlm
from rollplex_jax.placement import moves
from rollplex_jax.placement.ledger import Ledger, LedgerError
from rollplex_jax.placement.moves import Keeper
from rollplex_jax.schedule import Facts, ScheduleConfig
from rollplex_jax.settings import Settings
from rollplex_jax.stages import update
from rollplex_jax.stages.objectives import ObjectiveConfig
from rollplex_jax.stages.sampling import SamplingConfig
from tests.helpers import devices, tiny_policy

devices.use_virtual_devices()
_G, _R = 2, 8
_SLACK = 4096


@functools.cache
def fixtures():
  """Configuration, parameters and prompts, made once."""
  config = tiny_policy.config()
  batch = samples.make_batch(config, tiny_policy.prompts(config), range(4))
  return config, jax.device_get(tiny_policy.params(config)), batch


def make_plan(schedule, dtype, budget=None):
  config, _, batch = fixtures()
  num_prompts, length = batch.inputs.token_ids.shape
  work = Workload(
      num_prompts=num_prompts, prompt_length=length, num_generations=_G,
      response_length=_R, micro_batch_size=4,
      num_features=vlm.num_features(config, batch.vision))
  facts = Facts(has_media=True, has_reference=True, trains_tower=False,
                scores_policy=False)
  return residency_plan.plan(
      Setup(config=config, dtype=dtype), schedule, facts, work, budget)


class Run:
  """A run whose step is taken as a trainer takes it, under a ledger."""

  def __init__(self, schedule, dtype, share):
    """Plans for a share of the bytes that the run would take."""
    gc.collect()
    others = jax.live_arrays()
    self.config, params, self.batch = fixtures()
    params = jax.tree.map(jnp.asarray, params)
    budget = int(make_plan(schedule, dtype)[0].peak_bytes * share)
    self.plan, chosen = make_plan(schedule, dtype, budget)
    self.settings = Settings(
        config=self.config, schedule=chosen,
        sampling=SamplingConfig(max_completion_length=_R, eos_token_ids=(1,)),
        objective=ObjectiveConfig(beta=0.1, max_completion_length=_R),
        micro_batch_size=4)
    self.dtype = dtype
    self.frozen = update.cast_params({"visual": params.pop("visual")}, dtype)
    self.optimizer = update.make_optimizer(update.OptimizerConfig())
    state = update.create_state(params, self.optimizer)
    self.trained = update.cast_params(state.params, dtype)
    self.ledger = Ledger(self.plan, slack_bytes=_SLACK, ignore=others)
    self.keeper = Keeper(self.plan, self.ledger)
    self.ledger.register("policy/weights", self.trained)
    self.ledger.register("policy/frozen", self.frozen)
    self.keeper.hold("reference/weights", jax.tree.map(jnp.copy, self.trained))
    self.keeper.hold("optimizer", state, keep=self.trained)

  def end(self, work, group):
    """Artefacts go with their last consumer."""
    for name in work.store.names():
      if name in self.plan.lives_after(group):
        self.ledger.register(name, work.store._items[name][0])
      else:
        work.store.drop(name)

  def zeros(self, *args, zeros=programs.zero_gradients, **kwargs):
    """Accumulators, of which every pass has to make the next ones in place."""
    out = zeros(*args, **kwargs)
    self.ledger.register("grads", jax.tree.map(lambda a: a, out))
    return out

  def step(self, number):
    work = Step(
        self.settings, self.batch, Model(self.frozen | self.trained, number),
        Model({}, 0), num_generations=_G, seed=3, step=number)

    def reference():
      work.reference = Model(
          self.frozen | self.keeper.get("reference/weights"), 0)

    with self.keeper.phase("rollout"):
      reference()
      completions = work.roll_out()
      self.end(work, "rollout")
    groups = samples.Groups(
        rows=np.arange(4, dtype=np.int32), token_ids=completions.token_ids,
        lengths=completions.lengths, advantages=np.random.default_rng(
            number).normal(size=(4, _G)).astype(np.float32))
    with self.keeper.phase("score"):
      reference()
      groups = work.score(groups)
      self.end(work, "score")
    with self.keeper.phase("train"):
      with mock.patch.object(programs, "zero_gradients", self.zeros):
        grads, _, _ = work.gradient(groups, first=True)
      self.ledger.register("grads", grads)
      self.end(work, "train")
    with self.keeper.phase("update"):
      work = None
      if self.dtype != "float32":  # The master weights are not these.
        for a in jax.tree.leaves(self.trained):
          a.delete()
      state, self.trained, _ = update.apply_gradients(
          self.keeper.take("optimizer"), grads, self.optimizer, self.dtype)
      del grads
      self.ledger.register("policy/weights", self.trained)
      self.keeper.hold("optimizer", state, keep=self.trained)


def undonated(program, *static):
  return jax.jit(program.__wrapped__, static_argnames=static)


def rollplex(**kwargs):
  return ScheduleConfig(name="rollplex", **kwargs)


class RunTest(parameterized.TestCase):

  @parameterized.parameters(
      (20, "float32", 0.7, rollplex(),
       ("optimizer state offloaded", "reference weights offloaded")),
      (2, "bfloat16", 0.9, rollplex(save="offload"),
       ("optimizer state offloaded", "reference weights offloaded")),
      (2, "float32", 0.9, rollplex(prefix_source="window"),
       ("optimizer state offloaded",)),
      (2, "float32", 1.0, ScheduleConfig(), ()))
  @pytest.mark.slow
  def test_never_exceeds_its_budget(self, steps, dtype, share, schedule,
                                    changed):
    run = Run(schedule, dtype, share)
    self.assertEqual(changed, run.plan.changed)
    for i in range(steps):
      run.step(i)
    self.assertEmpty(run.ledger.violations)
    # The plan is right to the byte but for scalars: metrics, counters.
    for phase, found in run.ledger.found.items():
      planned = sum(run.plan.after(phase).values())
      self.assertBetween(found - planned, 0, 256, phase)
      self.assertLessEqual(found, run.plan.budget_bytes)

  def test_a_reference_that_was_put_away_cannot_be_read(self):
    run = Run(rollplex(), "float32", 0.7)
    with run.keeper.phase("rollout"):
      weights = run.keeper.get("reference/weights")
    self.assertTrue(all(a.is_deleted() for a in jax.tree.leaves(weights)))

  @parameterized.parameters(
      ("layer_inputs", moves, "offload", lambda tree, keep=(): tree,
       "after rollout/.* unexpected:.* optimizer.*not on the device in the plan"),
      ("layer_inputs", update, "update_program",
       undonated(update.update_program, "optimizer", "compute_dtype"),
       "after update.* unexpected: optimizer.*should have been donated"),
      ("layer_inputs", programs, "gradient_suffix",
       undonated(programs.gradient_suffix, "config", "objective",
                 "temperature", "remat", "with_entropy", "place"),
       "after train/.* unexpected: grads.*should have been donated"),
      ("offload", units, "_kept", lambda saved, save: saved,
       "after rollout/.* unexpected: policy/saved.*not on the device"))
  def test_is_found_out_without(self, save, module, name, instead, message):
    """An offload or a donation less than the plan counts on."""
    run = Run(rollplex(save=save), "float32", 0.7)
    with mock.patch.object(module, name, instead):
      with self.assertRaisesRegex(LedgerError, message):
        run.step(0)

  @pytest.mark.slow
  def test_is_found_out_with_two_copies_of_the_policy(self):
    run = Run(rollplex(save="offload"), "bfloat16", 0.9)
    run.dtype = "float32"  # Then the step does not delete the old.
    apply = update.apply_gradients
    with mock.patch.object(
        update, "apply_gradients", lambda *args: apply(*args[:-1], "bfloat16")):
      with self.assertRaisesRegex(
          LedgerError, "after update.* policy/weights.*should have been don"):
        run.step(0)


if __name__ == "__main__":
  absltest.main()
