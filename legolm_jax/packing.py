"""Codes as bit planes, and outliers in order: the layout of a compressed tensor.

`docs/legolm_format.md` has the diagram. In short, for weights of `out` outputs
and `inputs` inputs:

- Eight codes of one output that are neighbors along the inputs make a word. The
  low four bits of its codes are a uint32, the next two a uint16, the next one a
  uint8 (8 bits are two uint32), each in a plane of its own.
- The inputs are cut into up to eight sections, one per shard of the finest tensor
  parallelism. A section is filled up to whole words with code 0.
- 32 outputs make a band. Outliers of a band follow word by word along the inputs,
  inside that by output, inside that by place in the word. So the outliers of any
  run of words of a band are one run of values.
- A tile is a band times 128 inputs; it knows where its outliers begin.

Everything here is numpy, on the host.
"""

from __future__ import annotations

import dataclasses

import numpy as np

WORD = 8  # Codes in a word.
BAND = 32  # Outputs in a tile.
TILE_INPUTS = 128
MIN_BITS, MAX_BITS = 2, 8
_DEGREES = (8, 4, 2, 1)
# A section may be filled up by this share of its inputs.
_MAX_FILL = 1 / 32
_WORD_DTYPES = {4: np.uint32, 2: np.uint16, 1: np.uint8}
# How to bring the low bits of eight bytes together: (shift, mask) in turn.
_GATHER = {
    4: ((4, 0x00FF00FF00FF00FF), (8, 0x0000FFFF0000FFFF), (16, 0xFFFFFFFF)),
    2: ((6, 0x000F000F000F000F), (12, 0x000000FF000000FF), (24, 0xFFFF)),
    1: ((7, 0x0003000300030003), (14, 0x0000000F0000000F), (28, 0xFF)),
}
_BYTES = 0x0101010101010101


def code_bits(num_codes: int) -> int:
  """Bits of a code: ceil(log2 K), at least 2."""
  return max(MIN_BITS, (num_codes - 1).bit_length())


def plane_widths(bits: int) -> tuple[int, ...]:
  """Bits of a code in each plane, from the lowest: 6 = 4 + 2, 7 = 4 + 2 + 1."""
  if not MIN_BITS <= bits <= MAX_BITS:
    raise ValueError(f"expected {MIN_BITS} to {MAX_BITS} bits, found {bits}")
  if bits == 8:
    return (4, 4)
  return tuple(width for width in (4, 2, 1) if bits & width)


def plane_dtypes(bits: int) -> tuple[np.dtype, ...]:
  """The dtype of a word in each plane."""
  return tuple(np.dtype(_WORD_DTYPES[width]) for width in plane_widths(bits))


