"""The products in Pallas, for Triton.

A program decodes a block of bands times words at a time: it reads the planes,
finds the escapes, and looks each place's codes up. Place s of words w, w + 1, ...
holds the inputs 8 w + s, 8 (w + 1) + s, ..., so the eight places of a block are
eight small matrices, which are multiplied by x as [8, rows, words].

An outlier is found by counting: a band's outliers are in order by word, in it by
output, in it by place. The rank of a word's first outlier is the number of those
before the block, which an offset gives or the block before, plus a sum of counts
over the block's words before it and the outputs before it.
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
import jax.numpy as jnp

from pallas_kernels.codebook_matmul.packed import BAND, TILE_WORDS, WORD, Packed
from pallas_kernels.codebook_matmul.tuning import Tuning

_SPREAD = {
    4: ((0, 0x11111111),),
    2: ((8, 0x00FF00FF), (4, 0x0F0F0F0F), (2, 0x11111111)),
    1: ((12, 0x000F000F), (6, 0x03030303), (3, 0x11111111)),
}


def matmul(x: jax.Array, w: Packed, *, config: Tuning, interpret: bool = False
           ) -> jax.Array:
  """[m, in] to float32 [m, out]."""
  rows, shards = x.shape[0], w.shards[1]
  by_place = _filled(x, w).reshape(rows, w.words, WORD).transpose(2, 0, 1)
  row_blocks, blocks = pl.cdiv(rows, config.rows), _num_blocks(w, config)
  # A split is of one shard, in which outliers are counted.
  splits = _splits(config, row_blocks * blocks * shards, w.tiles // shards)
  parts = _call(
      functools.partial(_matmul_kernel, config=config, splits=splits),
      (shards * splits, rows, w.out), jnp.float32,
      (row_blocks, blocks, shards * splits), config, interpret,
      "codebook_matmul", by_place, w)
  return parts.sum(0)


def matmul_transposed(y: jax.Array, w: Packed, *, config: Tuning,
                      interpret: bool = False) -> jax.Array:
  """[m, out] to float32 [m, in]."""
  rows = y.shape[0]
  row_blocks = pl.cdiv(rows, config.rows)
  splits = _splits(config, row_blocks * w.tiles, _num_blocks(w, config))
  parts = _call(
      functools.partial(_transposed_kernel, config=config, splits=splits),
      (splits, WORD, rows, w.words), jnp.float32,
      (row_blocks, w.tiles, splits), config, interpret,
      "codebook_matmul_transposed", y, w)
  filled = parts.sum(0).transpose(1, 2, 0).reshape(
      rows, w.in_sections, w.words_per_section * WORD)
  return filled[..., :w.section_inputs].reshape(rows, w.inputs)


def lookup(w: Packed, *, dtype, config: Tuning, interpret: bool = False
           ) -> jax.Array:
  """The dense matrix, of `w.shape` and `dtype`."""
  return _call(
      functools.partial(_lookup_kernel, config=config), w.shape, dtype,
      (w.tiles, _num_blocks(w, config)), config, interpret,
      "codebook_lookup", w)


def _call(kernel, shape, dtype, grid, config, interpret, name, *operands):
  return pl.pallas_call(
      kernel, out_shape=jax.ShapeDtypeStruct(shape, dtype),
      grid=grid, interpret=interpret, name=name,
      compiler_params=plgpu.CompilerParams(
          num_warps=config.num_warps, num_stages=config.num_stages),
  )(*operands)


def _filled(x: jax.Array, w: Packed) -> jax.Array:
  """[m, in] with each section filled up to whole words."""
  fill = w.words_per_section * WORD - w.section_inputs
  x = x.reshape(x.shape[0], w.in_sections, w.section_inputs)
  return jnp.pad(x, ((0, 0), (0, 0), (0, fill)))


def _num_blocks(w: Packed, config: Tuning) -> int:
  """Blocks of bands; none lies in two sections."""
  return w.out_sections * pl.cdiv(w.bands_per_section, config.bands)


def _splits(config: Tuning, programs: int, most: int) -> int:
  """Into how many parts to cut a sum of `most` terms."""
  return max(1, min(pl.cdiv(config.programs, programs), most))


def _matmul_kernel(x_ref, w, y_ref, *, config: Tuning, splits: int):
  row, block, split = (pl.program_id(i) for i in range(3))
  rows, bands = _Rows.of(row, config), _Bands.of(w, block, config)
  shard = jax.lax.div(split, splits)
  first, last = _tiles(w, shard, jax.lax.rem(split, splits), splits)
  start, end = _first_word(w, first), _first_word(w, last)
  axis = 0 if w.is_words_first else 1

  def step(i, carry):
    sums, base = carry
    words = _Span.of(start + i * config.words, config.words, end)
    values, base = bands.decode(w, words, base, shard)
    for place, value in enumerate(values):
      x = rows.load(x_ref, (jnp.int32(place),), words)
      sums = rows.add_products(sums, x, value, axis)
    return sums, base

  zero = rows.zero(bands.span.size, _as_stored(w, bands.span.size, config.words))
  steps = pl.cdiv(jnp.maximum(end - start, 0), config.words)
  sums, _ = jax.lax.fori_loop(0, steps, step, (zero, bands.base(w, first)))
  rows.store(y_ref, (split,), bands.span, sums, axis)


def _transposed_kernel(y_ref, w, z_ref, *, config: Tuning, splits: int):
  row, tile, split = (pl.program_id(i) for i in range(3))
  rows, words = _Rows.of(row, config), _tile(w, tile)
  shard = jax.lax.div(tile, w.tiles // w.shards[1])
  axis = 1 if w.is_words_first else 0
  per_split = pl.cdiv(_num_blocks(w, config), splits)
  first = split * per_split
  last = jnp.minimum(first + per_split, _num_blocks(w, config))

  def step(block, sums):
    bands = _Bands.of(w, block, config)
    values, _ = bands.decode(w, words, bands.base(w, tile), shard)
    y = rows.load(y_ref, (), bands.span)
    return tuple(rows.add_products(total, y, value, axis)
                 for total, value in zip(sums, values))

  zero = rows.zero(words.size, _as_stored(w, config.bands * BAND, words.size))
  sums = jax.lax.fori_loop(first, last, step, (zero,) * WORD)
  for place, total in enumerate(sums):
    rows.store(z_ref, (split, jnp.int32(place)), words, total, axis)


def _lookup_kernel(w, dense_ref, *, config: Tuning):
  tile, block = pl.program_id(0), pl.program_id(1)
  bands, words = _Bands.of(w, block, config), _tile(w, tile)
  shard = jax.lax.div(tile, w.tiles // w.shards[1])
  section = jax.lax.div(tile, w.tiles_per_section)
  word = words.start - section * w.words_per_section + jnp.arange(words.size)
  values, _ = bands.decode(w, words, bands.base(w, tile), shard)
  for place, value in enumerate(values):
    column = word * WORD + place
    is_there = words.is_inside & (column < w.section_inputs)
    column += section * w.section_inputs
    row, column = _outer(w, bands.span.start + jnp.arange(bands.span.size),
                         column)
    plgpu.store(
        dense_ref.at[_as_stored(w, row, column)],
        value.astype(dense_ref.dtype),
        mask=_both(w, bands.span.is_inside, is_there))


@dataclasses.dataclass(frozen=True)
class _Span:
  """Part of a dimension: `size` places from `start`, not all need be there."""

  start: jax.Array
  size: int
  is_inside: jax.Array

  @classmethod
  def of(cls, start, size: int, end) -> _Span:
    return cls(start, size, start + jnp.arange(size) < end)

  @property
  def slice(self):
    return pl.ds(self.start, self.size)


@dataclasses.dataclass(frozen=True)
class _Rows:
  """A block of rows, and sums of products of theirs.

  For tensor cores a block of x is [rows, k], and the sums [rows, n]. Without,
  each is a tuple by row, of [k] and of [n, k] or [k, n], summed at the end.
  """

  start: jax.Array
  config: Tuning

  @classmethod
  def of(cls, block, config: Tuning) -> _Rows:
    return cls(block * config.rows, config)

  def load(self, ref, lead, span: _Span):
    """Of ref [*lead, rows, k]; zeros where there is nothing."""
    limit = ref.shape[len(lead)]
    if self.config.is_dot:
      rows = _Span.of(self.start, self.config.rows, limit)
      return plgpu.load(
          ref.at[(*lead, rows.slice, span.slice)],
          mask=rows.is_inside[:, None] & span.is_inside[None], other=0)
    return tuple(
        plgpu.load(ref.at[(*lead, row, span.slice)],
                   mask=span.is_inside & (row < limit), other=0)
        for row in self._each())

  def zero(self, size: int, shape):
    """Sums [rows, size] of products of values of a shape."""
    if self.config.is_dot:
      return jnp.zeros((self.config.rows, size), jnp.float32)
    return (jnp.zeros(shape, jnp.float32),) * self.config.rows

  def add_products(self, sums, x, values, axis: int):
    """Adds x times values, over their dimension `axis`."""
    if self.config.is_dot:
      values = values.astype(x.dtype)
      # Float32 on tensor cores has ten bits, unless asked for more.
      precision = (jax.lax.Precision.HIGHEST if x.dtype == jnp.float32
                   else jax.lax.Precision.DEFAULT)
      return sums + jax.lax.dot_general(
          x, values, (((1,), (axis,)), ((), ())), precision=precision,
          preferred_element_type=jnp.float32)
    return tuple(
        total + jnp.expand_dims(row.astype(jnp.float32), 1 - axis) * values
        for total, row in zip(sums, x))

  def store(self, ref, lead, span: _Span, sums, axis: int):
    """To ref [*lead, rows, n]."""
    limit = ref.shape[len(lead)]
    if self.config.is_dot:
      rows = _Span.of(self.start, self.config.rows, limit)
      plgpu.store(ref.at[(*lead, rows.slice, span.slice)], sums,
                  mask=rows.is_inside[:, None] & span.is_inside[None])
      return
    for row, total in zip(self._each(), sums):
      plgpu.store(ref.at[(*lead, row, span.slice)], total.sum(axis),
                  mask=span.is_inside & (row < limit))

  def _each(self):
    return [self.start + m for m in range(self.config.rows)]


@dataclasses.dataclass(frozen=True)
class _Bands:
  """A block of bands of one section.

  Attributes:
    span: its outputs.
    bands: the same by band.
    shard: of the outliers.
  """

  span: _Span
  bands: _Span
  shard: jax.Array

  @classmethod
  def of(cls, w: Packed, block, config: Tuning) -> _Bands:
    per_section = pl.cdiv(w.bands_per_section, config.bands)
    section = jax.lax.div(block, per_section)
    band = jax.lax.rem(block, per_section) * config.bands
    end = (section + 1) * w.section_out
    span = _Span.of(section * w.section_out + band * BAND,
                    config.bands * BAND, end)
    first = section * w.bands_per_section
    bands = _Span.of(first + band, config.bands, first + w.bands_per_section)
    shard = jax.lax.div(section, w.out_sections // w.shards[0])
    return cls(span, bands, shard)

  def base(self, w: Packed, tile) -> jax.Array:
    """int32 [bands], where the outliers of a tile begin."""
    if w.outliers is None:
      return jnp.zeros(self.bands.size, jnp.int32)
    # A tile that isn't there is that after the last, of which nothing is read.
    mask = self.bands.is_inside & (tile < w.tiles)
    return plgpu.load(w.offsets.at[_as_stored(w, self.bands.slice, tile)],
                      mask=mask, other=0).astype(jnp.int32)

  def decode(self, w: Packed, words: _Span, base, in_shard
             ) -> tuple[Iterator[jax.Array], jax.Array]:
    """The weights of some words.

    Args:
      w: the matrix, as references.
      words: which.
      base: int32 [bands], the ranks of their first outliers.
      in_shard: the shard of the inputs that they are in.

    Returns:
      Float32 [outputs, words] as stored, one place after the other, and the
      base for the words that follow.
    """
    where = _as_stored(w, self.span.slice, words.slice)
    mask = _both(w, self.span.is_inside, words.is_inside)
    planes = [plgpu.load(plane.at[where], mask=mask, other=0).astype(jnp.uint32)
              for plane in w.planes]
    escapes = rank = None
    if w.outliers is not None:
      escapes = _escapes(w, planes)
      rank, base = self._ranks(w, escapes, base)
    return self._places(w, planes, escapes, rank, in_shard), base

  def _ranks(self, w: Packed, escapes, base):
    """(rank of each word's first outlier, of the first after the block)."""
    # Triton counts no bits: the sum of the nibbles ends up in the highest.
    counts = escapes * jnp.uint32(0x11111111) >> jnp.uint32(28)
    counts = counts.astype(jnp.int32)
    shape, bands = counts.shape, self.bands.size
    if w.is_words_first:
      counts = counts.reshape(shape[0], bands, BAND)
      by_word = counts.sum(2)
      before = (jnp.cumsum(by_word, 0) - by_word + base[None])[:, :, None]
      rank, base = jnp.cumsum(counts, 2) - counts, base + by_word.sum(0)
    else:
      counts = counts.reshape(bands, BAND, shape[1])
      by_word = counts.sum(1)
      before = (jnp.cumsum(by_word, 1) - by_word + base[:, None])[:, None]
      rank, base = jnp.cumsum(counts, 1) - counts, base + by_word.sum(1)
    return (rank + before).reshape(shape), base

  def _places(self, w: Packed, planes, escapes, rank, in_shard):
    scale = None
    if w.scale is not None:
      scale = plgpu.load(w.scale.at[self.span.slice],
                         mask=self.span.is_inside, other=0)
      scale = jnp.expand_dims(scale.astype(jnp.float32),
                              0 if w.is_words_first else 1)
    for place in range(WORD):
      values = plgpu.load(w.codebook.at[_codes(w, planes, place)])
      if scale is not None:
        values *= scale
      if w.outliers is not None:
        is_escape = (escapes >> jnp.uint32(4 * place)) & jnp.uint32(1)
        shard = _as_stored(w, self.shard, in_shard)
        # The codebook has 0 for an escape.
        values += plgpu.load(
            w.outliers.at[(*shard, rank)], mask=is_escape == jnp.uint32(1),
            other=0).astype(jnp.float32)
        rank += is_escape.astype(jnp.int32)
      yield values


def _codes(w: Packed, planes, place: int) -> jax.Array:
  """int32, the codes at a place of words."""
  codes, shift = None, 0
  for plane, width in zip(planes, w.widths):
    part = (plane >> jnp.uint32(place * width)) & jnp.uint32((1 << width) - 1)
    part = part << jnp.uint32(shift)
    codes = part if codes is None else codes | part
    shift += width
  return codes.astype(jnp.int32)


def _escapes(w: Packed, planes) -> jax.Array:
  """uint32: bit 4 s is set where the code at place s is the escape."""
  found, escape = None, w.num_codes - 1
  for plane, width in zip(planes, w.widths):
    part = escape & ((1 << width) - 1)
    escape >>= width
    matches = _matches(plane, width, part)
    found = matches if found is None else found & matches
  return found


def _matches(plane: jax.Array, width: int, value: int) -> jax.Array:
  """uint32: bit 4 s is set where the field at place s has a value."""
  u = jnp.uint32
  other = ~value & ((1 << width) - 1)
  ones = plane ^ u(sum(other << place * width for place in range(WORD)))
  for shift in (1, 2)[:width // 2]:
    ones &= ones >> u(shift)
  # Eight fields of 4, 2 or 1 bits become eight of 4, by halves.
  for shift, mask in _SPREAD[width]:
    ones = (ones | ones << u(shift)) & u(mask) if shift else ones & u(mask)
  return ones


def _tiles(w: Packed, shard, part, parts: int):
  """(first, last + 1) tile of a part of a shard of the inputs."""
  tiles = w.tiles // w.shards[1]
  per_part = pl.cdiv(tiles, parts)
  first = jnp.minimum(part * per_part, tiles)
  last = jnp.minimum(first + per_part, tiles)
  return shard * tiles + first, shard * tiles + last


def _first_word(w: Packed, tile):
  """Of a tile, or the number of words."""
  section = jax.lax.div(tile, w.tiles_per_section)
  tile = jax.lax.rem(tile, w.tiles_per_section)
  return section * w.words_per_section + tile * TILE_WORDS


def _tile(w: Packed, tile) -> _Span:
  """The words of a tile."""
  section = jax.lax.div(tile, w.tiles_per_section)
  return _Span.of(_first_word(w, tile), TILE_WORDS,
                  (section + 1) * w.words_per_section)


def _as_stored(w: Packed, of_out, of_words):
  return (of_words, of_out) if w.is_words_first else (of_out, of_words)


def _outer(w: Packed, of_out, of_words):
  """Vectors of both dimensions, to be broadcast to a block as stored."""
  if w.is_words_first:
    return of_out[None], of_words[:, None]
  return of_out[:, None], of_words[None]


def _both(w: Packed, is_out, is_word):
  """The mask of a block, as stored."""
  is_out, is_word = _outer(w, is_out, is_word)
  return is_out & is_word
