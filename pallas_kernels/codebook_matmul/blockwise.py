"""The products in plain jnp, decoding a block of a matrix at a time.

What a processor without these kernels runs. A loop decodes the codes of some
bands that have one place in their words, few enough for a cache, and multiplies
by them. So no dense matrix exists, and none can be made early: compilers would
decode a matrix that a loop reads before the loop, and those of all layers at
once, since nothing has to come before. One place at a time, because nothing is
then interleaved, and the decoding vectorizes.
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import math

import jax
import jax.numpy as jnp

from pallas_kernels.codebook_matmul import reference
from pallas_kernels.codebook_matmul.packed import BAND, WORD, Packed

# Weights of a block: some 2 MB where they are float32.
_BLOCK = 1 << 19


def matmul(x: jax.Array, w: Packed) -> jax.Array:
  """[m, in] to float32 [m, out]; weights are rounded to the dtype of `x`."""
  size = block_outputs(w)
  by_place = w.split_words(x)
  product = "mk,ko->mo" if w.is_words_first else "mk,ok->mo"

  def put(i, parts):
    terms = (_product(product, *pair)
             for pair in zip(by_place, _places(_block(w, i, size), x.dtype)))
    return parts.at[i].set(sum(terms))

  parts = jax.lax.fori_loop(
      0, w.out // size, put, _buffer(x, (w.out // size, x.shape[0], size)))
  return parts.swapaxes(0, 1).reshape(x.shape[0], w.out)


def matmul_transposed(y: jax.Array, w: Packed) -> jax.Array:
  """[m, out] to float32 [m, in]; weights are rounded to the dtype of `y`."""
  size = block_outputs(w)
  product = "mo,ko->mk" if w.is_words_first else "mo,ok->mk"

  def add(i, total):
    part = jax.lax.dynamic_slice_in_dim(y, i * size, size, axis=1)
    found = jnp.stack([_product(product, part, values) for values in
                       _places(_block(w, i, size), y.dtype)])
    return jnp.where(i == 0, found, total + found)

  found = jax.lax.fori_loop(
      0, w.out // size, add, _buffer(y, (WORD, y.shape[0], w.words)))
  return w.cut(found.transpose(1, 2, 0).reshape(y.shape[0], -1))


def block_outputs(w: Packed) -> int:
  """How many outputs to decode at a time: whole bands, or a whole section."""
  if w.section_out % BAND:
    return w.section_out
  bands = w.section_out // BAND
  most = max(1, min(bands, _BLOCK // (BAND * WORD * w.words)))
  return BAND * next(n for n in range(most, 0, -1) if bands % n == 0)


def _block(w: Packed, i: jax.Array, size: int) -> Packed:
  """The i-th `size` outputs: a matrix of its own."""
  axis = 1 if w.is_words_first else 0

  def cut(a, at, n, axis=axis):
    return None if a is None else jax.lax.dynamic_slice_in_dim(a, at, n, axis)

  bands = math.ceil(size / BAND)
  outliers, shards = w.outliers, w.shards[0]
  if shards > 1:
    outliers = cut(outliers, i * size // (w.out // shards), 1)
  return dataclasses.replace(
      w, planes=tuple(cut(plane, i * size, size) for plane in w.planes),
      scale=cut(w.scale, i * size, size, 0), outliers=outliers,
      offsets=cut(w.offsets, i * bands, bands), section_out=size)


def _places(w: Packed, dtype) -> Iterator[jax.Array]:
  """The weights of each place in the words, [out, words] as `w` is stored."""
  codes = [_codes(w, place) for place in range(WORD)]
  stored = lambda a: a.T if w.is_words_first else a
  if w.outliers is not None:
    escaped = [code == w.num_codes - 1 for code in codes]
    bits = sum(e.astype(jnp.uint32) << place for place, e in enumerate(escaped))
    counts = jax.lax.population_count(bits)
    first = stored(reference.first_of_words(w.out_first(), stored(counts)))
    outliers = w.outliers.swapaxes(0, 1) if w.is_words_first else w.outliers
    outliers = outliers.reshape(-1)
  for place, code in enumerate(codes):
    values = w.codebook.at[code].get(mode="clip")
    if w.scale is not None:
      values *= stored(w.scale.astype(jnp.float32)[:, None])
    if w.outliers is not None:
      before = jax.lax.population_count(bits & jnp.uint32((1 << place) - 1))
      found = outliers.at[first + before.astype(jnp.int32)].get(mode="clip")
      values = jnp.where(escaped[place], found.astype(jnp.float32), values)
    yield values.astype(dtype)


def _codes(w: Packed, place: int) -> jax.Array:
  """int32 codes of one place in the words, [out, words] as `w` is stored."""
  found, shift = 0, 0
  for plane, width in zip(w.planes, w.widths):
    part = plane >> plane.dtype.type(width * place)
    part &= plane.dtype.type((1 << width) - 1)
    found |= part.astype(jnp.int32) << shift
    shift += width
  return found


def _product(subscripts: str, x: jax.Array, values: jax.Array) -> jax.Array:
  return jnp.einsum(subscripts, x, values,
                    precision=jax.lax.Precision.HIGHEST,
                    preferred_element_type=jnp.float32)


def _buffer(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """float32, to be written to: of any value, that isn't known before x is.

  Zeros for the products of all layers would be made at once, too.
  """
  return jnp.broadcast_to(x[0, 0].astype(jnp.float32), shape)
