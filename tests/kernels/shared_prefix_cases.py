"""Random calls of shared-prefix attention, and what they give in float64."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from pallas_kernels.shared_prefix_attention import tuning
from pallas_kernels.shared_prefix_attention.shapes import Shape

# What stands past a length: a number that shows wherever it is read.
_POISON = 1e3


@dataclasses.dataclass(frozen=True)
class Case:
  """Arrays of one call.

  Attributes:
    shape: their sizes.
    floats: q, prefix_k, prefix_v, suffix_k and suffix_v.
    prefix_lengths: int32 [B].
    suffix_lengths: int32 [B, G].
    grad: the gradient of the output, or None for decode.
  """

  shape: Shape
  floats: tuple
  prefix_lengths: np.ndarray
  suffix_lengths: np.ndarray
  grad: jnp.ndarray | None = None

  @property
  def arrays(self):
    """The call's arguments."""
    return (*self.floats, self.prefix_lengths, self.suffix_lengths)

  @property
  def row_mask(self) -> np.ndarray:
    """bool [B, G, R, 1, 1]: within the suffixes."""
    return (np.arange(self.shape.suffix)
            < self.suffix_lengths[..., None])[..., None, None]

  @property
  def prefix_mask(self) -> np.ndarray:
    """bool [B, 1, 1, P]: within the prefixes."""
    return (np.arange(self.shape.prefix)
            < self.prefix_lengths[:, None])[:, None, None, :]


def random_shape(rng: np.random.Generator) -> Shape:
  """Small and odd: no size is a multiple of a tile, but by chance."""
  kv_heads = int(rng.choice([1, 2, 3]))
  return Shape(
      prompts=int(rng.integers(1, 4)), samples=int(rng.integers(1, 6)),
      suffix=int(rng.choice([1, 2, 3, 5, 9, 17, 31])),
      prefix=int(rng.choice([1, 2, 7, 15, 16, 17, 40, 75])),
      heads=kv_heads * int(rng.choice([1, 2, 3, 5, 7, 8])), kv_heads=kv_heads,
      head_dim=int(rng.choice([2, 6, 8, 16, 20, 64, 80])))


def random_tuning(rng: np.random.Generator) -> tuning.Tuning:
  """Small tiles of all kinds, so that small arrays take several."""
  size = lambda: int(rng.choice([16, 32]))
  tile = lambda: tuning.Tile(rows=size(), keys=size(), num_warps=4,
                             num_stages=2)
  return tuning.Tuning(
      forward=tile(), grad_q=tile(), grad_prefix=tile(), grad_suffix=tile(),
      decode=tuning.DecodeTile(
          rows=size(), keys=16, num_warps=4, num_stages=2,
          programs=int(rng.choice([1, 8, 64])), split=size(),
          join_rows=int(rng.choice([1, 4]))))


def random_case(rng: np.random.Generator, shape: Shape, dtype=jnp.float32, *,
                decode: bool = False, prefix_length=None,
                suffix_length=None) -> Case:
  """Numbers and lengths, among these 0 and the largest, unless given."""
  s = shape
  lengths = lambda most, *size: np.where(
      rng.random(size) < 0.3, rng.choice([0, 1, most], size),
      rng.integers(0, most + 1, size)).astype(np.int32)
  prefix_lengths = lengths(s.prefix, s.prompts)
  suffix_lengths = lengths(s.suffix, s.prompts, s.samples)
  if prefix_length is not None:
    prefix_lengths[:] = prefix_length
  if suffix_length is not None:
    suffix_lengths[:] = suffix_length
  past_prefix = np.arange(s.prefix) >= prefix_lengths[:, None]  # [B, P]
  past_suffix = np.arange(s.suffix) >= suffix_lengths[..., None]  # [B, G, R]

  def draw(size, past=None):
    x = rng.normal(size=size)
    if past is not None:
      x = np.where(past, _POISON, x)
    return jnp.asarray(x, dtype)

  samples = (s.prompts, s.samples)
  prefix = (
      draw((s.prompts, s.kv_heads, s.head_dim, s.prefix),
           past_prefix[:, None, None, :]),
      draw((s.prompts, s.kv_heads, s.prefix, s.head_dim),
           past_prefix[:, None, :, None]))
  if decode:
    past = past_suffix.reshape(-1, s.suffix)
    return Case(s, (
        draw((*samples, s.heads, s.head_dim)), *prefix,
        draw((len(past), s.kv_heads, s.head_dim, s.suffix),
             past[:, None, None, :]),
        draw((len(past), s.kv_heads, s.suffix, s.head_dim),
             past[:, None, :, None])), prefix_lengths, suffix_lengths)
  past = past_suffix[..., None, None]
  tokens = (*samples, s.suffix)
  rows = (*tokens, s.heads, s.head_dim)
  keys = (*tokens, s.kv_heads, s.head_dim)
  return Case(s, (draw(rows, past), *prefix, draw(keys, past),
                  draw(keys, past)), prefix_lengths, suffix_lengths,
              draw(rows, past))


