"""Whether views of buffers alias on this device: `placement.buffer_view`."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

from rollplex_jax.placement import buffer_view

_SHAPE = (1024, 512)


def run(seed: int) -> dict[str, Any]:
  """Makes views, of one device's array and of one over all devices.

  Returns:
    "checks": what was looked at and whether it held; "failed", in lines;
    "skipped" with reasons.
  """
  checks: dict[str, bool] = {}
  base = jax.block_until_ready(jax.random.normal(
      jax.random.key(seed), _SHAPE, jnp.bfloat16))
  values = np.array(base)  # A copy: else it would hold the memory too.
  rows = (_SHAPE[0] // 4, _SHAPE[0] // 2)
  piece = buffer_view.part(base, rows[0] * _SHAPE[1],
                           (rows[1] - rows[0], _SHAPE[1]))
  checks["pointer of a piece"] = piece.unsafe_buffer_pointer() == (
      base.unsafe_buffer_pointer() + rows[0] * _SHAPE[1] * base.itemsize)
  checks["values of a piece"] = np.array_equal(piece, values[slice(*rows)])
  _donate(checks, base, piece, values[slice(*rows)], "a piece")

  skipped, devices = [], jax.devices()
  if len(devices) < 2:
    skipped.append("views of an array over several devices: there is one")
  else:
    _over_devices(checks, devices, seed)
  return {"checks": checks, "skipped": skipped, "left_out": [],
          "failed": [f"{name}: not so" for name, held in checks.items()
                     if not held]}


def _over_devices(checks, devices, seed: int) -> None:
  """Of an array that each device holds, a view that cuts it by rows."""
  mesh = Mesh(np.array(devices), ("tp",))
  whole, cut = (NamedSharding(mesh, PartitionSpec(*axes))
                for axes in ((), ("tp",)))
  rows = math.lcm(_SHAPE[0], len(devices))
  base = jax.block_until_ready(jax.device_put(jax.random.normal(
      jax.random.key(seed), (rows, _SHAPE[1]), jnp.bfloat16), whole))
  values = np.array(base)  # A copy: else it would hold the memory too.
  view = buffer_view.view(base, cut)
  held = {s.device: (s.data.unsafe_buffer_pointer(), s.data.nbytes)
          for s in base.addressable_shards}
  inside = []
  for shard in view.addressable_shards:
    start, size = held[shard.device]
    at = shard.data.unsafe_buffer_pointer()
    inside.append(start <= at and at + shard.data.nbytes <= start + size)
  checks["pointers inside the source's shards"] = all(inside)
  checks["values of a view"] = np.array_equal(view, values)
  _donate(checks, base, view, values, "a view")


def _donate(checks, base, view, values, name: str) -> None:
  """A live view keeps its values; without it the base's memory is reused."""
  negative = jax.jit(jnp.negative, donate_argnums=0)
  pointers = lambda a: [s.data.unsafe_buffer_pointer()
                        for s in a.addressable_shards]
  checks[f"{name} is found by `viewed`"] = bool(buffer_view.viewed(base))
  copied = jax.block_until_ready(negative(base))
  checks[f"values of {name} after its base was donated"] = np.array_equal(
      view, values)
  checks[f"donation of a base copies while {name} lives"] = (
      pointers(copied) != pointers(base) if not base.is_deleted() else True)
  view.delete()
  del view
  if base.is_deleted():
    base = copied
  before = pointers(base)
  after = jax.block_until_ready(negative(base))
  checks[f"donation without {name} takes the memory"] = (
      base.is_deleted() and pointers(after) == before)
