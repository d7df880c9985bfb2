"""The products in Pallas, for Triton.

A program decodes a block of bands times words at a time and multiplies it by x:
row by row, or by tensor cores, then all of the block's inputs at once. Its sums are
float32; a sum over several programs is added up afterwards, always in the same
order.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
import jax.numpy as jnp

from pallas_kernels.codebook_matmul import machine
from pallas_kernels.codebook_matmul.blocks import (
    Axes,
    Bands,
    Block,
    Words,
    first_word,
    num_blocks,
    tile_words,
    tiles_of,
)
from pallas_kernels.codebook_matmul.packed import BAND, TILE_WORDS, WORD, Packed
from pallas_kernels.codebook_matmul.tuning import Tuning


def matmul(x: jax.Array, w: Packed, *, config: Tuning, interpret: bool = False
           ) -> jax.Array:
  """[m, in] to float32 [m, out]."""
  rows = x.shape[0]
  if config.is_dot:
    x = w.fill(x)
  else:
    x = x.astype(jnp.float32)
    x = w.fill(x), w.split_words(x)
  grid = _grid(w, rows, config)
  parts = _call(
      functools.partial(_matmul_kernel, config=config,
                        splits=grid[2] // w.shards[1]),
      (grid[2], rows, w.out), jnp.float32, grid, config, interpret,
      "codebook_matmul", x, w)
  return parts.sum(0)


def matmul_transposed(y: jax.Array, w: Packed, *, config: Tuning,
                      interpret: bool = False) -> jax.Array:
  """[m, out] to float32 [m, in]."""
  rows = y.shape[0]
  row_blocks = pl.cdiv(rows, config.rows)
  splits = _splits(config, row_blocks * w.tiles, num_blocks(w, config))
  parts = _call(
      functools.partial(_transposed_kernel, config=config, splits=splits),
      (splits, rows, w.words * WORD), jnp.float32,
      (row_blocks, w.tiles, splits), config, interpret,
      "codebook_matmul_transposed", y, w)
  return w.cut(parts.sum(0))


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
      matrix but for offsets that no program begins at, x and what is made of it
      (filled up for tensor cores; twice in float32 without them), written and
      read, and parts of sums, written and read.
  """

  floor: int
  moved: int


def traffic(w: Packed, rows: int, itemsize: int, config: Tuning) -> Traffic:
  """Of a product of `rows` rows, its numbers of `itemsize` bytes."""
  x, product = rows * w.inputs * itemsize, rows * w.out * itemsize
  splits = _grid(w, rows, config)[2]
  offsets = 0 if w.offsets is None else w.offsets.nbytes
  begun = 0 if w.offsets is None else splits * w.bands * w.offsets.dtype.itemsize
  filled = rows * w.words * WORD * (itemsize if config.is_dot else 2 * 4)
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
      functools.partial(kernel, interpret=interpret),
      out_shape=jax.ShapeDtypeStruct(shape, dtype),
      grid=grid, interpret=interpret, name=name,
      compiler_params=plgpu.CompilerParams(
          num_warps=config.num_warps, num_stages=config.num_stages),
  )(*operands)


def _splits(config: Tuning, programs: int, most: int) -> int:
  """Into how many parts to cut a sum of `most` terms."""
  return max(1, min(pl.cdiv(config.programs, programs), most))


def _table(w: Packed, config: Tuning, interpret: bool) -> machine.Table:
  """A third of shared memory, two where it is needed for nothing else."""
  most = machine.LAUNCH_BYTES // 3 * (1 if config.is_dot else 2)
  return machine.Table.of(
      w.codebook, 32 * config.num_warps, most, interpret)


