"""What is alive in device memory: bytes by address, so that views count once."""

from __future__ import annotations

from collections.abc import Iterable

import jax


def covered(ranges: Iterable[tuple[float, float]]) -> float:
  """Length of the union of ranges, each a start and an end."""
  total, reached = 0, None
  for start, end in sorted(ranges):
    if reached is None or start >= reached:
      total, reached = total + (end - start), end
    elif end > reached:
      total, reached = total + (end - reached), end
  return total


def device_ranges(arrays: Iterable[jax.Array]
                  ) -> dict[jax.Device, list[tuple[int, int]]]:
  """Address ranges of arrays in device memory, by local device.

  Waits for the arrays. Arrays in host memory have none.
  """
  ranges: dict[jax.Device, list[tuple[int, int]]] = {}
  for array in arrays:
    kind = array.sharding.memory_kind
    for shard in array.addressable_shards:
      if shard.data.nbytes and kind == shard.device.default_memory().kind:
        at = shard.data.unsafe_buffer_pointer()
        ranges.setdefault(shard.device, []).append(
            (at, at + shard.data.nbytes))
  return ranges


def live_bytes_by_device(arrays: Iterable[jax.Array] | None = None
                         ) -> dict[jax.Device, int]:
  """Bytes of each local device's memory that arrays hold.

  Arrays may share bytes, wholly or in part: each address counts once. Arrays in
  host memory don't count, nor does what a running program uses besides its
  arguments and results.

  Args:
    arrays: those to count; by default all that are alive in this process.
  """
  arrays = jax.live_arrays() if arrays is None else arrays
  return {device: covered(found)
          for device, found in device_ranges(arrays).items()}


def live_bytes() -> int:
  """The sum of `live_bytes_by_device` over this process's devices."""
  return sum(live_bytes_by_device().values())
