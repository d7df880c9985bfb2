"""Blocks of a compressed matrix, decoded inside of a kernel.

A block is some words of some bands. Place s of words w, w + 1, ... holds the inputs
8 w + s, 8 (w + 1) + s, ..., so the eight places of a block are eight small
matrices.

An outlier is found by counting: a band's outliers are in order by word, in it by
output, in it by place. The rank of a word's first outlier is the number of those
before the block, which an offset gives or the block before, plus a sum of counts
over the block's words before it and the outputs before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import dataclasses

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


def num_blocks(w: Packed, config: Tuning) -> int:
  """Blocks of bands, none of which lies in two sections."""
  return w.out_sections * pl.cdiv(w.bands_per_section, config.bands)


@dataclasses.dataclass(frozen=True)
class Span:
  """Part of a dimension: `size` places from `start`, not all need be there."""

  start: jax.Array
  size: int
  is_inside: jax.Array

  @classmethod
  def of(cls, start, size: int, end) -> Span:
    return cls(start, size, start + jnp.arange(size) < end)

  @property
  def slice(self):
    return pl.ds(self.start, self.size)


@dataclasses.dataclass(frozen=True)
class Bands:
  """A block of bands of one section.

  Attributes:
    span: its outputs.
    bands: the same by band.
    shard: of the outliers.
  """

  span: Span
  bands: Span
  shard: jax.Array

  @classmethod
  def of(cls, w: Packed, block, config: Tuning) -> Bands:
    per_section = pl.cdiv(w.bands_per_section, config.bands)
    section = jax.lax.div(block, per_section)
    band = jax.lax.rem(block, per_section) * config.bands
    end = (section + 1) * w.section_out
    span = Span.of(section * w.section_out + band * BAND,
                    config.bands * BAND, end)
    first = section * w.bands_per_section
    bands = Span.of(first + band, config.bands, first + w.bands_per_section)
    shard = jax.lax.div(section, w.out_sections // w.shards[0])
    return cls(span, bands, shard)

  def base(self, w: Packed, tile) -> jax.Array:
    """int32 [bands], where the outliers of a tile begin."""
    if w.outliers is None:
      return jnp.zeros(self.bands.size, jnp.int32)
    # A tile that isn't there is that after the last, of which nothing is read.
    mask = self.bands.is_inside & (tile < w.tiles)
    return plgpu.load(w.offsets.at[as_stored(w, self.bands.slice, tile)],
                      mask=mask, other=0).astype(jnp.int32)

  def read(self, w: Packed, words: Span, base, in_shard
           ) -> tuple[Block, jax.Array]:
    """Reads some words and ranks their outliers.

    Args:
      w: the matrix, as references.
      words: which.
      base: int32 [bands], the ranks of their first outliers.
      in_shard: the shard of the inputs that they are in.

    Returns:
      The block, and the base of the words that follow.
    """
    where = as_stored(w, self.span.slice, words.slice)
    mask = both(w, self.span.is_inside, words.is_inside)
    planes = [plgpu.load(plane.at[where], mask=mask, other=0).astype(jnp.uint32)
              for plane in w.planes]
    codes, escapes, rank, most = _codes(w, planes), None, None, None
    if w.outliers is not None:
      escapes = _escapes(w, codes)
      # Triton counts no bits: the sum of the nibbles ends up in the highest.
      counts = (escapes * jnp.uint32(0x11111111) >> jnp.uint32(28)).astype(
          jnp.int32)
      rank, base, most = self._ranks(w, counts, base)
    return Block(self, words, as_stored(w, self.shard, in_shard), codes,
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
class Block:
  """Words of bands, [outputs, words] as stored.

  Attributes:
    bands, words: which.
    shard: indices into the first two dimensions of the outliers.
    codes: see `_codes`.
    escapes: uint32, see `_escapes`; None without outliers, as are the next.
    rank: int32, of the word's first outlier.
    most: of a word's escapes there are no more.
  """

  bands: Bands
  words: Span
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

  def add_outliers(self, w: Packed, gather: Callable, sums):
    """Adds x times the outliers alone, word by word: they are few.

    Args:
      w: the matrix, as references.
      gather: (place, word, mask) to x there, float32, for each row.
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
      x = gather(place.astype(jnp.int32), word, is_there)
      sums = tuple(total + row * values for total, row in zip(sums, x))
      return escapes & lower, rank + 1, sums

    _, word = outer(w, jnp.zeros(self.bands.span.size, jnp.int32),
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


def tile_words(w: Packed, tile) -> Span:
  """The words of a tile."""
  section = jax.lax.div(tile, w.tiles_per_section)
  return Span.of(first_word(w, tile), TILE_WORDS,
                  (section + 1) * w.words_per_section)


def as_stored(w: Packed, of_out, of_words):
  """A pair in the order of the matrix's dimensions."""
  return (of_words, of_out) if w.is_words_first else (of_out, of_words)


def outer(w: Packed, of_out, of_words):
  """Vectors of both dimensions, to be broadcast to a block as stored."""
  if w.is_words_first:
    return of_out[None], of_words[:, None]
  return of_out[:, None], of_words[None]


def both(w: Packed, is_out, is_word):
  """The mask of a block, as stored."""
  is_out, is_word = outer(w, is_out, is_word)
  return is_out & is_word
