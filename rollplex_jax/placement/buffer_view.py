"""Arrays whose memory is a part of another array's.

A rollout may split weights more finely than training does: each device then
needs a part of what it holds already. Slicing, by index or by sharding
annotation, copies that part. `view` copies nothing: through DLPack it makes an
array of each device's part in place, and of those an ordinary `jax.Array` under
the finer sharding.

The base's memory lives as long as its views do, whoever drops the base. But XLA
cannot donate memory that a view holds: it would keep the base and update a copy
of it, without a word. So views are deleted before their base is donated;
`viewed` finds those that were forgotten.
"""

from __future__ import annotations

import bisect
import ctypes
import math
from typing import Any

import jax
from jax.sharding import Sharding
import numpy as np

# What XLA's CPU client asks of memory that it did not allocate; GPU programs
# ask for less.
ALIGNMENT = 64
_PLATFORMS = ("cpu", "cuda", "gpu", "rocm")  # Those with DLPack.

Box = tuple[tuple[int, int], ...]  # (start, stop) of each dimension.


class _Device(ctypes.Structure):
  _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _DataType(ctypes.Structure):
  _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
              ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
  """DLTensor of dlpack.h, with which a capsule's contents begin."""

  _fields_ = (("data", ctypes.c_void_p), ("device", _Device),
              ("ndim", ctypes.c_int32), ("dtype", _DataType),
              ("shape", ctypes.POINTER(ctypes.c_int64)),
              ("strides", ctypes.POINTER(ctypes.c_int64)),
              ("byte_offset", ctypes.c_uint64))


_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


def boxes(sharding: Sharding, shape: tuple[int, ...]
          ) -> dict[jax.Device, Box]:
  """What each device holds of an array."""
  return {
      device: tuple(part.indices(n)[:2] for part, n in zip(index, shape))
      for device, index in sharding.devices_indices_map(shape).items()}


def extents(box: Box) -> tuple[int, ...]:
  """The shape of a box."""
  return tuple(stop - start for start, stop in box)


def overlap(a: Box, b: Box) -> Box:
  """Where two boxes overlap."""
  out = []
  for (start, stop), (other, end) in zip(a, b):
    start = max(start, other)
    out.append((start, max(start, min(stop, end))))
  return tuple(out)


def offset(source: Box, target: Box) -> int | None:
  """Where one box begins in the row-major memory of another, in elements.

  None if it does not lie inside, or not in one piece.
  """
  if any(a > c or b < d for (a, b), (c, d) in zip(source, target)):
    return None
  held, wanted = extents(source), extents(target)
  narrowed = [i for i, (n, m) in enumerate(zip(held, wanted)) if m < n]
  if narrowed and math.prod(wanted[:narrowed[-1]]) != 1:
    return None
  at = 0
  for n, (start, _), (inner, _) in zip(held, source, target):
    at = at * n + inner - start
  return at


def refusal(shape: tuple[int, ...], dtype: Any, source: Sharding,
            target: Sharding) -> str | None:
  """Why an array under `source` has no view under `target`; None if it has.

  Says so before anything is allocated: it takes for granted that arrays start
  at a multiple of `ALIGNMENT`, as those that programs make do.
  """
  platform = next(iter(source.device_set)).platform
  if platform not in _PLATFORMS:
    return f"{platform} arrays can't be shared"
  if source.memory_kind != target.memory_kind:
    return f"{source.memory_kind} is not {target.memory_kind}"
  if source.device_set != target.device_set:
    return "the devices differ"
  bits = jax.dtypes.itemsize_bits(dtype)
  if bits % 8:
    return f"{np.dtype(dtype).name} does not fill bytes"
  held, wanted = boxes(source, shape), boxes(target, shape)
  if held == wanted:
    return "the shards are the same"
  for device, box in wanted.items():
    at = offset(held[device], box)
    if at is None:
      inside = all(a <= c and d <= b
                   for (a, b), (c, d) in zip(held[device], box))
      return ("a shard is not one piece of memory" if inside else
              "a device lacks a part of its shard")
    if at * bits // 8 % ALIGNMENT:
      return (f"a shard would begin at byte {at * bits // 8}, no multiple of "
              f"{ALIGNMENT}")
  return None


