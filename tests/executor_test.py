"""Every schedule gives the monolithic gradient, and nothing stale is read."""

import dataclasses

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from rollplex_jax import samples
from rollplex_jax.artifacts import Model, StaleArtifactError
from rollplex_jax.executor import Settings, Step
from rollplex_jax.models import vlm
from rollplex_jax.placement.pools import Pools
from rollplex_jax.schedule import ScheduleConfig
from rollplex_jax.stages import full_sequence, objectives
from rollplex_jax.stages.objectives import ObjectiveConfig
from rollplex_jax.stages.prefix import SavePolicy
from rollplex_jax.stages.sampling import SamplingConfig
from tests.helpers import tiny_policy

_G, _R, _TEMPERATURE = 4, 6, 0.9
_OBJECTIVE = ObjectiveConfig(loss_type="dapo", beta=0.1)
_UNSHARED = dict(share_prefix=False)
_ROLLPLEX = dict(name="rollplex")
_APART = dict(name="disaggregated")


class ExecutorTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.config = tiny_policy.config()
    cls.params = tiny_policy.params(cls.config)
    cls.reference = tiny_policy.params(cls.config, seed=7)
    # The tower of a frozen-tower run is the policy's own.
    cls.frozen_reference = {**cls.reference, "visual": cls.params["visual"]}
    cls.batch = samples.make_batch(
        cls.config, tiny_policy.prompts(cls.config), [10, 11, 12, 13])

  def step(self, *, trained=("text",), micro=0, reference=True, several=False,
           **schedule):
    settings = Settings(
        config=self.config, schedule=ScheduleConfig(**schedule),
        sampling=SamplingConfig(
            max_completion_length=_R, temperature=_TEMPERATURE,
            eos_token_ids=tuple(range(1, 9)),
            banned_token_ids=self.config.vision_token_ids),
        objective=_OBJECTIVE, micro_batch_size=micro, trained=trained)
    apart = settings.schedule.name == "disaggregated"
    weights = (self.reference if "visual" in trained
               else self.frozen_reference)
    return Step(settings, self.batch, Model(self.params, 0),
                Model(weights, 0) if reference else None,
                num_generations=_G, seed=3, step=1, several_updates=several,
                pools=Pools() if apart else None)

  def groups(self, completions, keep=(0, 1, 2, 3)):
    advantages = np.random.default_rng(0).normal(size=(4, _G))
    keep = np.array(keep)
    return samples.Groups(
        rows=keep.astype(np.int32), token_ids=completions.token_ids[keep],
        lengths=completions.lengths[keep],
        advantages=advantages.astype(np.float32)[keep])

  def monolithic(self, groups, trained):
    """Loss and gradient of one program over whole sequences."""
    responses = full_sequence.Responses(
        jnp.repeat(jnp.asarray(groups.rows), _G),
        jnp.asarray(groups.token_ids.reshape(-1, _R)),
        jnp.asarray(groups.lengths.reshape(-1)))
    inputs = jax.tree.map(jnp.asarray, self.batch.inputs)

    def logprobs(params):
      features = vlm.vision_features(params, self.config, self.batch.vision)
      return full_sequence.response_logprobs(
          params, self.config, inputs, features, responses,
          temperature=_TEMPERATURE)[0]

    weights = (self.reference if "visual" in trained
               else self.frozen_reference)
    ref = jax.jit(logprobs)(weights)

    def loss(parts):
      return objectives.policy_loss(
          logprobs({**self.params, **parts}), responses.mask,
          jnp.asarray(groups.advantages.reshape(-1)), _OBJECTIVE,
          objectives.mini_batch_normalizers(responses.mask), ref_logp=ref)[0]

    value, grads = jax.jit(jax.value_and_grad(loss))(
        {k: self.params[k] for k in trained})
    return float(value), grads, np.asarray(ref * responses.mask)

  def assert_gradients_equal(self, got, want):
    self.assertEqual(jax.tree.structure(got), jax.tree.structure(want))
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(want),
                            jax.tree.leaves(got)):
      error = np.linalg.norm(a - b)
      # A gradient of rounding errors alone (key biases under softmax) is zero.
      self.assertLessEqual(
          error, 1e-5 * np.linalg.norm(a) + 1e-7,
          msg=jax.tree_util.keystr(path))

  @parameterized.parameters(
      dict(**_UNSHARED), dict(micro=5, **_UNSHARED),
      dict(micro=3, **_UNSHARED, trained=("text", "visual")),
      dict(), dict(micro=4), dict(micro=3), dict(micro=9),
      dict(save=SavePolicy.NOTHING), dict(save=SavePolicy.OFFLOAD, micro=4),
      dict(save=SavePolicy.ACTIVATIONS, micro=8),
      dict(micro=3, trained=("text", "visual")),
      dict(save=SavePolicy.ACTIVATIONS, trained=("text", "visual")),
      dict(**_APART), dict(**_APART, **_UNSHARED, micro=3),
      dict(**_APART, trained=("text", "visual")),
      dict(**_ROLLPLEX), dict(**_ROLLPLEX, micro=3),
      dict(**_ROLLPLEX, save=SavePolicy.NOTHING, micro=4),
      dict(**_ROLLPLEX, save=SavePolicy.OFFLOAD),
      dict(**_ROLLPLEX, save=SavePolicy.ACTIVATIONS, micro=8),
      dict(**_ROLLPLEX, micro=8, trained=("text", "visual")))
  def test_gradient_equals_monolithic(self, trained=("text",), **kwargs):
    work = self.step(trained=trained, **kwargs)
    completions = work.roll_out()
    self.assertGreater(len(np.unique(completions.lengths)), 1)
    groups = work.score(self.groups(completions))
    value, grads, ref = self.monolithic(groups, trained)
    np.testing.assert_allclose(
        groups.ref_logprobs.reshape(-1, _R), ref, atol=1e-5)
    got, metrics, logprobs = work.gradient(groups, first=True)
    np.testing.assert_allclose(
        metrics.finalize()["actor/loss"], value, rtol=1e-5)
    np.testing.assert_allclose(logprobs, completions.logprobs, atol=1e-5)
    self.assert_gradients_equal(got, grads)

  def test_same_tokens_under_all_schedules(self):
    tokens = [self.step(**kwargs).roll_out().token_ids for kwargs in (
        {}, _UNSHARED, _ROLLPLEX, _APART, dict(_ROLLPLEX, prefix_source="window"))]
    for other in tokens[1:]:
      np.testing.assert_array_equal(tokens[0], other)

  @parameterized.parameters(
      dict(), dict(**_ROLLPLEX), dict(**_UNSHARED),
      dict(**_ROLLPLEX, trained=("text", "visual")))
  def test_some_groups_only(self, trained=("text",), **kwargs):
    """Dynamic sampling: the gradient is that of the kept groups alone."""
    work = self.step(trained=trained, micro=4, **kwargs)
    groups = work.score(self.groups(work.roll_out(), keep=(0, 2, 3)))
    _, grads, _ = self.monolithic(groups, trained)
    got, _, _ = work.gradient(groups, first=True)
    self.assert_gradients_equal(got, grads)

  @parameterized.parameters(
      dict(), dict(**_ROLLPLEX), dict(**_UNSHARED), dict(**_APART),
      dict(**_ROLLPLEX, trained=("text", "visual")))
  def test_later_updates_recompute(self, trained=("text",), **kwargs):
    """After an update the gradient is that at the new parameters."""
    work = self.step(trained=trained, several=True, **kwargs)
    groups = work.score(self.groups(work.roll_out()))
    self.assertIsNotNone(groups.old_logprobs)
    work.gradient(dataclasses.replace(groups, old_logprobs=None), first=True)
    moved = {**self.params, **{k: tiny_policy.params(self.config, seed=9)[k]
                               for k in trained}}
    work.update_policy(Model(moved, 1, 1 if "visual" in trained else 0))
    groups = dataclasses.replace(groups, old_logprobs=None)
    got, _, _ = work.gradient(groups, first=False)
    before, self.params = self.params, moved
    try:
      if "visual" not in trained:
        self.params = {**moved, "visual": before["visual"]}
      _, grads, _ = self.monolithic(groups, trained)
    finally:
      self.params = before
    self.assert_gradients_equal(got, grads)

  def test_stale_artifacts_are_refused(self):
    work = self.step(**_ROLLPLEX)
    groups = work.score(self.groups(work.roll_out()))
    work.update_policy(Model(self.params, 1))
    with self.assertRaisesRegex(StaleArtifactError, "rollout/kv.*0.*1"):
      work.gradient(groups, first=True)

  def test_window_artifacts_of_the_reference_stay_valid(self):
    work = self.step(**_ROLLPLEX)
    groups = self.groups(work.roll_out())
    work.update_policy(Model(self.params, 1))
    self.assertIsNotNone(work.score(groups).ref_logprobs)

  def test_truncated_and_empty_groups(self):
    """All samples cut by the length limit, and responses of no tokens."""
    work = self.step(**_ROLLPLEX)
    completions = work.roll_out()
    groups = self.groups(completions)
    lengths = groups.lengths.copy()
    lengths[1] = 0
    lengths[2] = _R
    groups = work.score(dataclasses.replace(groups, lengths=lengths))
    _, grads, _ = self.monolithic(groups, ("text",))
    got, _, _ = work.gradient(groups, first=True)
    self.assert_gradients_equal(got, grads)

  def test_saved_leaves_are_no_weights(self):
    weights = [np.asarray(w) for w in jax.tree.leaves(self.params["text"])]
    for save in SavePolicy:
      work = self.step(**_ROLLPLEX, save=save)
      work.roll_out()
      saved = work.store.get("policy/saved", ("policy", 0))
      for leaf in jax.tree.leaves(saved):
        for weight in weights:
          for w in (weight, weight.T):
            if leaf.size == w.size:
              self.assertFalse(
                  np.array_equal(np.ravel(leaf), np.ravel(w)), msg=str(save))

  def test_bfloat16_error_is_that_of_the_monolithic_program(self):
    """Against the float32 gradient, at most 1.5 times the error."""
    work = self.step(**_ROLLPLEX, reference=True)
    groups = work.score(self.groups(work.roll_out()))
    _, exact, _ = self.monolithic(groups, ("text",))
    before = self.params, self.frozen_reference
    cast = lambda tree: jax.tree.map(lambda a: a.astype(jnp.bfloat16), tree)
    try:
      self.params, self.frozen_reference = map(cast, before)
      _, rounded, _ = self.monolithic(groups, ("text",))
      for kwargs in ({}, _ROLLPLEX,
                     dict(_ROLLPLEX, save=SavePolicy.ACTIVATIONS, micro=3)):
        work = self.step(**kwargs)
        work.roll_out()
        got, _, _ = work.gradient(work.score(groups), first=True)
        mine = theirs = 0.0
        for a, b, c in zip(*map(jax.tree.leaves, (exact, rounded, got))):
          mine += float(np.sum(np.square(np.asarray(c - a, np.float64))))
          theirs += float(np.sum(np.square(
              np.asarray(b.astype(jnp.float32) - a, np.float64))))
        self.assertLessEqual(mine ** 0.5, 1.5 * theirs ** 0.5)
    finally:
      self.params, self.frozen_reference = before


