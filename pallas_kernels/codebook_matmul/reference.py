"""Products with compressed matrices in plain jnp: what the kernels must equal."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.codebook_matmul.packed import BAND, TILE_WORDS, WORD, Packed


def codes(w: Packed) -> jax.Array:
  """uint8 [out, words, 8]."""
  w = w.out_first()
  found, shift = None, 0
  for plane, width in zip(w.planes, w.widths):
    places = jnp.arange(WORD, dtype=plane.dtype) * plane.dtype.type(width)
    part = (plane[..., None] >> places) & plane.dtype.type((1 << width) - 1)
    part = part.astype(jnp.uint8) << jnp.uint8(shift)
    found = part if found is None else found | part
    shift += width
  return found


def lookup(w: Packed) -> jax.Array:
  """The dense matrix, float32, of `w.shape`."""
  if w.is_words_first:
    return lookup(w.out_first()).T
  found = codes(w)
  values = w.codebook.at[found].get(mode="clip")
  if w.scale is not None:
    values *= w.scale.astype(jnp.float32)[:, None, None]
  if w.outliers is not None:
    outliers = w.outliers.reshape(-1).at[_outlier_of_each(w, found)].get(
        mode="clip")
    values = jnp.where(found == jnp.uint8(w.num_codes - 1),
                       outliers.astype(jnp.float32), values)
  by_section = values.reshape(w.out, w.in_sections, -1)
  return by_section[..., :w.section_inputs].reshape(w.out, w.inputs)


def escapes(w: Packed, found: jax.Array) -> jax.Array:
  """uint32 [out, words]: of codes [out, words, 8], the escapes as bits.

  Counted by words, there are eight times fewer numbers to add up.
  """
  places = jnp.arange(WORD, dtype=jnp.uint32)
  escaped = (found == jnp.uint8(w.num_codes - 1)).astype(jnp.uint32)
  return jnp.sum(escaped << places, axis=-1, dtype=jnp.uint32)


def _outlier_of_each(w: Packed, found: jax.Array) -> jax.Array:
  """int32 [out, words, 8], indices of all outliers: meant for escapes."""
  bits, places = escapes(w, found), jnp.arange(WORD, dtype=jnp.uint32)
  before = bits[..., None] & ((jnp.uint32(1) << places) - jnp.uint32(1))
  first = first_of_words(w, jax.lax.population_count(bits))
  return first[..., None] + jax.lax.population_count(before).astype(jnp.int32)


def first_of_words(w: Packed, counts: jax.Array) -> jax.Array:
  """int32 [out, words]: which of all outliers is the first of each word.

  Args:
    w: a matrix that has outliers.
    counts: integers [out, words], how many escapes each word has.
  """
  bands, tiles = w.bands_per_section, w.tiles_per_section
  filled = (w.out_sections, bands * BAND, w.in_sections, tiles * TILE_WORDS)
  cut = (w.out_sections, w.section_out, w.in_sections, w.words_per_section)
  tiled = jnp.pad(counts.astype(jnp.int32).reshape(cut), [
      (0, n - m) for n, m in zip(filled, cut)])
  tiled = tiled.reshape(
      w.out_sections, bands, BAND, w.in_sections, tiles, TILE_WORDS)
  # A tile's outliers by word, in it by output.
  tiled = tiled.transpose(0, 1, 3, 4, 5, 2)
  flat = tiled.reshape(w.bands, w.tiles, -1)
  first = jnp.cumsum(flat, axis=2) - flat + _first_of_tiles(w)[..., None]
  first = first.reshape(tiled.shape).transpose(0, 1, 5, 2, 3, 4)
  first = first.reshape(filled)[:, :w.section_out, :, :w.words_per_section]
  return first.reshape(w.out, w.words)


def _first_of_tiles(w: Packed) -> jax.Array:
  """int32 [bands, tiles]: which of all outliers is the first of each tile."""
  out_shards, in_shards = w.shards
  band = jnp.arange(w.bands)[:, None] // (w.bands // out_shards)
  tile = jnp.arange(w.tiles) // (w.tiles // in_shards)
  longest = w.outliers.shape[2]
  return (band * in_shards + tile) * longest + w.offsets.astype(jnp.int32)


def matmul(x: jax.Array, w: Packed) -> jax.Array:
  """[m, in] to float32 [m, out]; weights are rounded to the dtype of `x`."""
  dense = lookup(w).astype(x.dtype)
  return jnp.einsum(
      "mi,io->mo" if w.is_words_first else "mi,oi->mo", x, dense,
      precision=jax.lax.Precision.HIGHEST,
      preferred_element_type=jnp.float32)


def matmul_transposed(y: jax.Array, w: Packed) -> jax.Array:
  """[m, out] to float32 [m, in]; weights are rounded to the dtype of `y`."""
  dense = lookup(w).astype(y.dtype)
  return jnp.einsum(
      "mo,io->mi" if w.is_words_first else "mo,oi->mi", y, dense,
      precision=jax.lax.Precision.HIGHEST,
      preferred_element_type=jnp.float32)
