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

# What spreads a plane's word so that every byte has two neighboring codes' bits.
_SPREAD = {
    4: (),
    2: ((8, 0x00FF00FF), (4, 0x0F0F0F0F)),
    1: ((12, 0x000F000F), (6, 0x03030303)),
}
_BYTES = 0x01010101
# Few words have more outliers than this.
_FEW = 2


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
    block, base = bands.read(w, words, base, shard)
    x = lambda place: rows.load(x_ref, (jnp.int32(place),), words)
    if config.is_dot:
      for place, values in enumerate(block.weights(w)):
        sums = rows.add_products(sums, x(place), values, axis)
      return sums, base
    sums, others = sums
    for place in range(WORD):
      sums = rows.add_products(sums, x(place), block.centroids(w, place), axis)
    if w.outliers is not None:
      others = block.add_outliers(w, x_ref, rows, others)
    return (sums, others), base

  zero = rows.zero(bands.span.size, _as_stored(w, bands.span.size, config.words))
  if not config.is_dot:
    zero = (zero, zero)  # Of centroids, which are scaled in the end, and others.
  steps = pl.cdiv(jnp.maximum(end - start, 0), config.words)
  sums, _ = jax.lax.fori_loop(0, steps, step, (zero, bands.base(w, first)))
  if not config.is_dot:
    sums = rows.total(sums[0], sums[1], bands.scale(w), axis)
  rows.store(y_ref, (split,), bands.span, sums)


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
    block, _ = bands.read(w, words, bands.base(w, tile), shard)
    y = rows.load(y_ref, (), bands.span)
    return tuple(rows.add_products(total, y, values, axis)
                 for total, values in zip(sums, block.weights(w)))

  zero = rows.zero(words.size, _as_stored(w, config.bands * BAND, words.size))
  sums = jax.lax.fori_loop(first, last, step, (zero,) * WORD)
  for place, total in enumerate(sums):
    if not config.is_dot:
      total = tuple(row.sum(axis) for row in total)
    rows.store(z_ref, (split, jnp.int32(place)), words, total)


