"""Blocks of a compressed matrix, decoded inside of a kernel.

A block is some runs of 16 words of some bands. Its dimensions are such that Triton
gives whole runs to a warp, up to 16 bytes of a plane at a time to a thread, and
nothing but a few sums has to pass between warps:

    t  runs: by band, in it along the inputs   warps
    o  outputs of a band, by four              8 lanes
    g  words of a run, by four                 4 lanes
    q  four outputs                            in a thread
    j  four words                              in a thread

Place s of a word w is input 8 w + s, so the eight places of a block are eight
small matrices.

An outlier is found by counting: a band's outliers are in order by word, in it by
output, in it by place. The rank of a word's first outlier is the number of those
before the run, which an offset gives or the block before, plus a sum of counts
over the run's words before it and the outputs before it.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
import jax.numpy as jnp

from pallas_kernels.codebook_matmul import machine
from pallas_kernels.codebook_matmul.packed import BAND, TILE_WORDS, WORD, Packed
from pallas_kernels.codebook_matmul.tuning import Tuning

# What spreads a plane's word so that every byte has two neighboring codes' bits.
_SPREAD = {
    4: (),
    2: ((4, 0x0F0F0F0F),),
    1: ((12, 0x000F000F), (6, 0x03030303)),
}
_BYTES = 0x01010101
# Takes the two highest bits of each byte to the highest byte.
_GATHER = 0x00041041
_EVEN_BYTES = 0x00FF00FF
_FOUR = 4
# Few groups of four words have more outliers than this.
_FEW = 2


def num_blocks(w: Packed, config: Tuning) -> int:
  """Blocks of bands, none of which lies in two sections."""
  return w.out_sections * pl.cdiv(w.bands_per_section, config.bands)


@dataclasses.dataclass(frozen=True)
class Axes:
  """Names of dimensions, in order."""

  names: str

  @classmethod
  def of(cls, w: Packed) -> Axes:
    """Of a block; where a load is of single numbers, Triton's lanes go from the
    last dimension to the first, too."""
    return cls("qjtgo" if w.is_words_first else "qjtog")

  def index(self, name: str) -> int:
    return self.names.index(name)

  def only(self, names: str) -> Axes:
    """Some of these, in the same order."""
    return Axes("".join(name for name in self.names if name in names))

  def spread(self, array: jax.Array, names: str) -> jax.Array:
    """To be broadcast: an array of some of these, in the same order."""
    return jnp.expand_dims(array, tuple(
        i for i, name in enumerate(self.names) if name not in names))

  def arange(self, name: str, size: int) -> jax.Array:
    """int32: the place along a dimension."""
    return self.spread(jnp.arange(size), name)


@dataclasses.dataclass(frozen=True)
class Words:
  """Runs of 16 words that follow each other; those from `end` aren't there."""

  start: jax.Array
  runs: int
  end: jax.Array

  def indices(self, axes: Axes, bands: int = 1) -> jax.Array:
    """int32: over t, g and j."""
    return self.groups(axes, bands) + axes.arange("j", _FOUR)

  def groups(self, axes: Axes, bands: int = 1) -> jax.Array:
    """int32: the first of four words, over t and g."""
    words = self.start + axes.arange("g", TILE_WORDS // _FOUR) * _FOUR
    if self.runs * bands == 1:
      return words
    run = axes.arange("t", bands * self.runs)
    return words + (run & (self.runs - 1)) * TILE_WORDS


@dataclasses.dataclass(frozen=True)
class Bands:
  """A block of bands of one section.

  Attributes:
    start, size: of its first output, of how many bands.
    end: the section's first output that isn't there.
    first: of the bands.
    is_inside: [size], whether they are there.
    shard: of the outliers.
  """

  start: jax.Array
  size: int
  end: jax.Array
  first: jax.Array
  is_inside: jax.Array
  shard: jax.Array

  @classmethod
  def of(cls, w: Packed, block, config: Tuning) -> Bands:
    per_section = pl.cdiv(w.bands_per_section, config.bands)
    section = jax.lax.div(block, per_section)
    band = jax.lax.rem(block, per_section) * config.bands
    return cls(
        start=section * w.section_out + band * BAND, size=config.bands,
        end=(section + 1) * w.section_out,
        first=section * w.bands_per_section + band,
        is_inside=band + jnp.arange(config.bands) < w.bands_per_section,
        shard=jax.lax.div(section, w.out_sections // w.shards[0]))

  def base(self, w: Packed, tile) -> jax.Array:
    """int32 [bands], where the outliers of a tile begin."""
    if w.outliers is None:
      return jnp.zeros(self.size, jnp.int32)
    # A tile that isn't there is that after the last, of which nothing is read.
    where = pl.ds(self.first, self.size)
    return plgpu.load(
        w.offsets.at[(tile, where) if w.is_words_first else (where, tile)],
        mask=self.is_inside & (tile < w.tiles), other=0).astype(jnp.int32)

  def indices(self, axes: Axes, runs: int = 1) -> jax.Array:
    """int32: the outputs, over q, t and o."""
    run = axes.arange("t", self.size * runs)
    return (self.start + (run // runs if runs > 1 else run) * BAND
            + axes.arange("o", BAND // _FOUR) * _FOUR + axes.arange("q", _FOUR))

  def scale(self, w: Packed, axes: Axes, runs: int = 1):
    """Float32 over q, t and o, 1 where there is no output; or None."""
    if w.scale is None:
      return None
    outputs = self.indices(axes, runs)
    return plgpu.load(w.scale.at[outputs], mask=outputs < self.end,
                      other=1).astype(jnp.float32)

  def read(self, w: Packed, table: machine.Table, words: Words, base, in_shard
           ) -> tuple[Block, jax.Array]:
    """Reads some words and ranks their outliers.

    Args:
      w: the matrix, as references.
      table: its codebook.
      words: which.
      base: int32 [bands], the ranks of their first outliers.
      in_shard: the shard of the inputs that they are in.

    Returns:
      The block, and the base of the words that follow.
    """
    axes = Axes.of(w)
    outputs = self.indices(axes, words.runs)
    word = words.indices(axes, self.size)
    mask = (outputs < self.end) & (word < words.end)
    where = (word, outputs) if w.is_words_first else (outputs, word)
    planes = [plgpu.load(plane.at[where], mask=mask, other=0).astype(jnp.uint32)
              for plane in w.planes]
    codes, escapes, ranks = _codes(w, planes, table.is_plain), None, None
    if w.outliers is not None:
      escapes = _escapes(w, codes)
      ranks, base = _Ranks.of(axes, escapes, base, words.runs, table)
    shard = ((in_shard, self.shard) if w.is_words_first
             else (self.shard, in_shard))
    return Block(self, words, axes, table, shard,
                 codes, escapes, ranks), base


@dataclasses.dataclass(frozen=True)
class _Ranks:
  """How many outliers come before a word's.

  Attributes:
    group: int32 over t and g: before the group of four words.
    word: twice uint32 over q, t, o and g: more of them before the first and the
      third of the group (lower and higher half), before the second and fourth.
  """

  group: jax.Array
  word: tuple[jax.Array, jax.Array]

  @classmethod
  def of(cls, axes: Axes, escapes, base, runs: int, table: machine.Table
         ) -> tuple[_Ranks, jax.Array]:
    """Of masks of escapes; `base` and what is returned as of `Bands.read`."""
    u = jnp.uint32
    counts = machine.count_bits(escapes, table.is_plain)
    counts <<= 8 * axes.arange("j", _FOUR)
    counts = counts.sum(axes.index("j"))
    axes = axes.only("qtog")
    # No word has more than 8: bytes hold the sums over four outputs.
    q, o = axes.index("q"), axes.only("tog").index("o")
    before = (jnp.cumsum(counts, q) - counts).astype(u)
    four = counts.sum(q).astype(u)
    parts, totals = [], []
    for odd in range(2):
      count = ((four >> u(8 * odd)) & u(_EVEN_BYTES)).astype(jnp.int32)
      totals.append(count.sum(o).astype(u))
      parts.append((jnp.cumsum(count, o) - count).astype(u))
    # Sums of the group's words.
    first, third = totals[0] & u(0xFFFF), totals[0] >> u(16)
    second, fourth = totals[1] & u(0xFFFF), totals[1] >> u(16)
    two = first + second
    words = two << u(16), first + (two + third << u(16))
    word = tuple(
        ((before >> u(8 * odd)) & u(_EVEN_BYTES)) + axes.spread(
            parts[odd] + axes.only("tog").spread(words[odd], "tg"), "tog")
        for odd in range(2))
    sums = (two + third + fourth).astype(jnp.int32)
    group = jnp.cumsum(sums, 1) - sums
    by_run = sums.sum(1)
    if runs > 1:
      by_run = by_run.reshape(-1, runs)
      begin = jnp.cumsum(by_run, 1) - by_run + base[:, None]
      base, begin = base + by_run.sum(1), begin.reshape(-1)
    else:
      base, begin = base + by_run, base
    return cls(group + begin[:, None], word), base

  def of_words(self, axes: Axes) -> jax.Array:
    """int32 over all dimensions."""
    u, j = jnp.uint32, axes.arange("j", _FOUR)
    even, odd = (axes.spread(part, "qtog") for part in self.word)
    word = jnp.where((j & 1) == 1, odd, even) >> (j >> 1 << 4).astype(u)
    return (word & u(0xFFFF)).astype(jnp.int32) + axes.spread(self.group, "tg")


@dataclasses.dataclass(frozen=True)
class Block:
  """Words of bands.

  Attributes:
    bands, words: which.
    axes: the dimensions.
    table: the codebook.
    shard: indices into the first two dimensions of the outliers.
    codes: twice uint32, see `_codes`.
    escapes: uint32, see `_escapes`; None without outliers, as are the next.
    ranks: of the outliers.
  """

  bands: Bands
  words: Words
  axes: Axes
  table: machine.Table
  shard: tuple[jax.Array, jax.Array]
  codes: list[jax.Array]
  escapes: jax.Array | None
  ranks: _Ranks | None

  def centroids(self, place: int) -> jax.Array:
    """Float32: the codebook's entries at a place, 0 for an escape."""
    return self.table.at(self.codes[place % 2], place // 2)

  def weights(self, w: Packed, dtype, is_scaled: bool) -> list[jax.Array]:
    """Place by place, with the outliers.

    Args:
      w: the matrix, as references.
      dtype: of the result.
      is_scaled: False for weights that are yet to be scaled.
    """
    scale = self.bands.scale(w, self.axes, self.words.runs)
    scaled = lambda a: a * scale if is_scaled and scale is not None else a
    if self.ranks is None:
      return [scaled(self.centroids(place)).astype(dtype)
              for place in range(WORD)]
    inverse = None if is_scaled or scale is None else 1 / scale
    start = self.ranks.of_words(self.axes)

    def load(rank, mask):
      values = self._outliers(w, rank, mask)
      return values if inverse is None else values * inverse

    def with_few():
      """Two outliers at most: they are at hand before it is known where."""
      first, second = load(start, counts > 0), load(start + 1, counts > 1)
      for place in range(WORD):
        is_escape = self._is_escape(place)
        value = jnp.where(is_escape, first, scaled(self.centroids(place)))
        yield value.astype(dtype)
        first = jnp.where(is_escape, second, first)

    def with_many():
      rank = start
      for place in range(WORD):
        is_escape = self._is_escape(place)
        value = jnp.where(is_escape, load(rank, is_escape),
                          scaled(self.centroids(place)))
        yield value.astype(dtype)
        rank += is_escape.astype(jnp.int32)

    counts = machine.count_bits(self.escapes, self.table.is_plain)
    return jax.lax.cond(
        _largest(counts, self.axes) > 2,
        lambda: list(with_many()), lambda: list(with_few()))

  def matrices(self, w: Packed, dtype, is_scaled: bool) -> list[jax.Array]:
    """[outputs, words] as stored, place by place."""
    return [self._arranged(values, "", w)
            for values in self.weights(w, dtype, is_scaled)]

  def matrix(self, w: Packed, dtype, is_scaled: bool) -> jax.Array:
    """[outputs, inputs] as stored."""
    # Three dimensions of 2 are a word's places.
    values = _stack(self.weights(w, dtype, is_scaled))
    return self._arranged(values, "xyz", w)

  def _arranged(self, values, places: str, w: Packed) -> jax.Array:
    """From a block's dimensions and those of places to a matrix's."""
    bands, runs = self.bands.size, self.words.runs
    t = self.axes.index("t")
    # t as b and r: bands and runs.
    names = self.axes.names.replace("t", "br") + places
    shape = (*values.shape[:t], bands, runs, *values.shape[t + 1:])
    order = ["boq", "rgj" + places]
    if w.is_words_first:
      order.reverse()
    values = values.reshape(shape).transpose(
        [names.index(name) for name in "".join(order)])
    return values.reshape([
        bands * BAND if part == "boq" else -1 for part in order])

  def add_outliers(self, w: Packed, gather: Callable, sums):
    """Adds x times the outliers alone: they are few.

    Args:
      w: the matrix, as references.
      gather: (input, mask) to x there, float32, for each row.
      sums: float32 over q, t, o and g for each row.
    """
    u, plain = jnp.uint32, self.table.is_plain
    axes = self.axes.only("qtog")
    shift = (8 * self.axes.arange("j", _FOUR)).astype(u)
    # A bit for each of 32 weights.
    escapes = (self.escapes << shift).astype(jnp.int32).sum(
        self.axes.index("j")).astype(u)
    group = axes.spread(self.ranks.group, "tg")
    first = self.words.groups(axes, self.bands.size) * WORD

    def add_next(_, carry):
      """The last outlier of every four words that have one."""
      left, sums = carry
      is_there = left != u(0)
      bit = machine.highest_bit(left, plain).astype(u) & u(31)
      one = u(1) << bit
      word = jnp.where((bit & u(8)) != u(0), *self.ranks.word[::-1])
      word = (word >> (bit & u(16))) & u(0xFFFF)
      before = escapes & (one - u(1)) & (u(255) << (bit & u(24)))
      rank = group + word.astype(jnp.int32) + machine.count_bits(before, plain)
      values = self._outliers(w, rank, is_there)
      x = gather(first + bit.astype(jnp.int32), is_there)
      sums = tuple(machine.fma(row, values, total, plain)
                   for total, row in zip(sums, x))
      return left & ~one, sums

    carry = (escapes, sums)
    most = _largest(machine.count_bits(escapes, plain), axes)
    for i in range(_FEW):
      carry = add_next(i, carry)
    return jax.lax.fori_loop(jnp.int32(_FEW), most, add_next, carry)[1]

  def _is_escape(self, place: int) -> jax.Array:
    return (self.escapes & jnp.uint32(1 << place)) != jnp.uint32(0)

  def _outliers(self, w: Packed, rank, mask) -> jax.Array:
    """Float32, 0 where not in the mask."""
    return plgpu.load(w.outliers.at[(*self.shard, rank)], mask=mask,
                      other=0).astype(jnp.float32)


def _largest(values: jax.Array, axes: Axes) -> jax.Array:
  """The largest of a block's values."""
  for name in "jqogt":  # First what is in a thread.
    if name in axes.names:
      values = values.max(axes.index(name))
      axes = axes.only(axes.names.replace(name, ""))
  return values


def _stack(values: list[jax.Array]) -> jax.Array:
  """Along new last dimensions of 2 each: Triton joins no more than two."""
  if len(values) == 1:
    return values[0]
  return jnp.stack([_stack(values[0::2]), _stack(values[1::2])], -1)


def _codes(w: Packed, planes, plain: bool) -> list[jax.Array]:
  """Twice uint32, a byte per code: of the even places, of the odd places."""
  u = jnp.uint32
  codes, below = [None, None], 0
  for plane, width in zip(planes, w.widths):
    if width == 2:
      plane = machine.spread_bytes(plane, plain)
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
  """uint32: bit s is set where the code at place s is the escape."""
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
  pairs = odd & u(_BYTES << 7) | even >> u(1) & u(0xFFFFFFFF ^ (_BYTES << 7))
  return (pairs & u(_BYTES * 0xC0)) * u(_GATHER) >> u(24)


def tiles_of(w: Packed, shard, part, parts: int):
  """(first, last + 1) tile of a part of a shard of the inputs."""
  tiles = w.tiles // w.shards[1]
  per_part = pl.cdiv(tiles, parts)
  first = jnp.minimum(part * per_part, tiles)
  last = jnp.minimum(first + per_part, tiles)
  return shard * tiles + first, shard * tiles + last


def first_word(w: Packed, tile):
  """Of a tile, or the number of words."""
  section = jax.lax.div(tile, w.tiles_per_section)
  tile = jax.lax.rem(tile, w.tiles_per_section)
  return section * w.words_per_section + tile * TILE_WORDS


def tile_words(w: Packed, tile) -> Words:
  """The words of a tile."""
  section = jax.lax.div(tile, w.tiles_per_section)
  return Words(first_word(w, tile), 1, (section + 1) * w.words_per_section)
