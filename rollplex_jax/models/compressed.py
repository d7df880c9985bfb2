"""Products with compressed matrices whose parts lie on several devices."""

from __future__ import annotations

import jax
from jax.sharding import PartitionSpec

from legolm_jax import matmul
from legolm_jax.array import LegoArray
from rollplex_jax.placement import sharding


def product(x: jax.Array, w: LegoArray, axis: str | None, *, over: int,
            dtype=None) -> jax.Array:
  """x times a compressed matrix, over one of the matrix's dimensions.

  A kernel is whole to the compiler, which would bring all of x and of w to every
  device. So each device multiplies its parts, and shares of sums are added.

  Args:
    x: [batch, ..., k].
    w: of k at dimension `over`, n at the other.
    axis: the logical axis of dimension 0; dimension 1 is gathered.
    over: 0 or 1.
    dtype: of the product; None for that of `x`.

  Returns:
    [batch, ..., n].
  """
  run = matmul.matmul_transposed if over else matmul.matmul
  if sharding.is_free():  # The compiler splits neither kernels nor loops.
    return run(x, w, dtype, implementation="reference")
  mesh = sharding.mesh()
  if mesh is None:
    return run(x, w, dtype)
  split = sharding.axes_of(w.shape[:1], axis)[0]
  if not w.divides(sharding.ways(split)):
    split = ()
  middle = (None,) * (x.ndim - 2)
  batch = sharding.axes_of(x.shape[:1], "batch")[0]
  k, n = (None, split) if over else (split, None)

  def local(x, w):
    y = run(x, w, dtype)
    return y if over or not split else jax.lax.psum(y, split)

  return jax.shard_map(
      local, mesh=mesh, check_vma=False,
      in_specs=(_spec(batch, *middle, k),
                w.partition_specs(_spec(split, None))),
      out_specs=_spec(batch, *middle, n))(x, w)


def _spec(*parts: tuple[str, ...] | None) -> PartitionSpec:
  return PartitionSpec(*(part or None for part in parts))
