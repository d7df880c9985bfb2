"""A buffer: what lives from which phase to which, and how many bytes it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import enum
import math
from typing import NamedTuple

import jax
from jax.sharding import PartitionSpec


class Policy(enum.StrEnum):
  """What becomes of a buffer between its uses and after the last.

  Attributes:
    KEEP: stays to the end of the step, whoever reads it.
    DONATE: whoever rewrites it does so in place; goes after its last consumer.
    DROP: goes after its last consumer. A phase that rewrites it holds two.
    OFFLOAD: waits in pinned host memory where no phase uses it; rewritten in
      place.
    RECOMPUTE: never kept: phases that use it make it again.
  """

  KEEP = "keep"
  DONATE = "donate"
  DROP = "drop"
  OFFLOAD = "offload"
  RECOMPUTE = "recompute"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffer:
  """Arrays that live and go together. Several may have one name in turn.

  Attributes:
    name: of the tree.
    bytes_per_device: what it takes on a device.
    producer: the phase that makes it; None if it is there before the step.
    last_consumer: the last phase that reads it; None if it outlives the step.
    policy: see `Policy`.
    uses: phases that touch it, producer and last consumer always among them;
      None for all in its life. Matters where it is offloaded or recomputed.
    rewritten_in: phases that replace it.
    bytes_in_use: bytes in phases that use it (the producer apart) where it is
      offloaded or recomputed; None for all.
    early: offloaded: its moves overlap with the phases next to its uses, which
      then hold it too; otherwise they are waited for.
    setting: what a user would set to have this.
    fallbacks: what may take its place under a budget, best first.
    group: buffers of one group fall back together; by default its name.
  """

  name: str
  bytes_per_device: int
  producer: str | None = None
  last_consumer: str | None = None
  policy: Policy = Policy.DROP
  uses: tuple[str, ...] | None = None
  rewritten_in: tuple[str, ...] = ()
  bytes_in_use: int | None = None
  early: bool = False
  setting: str = ""
  fallbacks: tuple[Buffer, ...] = ()
  group: str = ""

  @property
  def together(self) -> str:
    """What falls back together has the same."""
    return self.group or self.name


def shard_bytes(shape: Sequence[int], dtype, spec: PartitionSpec,
                axis_sizes: Mapping[str, int]) -> int:
  """Bytes of an array on each device. What does not divide stays whole."""
  parts = [*spec, *[None] * (len(shape) - len(spec))]
  count = 1
  for size, part in zip(shape, parts, strict=True):
    axes = (part,) if isinstance(part, str) else part or ()
    ways = math.prod(axis_sizes[axis] for axis in axes)
    count *= size if size % ways else size // ways
  return count * jax.dtypes.canonicalize_dtype(dtype).itemsize


class Occupancy(NamedTuple):
  """A buffer's bytes on a device, phase by phase.

  Attributes:
    during: at its most in each phase.
    after: once each phase has ended.
    wanted: whether it has to be there by the end of each phase at the latest,
      which it does not where it is only still on its way out.
  """

  during: list[int]
  after: list[int]
  wanted: list[bool]


def occupancy(b: Buffer, index: Mapping[str, int]) -> Occupancy:
  """Where a buffer is, given the place of each phase.

  Raises:
    ValueError: if it names a phase that isn't there, or ends before it starts.
  """
  count = len(index)

  def where(phase):
    if phase not in index:
      raise ValueError(f"{b.name}: {phase} is not a phase")
    return index[phase]

  made = None if b.producer is None else where(b.producer)
  end = count - 1 if b.last_consumer is None else where(b.last_consumer)
  # Steps follow one another: what outlives one is there as the next begins.
  outlives = b.last_consumer is None
  start = 0 if outlives or made is None else made
  if end < start:
    raise ValueError(f"{b.name}: its last consumer {b.last_consumer} comes "
                     f"before its producer {b.producer}")
  rewrites = {where(p) for p in b.rewritten_in}
  during, after = [0] * count, [0] * count
  if b.policy not in (Policy.OFFLOAD, Policy.RECOMPUTE):
    if b.policy == Policy.KEEP:
      end = count - 1
    twice = b.policy != Policy.DONATE
    for i in range(start, end + 1):
      during[i] = b.bytes_per_device * (1 + (twice and i in rewrites))
      if i < end or outlives:
        after[i] = b.bytes_per_device
    return Occupancy(during, after, [size > 0 for size in during])
  used = set(range(start, end + 1))
  if b.uses is not None:
    ends = [p for p in (b.producer, b.last_consumer) if p is not None]
    used &= {where(p) for p in (*b.uses, *b.rewritten_in, *ends)}
  part = b.bytes_per_device if b.bytes_in_use is None else b.bytes_in_use
  for i in used:
    during[i] = b.bytes_per_device if i == made else part
  if b.policy == Policy.RECOMPUTE:
    if made is not None:
      during[made] = 0
    return Occupancy(during, after, [False] * count)
  step = lambda i, by: (i + by) % count if outlives else i + by
  for i in range(start, count if outlives else end):
    if step(i, 1) in used and (i in used or b.early):
      after[i] = max(during[i], part)
  wanted = [i in used or after[i] > 0 for i in range(count)]
  if b.early:
    for i in used:
      for near in (step(i, -1), step(i, 1)):
        if start <= near < count:
          during[near] = max(during[near], during[i])
  return Occupancy(during, after, wanted)