class MicroBatchTest(parameterized.TestCase):

  @parameterized.product(size=(0, 1, 2, 3, 4, 5, 8, 11, 12), k=(1, 3))
  def test_every_sample_once(self, size, k):
    rng = np.random.default_rng(0)
    groups = samples.Groups(
        rows=np.arange(k, dtype=np.int32) + 5,
        token_ids=rng.integers(1, 9, (k, 4, 6)),
        lengths=rng.integers(0, 6, (k, 4)),
        advantages=rng.normal(size=(k, 4)))
    parts = samples.micro_batches(groups, size)
    self.assertLen({p.responses.token_ids.shape for p in parts}, 1)
    if size:
      self.assertLessEqual(parts[0].responses.lengths.size, max(size, 1))
    out = np.zeros((k, 4, 6))
    counts = 0
    for p in parts:
      counts += p.responses.lengths.sum()
      width = p.responses.token_ids.shape[-1]
      p.place(out, p.responses.token_ids * np.ones(width))
      np.testing.assert_array_equal(
          p.rows[:len(p.groups)], groups.rows[p.groups])
    self.assertEqual(counts, groups.lengths.sum())
    np.testing.assert_array_equal(
        out * groups.mask, groups.token_ids * groups.mask)

  def test_few_shapes(self):
    rng = np.random.default_rng(0)
    shapes = set()
    for k in range(1, 17):
      groups = samples.Groups(
          rows=np.arange(k, dtype=np.int32),
          token_ids=np.zeros((k, 8, 16), np.int32),
          lengths=rng.integers(4, 16, (k, 8)), advantages=np.zeros((k, 8)))
      shapes |= {p.responses.token_ids.shape
                 for p in samples.micro_batches(groups, 32)}
    self.assertLessEqual(len(shapes), 3)


if __name__ == "__main__":
  absltest.main()
