"""The products in plain jnp, decoding some outputs of a matrix at a time.

What a processor without these kernels runs. A loop decodes a block of bands,
small enough for a cache, and multiplies by it: no dense matrix exists, and none
can be made early, which is what compilers do to a matrix that a loop reads
(they decode it once, before the loop, and keep it) and to those of all layers
(they decode them at once, since nothing has to come before).
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from pallas_kernels.codebook_matmul import reference
from pallas_kernels.codebook_matmul.packed import BAND, Packed

# Weights of a block: some 2 MB where they are float32.
_BLOCK = 1 << 19


def matmul(x: jax.Array, w: Packed) -> jax.Array:
  """[m, in] to float32 [m, out]; weights are rounded to the dtype of `x`."""
  size = block_outputs(w)
  if size == w.out:
    return reference.matmul(x, w)
  parts = jax.lax.map(lambda i: reference.matmul(x, _block(w, i, size)),
                      jnp.arange(w.out // size))
  return parts.swapaxes(0, 1).reshape(x.shape[0], w.out)


def matmul_transposed(y: jax.Array, w: Packed) -> jax.Array:
  """[m, out] to float32 [m, in]; weights are rounded to the dtype of `y`."""
  size = block_outputs(w)
  if size == w.out:
    return reference.matmul_transposed(y, w)

  def add(i, total):
    part = jax.lax.dynamic_slice_in_dim(y, i * size, size, axis=1)
    return total + reference.matmul_transposed(part, _block(w, i, size))

  zero = jnp.zeros((y.shape[0], w.inputs), jnp.float32)
  return jax.lax.fori_loop(0, w.out // size, add, zero)


def block_outputs(w: Packed) -> int:
  """How many outputs to decode at a time: whole bands, or a whole section."""
  if w.section_out % BAND:
    return w.section_out
  bands = w.section_out // BAND
  most = max(1, min(bands, _BLOCK // (BAND * w.words * 8)))
  return BAND * next(n for n in range(most, 0, -1) if bands % n == 0)


def _block(w: Packed, i: jax.Array, size: int) -> Packed:
  """The i-th `size` outputs: a matrix of its own."""
  axis = 1 if w.is_words_first else 0
  cut = lambda a, at, n, axis=axis: None if a is None else (
      jax.lax.dynamic_slice_in_dim(a, at, n, axis))
  bands = math.ceil(size / BAND)
  outliers, shards = w.outliers, w.shards[0]
  if shards > 1:
    outliers = cut(outliers, i * size // (w.out // shards), 1)
  return dataclasses.replace(
      w, planes=tuple(cut(plane, i * size, size) for plane in w.planes),
      scale=cut(w.scale, i * size, size, 0), outliers=outliers,
      offsets=cut(w.offsets, i * bands, bands), section_out=size)
