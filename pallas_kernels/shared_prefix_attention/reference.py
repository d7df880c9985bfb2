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
  r, p = q.shape[2], prefix_k.shape[3]
  place = jnp.arange(r)
  in_prefix = jnp.arange(p) < prefix_lengths[:, None]  # [B, P]
  in_suffix = place < suffix_lengths[..., None]  # [B, G, R]
  causal = place <= place[:, None]  # [R, R]
  out, logsumexp = _attend(
      _split_heads(q, prefix_k.shape[1]),
      ("bgrkjd,bkdp->bgrkjp", "bgrkjp,bkpd->bgrkjd",
       prefix_k, prefix_v, in_prefix[:, None, None, None, None, :]),
      ("bgrkjd,bgskd->bgrkjs", "bgrkjs,bgskd->bgrkjd",
       suffix_k, suffix_v, causal[:, None, None, :]))
  out, logsumexp = out.reshape(q.shape), logsumexp.reshape(q.shape[:-1])
  return (jnp.where(in_suffix[..., None, None], out, 0),
          jnp.where(in_suffix[..., None], logsumexp, 0))


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
  b, g = q.shape[:2]
  p, r = prefix_k.shape[3], suffix_k.shape[3]
  in_prefix = jnp.arange(p) < prefix_lengths[:, None]  # [B, P]
  in_suffix = jnp.arange(r) < suffix_lengths[..., None]  # [B, G, R]
  out, logsumexp = _attend(
      _split_heads(q, prefix_k.shape[1]),
      ("bgkjd,bkdp->bgkjp", "bgkjp,bkpd->bgkjd",
       prefix_k, prefix_v, in_prefix[:, None, None, None, :]),
      ("bgkjd,bgkdr->bgkjr", "bgkjr,bgkrd->bgkjd",
       suffix_k.reshape(b, g, *suffix_k.shape[1:]),
       suffix_v.reshape(b, g, *suffix_v.shape[1:]),
       in_suffix[:, :, None, None, :]))
  out, logsumexp = out.reshape(q.shape), logsumexp.reshape(q.shape[:-1])
  sees = ((prefix_lengths[:, None] > 0) | (suffix_lengths > 0))[..., None]
  return (jnp.where(sees[..., None], out, 0),
          jnp.where(sees, logsumexp, -jnp.inf))


def _split_heads(q, num_kv):
  """[..., H, D] -> [..., K, H / K, D]."""
  return q.reshape(*q.shape[:-2], num_kv, -1, q.shape[-1])


def _attend(q, *parts):
  """One softmax over the keys of all parts, and its log-sum-exp.

  A part is (einsum of scores, einsum of values, keys, values, mask).
  """
  scale = q.shape[-1] ** -0.5
  scores = []
  for equation, _, k, _, mask in parts:
    part = jnp.einsum(equation, q, k, preferred_element_type=jnp.float32)
    scores.append(jnp.where(mask, part * scale, _MASKED))
  joined = jnp.concatenate(scores, axis=-1)
  probs, out, end = jax.nn.softmax(joined, axis=-1), 0.0, 0
  for (_, equation, _, v, _), part in zip(parts, scores):
    start, end = end, end + part.shape[-1]
    out += jnp.einsum(equation, probs[..., start:end].astype(v.dtype), v,
                      preferred_element_type=jnp.float32)
  return out.astype(q.dtype), jax.nn.logsumexp(joined, axis=-1)