def _matmul_kernel(x_ref, w, y_ref, *, config: Tuning, splits: int,
                   interpret: bool):
  row, block, split = (pl.program_id(i) for i in range(3))
  rows, bands = _Rows.of(row, config, interpret), Bands.of(w, block, config)
  table = _table(w, config, interpret)
  shard = jax.lax.div(split, splits)
  first, last = tiles_of(w, shard, jax.lax.rem(split, splits), splits)
  start, end = first_word(w, first), first_word(w, last)
  axes, runs = Axes.of(w), config.words // TILE_WORDS

  def step(i, carry):
    sums, base = carry
    words = Words(start + i * config.words, runs, end)
    block, base = bands.read(w, table, words, base, shard)
    if config.is_dot:
      return rows.add_dot(sums, x_ref, words, block, w), base
    sums, others = sums
    by_input, by_place = x_ref
    index = words.indices(axes.only("togj"), bands.size)
    # As a block has them, so that nothing passes between threads.
    index = jnp.broadcast_to(index, [
        BAND // 4 if name == "o" else n
        for name, n in zip(axes.only("togj").names, index.shape)])
    for place in range(WORD):
      x = rows.load(by_place, index, index < end, jnp.int32(place))
      sums = rows.add_products(
          sums, [axes.spread(a, "togj") for a in x], block.centroids(place))
    if w.outliers is not None:
      others = block.add_outliers(
          w, functools.partial(rows.load, by_input), others)
    return (sums, others), base

  if config.is_dot:
    zero = jnp.zeros((config.rows, config.bands * BAND), jnp.float32)
  else:
    zero = tuple(rows.zero(names, axes, runs * config.bands)
                 for names in ("qtogj", "qtog"))
  steps = pl.cdiv(jnp.maximum(end - start, 0), config.words)
  sums, _ = jax.lax.fori_loop(0, steps, step, (zero, bands.base(w, first)))
  if config.is_dot:
    if w.scale is not None:
      output = bands.start + jnp.arange(config.bands * BAND)
      sums *= plgpu.load(w.scale.at[output], mask=output < bands.end,
                         other=0).astype(jnp.float32)[None]
    rows.store_dot(y_ref, (split,), bands.start, bands.end, sums)
    return
  # Centroids are scaled in the end.
  scale = bands.scale(w, axes.only("qto"), runs)
  outputs = bands.indices(axes.only("qto"))
  for m, total, other in zip(rows.each, *sums):
    total = total.sum(axes.index("j")).sum(axes.only("qtog").index("g"))
    if scale is not None:
      total *= scale
    total += other.sum(axes.only("qtog").index("g"))
    if runs > 1:
      t = axes.only("qto").index("t")
      shape = list(total.shape)
      shape[t:t + 1] = [bands.size, runs]
      total = total.reshape(shape).sum(t + 1)
    plgpu.store(y_ref.at[split, m, outputs], total,
                mask=(outputs < bands.end) & (m < y_ref.shape[1]))