def _lookup_kernel(w, dense_ref, *, config: Tuning):
  tile, block = pl.program_id(0), pl.program_id(1)
  bands, words = _Bands.of(w, block, config), _tile(w, tile)
  shard = jax.lax.div(tile, w.tiles // w.shards[1])
  section = jax.lax.div(tile, w.tiles_per_section)
  word = words.start - section * w.words_per_section + jnp.arange(words.size)
  block, _ = bands.read(w, words, bands.base(w, tile), shard)
  for place, values in enumerate(block.weights(w)):
    column = word * WORD + place
    is_there = words.is_inside & (column < w.section_inputs)
    column += section * w.section_inputs
    row, column = _outer(w, bands.span.start + jnp.arange(bands.span.size),
                         column)
    plgpu.store(
        dense_ref.at[_as_stored(w, row, column)],
        values.astype(dense_ref.dtype),
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

  def gather(self, ref, place, k, mask):
    """By row float32 ref[place, row, k]; zeros where not in the mask."""
    limit = ref.shape[1]
    return [
        plgpu.load(ref.at[place, row, k], mask=mask & (row < limit), other=0
                   ).astype(jnp.float32) for row in self._each()]

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

  def total(self, centroids, others, scale, axis: int):
    """Sums [n] by row from those that are not summed yet."""
    total = lambda sums: sums.sum(axis) * (1 if scale is None else scale)
    return tuple(total(a) + b.sum(axis) for a, b in zip(centroids, others))

  def store(self, ref, lead, span: _Span, sums):
    """To ref [*lead, rows, n]; a tuple's are [n]."""
    limit = ref.shape[len(lead)]
    if self.config.is_dot:
      rows = _Span.of(self.start, self.config.rows, limit)
      plgpu.store(ref.at[(*lead, rows.slice, span.slice)], sums,
                  mask=rows.is_inside[:, None] & span.is_inside[None])
      return
    for row, total in zip(self._each(), sums):
      plgpu.store(ref.at[(*lead, row, span.slice)], total,
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

  def read(self, w: Packed, words: _Span, base, in_shard
           ) -> tuple[_Block, jax.Array]:
    """Reads some words and ranks their outliers.

    Args:
      w: the matrix, as references.
      words: which.
      base: int32 [bands], the ranks of their first outliers.
      in_shard: the shard of the inputs that they are in.

    Returns:
      The block, and the base of the words that follow.
    """
    where = _as_stored(w, self.span.slice, words.slice)
    mask = _both(w, self.span.is_inside, words.is_inside)
    planes = [plgpu.load(plane.at[where], mask=mask, other=0).astype(jnp.uint32)
              for plane in w.planes]
    codes, escapes, rank, most = _codes(w, planes), None, None, None
    if w.outliers is not None:
      escapes = _escapes(w, codes)
      # Triton counts no bits: the sum of the nibbles ends up in the highest.
      counts = (escapes * jnp.uint32(0x11111111) >> jnp.uint32(28)).astype(
          jnp.int32)
      rank, base, most = self._ranks(w, counts, base)
    return _Block(self, words, _as_stored(w, self.shard, in_shard), codes,
                  escapes, rank, most), base

  def scale(self, w: Packed):
    """Float32 [outputs], or None."""
    if w.scale is None:
      return None
    return plgpu.load(w.scale.at[self.span.slice], mask=self.span.is_inside,
                      other=0).astype(jnp.float32)

  def _ranks(self, w: Packed, counts, base):
    """Ranks of outliers.

    Returns:
      The rank of each word's first, that of the first after the block, and how
      many a word has at most, or more.
    """
    bands = self.bands.size
    # To [bands, words x outputs], the order of outliers, and back.
    if w.is_words_first:
      shape, order, back = (-1, bands, BAND), (1, 0, 2), (1, 0, 2)
    else:
      shape, order, back = (bands, BAND, -1), (0, 2, 1), (0, 2, 1)
    by_output = counts.reshape(shape).transpose(order)
    ordered = by_output.reshape(bands, -1)
    rank = jnp.cumsum(ordered, 1) - ordered + base[:, None]
    rank = rank.reshape(by_output.shape).transpose(back)
    # One sum for two: of the counts, and how many words have more than a few.
    sums = (ordered + ((ordered > _FEW).astype(jnp.int32) << 16)).sum(1)
    most = jnp.where((sums >> 16).max() > 0, jnp.int32(WORD), jnp.int32(_FEW))
    return rank.reshape(counts.shape), base + (sums & 0xFFFF), most


@dataclasses.dataclass(frozen=True)
class _Block:
  """Words of bands, [outputs, words] as stored.

  Attributes:
    bands, words: which.
    shard: indices into the first two dimensions of the outliers.
    codes: see `_codes`.
    escapes: uint32, see `_escapes`; None without outliers, as are the next.
    rank: int32, of the word's first outlier.
    most: of a word's escapes there are no more.
  """

  bands: _Bands
  words: _Span
  shard: tuple[jax.Array, jax.Array]
  codes: list[jax.Array]
  escapes: jax.Array | None
  rank: jax.Array | None
  most: jax.Array | None

  def centroids(self, w: Packed, place: int) -> jax.Array:
    """Float32: the codebook's entries at a place, 0 for an escape."""
    code = self.codes[place % 2] >> jnp.uint32(place // 2 * 8) & jnp.uint32(255)
    return plgpu.load(w.codebook.at[code.astype(jnp.int32)])

  def weights(self, w: Packed) -> Iterator[jax.Array]:
    """Float32, place by place: scaled, and with the outliers."""
    scale, rank = self.bands.scale(w), self.rank
    if scale is not None:
      scale = jnp.expand_dims(scale, 0 if w.is_words_first else 1)
    for place in range(WORD):
      values = self.centroids(w, place)
      if scale is not None:
        values *= scale
      if w.outliers is not None:
        is_escape = (self.escapes >> jnp.uint32(4 * place)) & jnp.uint32(1)
        values += self._outliers(w, rank, is_escape == jnp.uint32(1))
        rank += is_escape.astype(jnp.int32)
      yield values

  def add_outliers(self, w: Packed, x_ref, rows: _Rows, sums):
    """Adds x times the outliers alone, word by word: they are few.

    Args:
      w: the matrix, as references.
      x_ref: [8, rows, words].
      rows: of x.
      sums: float32 [outputs, words] as stored for each row.
    """

    def add_next(_, carry):
      """The next outlier of every word that has one."""
      escapes, rank, sums = carry
      lower = escapes - jnp.uint32(1)
      # How many nibbles are below the lowest escape.
      place = (lower & ~escapes & jnp.uint32(0x11111111)) * jnp.uint32(
          0x11111111) >> jnp.uint32(28)
      is_there = escapes != jnp.uint32(0)
      values = self._outliers(w, rank, is_there)
      x = rows.gather(x_ref, place.astype(jnp.int32), word, is_there)
      sums = tuple(total + row * values for total, row in zip(sums, x))
      return escapes & lower, rank + 1, sums

    _, word = _outer(w, jnp.zeros(self.bands.span.size, jnp.int32),
                     self.words.start + jnp.arange(self.words.size))
    carry = (self.escapes, self.rank, sums)
    for i in range(_FEW):
      carry = add_next(i, carry)
    return jax.lax.fori_loop(jnp.int32(_FEW), self.most, add_next, carry)[2]

  def _outliers(self, w: Packed, rank, mask):
    """Float32, 0 where not in the mask."""
    return plgpu.load(w.outliers.at[(*self.shard, rank)], mask=mask,
                      other=0).astype(jnp.float32)


def _codes(w: Packed, planes) -> list[jax.Array]:
  """Twice uint32, a byte per code: of the even places, of the odd places."""
  u = jnp.uint32
  codes, below = [None, None], 0
  for plane, width in zip(planes, w.widths):
    for shift, mask in _SPREAD[width]:
      plane = (plane | plane << u(shift)) & u(mask)
    for odd in range(2):
      # From their place in the byte to their place in the code.
      shift = odd * width - below
      part = (plane >> u(shift) if shift >= 0 else plane << u(-shift))
      part &= u(_BYTES * (((1 << width) - 1) << below))
      codes[odd] = part if codes[odd] is None else codes[odd] | part
    below += width
  return codes


def _escapes(w: Packed, codes) -> jax.Array:
  """uint32: bit 4 s is set where the code at place s is the escape."""
  u, escape = jnp.uint32, w.num_codes - 1
  tops = []
  for part in codes:
    if w.bits < 8:
      # No code is above the escape: it alone reaches a byte's highest bit.
      tops.append(part + u(_BYTES * (128 - escape)))
    else:
      ones = part ^ u(_BYTES * (255 - escape))
      tops.append(ones & (ones & u(_BYTES * 127)) + u(_BYTES))
  even, odd = tops
  return even >> u(7) & u(_BYTES) | odd >> u(3) & u(_BYTES << 4)


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
