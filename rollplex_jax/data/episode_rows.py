"""Start states of an environment as rows, made when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
import threading
from typing import Any

from rollplex_jax.data.environments import PlanTask, Split
from rollplex_jax.data.episodes import TurnTask
from rollplex_jax.data.row_schema import RowError
from rollplex_jax.data.workers import Failure
from rollplex_jax.data.worlds import World

_CACHED_DEMONSTRATIONS = 1 << 16
_NO_DEMONSTRATION = "no demonstration"


class EpisodeRows(Sequence):
  """Episodes of a split, in order."""

  def __init__(self, make_row: Callable[[int], dict[str, Any] | Failure | None],
               split: Split, count: int, *, first: int = 0,
               tell: Callable[[Failure, str], None] | None = None):
    """Row i is the episode of seed `split.seed(first + i)`.

    Args:
      make_row: the row of a seed, or None where the teacher has no
        demonstration that it is to hold, or why making one failed. Is called
        from the threads that read.
      split: whose seeds.
      count: number of rows.
      first: index of the first episode.
      tell: told of each failure and the name of its row.
    """
    self._make_row, self._tell = make_row, tell
    self._split, self._count, self._first = split, count, first
    split.seed(first + count - 1)  # Refuses what would run out of seeds.

  def __len__(self) -> int:
    return self._count

  def where(self, index: int) -> str:
    return f"episode {self._split.seed(self._first + index)}"

  def __getitem__(self, index: int) -> dict[str, Any]:
    """Raises RowError where there is no row with a demonstration."""
    if not 0 <= index < self._count:
      raise IndexError(index)
    row = self._make_row(self._split.seed(self._first + index))
    if isinstance(row, Failure):
      if self._tell is not None:
        self._tell(row, self.where(index))
      raise RowError(self.where(index), _NO_DEMONSTRATION, row.reason)
    if row is None:
      raise RowError(self.where(index), _NO_DEMONSTRATION,
                     "the teacher has no plan that is short enough")
    return row


class LevelRows:
  """Makes the rows of a level in the thread that asks for them."""

  def __init__(self, world: World, key: str, noise: float, blind: bool):
    """With a demonstration under `key`, if that isn't empty."""
    self._world, self._key, self._blind = world, key, blind
    self._local = threading.local()
    # Plans are asked for again in every epoch, and a teacher thinks longer than
    # a world takes to draw. Those without a plan count too. Turns hold frames,
    # too much to keep.
    self._demonstration = functools.lru_cache(
        _CACHED_DEMONSTRATIONS if key == "response" else 0)(
            lambda seed: self._task().demonstration(seed, noise=noise))

  def __call__(self, seed: int) -> dict[str, Any] | None:
    row = self._task().row(seed, blind=self._blind)
    if self._key:
      row[self._key] = self._demonstration(seed)
      if row[self._key] is None:
        return None
    return row

  def _task(self) -> PlanTask | TurnTask:
    """This thread's own task."""
    if not hasattr(self._local, "task"):
      self._local.task = self._world.task()
    return self._local.task
