"""Building blocks shared by the text decoder and the vision tower."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from legolm_jax import matmul
from legolm_jax.array import LegoArray
from rollplex_jax.models import compressed

# Finite, so that a row whose keys are all masked softmaxes to numbers.
MASKED = -1e30
# Up to so many rows, a CPU multiplies by [out, in] storage weights first.
_FEW_ROWS = 32


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
  """Root-mean-square norm over the last axis, computed in float32."""
  y = x.astype(jnp.float32)
  y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
  return scale * y.astype(x.dtype)


def dense_out_in(x: jax.Array, w: jax.Array | LegoArray, bias=None,
                 dtype=None, *, axis: str | None = None) -> jax.Array:
  """x [..., in] times w [out, in] -> [..., out]: column-parallel storage.

  `dtype` is that of the product; None keeps the operands'. `axis` is the logical
  axis of w's first dimension: the compiler knows how an array is split, a
  compressed matrix has to be told.
  """
  rows_first = functools.partial(matmul.matmul_transposed, dtype=dtype)
  if isinstance(w, LegoArray):
    y = compressed.product(x, w, axis, over=1, dtype=dtype)
  elif math.prod(x.shape[:-1]) > _FEW_ROWS:
    y = rows_first(x, w)
  else:
    y = jax.lax.platform_dependent(
        x, w, cpu=functools.partial(_weights_first, dtype=dtype),
        default=rows_first)
  return y if bias is None else y + bias


def _weights_first(x, w, dtype):
  """x times w [out, in] as w x^T, transposed.

  On a CPU the right operand of a product is packed with its output dimension
  innermost. For weights stored as [out, in] that is a transposition of them
  all, which a handful of rows do not pay for. Without the barrier XLA would
  fold the last transposition into the product and so swap the operands back.
  """
  rows = x.reshape(-1, x.shape[-1])
  y = jax.lax.dot_general(w, rows, (((1,), (1,)), ((), ())),
                          preferred_element_type=dtype)
  return jax.lax.optimization_barrier(y).T.reshape(*x.shape[:-1], -1)


def dense_in_out(x: jax.Array, w: jax.Array | LegoArray, bias=None, *,
                 axis: str | None = None) -> jax.Array:
  """x [..., in] times w [in, out] -> [..., out]: row-parallel storage.

  `axis` is as of `dense_out_in`.
  """
  y = (compressed.product(x, w, axis, over=0) if isinstance(w, LegoArray)
       else matmul.matmul(x, w))
  return y if bias is None else y + bias


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
  """How Llama 3.1 slows rotary frequencies down for long contexts.

  Attributes:
    factor: by which low frequencies are divided.
    low_freq_factor: turns in the original context below which they are low.
    high_freq_factor: turns above which frequencies stay; between the two, some
      of both.
    original_max_position_embeddings: the original context, in tokens.
  """

  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original_max_position_embeddings: int


def inverse_frequencies(theta: float, count: int,
                        scaling: RopeScaling | None = None) -> np.ndarray:
  """Rotary frequencies theta^(-i / count), float32 [count], on the host.

  Constants, because a compiled power is off by an ulp: at position 32,000
  that turns a cosine by 2e-3, and differently in every program.
  """
  exponents = np.arange(count, dtype=np.float32) / np.float32(count)
  powers = np.float64(theta) ** exponents.astype(np.float64)
  plain = np.float32(1) / powers.astype(np.float32)
  if scaling is None:
    return plain
  # The share of each frequency that stays.
  turns = np.float32(scaling.original_max_position_embeddings) / (
      np.float32(2 * math.pi) / plain)
  low, high = scaling.low_freq_factor, scaling.high_freq_factor
  keep = np.clip((turns - np.float32(low)) / np.float32(high - low), 0, 1)
  return (1 - keep) * plain / np.float32(scaling.factor) + keep * plain


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
  """Rotary embedding of x [..., heads, h] by angles cos, sin [..., h].

  Pairs are (i, i + h/2), the "rotate half" convention of Qwen and Llama.
  """
  half = x.shape[-1] // 2
  turned = jnp.concatenate([-x[..., half:], x[..., :half]], axis=-1)
  return x * cos[..., None, :] + turned * sin[..., None, :]


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask) -> jax.Array:
  """Grouped-query attention with float32 scores.

  Args:
    q: [..., T, H, h] queries.
    k: [..., S, K, h] keys; H must be a multiple of K.
    v: [..., S, K, h] values.
    mask: bool, broadcastable to [..., 1, 1, T, S]; True where a query sees a
      key. None lets every query see every key.

  Returns:
    [..., T, H * h] in q's dtype.
  """
  groups = q.shape[-2] // k.shape[-2]
  scale = q.shape[-1] ** -0.5
  q = (q * scale).reshape(*q.shape[:-2], k.shape[-2], groups, q.shape[-1])
  scores = jnp.einsum("...tkgh,...skh->...kgts", q, k,
                      preferred_element_type=jnp.float32)
  if mask is not None:
    scores = jnp.where(mask, scores, MASKED)
  probs = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
  out = jnp.einsum("...kgts,...skh->...tkgh", probs, v)
  return out.reshape(*out.shape[:-3], -1)


def swiglu(x, gate, up, down, gate_bias=None, up_bias=None, down_bias=None):
  """down(silu(gate(x)) * up(x)); gate, up [F, D] and down [F, D]."""
  hidden = jax.nn.silu(dense_out_in(x, gate, gate_bias, axis="mlp"))
  hidden = hidden * dense_out_in(x, up, up_bias, axis="mlp")
  return dense_in_out(hidden, down, down_bias, axis="mlp")


def attend_causally(q: jax.Array, k: jax.Array, v: jax.Array, *,
                    block: int = 256, window: int | None = None) -> jax.Array:
  """Causal `attend` over whole sequences, [B, T, ...] each.

  With a `window`, a query sees only so many keys, its own the last of them.

  Queries go block by block, each against the keys up to its end only: half of
  a square of scores is never formed. A group's queries are rows of one product
  with their key head, in the layout of `attend_part`: on a CPU that takes half
  the time of `attend`.
  """
  b, t, num_heads, h = q.shape
  num_kv = k.shape[2]
  groups = num_heads // num_kv
  q = (q * h ** -0.5).reshape(b, t, num_kv, groups, h)
  q = q.transpose(0, 2, 3, 1, 4)
  k, v = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)
  out = []
  for start in range(0, t, block):
    end = min(start + block, t)
    first = 0 if window is None else max(0, start - window + 1)
    mask = jnp.tile(causal_mask(end, window)[start:, first:], (groups, 1))
    part = attend_part(
        q[:, :, :, start:end].reshape(b, num_kv, -1, h), k[..., first:end],
        v[:, :, first:end], mask)
    out.append(join_parts(part).astype(v.dtype).reshape(
        b, num_kv, groups, end - start, h))
  out = jnp.concatenate(out, axis=3).transpose(0, 3, 1, 2, 4)
  return out.reshape(b, t, num_heads * h)


def causal_mask(length: int, window: int | None = None) -> jax.Array:
  """[T, T]: query t sees keys up to t. Enough for right-padded batches.

  With a `window`, only the last so many of them.
  """
  everything = jnp.ones((length, length), bool)
  if window is None:
    return jnp.tril(everything)
  return jnp.tril(everything) & jnp.triu(everything, 1 - window)


def attend_part(q: jax.Array, k: jax.Array, v: jax.Array, mask):
  """Attention to some of the keys, to be joined with attention to the others.

  Args:
    q: [N, K, q, h] scaled queries.
    k: [N, K, h, S] keys.
    v: [N, K, S, h] values.
    mask: bool, broadcastable to [N, K, q, S].

  Returns:
    float32: the largest score [N, K, q, 1], the sum of exp(score - largest)
    [N, K, q, 1] and the values weighted with those [N, K, q, h].
  """
  scores = jnp.matmul(q, k, preferred_element_type=jnp.float32)
  scores = jnp.where(mask, scores, MASKED)
  top = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
  weights = jnp.exp(scores - top)
  values = jnp.matmul(weights.astype(v.dtype), v,
                      preferred_element_type=jnp.float32)
  return top, weights.sum(axis=-1, keepdims=True), values


def join_parts(*parts) -> jax.Array:
  """One softmax over the keys of several `attend_part`s; float32 values.

  At least one part must hold a key that its query sees; a part without any,
  such as an empty prefix, then gets no weight.
  """
  top = functools.reduce(jnp.maximum, (part[0] for part in parts))
  shares = [jnp.exp(part[0] - top) for part in parts]
  total = sum(part[1] * share for part, share in zip(parts, shares))
  return sum(part[2] * share for part, share in zip(parts, shares)) / total


def finish_backward(f):
  """f, all of whose gradients are made before any of them is read.

  Within a backward pass nothing waits for the gradients of weights and of a
  prefix's keys and values. Left to itself a compiler may put off those of all
  layers to the end, and keep alive what they are made of, attention scores
  among it.
  """

  def run(*args):
    return f(*_together(args))

  return run


@jax.custom_vjp
def _together(args):
  return args


_together.defvjp(
    lambda args: (args, None),
    lambda _, grads: (jax.lax.optimization_barrier(grads),))
