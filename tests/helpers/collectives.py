"""What a compiled program sends between devices, read from its text."""

import dataclasses
import math
import re

import numpy as np

from tests.helpers.gpu_program import Program

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4}
_OPS = ("all-gather", "all-reduce", "all-to-all", "collective-permute",
        "reduce-scatter", "collective-broadcast", "ragged-all-to-all")


@dataclasses.dataclass(frozen=True)
class Collective:
  """One collective; `groups` are those of devices that exchange something."""

  op: str
  result_bytes: int
  groups: frozenset[frozenset[int]]

  @property
  def received_bytes(self) -> int:
    """What a device gets from others, for an all-gather."""
    assert self.op == "all-gather"
    size = len(next(iter(self.groups)))
    return self.result_bytes * (size - 1) // size


def collectives(text: str) -> list[Collective]:
  """All collectives of a program, each as often as it is written."""
  found = []
  for lines in Program(text).computations.values():
    for line in lines:
      op = line.op.removesuffix("-start")
      if op in _OPS:
        size = sum(_BYTES[kind] * math.prod(dims) for kind, dims in line.shapes)
        found.append(Collective(op, size, _groups(line.rest)))
  return found


def axis_groups(mesh, *axes: str) -> frozenset[frozenset[int]]:
  """Devices that differ in some axes of a mesh only."""
  ids = np.arange(mesh.size).reshape(mesh.devices.shape)
  which = [mesh.axis_names.index(axis) for axis in axes]
  return _split(ids, which)


def _split(ids: np.ndarray, axes: list[int]) -> frozenset[frozenset[int]]:
  rows = np.moveaxis(ids, axes, range(-len(axes), 0))
  rows = rows.reshape(-1, math.prod(ids.shape[axis] for axis in axes))
  return frozenset(frozenset(row.tolist()) for row in rows)


def _groups(text: str) -> frozenset[frozenset[int]]:
  """The groups of `replica_groups`, in any of the ways that XLA writes them."""
  # {{0,1},{2,3}}
  if found := re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", text):
    return frozenset(frozenset(map(int, group.split(",")))
                     for group in re.findall(r"\{([\d,]+)\}", found[1]))
  # [4,2]<=[2,4]T(1,0): the devices in that shape and order, in rows.
  if found := re.search(r"replica_groups=\[([\d,]+)\](<=\S*?),? ", text):
    rows = _iota(found[2]).reshape([int(n) for n in found[1].split(",")])
    return frozenset(frozenset(row.tolist()) for row in rows)
  # mesh['a'=2,'b'=4] {'b'}, device_ids=([2,4]T(1,0))
  if found := re.search(
      r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}"
      r"(?:, device_ids=\(([^)]*\))\))?", text):
    sizes = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", found[1])}
    ids = (_iota("<=" + found[3]) if found[3] else
           np.arange(math.prod(sizes.values())))
    names = list(sizes)
    return _split(ids.reshape(list(sizes.values())),
                  [names.index(n) for n in re.findall(r"'(\w+)'", found[2])])
  return frozenset()  # A collective-permute has pairs.


def _iota(text: str) -> np.ndarray:
  """All devices, flat: "<=[8]" or "<=[2,4]T(1,0)"."""
  found = re.match(r"<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
  shape = [int(n) for n in found[1].split(",")]
  ids = np.arange(math.prod(shape)).reshape(shape)
  if found[2]:
    ids = ids.transpose([int(n) for n in found[2].split(",")])
  return ids.reshape(-1)