def _transposed_kernel(y_ref, w, z_ref, *, config: Tuning, splits: int,
                       interpret: bool):
  row, tile, split = (pl.program_id(i) for i in range(3))
  rows, words = _Rows.of(row, config, interpret), tile_words(w, tile)
  table = _table(w, config, interpret)
  shard = jax.lax.div(tile, w.tiles // w.shards[1])
  axes = Axes.of(w)
  per_split = pl.cdiv(num_blocks(w, config), splits)
  first = split * per_split
  last = jnp.minimum(first + per_split, num_blocks(w, config))

  def step(block, sums):
    bands = Bands.of(w, block, config)
    block, _ = bands.read(w, table, words, bands.base(w, tile), shard)
    if config.is_dot:
      return rows.add_dot_transposed(sums, y_ref, bands, block, w)
    outputs = bands.indices(axes.only("qto"))
    y = rows.load(y_ref, outputs, outputs < bands.end)
    y = [axes.spread(a, "qto") for a in y]
    values = block.weights(w, jnp.float32, True)
    sums = list(sums)
    for place, value in enumerate(values):
      for m, a in enumerate(y):
        k = place * config.rows + m
        sums[k] += (a * value).sum(axes.index("q"))
    return tuple(sums)

  if config.is_dot:
    zero = jnp.zeros((config.rows, TILE_WORDS * WORD), jnp.float32)
  else:
    zero = WORD * rows.zero("togj", axes, config.bands)
  sums = jax.lax.fori_loop(first, last, step, zero)
  if config.is_dot:
    rows.store_dot(z_ref, (split,), words.start * WORD, words.end * WORD, sums)
    return
  word = words.indices(axes.only("gj"))
  for k, total in enumerate(sums):
    place, m = divmod(k, config.rows)
    left = axes.only("togj")
    for name in "to":
      total = total.sum(left.index(name))
      left = left.only(left.names.replace(name, ""))
    m = rows.each[m]
    plgpu.store(z_ref.at[split, m, word * WORD + place], total,
                mask=(word < words.end) & (m < z_ref.shape[1]))


def _lookup_kernel(w, dense_ref, *, config: Tuning, interpret: bool):
  tile, block = pl.program_id(0), pl.program_id(1)
  bands, words = Bands.of(w, block, config), tile_words(w, tile)
  table = _table(w, config, interpret)
  shard = jax.lax.div(tile, w.tiles // w.shards[1])
  section = jax.lax.div(tile, w.tiles_per_section)
  axes = Axes.of(w)
  block, _ = bands.read(w, table, words, bands.base(w, tile), shard)
  output = bands.indices(axes)
  # From filled words to inputs.
  word = words.indices(axes, bands.size)
  column = (word - section * w.words_per_section) * WORD
  is_there = (word < words.end) & (output < bands.end)
  for place, values in enumerate(block.weights(w, jnp.float32, True)):
    mask = is_there & (column + place < w.section_inputs)
    index = section * w.section_inputs + column + place
    plgpu.store(
        dense_ref.at[(index, output) if w.is_words_first else (output, index)],
        values.astype(dense_ref.dtype), mask=mask)


@dataclasses.dataclass(frozen=True)
class _Rows:
  """A block of rows.

  Tensor cores multiply them by a whole block of the matrix. Without, sums are a
  tuple by row of the block's own dimensions, added up in the end.
  """

  start: jax.Array
  config: Tuning
  interpret: bool

  @classmethod
  def of(cls, block, config: Tuning, interpret: bool) -> _Rows:
    return cls(block * config.rows, config, interpret)

  @property
  def each(self) -> list[jax.Array]:
    return [self.start + m for m in range(self.config.rows)]

  def load(self, ref, index, mask, *lead) -> list[jax.Array]:
    """By row float32 ref[*lead, row, index]; zeros where not in the mask."""
    limit = ref.shape[len(lead)]
    if limit > 1:  # A single row is there.
      mask = [mask & (row < limit) for row in self.each]
    else:
      mask = [mask]
    return [
        plgpu.load(ref.at[(*lead, row, index)], mask=m, other=0).astype(
            jnp.float32) for row, m in zip(self.each, mask)]

  def zero(self, names: str, axes: Axes, runs: int) -> tuple[jax.Array, ...]:
    """Sums over some dimensions of a block."""
    sizes = dict(t=runs, q=4, o=BAND // 4, g=TILE_WORDS // 4, j=4)
    shape = [sizes[name] for name in axes.only(names).names]
    return (jnp.zeros(shape, jnp.float32),) * self.config.rows

  def add_products(self, sums, x, values):
    """Adds x times values, row by row."""
    return tuple(machine.fma(row, values, total, self.interpret)
                 for total, row in zip(sums, x))

  def add_dot(self, sums, ref, words: Words, block: Block, w: Packed):
    """Adds products over the inputs of a block: [rows, outputs]."""
    size, axis = words.runs * TILE_WORDS, int(not w.is_words_first)
    if ref.dtype != jnp.float32:
      x = self._block(ref, words.start * WORD, size * WORD, words.end * WORD)
      return sums + _dot(x, block.matrix(w, x.dtype, False), axis)
    # Numbers of four bytes take too many registers at once.
    row = self.start + jnp.arange(self.config.rows)
    word = words.start + jnp.arange(size)
    mask = (row < ref.shape[0])[:, None] & (word < words.end)[None]
    for place, values in enumerate(block.matrices(w, ref.dtype, False)):
      x = plgpu.load(ref.at[row[:, None], (word * WORD + place)[None]],
                     mask=mask, other=0)
      sums += _dot(x, values, axis)
    return sums

  def add_dot_transposed(self, sums, ref, bands: Bands, block: Block, w: Packed):
    """Adds products over the outputs of a block: [rows, inputs]."""
    y = self._block(ref, bands.start, bands.size * BAND, bands.end)
    return sums + _dot(y, block.matrix(w, y.dtype, True), int(w.is_words_first))

  def store_dot(self, ref, lead, start, end, sums) -> None:
    """To ref[*lead, rows, start:end]."""
    where, mask = self._where(start, sums.shape[1], end, ref.shape[-2])
    plgpu.store(ref.at[(*lead, *where)], sums, mask=mask)

  def _block(self, ref, start, size: int, end):
    """ref[rows, start:start + size]; zeros where there is nothing."""
    where, mask = self._where(start, size, end, ref.shape[0])
    return plgpu.load(ref.at[where], mask=mask, other=0)

  def _where(self, start, size: int, end, rows: int):
    of_rows = pl.ds(self.start, self.config.rows), pl.ds(start, size)
    row = self.start + jnp.arange(self.config.rows)
    return of_rows, (row < rows)[:, None] & (
        start + jnp.arange(size) < end)[None]


def _dot(x, values, axis: int):
  """Float32 x times values, over their dimension `axis`."""
  # Float32 on tensor cores has ten bits, unless asked for more.
  precision = (jax.lax.Precision.HIGHEST if x.dtype == jnp.float32
               else jax.lax.Precision.DEFAULT)
  return jax.lax.dot_general(
      x, values, (((1,), (axis,)), ((), ())), precision=precision,
      preferred_element_type=jnp.float32)
