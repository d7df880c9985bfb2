"""Weights declared once: shape, logical axes, initializer, checkpoint name.

A model is described by a tree of `Weight`. From that one tree come the random
parameters, their abstract shapes, their shardings and the mapping to and from
checkpoint files, so that the four cannot disagree.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from legolm_jax import sharding as lego_sharding
from legolm_jax.array import LegoArray

# A tree of arrays shaped like a tree of `Weight`; matrices may be LegoArrays.
Params = Any


class Init(enum.Enum):
  NORMAL = "normal"
  ZEROS = "zeros"
  ONES = "ones"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weight:
  """One parameter.

  Attributes:
    shape: as stored. The dimension that tensor parallelism splits comes first
      (column-parallel [out, in], row-parallel [in, out]), so that a finer
      shard is a contiguous part of a coarser one.
    axes: a logical name per dimension, mapped to mesh axes by sharding rules.
    name: the tensor's name in a published checkpoint.
    init: how a fresh parameter is drawn; `std` applies to NORMAL.
    transposed: the checkpoint holds the transpose.
    file_shape: the checkpoint's shape where it is not `shape` (or its
      transpose): the tensor is reshaped.
    part: (i, count): this weight is the i-th of `count` equal parts of the
      checkpoint tensor along its first dimension.
  """

  shape: tuple[int, ...]
  axes: tuple[str | None, ...]
  name: str
  init: Init = Init.NORMAL
  std: float = 0.02
  transposed: bool = False
  file_shape: tuple[int, ...] | None = None
  part: tuple[int, int] = (0, 1)

  def __post_init__(self):
    if len(self.shape) != len(self.axes):
      raise ValueError(f"{self.name}: axes {self.axes} for {self.shape}")

  @property
  def checkpoint_shape(self) -> tuple[int, ...]:
    """Shape of the whole tensor in a checkpoint file."""
    shape = self.shape[::-1] if self.transposed else self.shape
    shape = self.file_shape or shape
    return (shape[0] * self.part[1], *shape[1:])

  def from_checkpoint(
      self, tensor: np.ndarray | LegoArray) -> np.ndarray | LegoArray:
    """Cuts and turns a checkpoint tensor into this weight (maybe a view)."""
    i, count = self.part
    if isinstance(tensor, LegoArray):
      if count > 1:
        tensor = lego_sharding.part(tensor, i, count)
      return tensor.T if self.transposed else tensor
    rows = tensor.shape[0] // count
    tensor = tensor[i * rows:(i + 1) * rows]
    if self.transposed:
      return tensor.T
    return tensor.reshape(self.shape)

  def to_checkpoint(self, array: np.ndarray) -> np.ndarray:
    """The inverse of `from_checkpoint`, for this weight's part."""
    if self.transposed:
      array = array.T
    return array.reshape(self.file_shape) if self.file_shape else array


def is_weight(x) -> bool:
  """Tells the leaves of a declared tree, for `jax.tree` functions."""
  return isinstance(x, Weight)


def init_params(weights, key: jax.Array, dtype=jnp.float32) -> Params:
  """Draws fresh parameters: a tree of arrays of `dtype` like `weights`."""
  leaves, tree = jax.tree.flatten(weights, is_leaf=is_weight)
  keys = jax.random.split(key, len(leaves))

  def draw(weight, key):
    if weight.init is Init.ZEROS:
      return jnp.zeros(weight.shape, dtype)
    if weight.init is Init.ONES:
      return jnp.ones(weight.shape, dtype)
    return (weight.std * jax.random.normal(key, weight.shape)).astype(dtype)

  return tree.unflatten([draw(w, k) for w, k in zip(leaves, keys)])


def abstract_params(weights, dtype=jnp.float32) -> Params:
  """Shapes and dtypes of the parameters, without allocating any."""
  return jax.tree.map(
      lambda w: jax.ShapeDtypeStruct(w.shape, dtype), weights,
      is_leaf=is_weight)


def num_parameters(weights) -> int:
  """Number of scalars in a tree of `Weight` or of arrays."""
  leaves = jax.tree.leaves(weights, is_leaf=is_weight)
  return sum(math.prod(w.shape) for w in leaves)