@dataclasses.dataclass(frozen=True)
class Layout:
  """Where codes and outliers of a tensor lie.

  Attributes:
    out, inputs: the tensor's dimensions.
    section_out, section_inputs: of one section; they divide `out`, `inputs`.
  """

  out: int
  inputs: int
  section_out: int
  section_inputs: int

  @classmethod
  def of(cls, out: int, inputs: int) -> Layout:
    """As many sections as the finest tensor parallelism asks for.

    Fewer, where the dimension can't be divided so, or where filling the words
    of a section up would cost more than 1/32 of it.
    """
    section_out = out // next(d for d in _DEGREES if out % d == 0)
    for degree in _DEGREES:
      section = inputs // degree
      if inputs % degree == 0 and -section % WORD <= section * _MAX_FILL:
        return cls(out, inputs, section_out, section)
    return cls(out, inputs, section_out, inputs)

  @property
  def words_per_section(self) -> int:
    return -(-self.section_inputs // WORD)

  @property
  def words(self) -> int:
    return self.inputs // self.section_inputs * self.words_per_section

  @property
  def bands_per_section(self) -> int:
    return -(-self.section_out // BAND)

  @property
  def bands(self) -> int:
    return self.out // self.section_out * self.bands_per_section

  @property
  def tiles_per_section(self) -> int:
    return -(-self.words_per_section * WORD // TILE_INPUTS)

  @property
  def tiles(self) -> int:
    """Tiles of one band."""
    return self.inputs // self.section_inputs * self.tiles_per_section

  @property
  def is_filled(self) -> bool:
    """Whether words hold codes that stand for no weight."""
    return self.section_inputs % WORD != 0

  def places(self, flat: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Orders weights as outliers are ordered.

    Args:
      flat: int64, indices into the tensor read as [out, inputs].

    Returns:
      int64 of its shape: a rank to sort by, and the tile's number (tiles of a
      band in turn, band by band).
    """
    row, column = np.divmod(flat, self.inputs)
    section, row = np.divmod(row, self.section_out)
    band = section * self.bands_per_section + row // BAND
    part, column = np.divmod(column, self.section_inputs)
    word = part * self.words_per_section + column // WORD
    rank = ((band * self.words + word) * BAND + row % BAND) * WORD
    tile = band * self.tiles + (
        part * self.tiles_per_section + column // TILE_INPUTS)
    return rank + column % WORD, tile

  def fill(self, codes: np.ndarray) -> np.ndarray:
    """[rows, inputs] -> [rows, words * WORD], sections filled up with 0."""
    if not self.is_filled:
      return codes
    rows = codes.shape[0]
    filled = np.zeros(
        (rows, self.inputs // self.section_inputs,
         self.words_per_section * WORD), codes.dtype)
    filled[..., :self.section_inputs] = codes.reshape(
        rows, -1, self.section_inputs)
    return filled.reshape(rows, -1)

  def unfill(self, codes: np.ndarray) -> np.ndarray:
    """The inverse of `fill`."""
    if not self.is_filled:
      return codes
    rows = codes.shape[0]
    parts = codes.reshape(rows, -1, self.words_per_section * WORD)
    return parts[..., :self.section_inputs].reshape(rows, self.inputs)


def pack(codes: np.ndarray, bits: int) -> list[np.ndarray]:
  """Packs codes, uint8 [rows, words * 8] -> planes, each [rows, words]."""
  # One uint64 is a word with a byte per code.
  v = np.ascontiguousarray(codes).view("<u8")
  planes, shift = [], 0
  for width in plane_widths(bits):
    mask = np.uint64(_BYTES * ((1 << width) - 1))
    t = (v >> np.uint64(shift)) & mask
    for step, keep in _GATHER[width]:
      t |= t >> np.uint64(step)
      t &= np.uint64(keep)
    planes.append(t.astype(_WORD_DTYPES[width]))
    shift += width
  return planes


def unpack(planes: list[np.ndarray], bits: int) -> np.ndarray:
  """The inverse of `pack`: planes [rows, words] -> uint8 [rows, words * 8]."""
  v = np.zeros(planes[0].shape, "<u8")
  shift = 0
  for plane, width in zip(planes, plane_widths(bits)):
    t = plane.astype("<u8")
    steps = _GATHER[width]
    keeps = [keep for _, keep in steps[-2::-1]]
    keeps.append(_BYTES * ((1 << width) - 1))
    for (step, _), keep in zip(steps[::-1], keeps):
      t |= t << np.uint64(step)
      t &= np.uint64(keep)
    v |= t << np.uint64(shift)
    shift += width
  return v.view(np.uint8)


def order_outliers(layout: Layout, flat: np.ndarray, values: np.ndarray
                   ) -> tuple[np.ndarray, np.ndarray]:
  """Puts outliers in order.

  Args:
    layout: the tensor's.
    flat: int64 [n], where they stand in the tensor read as [out, inputs].
    values: [n].

  Returns:
    The values in order, and uint32 [bands, tiles]: how many come before each
    tile.

  Raises:
    ValueError: if there are 2^32 or more.
  """
  if flat.size >= 1 << 32:
    raise ValueError(f"a tensor has {flat.size} outliers, at most 2^32 - 1 fit")
  rank, tile = layout.places(flat)
  per_tile = np.bincount(tile, minlength=layout.bands * layout.tiles)
  before = np.cumsum(per_tile) - per_tile
  offsets = before.astype(np.uint32).reshape(layout.bands, layout.tiles)
  return values[np.argsort(rank)], offsets
