"""The products in plain jnp, decoding a block of a matrix at a time.

What a processor without these kernels runs. A loop decodes the codes of some
bands that have one place in their words, few enough for a cache, and multiplies
by them; for many rows, whose product takes longer than the decoding, it decodes
all and one product follows. So at most one matrix is dense, and none too early:
compilers would decode a matrix that a loop reads before the loop, and those of
all layers at once, since nothing has to come before. One place at a time,
because nothing is then interleaved, and the decoding vectorizes.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from pallas_kernels.codebook_matmul import reference
from pallas_kernels.codebook_matmul.packed import BAND, WORD, Packed

# Weights of a block: some 2 MB where they are float32.
_BLOCK = 1 << 19
# From so many rows on, all is decoded first: products in a loop use fewer cores.
_MANY_ROWS = 64


def matmul(x: jax.Array, w: Packed) -> jax.Array:
  """[m, in] to float32 [m, out]; weights are rounded to the dtype of `x`."""
  size = block_outputs(w)
  by_place = w.split_words(x)
  product = "mk,ko->mo" if w.is_words_first else "mk,ok->mo"
  if x.shape[0] >= _MANY_ROWS:
    return _product(product, by_place.swapaxes(0, 1).reshape(x.shape[0], -1),
                    _decoded(w, size, x))

  def put(i, parts):
    block = _Block.of(w, i, size)

    def add(place, total):
      term = _product(product, by_place[place], block.weights(place, x.dtype))
      return jnp.where(place == 0, term, total + term)

    return parts.at[i].set(jax.lax.fori_loop(0, WORD, add, parts[i]))

  parts = jax.lax.fori_loop(
      0, w.out // size, put, _buffer(x, (w.out // size, x.shape[0], size)))
  return parts.swapaxes(0, 1).reshape(x.shape[0], w.out)


def matmul_transposed(y: jax.Array, w: Packed) -> jax.Array:
  """[m, out] to float32 [m, in]; weights are rounded to the dtype of `y`."""
  size = block_outputs(w)
  product = "mo,ko->mk" if w.is_words_first else "mo,ok->mk"
  if y.shape[0] >= _MANY_ROWS:
    found = _product(product, y, _decoded(w, size, y))
    found = found.reshape(y.shape[0], WORD, w.words).swapaxes(1, 2)
    return w.cut(found.reshape(y.shape[0], -1))

  def add(i, total):
    block = _Block.of(w, i, size)
    part = jax.lax.dynamic_slice_in_dim(y, i * size, size, axis=1)

    def put(place, total):
      term = _product(product, part, block.weights(place, y.dtype))
      return total.at[place].set(jnp.where(i == 0, term, total[place] + term))

    return jax.lax.fori_loop(0, WORD, put, total)

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


@dataclasses.dataclass(frozen=True)
class _Block:
  """Some of a matrix's outputs.

  Attributes:
    part: these, as a matrix of its own.
    escapes: uint32, each word's escapes as bits; None without any.
    first: int32, which of all outliers is the first of each word; or None.
  """

  part: Packed
  escapes: jax.Array | None
  first: jax.Array | None

  @classmethod
  def of(cls, w: Packed, i: jax.Array, size: int) -> _Block:
    """The i-th `size` outputs."""
    part = _cut(w, i, size)
    if part.outliers is None:
      return cls(part, None, None)
    escapes = reference.escapes(part, reference.codes(part))
    first = reference.first_of_words(
        part.out_first(), jax.lax.population_count(escapes))
    return cls(part, _stored(w, escapes), _stored(w, first))

  def weights(self, place: jax.Array, dtype) -> jax.Array:
    """Those of one place in the words, [out, words] as stored."""
    w = self.part
    codes = _codes(w, place)
    values = w.codebook.at[codes].get(mode="clip")
    if w.scale is not None:
      values *= _stored(w, w.scale.astype(jnp.float32)[:, None])
    if w.outliers is not None:
      outliers = w.out_first().outliers.reshape(-1)
      before = self.escapes & ((jnp.uint32(1) << place.astype(jnp.uint32))
                               - jnp.uint32(1))
      rank = self.first + jax.lax.population_count(before).astype(jnp.int32)
      values = jnp.where(
          codes == w.num_codes - 1,
          outliers.at[rank].get(mode="clip").astype(jnp.float32), values)
    return values.astype(dtype)


def _decoded(w: Packed, size: int, x: jax.Array) -> jax.Array:
  """All weights by their place, in the dtype of `x` and not before it is there.

  [out, 8 * words], or as `w` is stored.
  """
  count = w.out // size
  if w.is_words_first:
    shape = WORD, w.words, count, size
    at = lambda i, place: (place, slice(None), i)
  else:
    shape = count, size, WORD, w.words
    at = lambda i, place: (i, slice(None), place)

  def put(i, values):
    block = _Block.of(w, i, size)
    return jax.lax.fori_loop(0, WORD, lambda place, values: values.at[
        at(i, place)].set(block.weights(place, x.dtype)), values)

  values = jax.lax.fori_loop(
      0, count, put, _buffer(x, shape).astype(x.dtype))
  return (values.reshape(-1, w.out) if w.is_words_first
          else values.reshape(w.out, -1))


def _cut(w: Packed, i: jax.Array, size: int) -> Packed:
  """The i-th `size` outputs, as a matrix of its own."""
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


def _stored(w: Packed, a: jax.Array) -> jax.Array:
  """[out, ...] as `w` is stored."""
  return a.T if w.is_words_first else a


def _codes(w: Packed, place: jax.Array) -> jax.Array:
  """int32 codes of one place in the words, [out, words] as `w` is stored."""
  found, shift = 0, 0
  for plane, width in zip(w.planes, w.widths):
    part = plane >> (width * place).astype(plane.dtype)
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
