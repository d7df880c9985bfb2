"""One copy of the weights for two stages that split them differently.

Weights are stored under one placement; the rollout reads them under another, on
the same mesh. For each tensor a plan says how that goes without a second copy:

  ALIAS    every device needs exactly what it holds: the same array serves both.
  VIEW     every device needs one piece of what it holds: an array over the same
           memory (`buffer_view`) serves.
  REBUILD  all else: resharded by one program per layer, for the rollout only.

Where the rollout's tensor parallelism is the finer one, either storage is in
training's coarser layout, which the rollout views, or in the rollout's own, and
training gathers each layer over tp_minor as it is used: the plan says how much.
Where the rollout's is the coarser one, split tensors are gathered for it.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import math
from typing import Any

import jax
from jax.sharding import NamedSharding
import numpy as np

from legolm_jax.array import LegoArray
from rollplex_jax.placement import buffer_view, layout_table
from rollplex_jax.placement.reshard import resharding
from rollplex_jax.placement.sharding import Placement


class How(enum.Enum):
  ALIAS = "alias"
  VIEW = "view"
  REBUILD = "rebuild"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
  """What the plan says of one tensor. Bytes are those of a device.

  Attributes:
    name: its path, "layers/3/q".
    shape: of the whole tensor.
    how: it comes to the rollout.
    storage: its sharding as stored.
    rollout: its sharding in the rollout.
    storage_bytes: of the stored shard.
    rollout_bytes: of the rollout's shard, which only a REBUILD adds.
    moved_bytes: received from other devices by a REBUILD.
    gathered_bytes: received by training whenever it uses the tensor, beyond
      what its own rules split.
    why: why it is rebuilt.
  """

  name: str
  shape: tuple[int, ...]
  how: How
  storage: NamedSharding
  rollout: NamedSharding
  storage_bytes: int
  rollout_bytes: int
  moved_bytes: int
  gathered_bytes: int
  why: str | None

  @property
  def kind(self) -> str:
    """Its name without numbers: "layers/*/q"."""
    return "/".join("*" if part.isdigit() else part
                    for part in self.name.split("/"))

  @property
  def layer(self) -> str:
    """Its name up to the first number, or all of it."""
    parts = self.name.split("/")
    return "/".join(parts[:next(
        (i + 1 for i, part in enumerate(parts) if part.isdigit()), len(parts))])


@dataclasses.dataclass(frozen=True)
class LayoutPlan:
  """How each tensor of a tree comes to the rollout. See `plan_layout`.

  Attributes:
    tensors: in the order of the tree's leaves.
    tree: the tree's structure.
    dtype: of the weights.
  """

  tensors: tuple[Tensor, ...]
  tree: Any
  dtype: np.dtype

  def rollout_weights(self, weights: Any, *, keep_source: bool = True) -> Any:
    """The weights as the rollout reads them.

    Args:
      weights: the tree as stored.
      keep_source: False to delete what is rebuilt, layer by layer, once its
        copy is under way; `restore` brings it back.

    Returns:
      A tree in which ALIAS leaves are the very arrays of `weights` and VIEW
      leaves lie in their memory. `release` it before `weights` are donated.
      LegoArrays stay as they are: what reads them splits them, or gathers so
      few bytes.

    Raises:
      ValueError: naming a tensor that is not as planned.
    """
    out = self._leaves(weights, "storage")
    for i, tensor in enumerate(self.tensors):
      if tensor.how is How.VIEW and not _is_compressed(out[i]):
        out[i] = buffer_view.view(out[i], tensor.rollout)
    for group in self._layers(How.REBUILD):
      group = [i for i in group if not _is_compressed(out[i])]
      self._reshard(out, group, "storage", "rollout", delete=not keep_source)
    return self.tree.unflatten(out)

  def restore(self, weights: Any, rollout: Any) -> Any:
    """The weights as stored, after a rollout that did not keep the source.

    Args:
      weights: the tree given to `rollout_weights`.
      rollout: the tree that it returned, whose views and rebuilt copies are
        deleted.
    """
    out = self.tree.flatten_up_to(weights)
    copies = self._leaves(rollout, "rollout")
    for group in self._layers(How.REBUILD):
      self._reshard(copies, group, "rollout", "storage", delete=True)
      for i in group:
        out[i] = copies[i]
    self.release(rollout)
    return self.tree.unflatten(out)

  def release(self, rollout: Any) -> None:
    """Deletes the views and rebuilt copies of a tree from `rollout_weights`.

    On a GPU the memory of a view is given up when the programs that read it are
    done: wait for the rollout's results before the weights are donated.
    """
    for tensor, array in zip(self.tensors, self.tree.flatten_up_to(rollout)):
      if (tensor.how is not How.ALIAS and not _is_compressed(array)
          and not array.is_deleted()):
        array.delete()

  def rebuild_programs(self) -> dict[str, jax.stages.Traced]:
    """The programs that rebuild, by the layer that first needs each."""
    programs = {}
    for group in self._layers(How.REBUILD):
      tensors = [self.tensors[i] for i in group]
      program = resharding(
          tuple((t.storage, t.rollout, len(t.shape)) for t in tensors))
      args = [jax.ShapeDtypeStruct(t.shape, self.dtype, sharding=t.storage)
              for t in tensors]
      key = program, tuple(t.shape for t in tensors)
      if key not in programs:
        programs[key] = tensors[0].layer, program.trace(args)
    return dict(programs.values())

  def bytes_of(self, how: How) -> int:
    """Bytes per device of the rollout's shards that come about in one way."""
    return sum(t.rollout_bytes for t in self.tensors if t.how is how)

  @property
  def largest_gather_bytes(self) -> int:
    """The most that a device gathers at once in training, of a layer or so."""
    return max((sum(self.tensors[i].gathered_bytes for i in group)
                for group in self._layers(*How)), default=0)

  def to_dict(self) -> dict[str, Any]:
    """The plan for a run's summary, by kinds of tensors, in bytes per device."""
    total = lambda name: sum(getattr(t, name) for t in self.tensors)
    return {
        "dtype": self.dtype.name,
        "bytes": {how.value: self.bytes_of(how) for how in How},
        "storage_bytes": total("storage_bytes"),
        "added_bytes": self.bytes_of(How.REBUILD),
        "moved_bytes": total("moved_bytes"),
        "gathered_bytes": total("gathered_bytes"),
        "largest_gather_bytes": self.largest_gather_bytes,
        "tensors": self._kinds(),
    }

  def __str__(self) -> str:
    return layout_table.text(self.to_dict())

  def _kinds(self) -> list[dict[str, Any]]:
    rows: dict[Any, dict[str, Any]] = {}
    for t in self.tensors:
      row = rows.setdefault((t.kind, t.how, t.shape, t.why), {
          "name": t.kind, "count": 0, "shape": list(t.shape),
          "how": t.how.value, "storage_bytes": 0, "rollout_bytes": 0,
          "moved_bytes": 0, "gathered_bytes": 0, "why": t.why})
      row["count"] += 1
      for name in ("storage", "rollout", "moved", "gathered"):
        row[f"{name}_bytes"] += getattr(t, f"{name}_bytes")
    return list(rows.values())

  def _layers(self, *how: How) -> list[list[int]]:
    """Indices of the tensors that come about in some ways, layer by layer."""
    found = (i for i, tensor in enumerate(self.tensors) if tensor.how in how)
    return [list(group) for _, group in itertools.groupby(
        found, lambda i: self.tensors[i].layer)]

  def _leaves(self, tree: Any, where: str) -> list[jax.Array]:
    """The leaves of a tree, whose tensors are as the plan has them."""
    leaves = self.tree.flatten_up_to(tree)
    for tensor, array in zip(self.tensors, leaves):
      if _is_compressed(array):
        continue
      # An array that is the same in both keeps the sharding that it came with.
      at = getattr(tensor, where)
      if (array.shape != tensor.shape or array.dtype != self.dtype
          or not array.sharding.is_equivalent_to(at, array.ndim)):
        raise ValueError(
            f"{tensor.name}: expected {self.dtype.name}{list(tensor.shape)} "
            f"over {at.spec}, found {array.dtype.name}{list(array.shape)} over "
            f"{getattr(array.sharding, 'spec', array.sharding)}")
    return leaves

  def _reshard(self, arrays: list[jax.Array], group: list[int], source: str,
               target: str, *, delete: bool) -> None:
    program = resharding(tuple(
        (getattr(t, source), getattr(t, target), len(t.shape))
        for t in (self.tensors[i] for i in group)))
    before = [arrays[i] for i in group]
    for i, array in zip(group, program(before)):
      arrays[i] = array
    if delete:
      # A donation that no result of the same size can use is not carried out.
      for array in before:
        array.delete()