def view(base: jax.Array, target: Sharding) -> jax.Array:
  """`base` under a finer sharding, in the same memory.

  Each device's shard must be one contiguous piece of the shard that it holds:
  split further along the first dimension that is larger than one.

  Args:
    base: an array whose memory is row-major.
    target: of the view, over the same devices.

  Returns:
    An array equal to `base`. Delete it before `base` is donated.

  Raises:
    ValueError: if there is no such view (see `refusal`).
  """
  why = refusal(base.shape, base.dtype, base.sharding, target)
  if why:
    raise ValueError(f"no view of {base.dtype.name}{list(base.shape)}: {why}")
  held, wanted = (boxes(s, base.shape) for s in (base.sharding, target))
  return jax.make_array_from_single_device_arrays(
      base.shape, target,
      [part(shard.data, offset(held[shard.device], wanted[shard.device]),
            extents(wanted[shard.device]))
       for shard in base.addressable_shards])


def viewed(tree: Any) -> list[str]:
  """Names of the arrays of a tree of which some live array holds a part.

  Donating those would copy them. An array over the very same memory (such as
  `shard.data`) does not count: it goes with the donation.
  """
  spans: dict[jax.Device, list[tuple[int, int, str]]] = {}
  for path, array in jax.tree_util.tree_leaves_with_path(tree):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    for device, start, size in _memory(array):
      spans.setdefault(device, []).append((start, size, name))
  for found in spans.values():
    found.sort()
  names = set()
  for array in jax.live_arrays():
    if next(iter(array.sharding.device_set)).platform not in _PLATFORMS:
      continue
    for device, start, size in _memory(array):
      found = spans.get(device, [])
      i = bisect.bisect_right(found, start, key=lambda span: span[0]) - 1
      if i >= 0 and size < found[i][1] and start < sum(found[i][:2]):
        names.add(found[i][2])
  return sorted(names)


def _memory(array: jax.Array):
  """(device, address, bytes) of each shard that is not empty."""
  return [(shard.device, shard.data.unsafe_buffer_pointer(), shard.data.nbytes)
          for shard in array.addressable_shards if shard.data.nbytes]


class _Part:
  """A piece of a single-device array, as `from_dlpack` takes it."""

  def __init__(self, data: jax.Array, start: int, shape: tuple[int, ...]):
    self._data, self._start = data, start
    # A capsule may point to the array's own shape, so that is not written to.
    self._shape = (ctypes.c_int64 * len(shape))(*shape)
    self._strides = (ctypes.c_int64 * len(shape))(*_row_major(shape))

  def __dlpack_device__(self) -> tuple[int, int]:
    # Virtual CPU devices all say 0 themselves, and would be taken for the first.
    device, = self._data.devices()
    return int(self._data.__dlpack_device__()[0]), device.local_hardware_id

  def __dlpack__(self, *, stream=None, **_):
    if stream is None:  # There is none that could wait in our place.
      self._data.block_until_ready()
    capsule = self._data.__dlpack__(stream=stream)
    tensor = _Tensor.from_address(_get_pointer(capsule, b"dltensor"))
    shape = self._data.shape
    if tensor.strides and any(
        n > 1 and tensor.strides[i] != step
        for i, (n, step) in enumerate(zip(shape, _row_major(shape)))):
      raise ValueError(
          f"no view of {self._data.dtype.name}{list(shape)}: expected memory in "
          f"row-major order, found strides {tensor.strides[:len(shape)]}")
    tensor.data += self._start
    tensor.shape, tensor.strides = self._shape, self._strides
    return capsule


def _row_major(shape: tuple[int, ...]) -> list[int]:
  """How many elements lie between neighbors along each dimension."""
  return [math.prod(shape[i + 1:]) for i in range(len(shape))]


def part(data: jax.Array, start: int, shape: tuple[int, ...]) -> jax.Array:
  """A contiguous piece of a single-device array, in the same memory.

  Args:
    data: an array whose memory is row-major.
    start: the piece's first element, counted in memory.
    shape: of the piece.

  Raises:
    ValueError: if the backend copies what it takes.
  """
  start = start * jax.dtypes.itemsize_bits(data.dtype) // 8
  piece = jax.dlpack.from_dlpack(_Part(data, start, shape), copy=False)
  if piece.unsafe_buffer_pointer() != data.unsafe_buffer_pointer() + start:
    raise ValueError(f"no view of {data.dtype.name}{list(data.shape)}: this "
                     "backend copies what it takes through DLPack")
  return piece
