"""Prefill and decode against a forward pass over whole sequences."""

import dataclasses

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from rollplex_jax.models import decoder, vlm
from rollplex_jax.stages import full_sequence, prefix, rollout
from rollplex_jax.stages.sampling import SamplingConfig, sample_keys
from tests.helpers import batches, tiny_policy

_B, _G, _R = 4, 3, 6

_decode = jax.jit(rollout.decode, static_argnums=(1, 2))
_prefix = jax.jit(
    lambda params, *args: prefix.prefix_kv(params["text"], *args)[0],
    static_argnums=1)
_features = jax.jit(vlm.vision_features, static_argnums=1)
_score = jax.jit(full_sequence.response_logprobs, static_argnums=1,
                 static_argnames="temperature")


class RolloutTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.config = tiny_policy.config()
    cls.params = tiny_policy.params(cls.config)
    cls.prompts, vision = batches.prompt_inputs(
        cls.config, tiny_policy.prompts(cls.config))
    cls.features = _features(cls.params, cls.config, vision)
    cls.kv = _prefix(
        cls.params, cls.config, cls.prompts, cls.features)
    cls.keys = sample_keys(0, 0, cls.prompts.row_ids, _G)

  def roll(self, sampling, keys=None):
    return _decode(
        self.params, self.config, sampling, self.prompts, self.kv,
        self.keys if keys is None else keys)

  def sampling(self, **kwargs):
    return SamplingConfig(**{
        "max_completion_length": _R, "eos_token_ids": (1,),
        "banned_token_ids": self.config.vision_token_ids, **kwargs})

  @parameterized.parameters(1.0, 0.6)
  def test_logprobs_equal_full_forward(self, temperature):
    # Video, text-only, several-image and ragged prompts; five EOS ids make
    # ragged responses.
    done = self.roll(self.sampling(
        temperature=temperature, eos_token_ids=(1, 2, 3, 4, 5, 6, 7, 8)))
    self.assertGreater(len(np.unique(done.lengths)), 1)
    responses = full_sequence.Responses(
        jnp.repeat(jnp.arange(_B), _G), done.token_ids.reshape(-1, _R),
        done.lengths.reshape(-1))
    full, _ = _score(
        self.params, self.config, self.prompts, self.features, responses,
        temperature=temperature)
    np.testing.assert_allclose(
        done.logprobs.reshape(-1, _R), full * responses.mask, atol=1e-5)

  def test_greedy_takes_the_best_token_of_the_full_forward(self):
    done = self.roll(self.sampling(temperature=0.0, eos_token_ids=()))
    responses = full_sequence.Responses(
        jnp.repeat(jnp.arange(_B), _G), done.token_ids.reshape(-1, _R),
        done.lengths.reshape(-1))
    ids, positions, index = full_sequence.join(self.prompts, responses)
    hidden = vlm.forward(self.params, self.config, ids, positions,
                         self.features, index)
    scores = decoder.logits(self.params["text"], hidden)
    scores = scores.at[..., jnp.array(self.config.vision_token_ids)].set(-1e9)
    best = np.argmax(scores, axis=-1)
    for n in range(_B * _G):
      first = int(self.prompts.lengths[n // _G]) - 1
      np.testing.assert_array_equal(
          done.token_ids.reshape(-1, _R)[n], best[n, first:first + _R])

  def test_lengths_and_finish(self):
    stop = tuple(range(1, 20))
    done = self.roll(self.sampling(eos_token_ids=stop))
    ids, lengths = np.asarray(done.token_ids), np.asarray(done.lengths)
    self.assertTrue(np.any(done.finished) and not np.all(done.finished))
    for b in range(_B):
      for g in range(_G):
        n = lengths[b, g]
        self.assertEqual(bool(done.finished[b, g]), ids[b, g, n - 1] in stop)
        self.assertFalse(np.isin(ids[b, g, :n - 1], stop).any())
        self.assertTrue((ids[b, g, n:] == 0).all())
        self.assertTrue((np.asarray(done.logprobs)[b, g, n:] == 0).all())
        if not done.finished[b, g]:
          self.assertEqual(n, _R)

  def test_stops_when_all_are_done(self):
    # Every token ends a completion, so one step is enough.
    everything = tuple(range(self.config.text.vocab_size))
    done = self.roll(self.sampling(eos_token_ids=everything))
    self.assertTrue((np.asarray(done.lengths) == 1).all())

  def test_vision_tokens_are_never_sampled(self):
    ids = jnp.array(self.config.vision_token_ids)
    # Make placeholders by far the likeliest tokens.
    text = self.params["text"]
    text = {**text, "head": text["head"].at[ids].mul(5.0)}
    params = {**self.params, "text": text}
    run = lambda banned: _decode(
        params, self.config,
        self.sampling(eos_token_ids=(), banned_token_ids=banned),
        self.prompts, self.kv, self.keys)
    free = run(())
    self.assertTrue(np.isin(free.token_ids, ids).any())
    kept = run(self.config.vision_token_ids)
    self.assertFalse(np.isin(kept.token_ids, ids).any())
    # The ban shapes the choice only: log-probs are those of the full softmax.
    responses = full_sequence.Responses(
        jnp.repeat(jnp.arange(_B), _G), kept.token_ids.reshape(-1, _R),
        kept.lengths.reshape(-1))
    full, _ = _score(
        params, self.config, self.prompts, self.features, responses)
    np.testing.assert_allclose(kept.logprobs.reshape(-1, _R), full, atol=1e-4)

  def test_tokens_do_not_depend_on_the_batch(self):
    sampling = self.sampling()
    whole = self.roll(sampling)
    some = tiny_policy.prompts(self.config)[2:3]
    prompts, vision = batches.prompt_inputs(self.config, some, row_ids=[2])
    features = _features(self.params, self.config, vision)
    kv = _prefix(self.params, self.config, prompts, features)
    alone = _decode(
        self.params, self.config, sampling, prompts, kv,
        sample_keys(0, 0, prompts.row_ids, _G))
    np.testing.assert_array_equal(alone.token_ids[0], whole.token_ids[2])

  def test_groups_and_steps_draw_differently(self):
    sampling = self.sampling(eos_token_ids=())
    first = self.roll(sampling)
    later = self.roll(sampling, sample_keys(0, 1, self.prompts.row_ids, _G))
    self.assertFalse(np.array_equal(first.token_ids, later.token_ids))
    self.assertFalse(
        np.array_equal(first.token_ids[:, 0], first.token_ids[:, 1]))

  def test_prefix_skips_dead_work(self):
    """The last layer's output projection and MLP are not even read."""
    text = dict(self.params["text"])
    *rest, last = text["layers"]
    broken = {k: v * jnp.nan if k in ("o", "gate", "up", "down", "mlp_norm")
              else v for k, v in last.items()}
    text["layers"] = [*rest, broken]
    kv = _prefix({**self.params, "text": text}, self.config,
                          self.prompts, self.features)
    for (k, v), (k2, v2) in zip(self.kv, kv):
      np.testing.assert_array_equal(k, k2)
      np.testing.assert_array_equal(v, v2)

  def test_padding_rows_are_empty(self):
    prompts = dataclasses.replace(
        self.prompts, lengths=self.prompts.lengths.at[3].set(0))
    done = _decode(self.params, self.config, self.sampling(), prompts,
                          self.kv, self.keys)
    np.testing.assert_array_equal(done.lengths[3], 0)
    np.testing.assert_array_equal(done.token_ids[3], 0)
    whole = self.roll(self.sampling())
    np.testing.assert_array_equal(done.token_ids[:3], whole.token_ids[:3])


if __name__ == "__main__":
  absltest.main()
