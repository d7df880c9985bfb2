"""LegoArrays on several devices, cut as dense matrices are."""

from __future__ import annotations

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

from legolm_jax import encoding, packing
from legolm_jax.array import LegoArray, Storage


def device_put(array: LegoArray, mesh: Mesh, spec: PartitionSpec) -> LegoArray:
  """Puts a LegoArray on the devices of a mesh.

  Args:
    array: on the host, not sharded.
    mesh: of devices.
    spec: what a dense matrix of the array's shape would have.

  Returns:
    The same on the devices, every leaf sharded as the matrix would be.

  Raises:
    ValueError: if the mesh doesn't divide the matrix.
  """
  shards = [1, 1]
  for i, names in enumerate((*spec, None, None)[:2]):
    for name in names if isinstance(names, tuple) else (names,):
      shards[i] *= 1 if name is None else mesh.shape[name]
  array = with_shards(array, *shards)
  return jax.tree.map(
      lambda leaf, s: put_leaf(leaf, NamedSharding(mesh, s)),
      array, array.partition_specs(spec))


def put_leaf(leaf: np.ndarray, sharding: NamedSharding) -> jax.Array:
  """Puts a host array, maybe a memory map, on this process's devices.

  Only the parts that these devices hold are read.
  """
  return jax.make_array_from_callback(
      leaf.shape, sharding, lambda index: np.ascontiguousarray(leaf[index]))


def with_shards(array: LegoArray, first: int, second: int) -> LegoArray:
  """Gives every shard a list of outliers of its own.

  Args:
    array: on the host, not sharded.
    first, second: into how many parts its dimensions will be cut.

  Returns:
    The same weights; equal parts of every leaf are then the parts' leaves.

  Raises:
    ValueError: if a dimension is no multiple of its number of shards.
  """
  if array.storage is Storage.IN_OUT:
    return encoding.contiguous(with_shards(array.T, second, first).T)
  layout = array.layout
  for size, count in zip((layout.out, layout.inputs), (first, second)):
    if size % count:
      raise ValueError(f"a dimension of {size} can't be cut into {count} shards")
  if ((layout.out // layout.section_out) % first
      or (layout.inputs // layout.section_inputs) % second):
    array = _with_sections(array, layout.out // first, layout.inputs // second)
    layout = array.layout
  if array.outliers is None or first == second == 1:
    return array
  # Tiles as [out shard, band, in shard, tile].
  flat = array.outliers[0, 0]
  starts = array.offsets.astype(np.int64).ravel()
  counts = np.diff(starts, append=num_outliers(array))
  shape = (first, layout.bands // first, second, layout.tiles // second)
  by_shard = lambda a: a.reshape(shape).transpose(0, 2, 1, 3).reshape(
      first * second, -1)
  counts_of = by_shard(counts)
  begins = np.cumsum(counts_of, axis=1) - counts_of
  sizes = counts_of.sum(axis=1)
  outliers = np.zeros((first * second, max(sizes.max(), 1)), flat.dtype)
  # A tile's outliers stay together, and its shard lists its tiles in turn.
  shard_of_tile = by_shard(np.arange(counts.size))
  shard = np.empty(counts.size, np.int64)
  shard[shard_of_tile] = np.arange(first * second)[:, None]
  begin = np.empty(counts.size, np.int64)
  begin[shard_of_tile] = begins
  within = np.arange(counts.sum()) - np.repeat(starts, counts)
  outliers[np.repeat(shard, counts), np.repeat(begin, counts) + within] = (
      flat[:counts.sum()])
  return array.replace(
      outliers=outliers.reshape(first, second, -1),
      offsets=begin.astype(np.uint32).reshape(array.offsets.shape))


def num_outliers(array: LegoArray) -> int:
  """Outliers of a LegoArray on the host, OUT_IN or not; its list may be longer.

  Where the list is filled up: what stands before the last tile, and the last
  tile's escapes.
  """
  if array.storage is Storage.IN_OUT:
    array = array.T
  layout = array.layout
  last = encoding.tile_codes(array, layout.bands - 1, layout.tiles - 1)
  return int(array.offsets[-1, -1]) + int(
      np.count_nonzero(last == array.num_codes - 1))


def _with_sections(array: LegoArray, section_out: int, section_inputs: int
                   ) -> LegoArray:
  """The same weights with sections of other sizes, by repacking."""
  old, bits = array.layout, array.bits
  codes = old.unfill(packing.unpack(
      [np.ascontiguousarray(p) for p in array.planes], bits))
  new = packing.Layout(old.out, old.inputs, section_out, section_inputs)
  outliers, offsets = array.outliers, array.offsets
  if outliers is not None:
    flat = np.flatnonzero(codes == array.num_codes - 1)
    flat = flat[np.argsort(old.places(flat)[0])]
    values, offsets = packing.order_outliers(
        new, flat, outliers[0, 0, :flat.size])
    outliers = values[None, None] if flat.size else outliers
  return array.replace(
      planes=tuple(packing.pack(new.fill(codes), bits)), outliers=outliers,
      offsets=offsets, section_out=section_out, section_inputs=section_inputs)
