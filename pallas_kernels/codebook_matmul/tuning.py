"""Numbers that change a kernel's speed and nothing else."""

from __future__ import annotations

import dataclasses

from pallas_kernels.codebook_matmul.packed import TILE_WORDS

# A tensor core's product has at least so many rows.
DOT_ROWS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
  """What one program does; sizes are powers of two.

  Attributes:
    rows: of x. Below 16 they are multiplied and added one by one, from 16 on by
      tensor cores.
    bands: of 32 outputs each; in the transposed product, at a time.
    words: of 8 inputs each, at a time; in the transposed product and the lookup
      16, a tile's.
    programs: the sum is split over programs until there are about so many.
    num_warps, num_stages: of Triton.
  """

  rows: int
  bands: int
  words: int
  programs: int
  num_warps: int
  num_stages: int

  @property
  def is_dot(self) -> bool:
    """Whether tensor cores multiply."""
    return self.rows >= DOT_ROWS

  def check(self, is_transposed: bool) -> None:
    """Raises ValueError for numbers that no kernel is made for."""
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if value < 1 or (value & (value - 1)
                       and field.name not in ("programs", "num_stages")):
        raise ValueError(f"{field.name}: expected a power of two, found {value}")
    if is_transposed and self.words != TILE_WORDS:
      raise ValueError(f"words: expected {TILE_WORDS}, found {self.words}")
    if self.is_dot and self.words < DOT_ROWS:
      raise ValueError(f"words: expected at least {DOT_ROWS} with {self.rows} "
                       f"rows, found {self.words}")


BATCH_1 = Tuning(
    rows=1, bands=1, words=32, programs=1056, num_warps=4, num_stages=1)
SMALL = Tuning(
    rows=16, bands=1, words=32, programs=1056, num_warps=4, num_stages=1)
LARGE = Tuning(
    rows=128, bands=2, words=32, programs=264, num_warps=8, num_stages=1)
TRANSPOSED_1 = Tuning(
    rows=1, bands=1, words=16, programs=1056, num_warps=4, num_stages=1)
TRANSPOSED_SMALL = Tuning(
    rows=16, bands=1, words=16, programs=1056, num_warps=4, num_stages=1)
TRANSPOSED_LARGE = Tuning(
    rows=64, bands=1, words=16, programs=264, num_warps=4, num_stages=1)
LOOKUP = Tuning(
    rows=1, bands=1, words=16, programs=1, num_warps=2, num_stages=1)


def default(rows: int, itemsize: int, is_transposed: bool = False) -> Tuning:
  """The tuning for a number of rows: one, up to 16, or more.

  Numbers of four bytes are multiplied by 16 rows at a time: more need more
  registers than there are.
  """
  one, small, large = (
      (TRANSPOSED_1, TRANSPOSED_SMALL, TRANSPOSED_LARGE) if is_transposed
      else (BATCH_1, SMALL, LARGE))
  if rows <= 1:
    return one
  return small if rows <= DOT_ROWS or itemsize > 2 else large