def _is_compressed(leaf: Any) -> bool:
  return isinstance(leaf, LegoArray)


def plan_layout(declared: Any, storage: Placement, rollout: Placement,
                dtype: Any, *, training: Placement | None = None,
                part: str = "text", views: bool = True) -> LayoutPlan:
  """Plans how stored weights come to the rollout. Allocates nothing.

  Args:
    declared: a tree of what has `.shape` and logical `.axes`.
    storage: how the weights are stored: training's placement, to be viewed, or
      the rollout's own.
    rollout: how the rollout reads them, on the same mesh.
    dtype: of the weights.
    training: how training's programs use them, if that is not as stored.
    part: which rules count, "text" or "vision".
    views: False rebuilds what could be viewed, at the price of a copy.

  Raises:
    ValueError: if the meshes differ.
  """
  training = training or storage
  if not storage.mesh == rollout.mesh == training.mesh:
    raise ValueError(
        f"expected one mesh, found {storage.mesh.shape} for storage, "
        f"{rollout.mesh.shape} for the rollout and {training.mesh.shape} for "
        "training")
  has_axes = lambda w: hasattr(w, "axes")
  leaves, tree = jax.tree_util.tree_flatten_with_path(
      declared, is_leaf=has_axes)
  places = [jax.tree.leaves(p.weights(declared, part))
            for p in (storage, rollout, training)]
  dtype = np.dtype(dtype)
  compare = functools.cache(functools.partial(_compare, dtype, views))
  return LayoutPlan(tuple(
      Tensor(name=jax.tree_util.keystr(path, simple=True, separator="/"),
             shape=weight.shape, storage=stored, rollout=wanted,
             **compare(weight.shape, stored, wanted, used))
      for (path, weight), stored, wanted, used in zip(leaves, *places)
  ), tree, dtype)


def _compare(dtype: np.dtype, views: bool, shape: tuple[int, ...],
             stored: NamedSharding, wanted: NamedSharding,
             used: NamedSharding) -> dict[str, Any]:
  """All that a `Tensor` says besides its name and place."""
  held, needed, trained = (
      buffer_view.boxes(s, shape) for s in (stored, wanted, used))
  bits = jax.dtypes.itemsize_bits(dtype)
  count = lambda box: math.prod(buffer_view.extents(box)) * bits // 8

  def missing(target):
    return max(count(box) - count(buffer_view.overlap(held[device], box))
               for device, box in target.items())

  if held == needed:
    how, why = How.ALIAS, None
  else:
    why = (buffer_view.refusal(shape, dtype, stored, wanted) if views
           else "views are off")
    how = How.REBUILD if why else How.VIEW
  return {
      "how": how, "why": why,
      "storage_bytes": max(map(count, held.values())),
      "rollout_bytes": max(map(count, needed.values())),
      "moved_bytes": missing(needed) if how is How.REBUILD else 0,
      "gathered_bytes": missing(trained)}
