"""The compressed matrix that these kernels read.

docs/legolm_format.md has the layout with a diagram. `legolm_jax`'s LegoArray has
the fields below; this floor knows nothing else of it.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp

WORD = 8  # Codes in a word, neighbors along the inputs.
BAND = 32  # Outputs in a tile.
TILE_WORDS = 16
MIN_BITS, MAX_BITS = 2, 8
_WIDTHS = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1),
           8: (4, 4)}
_WORD_DTYPES = {4: "uint32", 2: "uint16", 1: "uint8"}
# Ranks of outliers are int32.
_MOST_OUTLIERS = (1 << 31) - 1


class CompressedMatrix(Protocol):
  """What a caller gives; with IN_OUT, leading dimensions are swapped.

  Attributes:
    planes: the codes' bits, from the lowest: [out, words] each, uint32 for four
      bits, uint16 for two, uint8 for one.
    codebook: float32 [num_codes]; with outliers the last is the escape's, 0.
    scale: [out], or None.
    outliers: [out shards, in shards, n], or None: in order, a list per shard.
    offsets: uint32 [bands, tiles], or None: how many outliers of its shard come
      before each tile.
    section_out, section_inputs: into which the dimensions are cut.
    num_codes: K, with the escape.
    storage: an enum of the values "out_in" and "in_out".
  """

  planes: tuple[jax.Array, ...]
  codebook: jax.Array
  scale: jax.Array | None
  outliers: jax.Array | None
  offsets: jax.Array | None
  section_out: int
  section_inputs: int
  num_codes: int
  dtype: Any
  storage: enum.Enum


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["planes", "codebook", "scale", "outliers", "offsets"],
    meta_fields=["section_out", "section_inputs", "is_words_first"])
@dataclasses.dataclass(frozen=True, kw_only=True)
class Packed:
  """A `CompressedMatrix` that was checked.

  Attributes:
    planes, codebook, scale, outliers, offsets, section_out, section_inputs: as
      there.
    is_words_first: whether planes are [words, out] and so on: IN_OUT storage.
  """

  planes: tuple[jax.Array, ...]
  codebook: jax.Array
  scale: jax.Array | None
  outliers: jax.Array | None
  offsets: jax.Array | None
  section_out: int
  section_inputs: int
  is_words_first: bool

  @classmethod
  def of(cls, w: CompressedMatrix) -> Packed:
    """Takes a matrix; nothing is copied on a device.

    Raises:
      ValueError: if its leaves don't fit together.
    """
    as_array = lambda a: None if a is None else jnp.asarray(a)
    packed = cls(
        planes=tuple(map(as_array, w.planes)), codebook=as_array(w.codebook),
        scale=as_array(w.scale), outliers=as_array(w.outliers),
        offsets=as_array(w.offsets), section_out=w.section_out,
        section_inputs=w.section_inputs,
        is_words_first=w.storage.value == "in_out")
    packed.check(w.num_codes)
    return packed

  @property
  def num_codes(self) -> int:
    return self.codebook.shape[0]

  @property
  def bits(self) -> int:
    return max(MIN_BITS, (self.num_codes - 1).bit_length())

  @property
  def widths(self) -> tuple[int, ...]:
    """Bits of a code in each plane."""
    return _WIDTHS[self.bits]

  @property
  def out(self) -> int:
    return self.planes[0].shape[self.is_words_first]

  @property
  def words(self) -> int:
    return self.planes[0].shape[not self.is_words_first]

  @property
  def words_per_section(self) -> int:
    return -(-self.section_inputs // WORD)

  @property
  def inputs(self) -> int:
    return self.words // self.words_per_section * self.section_inputs

  @property
  def shape(self) -> tuple[int, int]:
    """Of the dense matrix, as stored."""
    shape = (self.out, self.inputs)
    return shape[::-1] if self.is_words_first else shape

  @property
  def out_sections(self) -> int:
    return self.out // self.section_out

  @property
  def in_sections(self) -> int:
    return self.words // self.words_per_section

  @property
  def bands_per_section(self) -> int:
    return -(-self.section_out // BAND)

  @property
  def tiles_per_section(self) -> int:
    return -(-self.words_per_section // TILE_WORDS)

  @property
  def bands(self) -> int:
    return self.out_sections * self.bands_per_section

  @property
  def tiles(self) -> int:
    """Of one band."""
    return self.in_sections * self.tiles_per_section

  @property
  def shards(self) -> tuple[int, int]:
    """(out, in): into how many lists the outliers are cut."""
    if self.outliers is None:
      return 1, 1
    first, second = self.outliers.shape[:2]
    return (second, first) if self.is_words_first else (first, second)

  @property
  def nbytes(self) -> int:
    """Of all leaves: what a product has to read of the matrix."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

  def out_first(self) -> Packed:
    """The same as [out, in]."""
    if not self.is_words_first:
      return self
    swap = lambda a: None if a is None else a.swapaxes(0, 1)
    return dataclasses.replace(
        self, planes=tuple(map(swap, self.planes)),
        outliers=swap(self.outliers), offsets=swap(self.offsets),
        is_words_first=False)

  def fill(self, x: jax.Array) -> jax.Array:
    """[m, in] as [m, words * 8]: sections filled up to whole words by zeros."""
    fill = self.words_per_section * WORD - self.section_inputs
    x = x.reshape(x.shape[0], self.in_sections, self.section_inputs)
    return jnp.pad(x, ((0, 0), (0, 0), (0, fill))).reshape(x.shape[0], -1)

  def cut(self, filled: jax.Array) -> jax.Array:
    """[m, words * 8] as [m, in]: what `fill` filled up is left out."""
    rows = filled.shape[0]
    sections = filled.reshape(rows, self.in_sections, -1)
    return sections[..., :self.section_inputs].reshape(rows, self.inputs)

  def split_words(self, x: jax.Array) -> jax.Array:
    """[m, in] as [8, m, words], by the place in a word."""
    return self.fill(x).reshape(
        x.shape[0], self.words, WORD).transpose(2, 0, 1)

  def check(self, num_codes: int) -> None:
    """Raises ValueError, with the values, unless all leaves fit together."""
    _expect("num_codes", num_codes, "2 to 256", 2 <= num_codes <= 256)
    _expect_array("codebook", self.codebook, (num_codes,), "float32")
    widths, found = self.widths, [p.shape for p in self.planes]
    _expect("planes", found, f"{len(widths)} of {self.bits} bits",
            len(found) == len(widths))
    _expect("planes", found, "two dimensions, none of them 0",
            all(len(shape) == 2 and all(shape) for shape in found))
    for plane, width in zip(self.planes, widths):
      _expect_array(f"plane of {width} bits", plane, found[0],
                    _WORD_DTYPES[width])
    for name, section, whole, part in (
        ("section_out", self.section_out, self.out, self.section_out),
        ("section_inputs", self.section_inputs, self.words,
         self.words_per_section)):
      _expect(name, section, f"a part of planes {found[0]}",
              section > 0 and whole % part == 0)
    if self.scale is not None:
      _expect_array("scale", self.scale, (self.out,))
    if (self.outliers is None) != (self.offsets is None):
      raise ValueError("outliers and offsets: expected both or neither")
    if self.outliers is None:
      return
    shape = (self.bands, self.tiles)
    _expect_array("offsets", self.offsets,
                  shape[::-1] if self.is_words_first else shape, "uint32")
    shape = self.outliers.shape
    sections = (self.out_sections, self.in_sections)
    _expect("outliers", shape, "three dimensions, none of them 0",
            len(shape) == 3 and all(shape))
    _expect("outliers", shape, f"shards that divide {sections} sections "
            "of outputs and inputs",
            all(n % m == 0 for n, m in zip(sections, self.shards)))
    _expect("outliers", shape, f"at most {_MOST_OUTLIERS}",
            self.outliers.size <= _MOST_OUTLIERS)
    _expect("dtype of outliers", self.outliers.dtype, "a floating one",
            jnp.issubdtype(self.outliers.dtype, jnp.floating))


def _expect(what: str, found, expected: str, is_so: bool) -> None:
  if not is_so:
    raise ValueError(f"{what}: expected {expected}, found {found}")


def _expect_array(name: str, array, shape, dtype=None) -> None:
  dtype = dtype or str(array.dtype)
  if array.shape != tuple(shape) or array.dtype != dtype:
    raise ValueError(
        f"{name}: expected {dtype} {list(shape)}, found "
        f"{array.dtype} {list(array.shape)}")
