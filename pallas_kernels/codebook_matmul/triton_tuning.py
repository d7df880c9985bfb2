"""Numbers that change the speed of the Triton kernels and nothing else."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class TritonTuning:
  """What one program, a warp, does.

  Attributes:
    rows: of x at a time, 8 or 16.
    programs: the sum is split over programs until there are about so many.
    slots: listed outliers of each output that are loaded at a time; a power of
      two, at most 16. More hide more of memory's latency, in more registers.
  """

  rows: int
  programs: int
  slots: int

  def check(self) -> None:
    """Raises ValueError for numbers that no kernel is made for."""
    for name, values in (("rows", (8, 16)), ("slots", (1, 2, 4, 8, 16))):
      if getattr(self, name) not in values:
        raise ValueError(f"{name}: expected one of {values}, found "
                         f"{getattr(self, name)}")
    if self.programs < 1:
      raise ValueError(f"programs: expected 1 or more, found {self.programs}")


def default(rows: int) -> TritonTuning:
  """The tuning for a number of rows."""
  # 132 multiprocessors hold 16 warps each.
  if rows <= 1:
    return TritonTuning(rows=8, programs=2112, slots=4)
  if rows <= 8:
    return TritonTuning(rows=8, programs=2112, slots=2)
  return TritonTuning(rows=16, programs=2112, slots=2)


def candidates(rows: int) -> tuple[TritonTuning, ...]:
  """What is worth timing for a number of rows, the default first."""
  first = default(rows)
  slots = (4, 8, 16) if rows <= 1 else (1, 2, 4)
  return (first,) + tuple(
      other for programs in (1056, 2112, 4224) for n in slots
      if (other := dataclasses.replace(first, programs=programs, slots=n))
      != first)
