"""The serial schedule: results do not depend on how samples are cut."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from rollplex_jax import schedule
from rollplex_jax.models import vlm
from rollplex_jax.stages import full_sequence, objectives
from rollplex_jax.stages.objectives import ObjectiveConfig
from tests.helpers import tiny_policy


def _samples(rng, num_prompts=4, group=3, width=6):
  n = num_prompts * group
  lengths = rng.integers(0, width + 1, n).astype(np.int32)
  return schedule.Samples(
      prompt_index=np.repeat(np.arange(num_prompts), group).astype(np.int32),
      token_ids=rng.integers(2, 50, (n, width)).astype(np.int32),
      lengths=lengths,
      advantages=rng.normal(size=n).astype(np.float32),
      ref_logprobs=rng.normal(-3, 1, (n, width)).astype(np.float32))


class ScheduleTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.config = tiny_policy.config()
    cls.params = tiny_policy.params(cls.config)
    cls.batch = schedule.make_batch(
        cls.config, tiny_policy.prompts(cls.config), [10, 11, 12, 13])
    cls.features = schedule.features_of(cls.params, cls.config, cls.batch)
    cls.samples = _samples(np.random.default_rng(0))

  def gradient(self, micro_batch_size, trained=("text",), samples=None,
               objective=None):
    parts = {k: self.params[k] for k in trained}
    frozen = {k: v for k, v in self.params.items() if k not in trained}
    grads, metrics, logprobs = schedule.gradient(
        parts, frozen, self.config,
        objective or ObjectiveConfig(loss_type="dapo", beta=0.1), self.batch,
        self.features, samples or self.samples, temperature=0.9,
        micro_batch_size=micro_batch_size, remat=False, with_entropy=True)
    return grads, metrics.finalize(), logprobs

  def monolithic(self, trained):
    """One program over everything, written without the schedule."""
    s = self.samples
    responses = full_sequence.Responses(
        jnp.asarray(s.prompt_index), jnp.asarray(s.token_ids),
        jnp.asarray(s.lengths))
    inputs = jax.tree.map(jnp.asarray, self.batch.inputs)

    def loss(parts):
      params = {**self.params, **parts}
      features = vlm.vision_features(params, self.config, self.batch.vision)
      logprobs, _ = full_sequence.response_logprobs(
          params, self.config, inputs, features, responses, temperature=0.9)
      return objectives.policy_loss(
          logprobs, responses.mask, jnp.asarray(s.advantages),
          ObjectiveConfig(loss_type="dapo", beta=0.1),
          objectives.mini_batch_normalizers(responses.mask),
          ref_logp=jnp.asarray(s.ref_logprobs))[0]

    return jax.jit(jax.value_and_grad(loss))(
        {k: self.params[k] for k in trained})

  @parameterized.parameters(
      (12, ("text",)), (4, ("text",)), (5, ("text",)), (1, ("text",)),
      (12, ("text", "visual")), (5, ("text", "visual")))
  def test_gradient_equals_monolithic(self, size, trained):
    # 5 splits groups, leaves a ragged last pass and cuts between prompts with
    # one medium, three and none.
    value, expected = self.monolithic(trained)
    grads, metrics, _ = self.gradient(size, trained)
    self.assertAlmostEqual(
        metrics["actor/loss"], float(value), delta=1e-5 * abs(float(value)))
    for path, want in jax.tree_util.tree_leaves_with_path(expected):
      got = grads
      for key in path:
        got = got[getattr(key, "key", getattr(key, "idx", None))]
      scale = np.linalg.norm(want)
      self.assertLessEqual(
          np.linalg.norm(got - want), 1e-5 * scale + 1e-7, msg=str(path))

  def test_score_equals_training_logprobs(self):
    _, _, training = self.gradient(4)
    for size in (12, 5):
      scored = schedule.score(
          self.params, self.config, self.batch, self.features, self.samples,
          temperature=0.9, micro_batch_size=size)
      np.testing.assert_allclose(scored, training, atol=1e-5)
    mask = np.arange(6) < self.samples.lengths[:, None]
    self.assertTrue((training[~mask] == 0).all())

  def test_first_update_has_ratio_one(self):
    _, metrics, _ = self.gradient(5)
    self.assertEqual(metrics["actor/ratio_mean"], 1.0)
    self.assertEqual(metrics["actor/ratio_max"], 1.0)

  def test_few_programs(self):
    """Numbers of samples, lengths and groups that vary share programs."""
    rng = np.random.default_rng(1)
    before = schedule.gradient_program._cache_size()
    for rows in ([0, 1, 2], [3, 4, 5, 6, 7, 8], range(9), range(12)):
      part = self.samples.take(np.array(rows))
      part.lengths[:] = rng.integers(4, 6, len(part.lengths))
      self.gradient(3, samples=part)
    self.assertLessEqual(schedule.gradient_program._cache_size() - before, 2)


if __name__ == "__main__":
  absltest.main()
