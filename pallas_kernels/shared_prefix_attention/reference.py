"""Shared-prefix attention in plain jnp: slow, and the truth.

Letters: B prompts, G samples of each, R suffix tokens of each sample, P prefix
tokens, H query heads, K heads of keys and values, D the size of a head. Query
head h reads head h // (H / K) of keys and values.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

# Finite, so that rows without any key softmax to numbers.
_MASKED = -1e30


def attention(q: jax.Array, prefix_k: jax.Array, prefix_v: jax.Array,
              suffix_k: jax.Array, suffix_v: jax.Array,
              prefix_lengths: jax.Array, suffix_lengths: jax.Array):
  """As `api.shared_prefix_attention`, with the log-sum-exp of the scores.

  Args:
    q: [B, G, R, H, D] queries.
    prefix_k: [B, K, D, P] keys of the prompts.
    prefix_v: [B, K, P, D] values of the prompts.
    suffix_k: [B, G, R, K, D] keys of the samples.
    suffix_v: [B, G, R, K, D] values of the samples.
    prefix_lengths: int32 [B].
    suffix_lengths: int32 [B, G].

  Returns:
    [B, G, R, H, D] in q's dtype, and float32 [B, G, R, H]. Rows past a suffix's
    length are zeros in both.
  """
  b, g, r, h, d = q.shape
  k, p = prefix_k.shape[1], prefix_k.shape[3]
  in_prefix = jnp.arange(p) < prefix_lengths[:, None]  # [B, P]
  in_suffix = jnp.arange(r) < suffix_lengths[..., None]  # [B, G, R]
  causal = jnp.tril(jnp.ones((r, r), bool))
  split = q.reshape(b, g, r, k, h // k, d)
  out, logsumexp = _attend(
      split.transpose(0, 1, 3, 2, 4, 5).reshape(b, g, k, -1, d),
      prefix_k, prefix_v, in_prefix[:, None, None, None, :],
      suffix_k.transpose(0, 1, 3, 4, 2), suffix_v.transpose(0, 1, 3, 2, 4),
      jnp.repeat(causal, h // k, axis=0))
  out = out.reshape(b, g, k, r, -1, d).swapaxes(2, 3).reshape(q.shape)
  logsumexp = logsumexp.reshape(b, g, k, r, -1).swapaxes(2, 3)
  return (jnp.where(in_suffix[..., None, None], out, 0),
          jnp.where(in_suffix[..., None], logsumexp.reshape(b, g, r, h), 0))


def decode(q: jax.Array, prefix_k: jax.Array, prefix_v: jax.Array,
           suffix_k: jax.Array, suffix_v: jax.Array,
           prefix_lengths: jax.Array, suffix_lengths: jax.Array):
  """As `api.shared_prefix_decode`.

  Args:
    q: [B, G, H, D], one query per sample.
    prefix_k: [B, K, D, P] keys of the prompts.
    prefix_v: [B, K, P, D] values of the prompts.
    suffix_k: [B * G, K, D, R] keys of the samples, those of a prompt in a row.
    suffix_v: [B * G, K, R, D] values of the samples.
    prefix_lengths: int32 [B].
    suffix_lengths: int32 [B, G], how many entries of a suffix are seen.

  Returns:
    [B, G, H, D] in q's dtype, and float32 [B, G, H]: the log-sum-exp of the
    scores. Where a query sees no key, zeros, and -inf.
  """
  b, g, h, d = q.shape
  k, p, r = prefix_k.shape[1], prefix_k.shape[3], suffix_k.shape[3]
  in_prefix = jnp.arange(p) < prefix_lengths[:, None]  # [B, P]
  in_suffix = jnp.arange(r) < suffix_lengths[..., None]  # [B, G, R]
  out, logsumexp = _attend(
      q.reshape(b, g, k, h // k, d),
      prefix_k, prefix_v, in_prefix[:, None, None, None, :],
      suffix_k.reshape(b, g, k, d, r), suffix_v.reshape(b, g, k, r, d),
      in_suffix[:, :, None, None, :])
  out, logsumexp = out.reshape(q.shape), logsumexp.reshape(q.shape[:-1])
  sees = ((prefix_lengths[:, None] > 0) | (suffix_lengths > 0))[..., None]
  return (jnp.where(sees[..., None], out, 0),
          jnp.where(sees, logsumexp, -jnp.inf))


def _attend(q, prefix_k, prefix_v, prefix_mask, suffix_k, suffix_v,
            suffix_mask):
  """One softmax over the keys of prefix and suffix, and its log-sum-exp.

  Args:
    q: [B, G, K, n, D], n queries of a sample and a head of keys and values.
    prefix_k: [B, K, D, P].
    prefix_v: [B, K, P, D].
    prefix_mask: bool, broadcastable to [B, G, K, n, P].
    suffix_k: [B, G, K, D, R].
    suffix_v: [B, G, K, R, D].
    suffix_mask: bool, broadcastable to [B, G, K, n, R].

  Returns:
    [B, G, K, n, D] in q's dtype, and float32 [B, G, K, n].
  """
  p = prefix_k.shape[-1]
  scale = q.shape[-1] ** -0.5
  scores = jnp.concatenate([
      jnp.where(prefix_mask, _by_group(q, prefix_k) * scale, _MASKED),
      jnp.where(suffix_mask, _product(q, suffix_k) * scale, _MASKED)], axis=-1)
  probs = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
  out = _by_group(probs[..., :p], prefix_v) + _product(probs[..., p:], suffix_v)
  return out.astype(q.dtype), jax.nn.logsumexp(scores, axis=-1)


def _product(x, y):
  return jnp.matmul(x, y, preferred_element_type=jnp.float32)


def _by_group(x, y):
  """x [B, G, K, n, a] times y [B, K, a, c]: a group's rows in one product."""
  b, g, k, n, a = x.shape
  out = _product(x.swapaxes(1, 2).reshape(b, k, g * n, a), y)
  return out.reshape(b, k, g, n, -1).swapaxes(1, 2)
