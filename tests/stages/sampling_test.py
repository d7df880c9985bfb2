"""Sampling against probabilities written out."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from rollplex_jax.errors import InputError
from rollplex_jax.stages import sampling
from rollplex_jax.stages.sampling import SamplingConfig

_LOGITS = np.log(np.array([[0.4, 0.05, 0.25, 0.2, 0.1]], np.float32))


def _kept(filtered):
  return set(np.flatnonzero(np.isfinite(np.asarray(filtered)[0])))


def _draw(config, count=20000, logits=_LOGITS):
  keys = jax.random.split(jax.random.key(0), count)
  many = jnp.broadcast_to(logits, (count, logits.shape[-1]))
  return jax.jit(sampling.sample, static_argnums=3)(
      many, keys, jnp.int32(0), config)


class FilterTest(parameterized.TestCase):

  @parameterized.parameters(
      (0, {0, 1, 2, 3, 4}), (1, {0}), (3, {0, 2, 3}), (9, {0, 1, 2, 3, 4}))
  def test_top_k(self, k, expected):
    self.assertEqual(_kept(sampling.top_k_filter(_LOGITS, k)), expected)

  @parameterized.parameters(
      (1.0, {0, 1, 2, 3, 4}), (0.3, {0}), (0.41, {0, 2}), (0.64, {0, 2}),
      (0.7, {0, 2, 3}), (0.96, {0, 1, 2, 3, 4}), (1e-6, {0}))
  def test_top_p(self, p, expected):
    self.assertEqual(_kept(sampling.top_p_filter(_LOGITS, p)), expected)


class SampleTest(parameterized.TestCase):

  @parameterized.parameters(
      dict(), dict(temperature=0.5), dict(temperature=2.0), dict(top_k=2),
      dict(top_p=0.7), dict(top_k=4, top_p=0.6), dict(banned_token_ids=(0,)))
  def test_frequencies(self, **kwargs):
    config = SamplingConfig(max_completion_length=4, **kwargs)
    tokens, logprobs = _draw(config)
    t = kwargs.get("temperature", 1.0)
    full = np.exp(_LOGITS[0] / t) / np.exp(_LOGITS[0] / t).sum()
    expected = full.copy()
    for banned in kwargs.get("banned_token_ids", ()):
      expected[banned] = 0
    order = np.argsort(-expected)
    if "top_k" in kwargs:
      expected[order[kwargs["top_k"]:]] = 0
    if "top_p" in kwargs:
      # Reference: walk down the renormalized list until the mass reaches p.
      mass, total = 0.0, expected.sum()
      for i in order:
        if mass >= kwargs["top_p"]:
          expected[i] = 0
        mass += expected[i] / total
    expected /= expected.sum()
    counts = np.bincount(tokens, minlength=5) / len(tokens)
    np.testing.assert_allclose(counts, expected, atol=0.015)
    np.testing.assert_array_equal(counts[expected == 0], 0)
    # What is recorded is the full softmax, whatever shaped the choice.
    np.testing.assert_allclose(logprobs, np.log(full)[tokens], atol=1e-5)

  def test_greedy(self):
    config = SamplingConfig(max_completion_length=4, temperature=0.0,
                            banned_token_ids=(0,))
    tokens, logprobs = _draw(config, count=3)
    np.testing.assert_array_equal(tokens, 2)
    np.testing.assert_allclose(logprobs, np.log(0.25), atol=1e-5)

  def test_position_changes_the_draw(self):
    config = SamplingConfig(max_completion_length=4)
    keys = jax.random.split(jax.random.key(0), 200)
    many = jnp.broadcast_to(_LOGITS, (200, 5))
    first, _ = sampling.sample(many, keys, jnp.int32(0), config)
    second, _ = sampling.sample(many, keys, jnp.int32(1), config)
    self.assertFalse(np.array_equal(first, second))

  def test_keys_depend_on_row_sample_step_and_seed_alone(self):
    data = lambda *args: jax.random.key_data(sampling.sample_keys(*args))
    rows = jnp.array([7, 3, 11])
    keys = data(0, 5, rows, 4)
    np.testing.assert_array_equal(keys[1], data(0, 5, rows[1:2], 4)[0])
    np.testing.assert_array_equal(keys[:, :2], data(0, 5, rows, 2))
    flat = np.asarray(keys).reshape(12, -1)
    self.assertLen(np.unique(flat, axis=0), 12)
    self.assertFalse(np.array_equal(keys, data(0, 6, rows, 4)))
    self.assertFalse(np.array_equal(keys, data(1, 5, rows, 4)))


class ConfigTest(parameterized.TestCase):

  @parameterized.parameters(
      dict(max_completion_length=0), dict(temperature=-1.0), dict(top_k=-1),
      dict(top_p=0.0), dict(top_p=1.5))
  def test_refuses(self, **kwargs):
    name, value = next(iter(kwargs.items()))
    with self.assertRaisesRegex(InputError, f"{name}.*{value}"):
      SamplingConfig(**{"max_completion_length": 4, **kwargs})


if __name__ == "__main__":
  absltest.main()
