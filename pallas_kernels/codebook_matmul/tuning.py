"""Numbers that change a kernel's speed and nothing else."""

from __future__ import annotations

import dataclasses

from pallas_kernels.codebook_matmul.packed import TILE_WORDS

# A tensor core's product has at least so many rows.
DOT_ROWS = 16
# Of more rows a product has no default: a kernel decodes again for each block of
# them, and a matrix that is decoded once is multiplied faster.
MOST_ROWS = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
  """What one program does; sizes are powers of two.

  Attributes:
    rows: of x. Below 16 they are multiplied and added one by one, from 16 on by
      tensor cores.
    bands: of 32 outputs each; in the transposed product, at a time.
    words: of 8 inputs each, at a time, in runs of 16; in the transposed product
      and the lookup 16, a tile's. A warp decodes whole runs: there should be as
      many (of all bands) as warps.
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
    if self.words < TILE_WORDS:
      raise ValueError(
          f"words: expected at least {TILE_WORDS}, found {self.words}")


def _tuning(rows: int, bands: int, words: int, num_warps: int,
            programs: int = 1056) -> Tuning:
  return Tuning(rows=rows, bands=bands, words=words, programs=programs,
                num_warps=num_warps, num_stages=1)


# What an autotuner tries, first what there is reason to prefer. All compile for an
# H100 without spills, but for 8 bytes of the last that is transposed, of few rows.
_BATCH_1 = _tuning(1, 1, 32, 2), _tuning(1, 1, 16, 1), _tuning(1, 1, 64, 4)
_BATCH_2 = _tuning(2, 1, 32, 2), _tuning(2, 1, 16, 1), _tuning(2, 1, 64, 4)
_SMALL = _tuning(16, 2, 16, 2), _tuning(16, 1, 16, 1)
_LARGE = _tuning(128, 4, 16, 8, 264), _tuning(64, 2, 16, 4, 264)
_FLOAT_SMALL = _tuning(16, 4, 16, 8, 264), _tuning(16, 1, 16, 4, 528)
_FLOAT_LARGE = (_tuning(32, 1, 16, 4, 528), _tuning(32, 1, 16, 8, 528),
                _tuning(16, 4, 16, 8, 264))
_TRANSPOSED_1 = (_tuning(1, 2, 16, 2), _tuning(1, 1, 16, 1),
                 _tuning(1, 4, 16, 4))
_TRANSPOSED_SMALL = _tuning(16, 2, 16, 2), _tuning(16, 1, 16, 2)
_TRANSPOSED_LARGE = _tuning(64, 2, 16, 4, 264), _tuning(128, 4, 16, 8, 264)
_TRANSPOSED_FLOAT = _tuning(16, 1, 16, 8, 528), _tuning(16, 1, 16, 4, 528)
LOOKUP = _tuning(1, 2, 16, 2, 1)


def _kernels(rows: int, itemsize: int, is_transposed: bool
             ) -> tuple[Tuning, ...]:
  """For a number of rows: one, two, up to 16, or more."""
  is_large, is_wide = rows > DOT_ROWS, itemsize > 2
  if is_transposed:
    if rows <= 1:
      return _TRANSPOSED_1
    if is_wide:
      return _TRANSPOSED_FLOAT
    return _TRANSPOSED_LARGE if is_large else _TRANSPOSED_SMALL
  if rows <= 2:
    return _BATCH_1 if rows <= 1 else _BATCH_2
  if is_wide:
    return _FLOAT_LARGE if is_large else _FLOAT_SMALL
  return _LARGE if is_large else _SMALL


def default(rows: int, itemsize: int, is_transposed: bool = False) -> Tuning:
  """The tuning for rows of numbers of `itemsize` bytes."""
  return _kernels(rows, itemsize, is_transposed)[0]


def candidates(rows: int, itemsize: int, is_transposed: bool = False
               ) -> list[Tuning]:
  """What an autotuner tries, the default first: 6 to 9 tunings.

  Args:
    rows: of x.
    itemsize: bytes of its numbers.
    is_transposed: whether the product is over the outputs.
  """
  kernels = _kernels(rows, itemsize, is_transposed)
  return [dataclasses.replace(kernel, programs=max(1, int(part * kernel.programs)))
          for part in (1, 2, 0.5) for kernel in kernels]
