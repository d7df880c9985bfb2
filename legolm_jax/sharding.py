"""LegoArrays on several devices, cut as dense matrices are."""

from __future__ import annotations

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

from legolm_jax import encoding, packing
from legolm_jax.array import LegoArray, Storage


def device_put(array: LegoArray, mesh: Mesh, spec: PartitionSpec,
               finest: PartitionSpec | None = None) -> LegoArray:
  """Puts a LegoArray on the devices of a mesh.

  Args:
    array: on the host, not sharded.
    mesh: of devices.
    spec: what a dense matrix of the array's shape would have.
    finest: the finest that any program will read it under, by default `spec`.
      Each part of that has a list of outliers of its own; a program that splits
      the array no finer can do so.

  Returns:
    The same on the devices, every leaf sharded as the matrix would be.

  Raises:
    ValueError: if the mesh doesn't divide the matrix.
  """
  shards = [1, 1]
  for i, names in enumerate((*(finest or spec), None, None)[:2]):
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


def part(array: LegoArray, index: int, count: int) -> LegoArray:
  """The index-th of `count` equal parts along the first dimension.

  Args:
    array: on the host, not sharded.
    index, count: which part.

  Returns:
    The same weights, packed as a matrix of that size would be.

  Raises:
    ValueError: if the dimension is no multiple of `count`.
  """
  size = array.shape[0]
  if size % count:
    raise ValueError(f"a dimension of {size} can't be cut into {count} parts")
  kept = slice(index * size // count, (index + 1) * size // count)
  if array.storage is Storage.OUT_IN:
    return _repacked(array, kept, slice(None))
  return encoding.contiguous(_repacked(array.T, slice(None), kept).T)


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
  old = array.layout
  return _repacked(array, slice(None), slice(None), packing.Layout(
      old.out, old.inputs, section_out, section_inputs))


def _repacked(array: LegoArray, rows: slice, columns: slice,
              layout: packing.Layout | None = None) -> LegoArray:
  """Part of an OUT_IN array in a layout, by default that of its size."""
  old, bits = array.layout, array.bits
  codes = old.unfill(packing.unpack(
      [np.ascontiguousarray(p) for p in array.planes], bits))
  outliers, offsets = array.outliers, array.offsets
  if outliers is not None:
    # Every weight's outlier, or 0, where it stands.
    values = np.zeros(codes.size, outliers.dtype)
    flat = np.flatnonzero(codes == array.num_codes - 1)
    flat = flat[np.argsort(old.places(flat)[0])]
    values[flat] = outliers[0, 0, :flat.size]
    values = values.reshape(codes.shape)[rows, columns]
  codes = np.ascontiguousarray(codes[rows, columns])
  new = layout or packing.Layout.of(*codes.shape)
  if outliers is not None:
    flat = np.flatnonzero(codes == array.num_codes - 1)
    values, offsets = packing.order_outliers(new, flat, values.ravel()[flat])
    outliers = encoding.at_least_one(values)[None, None]
  return array.replace(
      planes=tuple(packing.pack(new.fill(codes), bits)), outliers=outliers,
      offsets=offsets, section_out=new.section_out,
      section_inputs=new.section_inputs,
      scale=None if array.scale is None else array.scale[rows])
