"""The products in Pallas, for Triton.

A program decodes a block of bands times words at a time and multiplies it by x,
which was brought to [8, rows, words] before. Its sums are float32; a sum over
several programs is added up afterwards, always in the same order.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
import jax.numpy as jnp

from pallas_kernels.codebook_matmul.blocks import (
    Bands,
    Span,
    as_stored,
    both,
    first_word,
    num_blocks,
    outer,
    tile_words,
    tiles_of,
)
from pallas_kernels.codebook_matmul.packed import BAND, WORD, Packed
from pallas_kernels.codebook_matmul.tuning import Tuning


def matmul(x: jax.Array, w: Packed, *, config: Tuning, interpret: bool = False
           ) -> jax.Array:
  """[m, in] to float32 [m, out]."""
  rows = x.shape[0]
  by_place = _filled(x, w).reshape(rows, w.words, WORD).transpose(2, 0, 1)
  grid = _grid(w, rows, config)
  parts = _call(
      functools.partial(_matmul_kernel, config=config,
                        splits=grid[2] // w.shards[1]),
      (grid[2], rows, w.out), jnp.float32, grid, config, interpret,
      "codebook_matmul", by_place, w)
  return parts.sum(0)


def matmul_transposed(y: jax.Array, w: Packed, *, config: Tuning,
                      interpret: bool = False) -> jax.Array:
  """[m, out] to float32 [m, in]."""
  rows = y.shape[0]
  row_blocks = pl.cdiv(rows, config.rows)
  splits = _splits(config, row_blocks * w.tiles, num_blocks(w, config))
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
      (w.tiles, num_blocks(w, config)), config, interpret,
      "codebook_lookup", w)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
  """Bytes between a product and device memory.

  Attributes:
    floor: of the matrix, x and the product, each once.
    moved: what `matmul` moves if caches hold x and what programs share: the
      matrix but for offsets that no program begins at, x three times since its
      order is changed first, and parts of sums, written and read.
  """

  floor: int
  moved: int


def traffic(w: Packed, rows: int, itemsize: int, config: Tuning) -> Traffic:
  """Of a product of `rows` rows, its numbers of `itemsize` bytes."""
  x, product = rows * w.inputs * itemsize, rows * w.out * itemsize
  splits = _grid(w, rows, config)[2]
  offsets = 0 if w.offsets is None else w.offsets.nbytes
  begun = 0 if w.offsets is None else splits * w.bands * w.offsets.dtype.itemsize
  filled = rows * w.words * WORD * itemsize
  parts = splits * rows * w.out * 4
  return Traffic(
      floor=w.nbytes + x + product,
      moved=w.nbytes - offsets + begun + x + 2 * filled + 2 * parts + product)


def _grid(w: Packed, rows: int, config: Tuning) -> tuple[int, int, int]:
  """Blocks of rows, blocks of bands, parts of the sums."""
  row_blocks, blocks = pl.cdiv(rows, config.rows), num_blocks(w, config)
  # A part is of one shard, in which outliers are counted.
  shards = w.shards[1]
  splits = _splits(config, row_blocks * blocks * shards, w.tiles // shards)
  return row_blocks, blocks, shards * splits


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


def _splits(config: Tuning, programs: int, most: int) -> int:
  """Into how many parts to cut a sum of `most` terms."""
  return max(1, min(pl.cdiv(config.programs, programs), most))


def _matmul_kernel(x_ref, w, y_ref, *, config: Tuning, splits: int):
  row, block, split = (pl.program_id(i) for i in range(3))
  rows, bands = _Rows.of(row, config), Bands.of(w, block, config)
  shard = jax.lax.div(split, splits)
  first, last = tiles_of(w, shard, jax.lax.rem(split, splits), splits)
  start, end = first_word(w, first), first_word(w, last)
  axis = 0 if w.is_words_first else 1

  def step(i, carry):
    sums, base = carry
    words = Span.of(start + i * config.words, config.words, end)
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
      others = block.add_outliers(
          w, functools.partial(rows.gather, x_ref), others)
    return (sums, others), base

  zero = rows.zero(bands.span.size, as_stored(w, bands.span.size, config.words))
  if not config.is_dot:
    zero = (zero, zero)  # Of centroids, which are scaled in the end, and others.
  steps = pl.cdiv(jnp.maximum(end - start, 0), config.words)
  sums, _ = jax.lax.fori_loop(0, steps, step, (zero, bands.base(w, first)))
  if not config.is_dot:
    sums = rows.total(sums[0], sums[1], bands.scale(w), axis)
  rows.store(y_ref, (split,), bands.span, sums)


def _transposed_kernel(y_ref, w, z_ref, *, config: Tuning, splits: int):
  row, tile, split = (pl.program_id(i) for i in range(3))
  rows, words = _Rows.of(row, config), tile_words(w, tile)
  shard = jax.lax.div(tile, w.tiles // w.shards[1])
  axis = 1 if w.is_words_first else 0
  per_split = pl.cdiv(num_blocks(w, config), splits)
  first = split * per_split
  last = jnp.minimum(first + per_split, num_blocks(w, config))

  def step(block, sums):
    bands = Bands.of(w, block, config)
    block, _ = bands.read(w, words, bands.base(w, tile), shard)
    y = rows.load(y_ref, (), bands.span)
    return tuple(rows.add_products(total, y, values, axis)
                 for total, values in zip(sums, block.weights(w)))

  zero = rows.zero(words.size, as_stored(w, config.bands * BAND, words.size))
  sums = jax.lax.fori_loop(first, last, step, (zero,) * WORD)
  for place, total in enumerate(sums):
    if not config.is_dot:
      total = tuple(row.sum(axis) for row in total)
    rows.store(z_ref, (split, jnp.int32(place)), words, total)


def _lookup_kernel(w, dense_ref, *, config: Tuning):
  tile, block = pl.program_id(0), pl.program_id(1)
  bands, words = Bands.of(w, block, config), tile_words(w, tile)
  shard = jax.lax.div(tile, w.tiles // w.shards[1])
  section = jax.lax.div(tile, w.tiles_per_section)
  word = words.start - section * w.words_per_section + jnp.arange(words.size)
  block, _ = bands.read(w, words, bands.base(w, tile), shard)
  for place, values in enumerate(block.weights(w)):
    column = word * WORD + place
    is_there = words.is_inside & (column < w.section_inputs)
    column += section * w.section_inputs
    row, column = outer(
        w, bands.span.start + jnp.arange(bands.span.size), column)
    plgpu.store(
        dense_ref.at[as_stored(w, row, column)],
        values.astype(dense_ref.dtype),
        mask=both(w, bands.span.is_inside, is_there))


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

  def load(self, ref, lead, span: Span):
    """Of ref [*lead, rows, k]; zeros where there is nothing."""
    limit = ref.shape[len(lead)]
    if self.config.is_dot:
      rows = Span.of(self.start, self.config.rows, limit)
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

  def store(self, ref, lead, span: Span, sums):
    """To ref [*lead, rows, n]; a tuple's are [n]."""
    limit = ref.shape[len(lead)]
    if self.config.is_dot:
      rows = Span.of(self.start, self.config.rows, limit)
      plgpu.store(ref.at[(*lead, rows.slice, span.slice)], sums,
                  mask=rows.is_inside[:, None] & span.is_inside[None])
      return
    for row, total in zip(self._each(), sums):
      plgpu.store(ref.at[(*lead, row, span.slice)], total,
                  mask=span.is_inside & (row < limit))

  def _each(self):
    return [self.start + m for m in range(self.config.rows)]
