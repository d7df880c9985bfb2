"""Steps of some groups and several updates; nothing stale is read."""

import dataclasses

from absl.testing import absltest, parameterized
import jax
import numpy as np

from rollplex_jax import samples
from rollplex_jax.artifacts import Model, StaleArtifactError
from rollplex_jax.stages.prefix import SavePolicy
from tests.helpers import tiny_policy, tiny_steps

_UNSHARED = dict(share_prefix=False)
_ROLLPLEX = dict(name="rollplex")
_APART = dict(name="disaggregated")
_TRAINED = ("text", "visual")
_TEXT_ROW = 1


class ExecutorTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    config = tiny_policy.config()
    cls.steps = tiny_steps.TinySteps(
        config, tiny_policy.video_prompts(config), num_generations=4)

  def score(self, work, completions, **kwargs):
    """Scored groups; the scores are those of whole sequences."""
    groups = work.score(self.steps.groups(completions, **kwargs))
    np.testing.assert_allclose(
        groups.ref_logprobs,
        self.steps.ref_logprobs(groups, work.settings.trained), atol=1e-5)
    return groups

  def assert_gradient(self, got, groups, params=None):
    _, grads = self.steps.monolithic(groups, params)
    errors = tiny_steps.relative_errors(got, {k: grads[k] for k in got})
    self.assertLessEqual(max(errors.values()), 1e-5, msg=errors)

  @parameterized.parameters(
      dict(), dict(**_ROLLPLEX), dict(**_UNSHARED),
      dict(**_ROLLPLEX, trained=_TRAINED))
  def test_some_groups_only(self, **kwargs):
    """The gradient is that of the groups at hand alone, in any order."""
    work = self.steps.step(micro=4, **kwargs)
    groups = self.score(work, work.roll_out(), keep=(3, 0, 2))
    got, _, _ = work.gradient(groups, first=True)
    self.assert_gradient(got, groups)

  @parameterized.parameters(
      dict(), dict(**_ROLLPLEX), dict(**_UNSHARED))
  def test_no_pictures_among_the_groups(self, **kwargs):
    """A tower that learns nothing from a mini-batch of text."""
    work = self.steps.step(micro=4, trained=_TRAINED, **kwargs)
    groups = self.score(work, work.roll_out(), keep=(_TEXT_ROW,))
    got, _, _ = work.gradient(groups, first=True)
    for leaf in jax.tree.leaves(got.pop("visual")):
      np.testing.assert_array_equal(leaf, 0)
    self.assert_gradient(got, groups)

  @parameterized.parameters(
      dict(), dict(**_ROLLPLEX), dict(**_UNSHARED), dict(**_APART),
      dict(**_ROLLPLEX, trained=_TRAINED))
  def test_later_updates_recompute(self, trained=("text",), **kwargs):
    """After an update the gradient is that at the new parameters."""
    work = self.steps.step(trained=trained, several=True, **kwargs)
    groups = self.score(work, work.roll_out())
    self.assertIsNotNone(groups.old_logprobs)
    groups = dataclasses.replace(groups, old_logprobs=None)
    work.gradient(groups, first=True)
    other = self.steps.random_params(9)
    moved = self.steps.params | {k: other[k] for k in trained}
    work.update_policy(Model(moved, 1, 1 if "visual" in trained else 0))
    got, _, _ = work.gradient(groups, first=False)
    self.assert_gradient(got, groups, moved)

  def test_stale_artifacts_are_refused(self):
    work = self.steps.step(**_ROLLPLEX)
    groups = self.score(work, work.roll_out())
    work.update_policy(Model(self.steps.params, 1))
    with self.assertRaisesRegex(StaleArtifactError, "rollout/kv.*0.*1"):
      work.gradient(groups, first=True)

  def test_window_artifacts_of_the_reference_stay_valid(self):
    work = self.steps.step(**_ROLLPLEX)
    completions = work.roll_out()
    work.update_policy(Model(self.steps.params, 1))
    self.score(work, completions)

  def test_saved_leaves_are_no_weights(self):
    weights = [np.asarray(w) for w in jax.tree.leaves(self.steps.params["text"])]
    for save in SavePolicy:
      work = self.steps.step(**_ROLLPLEX, save=save)
      work.roll_out()
      saved = work.store.get("policy/saved", ("policy", 0))
      for leaf in jax.tree.leaves(saved):
        for weight in weights:
          for w in (weight, weight.T):
            if leaf.shape == w.shape and w.ndim > 1:
              self.assertFalse(np.array_equal(leaf, w), msg=str(save))


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
