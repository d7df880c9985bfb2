"""Programs that move arrays from one sharding to another on the same mesh.

Left to itself the compiler may turn an array whose rows are to be split further
and whose columns are to be gathered by all-to-all and collective-permute. Here
what is split further is cut first, where it is, and then the rest is gathered:
each device receives what it lacks.
"""

from __future__ import annotations

import functools

import jax
from jax.sharding import NamedSharding, PartitionSpec


@functools.cache
def resharding(places: tuple[tuple[NamedSharding, NamedSharding, int], ...]):
  """A compiled identity from a list of arrays to the same, placed otherwise.

  Args:
    places: source, target and number of dimensions of each array.
  """
  between = [_cut(*place) for place in places]

  def reshard(arrays):
    return jax.lax.with_sharding_constraint(arrays, between)

  return jax.jit(reshard, out_shardings=[target for _, target, _ in places])


def _cut(source: NamedSharding, target: NamedSharding, ndim: int
         ) -> NamedSharding:
  """The source split as the target is, in dimensions that only split further."""
  old, new = (_axes(s, ndim) for s in (source, target))
  taken = {axis for axes in old for axis in axes}
  return NamedSharding(source.mesh, PartitionSpec(*(
      b if b[:len(a)] == a and taken.isdisjoint(b[len(a):]) else a
      for a, b in zip(old, new))))


def _axes(sharding: NamedSharding, ndim: int) -> list[tuple[str, ...]]:
  """The mesh axes that split each dimension, those of one device left out."""
  spec = [*sharding.spec, *[None] * (ndim - len(sharding.spec))]
  named = [(part,) if isinstance(part, str) else part or () for part in spec]
  return [tuple(axis for axis in part if sharding.mesh.shape[axis] > 1)
          for part in named]
