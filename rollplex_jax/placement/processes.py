"""What the processes of a run tell one another, host to host.

All of them run the same program on the same mesh. Each reads and processes the
rows of those parts of a batch that its own devices hold; what is small and
needed everywhere (token ids, completions, rewards) every process gets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import pickle
from typing import Any, TypeVar

import jax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
import numpy as np

_T = TypeVar("_T")


def is_first() -> bool:
  """Whether this process is the one that writes files."""
  return jax.process_index() == 0


def exchange(value: _T) -> list[_T]:
  """Every process's value, in the order of their numbers.

  All processes must call this, in the same order of calls.

  Args:
    value: anything that pickles.
  """
  if jax.process_count() == 1:
    return [value]
  data = np.frombuffer(pickle.dumps(value), np.uint8)
  sizes = multihost_utils.process_allgather(np.int32(data.size))
  padded = np.zeros(int(sizes.max()), np.uint8)
  padded[:data.size] = data
  rows = multihost_utils.process_allgather(padded)
  return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes)]


def from_first(make: Callable[[], _T]) -> _T:
  """What the first process makes, in all of them; the others don't make it."""
  return exchange(make() if is_first() else None)[0]


@dataclasses.dataclass(frozen=True)
class Spread:
  """Which parts of a batch this process has.

  Attributes:
    sharding: of an array whose first dimension is the part.
    parts: into how many a batch is split.
    local: parts that are on this process's devices.
    owned: those of them that no process with a lower number has.
  """

  sharding: NamedSharding
  parts: int
  local: tuple[int, ...]
  owned: tuple[int, ...]

  @classmethod
  def of(cls, sharding: NamedSharding, parts: int) -> Spread:
    """Of the devices of a mesh, by the processes that they belong to."""
    holders: dict[int, set[int]] = {}
    for device, (index, *_) in sharding.devices_indices_map((parts,)).items():
      for part in range(*index.indices(parts)):
        holders.setdefault(part, set()).add(device.process_index)
    here = jax.process_index()
    local = tuple(p for p in range(parts) if here in holders[p])
    return cls(sharding, parts, local,
               tuple(p for p in local if min(holders[p]) == here))

  def rows(self, batch_size: int) -> list[int]:
    """Rows of a batch that this process has to process."""
    size = batch_size // self.parts
    return [part * size + i for part in self.local for i in range(size)]

  def owned_rows(self, batch_size: int) -> list[int]:
    """Rows of a batch that this process answers for."""
    size = batch_size // self.parts
    return [part * size + i for part in self.owned for i in range(size)]

  def share(self, items: Sequence[_T], slim: Callable[[_T], _T]) -> list[_T]:
    """Items of all rows of a batch: those of this process, and others' slim.

    Args:
      items: of this process's rows, in order.
      slim: an item without what only its own process needs.
    """
    size = len(items) // len(self.local)
    own = {part: list(items[i * size:(i + 1) * size])
           for i, part in enumerate(self.local)}
    found: dict[int, list[_T]] = {}
    for parts in exchange({part: list(map(slim, own[part]))
                           for part in self.owned}):
      found |= parts
    return [item for part in range(self.parts)
            for item in own.get(part, found[part])]

  def place(self, tree: Any) -> Any:
    """Arrays over all processes from stacked arrays of the local parts."""
    at = {part: i for i, part in enumerate(self.local)}

    def spread(a):
      def piece(index):
        start, stop, _ = index[0].indices(self.parts)
        return a[at[start]:at[stop - 1] + 1]

      return jax.make_array_from_callback(
          (self.parts, *a.shape[1:]), self.sharding, piece)

    return jax.tree.map(spread, tree)
