"""Joined sequences and their log-probs, sample by sample."""

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np

from rollplex_jax.models import decoder, vlm
from rollplex_jax.stages import full_sequence
from rollplex_jax.stages.full_sequence import Responses
from tests.helpers import batches, tiny_policy, tiny_steps

_score = jax.jit(full_sequence.response_logprobs, static_argnums=1,
                 static_argnames=("temperature", "with_entropy", "remat"))


class FullSequenceTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.config = tiny_policy.config()
    cls.params = tiny_policy.params(cls.config)
    cls.list = tiny_policy.prompts(cls.config)
    cls.prompts, vision = batches.prompt_inputs(cls.config, cls.list)
    cls.features = vlm.vision_features(cls.params, cls.config, vision)
    rng = np.random.default_rng(0)
    # Placeholder ids among the response tokens: they stay tokens.
    ids = rng.integers(0, 60, (6, 5)).astype(np.int32)
    ids[0, 1] = ids[3, 0] = tiny_policy.VIDEO
    cls.responses = Responses(
        jnp.array([0, 2, 2, 3, 1, 0], jnp.int32), jnp.asarray(ids),
        jnp.array([5, 3, 1, 4, 0, 2], jnp.int32))

  def test_join_puts_responses_right_after_their_prompts(self):
    ids, positions, index = map(
        np.asarray, full_sequence.join(self.prompts, self.responses))
    for n, b in enumerate(np.asarray(self.responses.prompt_index)):
      prompt, length = self.list[b], int(self.responses.lengths[n])
      t = len(prompt.token_ids)
      np.testing.assert_array_equal(ids[n, :t], prompt.token_ids)
      np.testing.assert_array_equal(
          ids[n, t:t + length], self.responses.token_ids[n, :length])
      np.testing.assert_array_equal(positions[:, n, :t], prompt.positions)
      after = prompt.positions.max() + 1 + np.arange(length)
      np.testing.assert_array_equal(
          positions[:, n, t:t + length], np.broadcast_to(after, (3, length)))
      np.testing.assert_array_equal(index[n, t:], -1)
      np.testing.assert_array_equal(
          index[n, :t] >= 0, prompt.feature_index >= 0)

  def test_logprobs_and_entropy_equal_one_sample_at_a_time(self):
    got, entropy = _score(
        self.params, self.config, self.prompts, self.features, self.responses,
        temperature=0.7, with_entropy=True)
    for n, b in enumerate(np.asarray(self.responses.prompt_index)):
      prompt, length = self.list[b], int(self.responses.lengths[n])
      if not length:
        continue
      _, vision = batches.prompt_inputs(self.config, [prompt])
      t = len(prompt.token_ids)
      answer = np.asarray(self.responses.token_ids[n, :length])
      ids = np.concatenate([prompt.token_ids, answer])
      after = prompt.positions.max() + 1 + np.arange(length)
      positions = np.concatenate(
          [prompt.positions, np.broadcast_to(after, (3, length))], axis=1)
      index = np.concatenate([prompt.feature_index, np.full(length, -1)])
      features = vlm.vision_features(self.params, self.config, vision)
      hidden = vlm.forward(
          self.params, self.config, jnp.asarray(ids)[None],
          jnp.asarray(positions)[:, None], features, jnp.asarray(index)[None])
      scores = jax.nn.log_softmax(
          decoder.logits(self.params["text"], hidden)[0] / 0.7, axis=-1)
      scores = np.asarray(scores)[t - 1:-1]
      np.testing.assert_allclose(
          got[n, :length], scores[np.arange(length), answer], atol=1e-5)
      np.testing.assert_allclose(
          entropy[n, :length], -(np.exp(scores) * scores).sum(-1), atol=1e-5)

  def test_gradient_does_not_depend_on_remat_or_freezing(self):
    """With features as inputs or computed inside, text gradients agree."""
    _, vision = batches.prompt_inputs(self.config, self.list)
    loss = lambda logprobs, _: (
        jnp.sum(logprobs * self.responses.mask), None)

    def grads(trained, remat):
      parts = {k: self.params[k] for k in trained}
      frozen = {k: v for k, v in self.params.items() if k not in trained}
      return jax.jit(
          lambda parts: full_sequence.loss_and_grad(
              parts, frozen, self.config, self.prompts, self.features, vision,
              self.responses, loss, remat=remat)[1])(parts)

    text = grads(("text",), False)["text"]
    both = grads(("text", "visual"), False)
    rematted = grads(("text", "visual"), True)
    self.assertGreater(
        float(jnp.abs(both["visual"]["patch_embed"]).max()), 1e-3)
    for got, want in ((text, both["text"]), (rematted, both)):
      errors = tiny_steps.relative_errors(got, want)
      self.assertLessEqual(max(errors.values()), 1e-5, msg=errors)


if __name__ == "__main__":
  absltest.main()