def attention_float64(case: Case):
  """The output, and the gradients of the five floats; loops, one at a time."""
  q, prefix_k, prefix_v, suffix_k, suffix_v = (
      np.asarray(x, np.float64) for x in case.floats)
  grad = np.asarray(case.grad, np.float64)
  out = np.zeros_like(q)
  grads = [np.zeros_like(x) for x in (q, prefix_k, prefix_v, suffix_k,
                                      suffix_v)]
  s, scale = case.shape, case.shape.head_dim ** -0.5
  for b, g, r, h in np.ndindex(s.prompts, s.samples, s.suffix, s.heads):
    if r >= case.suffix_lengths[b, g]:
      continue
    n, kv = case.prefix_lengths[b], h // s.group
    k = np.concatenate([prefix_k[b, kv, :, :n].T, suffix_k[b, g, :r + 1, kv]])
    v = np.concatenate([prefix_v[b, kv, :n], suffix_v[b, g, :r + 1, kv]])
    probs = _softmax(k @ q[b, g, r, h] * scale)
    out[b, g, r, h] = probs @ v
    grad_v = np.outer(probs, grad[b, g, r, h])
    grad_probs = v @ grad[b, g, r, h]
    grad_scores = probs * (grad_probs - probs @ grad_probs) * scale
    grad_k = np.outer(grad_scores, q[b, g, r, h])
    grads[0][b, g, r, h] = grad_scores @ k
    grads[1][b, kv, :, :n] += grad_k[:n].T
    grads[2][b, kv, :n] += grad_v[:n]
    grads[3][b, g, :r + 1, kv] += grad_k[n:]
    grads[4][b, g, :r + 1, kv] += grad_v[n:]
  return out, grads


def decode_float64(case: Case):
  """The output and the log-sum-exp of a decode step."""
  q, prefix_k, prefix_v, suffix_k, suffix_v = (
      np.asarray(x, np.float64) for x in case.floats)
  s = case.shape
  out = np.zeros_like(q)
  logsumexp = np.full(q.shape[:-1], -np.inf)
  for b, g, h in np.ndindex(s.prompts, s.samples, s.heads):
    n, m = case.prefix_lengths[b], case.suffix_lengths[b, g]
    at, kv = b * s.samples + g, h // s.group
    if n + m == 0:
      continue
    k = np.concatenate([prefix_k[b, kv, :, :n].T, suffix_k[at, kv, :, :m].T])
    v = np.concatenate([prefix_v[b, kv, :n], suffix_v[at, kv, :m]])
    scores = k @ q[b, g, h] * s.head_dim ** -0.5
    out[b, g, h] = _softmax(scores) @ v
    logsumexp[b, g, h] = np.log(np.sum(np.exp(scores - scores.max()))
                                ) + scores.max()
  return out, logsumexp


def _softmax(scores):
  weights = np.exp(scores - scores.max())
  return weights / weights.sum()


def relative_error(found, expected, scale: float = 0.0) -> float:
  """||found - expected|| / ||expected||.

  Where `expected` is zero, as gradients are of queries that see one key, it is
  relative to `scale` in place of it, or inf without one.
  """
  found = np.asarray(found, np.float64)
  norm = np.linalg.norm(expected) or scale
  distance = np.linalg.norm(found - expected)
  return float(distance / norm) if norm else float(np.inf if distance else 0)
