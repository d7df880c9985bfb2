"""Random inputs of the kernels, of any size, made on the host."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from legolm_jax import encoding, packing
from legolm_jax.array import LegoArray, Storage
from pallas_kernels.shared_prefix_attention.shapes import Shape

# What stands past a length: a number that shows wherever it is read.
_PAST = 1e3


def matrix(rng: np.random.Generator, out: int, inputs: int, num_codes: int,
           storage: Storage, *, has_outliers: bool = True,
           is_scaled: bool = True) -> LegoArray:
  """A compressed matrix of random codes, on the default device.

  Args:
    rng: draws all that is random.
    out, inputs: dimensions.
    num_codes: K; one of them is the escape if there are outliers, which are
      then every K-th weight.
    storage: of the matrix.
    has_outliers: whether it has.
    is_scaled: whether each output has a scale.
  """
  layout, bits = packing.Layout.of(out, inputs), packing.code_bits(num_codes)
  codes = rng.integers(0, num_codes, (out, inputs), np.uint8)
  codebook = np.sort(rng.standard_normal(num_codes)).astype(np.float32)
  outliers = offsets = None
  if has_outliers:
    codebook[-1] = 0
    flat = np.flatnonzero(codes == num_codes - 1)
    values = (5 * rng.standard_normal(flat.size)).astype(ml_dtypes.bfloat16)
    ordered, offsets = packing.order_outliers(layout, flat, values)
    outliers = encoding.at_least_one(ordered)[None, None]
  scale = None
  if is_scaled:
    scale = rng.uniform(0.5, 2, out).astype(ml_dtypes.bfloat16)
  array = LegoArray(
      planes=tuple(packing.pack(layout.fill(codes), bits)), codebook=codebook,
      scale=scale, outliers=outliers, offsets=offsets,
      section_out=layout.section_out, section_inputs=layout.section_inputs,
      num_codes=num_codes, dtype=np.dtype(ml_dtypes.bfloat16),
      storage=Storage.OUT_IN)
  if storage is Storage.IN_OUT:
    array = encoding.contiguous(array.T)
  return jax.device_put(array)


def normal(rng: np.random.Generator, shape: Sequence[int], dtype) -> jax.Array:
  """Normal numbers, on the default device."""
  return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)


def copies(tree, count: int) -> list:
  """The tree, and copies of it elsewhere in the device's memory."""
  return [tree, *(jax.tree.map(lambda a: jnp.array(a, copy=True), tree)
                  for _ in range(count - 1))]


@dataclasses.dataclass(frozen=True)
class AttentionCase:
  """Arguments of a call of the attention.

  Attributes:
    floats: q, prefix_k, prefix_v, suffix_k and suffix_v.
    lengths: of the prefixes and of the suffixes.
    grad: of the output; None for decode.
  """

  floats: tuple[jax.Array, ...]
  lengths: tuple[jax.Array, jax.Array]
  grad: jax.Array | None = None


def attention(rng: np.random.Generator, s: Shape, dtype, *, is_decode: bool,
              is_ragged: bool = True) -> AttentionCase:
  """A random call; without ragged lengths all are full.

  Where they are ragged, what lies past a length is a large number.
  """
  lengths = (np.full(s.prompts, s.prefix), np.full(
      (s.prompts, s.samples), s.suffix))
  if is_ragged:
    lengths = tuple(rng.integers(1, n + 1) for n in lengths)
  samples = (s.prompts, s.samples)
  in_prefix = np.arange(s.prefix) < lengths[0][:, None]
  in_suffix = np.arange(s.suffix) < lengths[1][..., None]

  def draw(shape, inside=None):
    x = rng.standard_normal(shape, np.float32)
    if is_ragged and inside is not None:
      x = np.where(inside, x, np.float32(_PAST))
    return jnp.asarray(x, dtype)

  prefix = (
      draw((s.prompts, s.kv_heads, s.head_dim, s.prefix),
           in_prefix[:, None, None, :]),
      draw((s.prompts, s.kv_heads, s.prefix, s.head_dim),
           in_prefix[:, None, :, None]))
  lengths = tuple(jnp.asarray(n, jnp.int32) for n in lengths)
  if is_decode:
    inside = in_suffix.reshape(-1, s.suffix)
    return AttentionCase((
        draw((*samples, s.heads, s.head_dim)), *prefix,
        draw((len(inside), s.kv_heads, s.head_dim, s.suffix),
             inside[:, None, None, :]),
        draw((len(inside), s.kv_heads, s.suffix, s.head_dim),
             inside[:, None, :, None])), lengths)
  inside = in_suffix[..., None, None]
  rows = (*samples, s.suffix, s.heads, s.head_dim)
  keys = (*samples, s.suffix, s.kv_heads, s.head_dim)
  return AttentionCase(
      (draw(rows, inside), *prefix, draw(keys, inside), draw(keys, inside)),
      lengths, draw(rows, inside))
