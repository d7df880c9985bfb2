"""Products with compressed matrices in plain jnp: what the kernels must equal."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.codebook_matmul.packed import BAND, TILE_WORDS, WORD, Packed


def codes(w: Packed) -> jax.Array:
  """int32 [out, words, 8]."""
  w = w.out_first()
  found, shift = jnp.zeros((w.out, w.words, WORD), jnp.int32), 0
  for plane, width in zip(w.planes, w.widths):
    place = jnp.arange(WORD, dtype=jnp.uint32) * jnp.uint32(width)
    part = plane.astype(jnp.uint32)[..., None] >> place
    part &= jnp.uint32((1 << width) - 1)
    found |= part.astype(jnp.int32) << shift
    shift += width
  return found


def lookup(w: Packed) -> jax.Array:
  """The dense matrix, float32, of `w.shape`."""
  if w.is_words_first:
    return lookup(w.out_first()).T
  found = codes(w)
  values = w.codebook[found]
  if w.scale is not None:
    values *= w.scale.astype(jnp.float32)[:, None, None]
  if w.outliers is not None:
    escaped = found == w.num_codes - 1
    values = jnp.where(escaped, _outlier_of_each(w, escaped), values)
  by_section = values.reshape(w.out, w.in_sections, -1)
  return by_section[..., :w.section_inputs].reshape(w.out, w.inputs)


def _outlier_of_each(w: Packed, escaped: jax.Array) -> jax.Array:
  """float32 [out, words, 8]: meant only where `escaped`."""
  bands, tiles = w.bands_per_section, w.tiles_per_section
  filled = (w.out_sections, bands * BAND, w.in_sections, tiles * TILE_WORDS,
            WORD)
  cut = (w.out_sections, w.section_out, w.in_sections, w.words_per_section,
         WORD)
  tiled = jnp.pad(escaped.reshape(cut), [
      (0, n - m) for n, m in zip(filled, cut)])
  tiled = tiled.reshape(
      w.out_sections, bands, BAND, w.in_sections, tiles, TILE_WORDS, WORD)
  # A tile's escapes by word, in it by output, in it by place.
  tiled = tiled.transpose(0, 1, 3, 4, 5, 2, 6)
  ones = tiled.reshape(w.bands, w.tiles, -1).astype(jnp.int32)
  rank = jnp.cumsum(ones, axis=2) - ones + w.offsets.astype(
      jnp.int32)[..., None]
  band, tile = jnp.ogrid[:w.bands, :w.tiles]
  out_shards, in_shards = w.shards
  found = w.outliers[(band // (w.bands // out_shards))[..., None],
                     (tile // (w.tiles // in_shards))[..., None], rank]
  found = found.astype(jnp.float32).reshape(tiled.shape)
  found = found.transpose(0, 1, 5, 2, 3, 4, 6).reshape(filled)
  return found[:, :w.section_out, :, :w.words_per_section].reshape(
      escaped.shape)


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
