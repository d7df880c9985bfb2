"""Mesh axes, and which of them split what in which stage.

Weights and activations have logical axes ("heads", "mlp", "batch"). A `Rules`
says, for one stage, over which mesh axes each of them is split; different
stages may have different rules over the same mesh, so that the rollout and
training differ in their tensor-parallel degree. The mesh is

  data      prompts
  fsdp      prompts, and weights, which are gathered where they are used
  tp_major  heads, MLP and vocabulary
  tp_minor  the same in stages of the higher tensor-parallel degree; prompts in
            the others

A stage's tensor parallelism is a prefix of ("tp_major", "tp_minor"): with the
surviving axis first a coarser shard is made of neighboring finer ones.

Model code calls `constrain` with logical axes. It does nothing outside of
`use`, which a program enters while it is traced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
import contextlib
import contextvars
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

from rollplex_jax.errors import InputError

AXES = ("data", "fsdp", "tp_major", "tp_minor")
TENSOR_AXES = ("tp_major", "tp_minor")
# Logical axes that tensor parallelism splits.
SPLIT = ("vocab", "heads", "kv_heads", "mlp")
# Of these a part may stay whole where the degree does not divide their size:
# the result is the same, at the price of some memory.
_MAY_STAY_WHOLE = ("vocab", "kv_heads")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshShape:
  """How many devices each mesh axis has."""

  data: int = 1
  fsdp: int = 1
  tp_major: int = 1
  tp_minor: int = 1

  def __post_init__(self):
    for name in AXES:
      if getattr(self, name) < 1:
        raise InputError(
            f"mesh.{name}={getattr(self, name)}: expected at least 1")

  @property
  def size(self) -> int:
    return math.prod(getattr(self, name) for name in AXES)

  def ways(self, axes: Sequence[str]) -> int:
    """Into how many parts a dimension is split by some axes."""
    return math.prod(getattr(self, name) for name in axes)

  def make(self, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh over all of `devices`, by default all there are.

    Raises:
      InputError: naming both numbers, if the shape does not fit them.
    """
    devices = np.asarray(jax.devices() if devices is None else devices)
    if devices.size != self.size:
      shape = " x ".join(f"{name} {getattr(self, name)}" for name in AXES)
      raise InputError(f"mesh of {shape} = {self.size} devices: expected "
                       f"{devices.size}, the devices at hand")
    return Mesh(devices.reshape([getattr(self, name) for name in AXES]), AXES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
  """The mesh axes that split each logical axis in one stage.

  Attributes:
    batch: prompts, samples, and packed media by their prompts.
    embed: the model dimension of weights (not of activations).
    saved: the model dimension of activations that are kept.
    vocab, heads, kv_heads, mlp: as their names say.
  """

  batch: tuple[str, ...] = ()
  embed: tuple[str, ...] = ()
  saved: tuple[str, ...] = ()
  vocab: tuple[str, ...] = ()
  heads: tuple[str, ...] = ()
  kv_heads: tuple[str, ...] = ()
  mlp: tuple[str, ...] = ()

  def axes(self, *logical: str | None) -> tuple[tuple[str, ...], ...]:
    """The mesh axes that split each dimension of an array.

    Raises:
      ValueError: if a mesh axis would split two of its dimensions.
    """
    parts = [getattr(self, name) if name else () for name in logical]
    used = [axis for part in parts for axis in part]
    if len(set(used)) < len(used):
      twice = next(axis for axis in used if used.count(axis) > 1)
      raise ValueError(
          f"mesh axis {twice} splits two dimensions of {logical}")
    return tuple(parts)

  def spec(self, *logical: str | None) -> PartitionSpec:
    """`axes` as jax takes them."""
    return _spec(self.axes(*logical))


def make_rules(shape: MeshShape, sizes: Mapping[str, int],
               tensor_axes: Sequence[str], *, what: str,
               split_all: bool = True) -> Rules:
  """Rules of a stage with a given tensor parallelism.

  Args:
    shape: of the mesh.
    sizes: of "embed", and of "vocab", "heads", "kv_heads" and "mlp" those that
      the model part has.
    tensor_axes: a prefix of ("tp_major", "tp_minor").
    what: names the stage and model part in errors.
    split_all: refuse heads and MLP that do not divide; otherwise keep them
      whole.

  Raises:
    InputError: naming what does not divide by what.
  """
  tensor_axes = tuple(tensor_axes)
  if tensor_axes != TENSOR_AXES[:len(tensor_axes)]:
    raise InputError(f"{what}: expected tensor parallelism over a prefix of "
                     f"{', '.join(TENSOR_AXES)}, found {', '.join(tensor_axes)}")
  ways = shape.ways(tensor_axes)
  split = {}
  for name in SPLIT:
    if name not in sizes:
      continue
    # Attention pairs query heads with key heads: those split no finer.
    within = split.get("heads", ()) if name == "kv_heads" else tensor_axes
    axes = _dividing(shape, within, sizes[name])
    if split_all and axes != tensor_axes and name not in _MAY_STAY_WHOLE:
      raise InputError(f"{what}: {sizes[name]} {name} do not divide by tensor "
                       f"parallelism {ways}")
    split[name] = axes
  fsdp = ("fsdp",) if sizes["embed"] % shape.fsdp == 0 else ()
  if shape.fsdp > 1 and not fsdp and split_all:
    raise InputError(f"{what}: the model dimension {sizes['embed']} does not "
                     f"divide by mesh.fsdp={shape.fsdp}")
  rest = tuple(axis for axis in TENSOR_AXES if axis not in tensor_axes)
  return Rules(
      batch=("data", "fsdp", *rest), embed=fsdp,
      saved=_dividing(shape, tensor_axes, sizes["embed"]), **split)


def _dividing(shape: MeshShape, axes: tuple[str, ...],
              size: int) -> tuple[str, ...]:
  """The longest prefix of mesh axes that divides a size."""
  while axes and size % shape.ways(axes):
    axes = axes[:-1]
  return axes


def _spec(parts: Iterable[Sequence[str]]) -> PartitionSpec:
  return PartitionSpec(*(tuple(part) or None for part in parts))


def _shape_of(mesh: Mesh) -> MeshShape:
  return MeshShape(**{axis: mesh.shape[axis] for axis in AXES})


def fully_sharded(shape: MeshShape, rules: Rules,
                  weight_shape: Sequence[int],
                  logical: Sequence[str | None]) -> PartitionSpec:
  """A weight's spec with every mesh axis on some dimension, if they divide.

  For what no program multiplies by: master weights, moments, gradients. Axes
  that `rules` leave out go to the largest dimension that still divides.
  """
  parts = [list(_dividing(shape, part, size))
           for part, size in zip(rules.axes(*logical), weight_shape)]
  for axis in AXES:
    if getattr(shape, axis) == 1 or any(axis in part for part in parts):
      continue
    left = [size // shape.ways(part)
            for size, part in zip(weight_shape, parts)]
    fits = [i for i, n in enumerate(left) if n % getattr(shape, axis) == 0]
    if fits:
      parts[max(fits, key=lambda i: left[i])].append(axis)
  return _spec(parts)


@dataclasses.dataclass(frozen=True)
class Placement:
  """One stage's rules on a mesh. Hashable: a static argument of programs.

  Attributes:
    mesh: of the run.
    text: rules of the decoder.
    vision: rules of the vision tower.
  """

  mesh: Mesh
  text: Rules
  vision: Rules

  def sharding(self, *logical: str | None, part: str = "text"
               ) -> NamedSharding:
    """Of an array with logical axes, in the decoder or the tower."""
    return NamedSharding(self.mesh, getattr(self, part).spec(*logical))

  def weights(self, declared: Any, part: str = "text") -> Any:
    """A tree of shardings for a tree of declared weights (with `.axes`).

    Weights of one logical axis may differ in size (the patch merger's MLP is
    wider than the tower's): what does not divide is split by fewer axes.
    """
    shape, rules = _shape_of(self.mesh), getattr(self, part)

    def place(weight):
      return NamedSharding(self.mesh, _spec(
          _dividing(shape, axes, size)
          for axes, size in zip(rules.axes(*weight.axes), weight.shape)))

    return jax.tree.map(place, declared, is_leaf=lambda w: hasattr(w, "axes"))

  def master(self, declared: Mapping[str, Any]) -> dict[str, Any]:
    """Shardings over all devices for {"text": ..., "visual": ...} weights."""
    shape = _shape_of(self.mesh)

    def of(part, w):
      rules = self.vision if part == "visual" else self.text
      return NamedSharding(
          self.mesh, fully_sharded(shape, rules, w.shape, w.axes))

    return {part: jax.tree.map(lambda w, part=part: of(part, w), tree,
                               is_leaf=lambda w: hasattr(w, "axes"))
            for part, tree in declared.items()}

  def storage(self, declared: Mapping[str, Any]) -> dict[str, Any]:
    """Shardings of compute parameters {"text": ..., "visual": ...}."""
    return {part: self.weights(tree, "vision" if part == "visual" else "text")
            for part, tree in declared.items()}

  def weights_move(self, rollout: Placement) -> bool:
    """Whether the rollout reads the decoder's weights laid out otherwise."""
    split = self.mesh.shape["fsdp"] > 1 and self.text.embed
    return self.text.heads != rollout.text.heads or bool(
        split and not rollout.text.embed)

  @property
  def replicated(self) -> NamedSharding:
    """Of an array that every device has whole."""
    return NamedSharding(self.mesh, PartitionSpec())

  @property
  def batch_ways(self) -> int:
    """Into how many parts prompts are split."""
    return math.prod(self.mesh.shape[axis] for axis in self.text.batch)


_current: contextvars.ContextVar[tuple[Mesh, Rules | None] | None] = (
    contextvars.ContextVar("sharding", default=None))


@contextlib.contextmanager
def use(mesh: Mesh | None, rules: Rules | None = None) -> Iterator[None]:
  """Makes `constrain` work, while a program is traced.

  With a mesh alone nothing is constrained, but `is_free`; without either,
  arrays are whole or, inside `shard_map`, a device's own.
  """
  token = _current.set(None if mesh is None else (mesh, rules))
  try:
    yield
  finally:
    _current.reset(token)


def is_free() -> bool:
  """Whether the compiler splits arrays over devices without any rules."""
  current = _current.get()
  return current is not None and current[1] is None and current[0].size > 1


def _ruled() -> tuple[Mesh, Rules] | None:
  """The mesh and the rules in use, if there are rules."""
  current = _current.get()
  return None if current is None or current[1] is None else current


def constrain(x: jax.Array, *logical: str | None) -> jax.Array:
  """Splits x by the rules in use; a dimension that they don't divide is left.

  Args:
    x: an array.
    logical: a logical axis per dimension, or None.
  """
  current = _ruled()
  if current is None:
    return x
  if len(logical) != x.ndim:
    raise ValueError(f"{logical} for an array of {x.shape}")
  return jax.lax.with_sharding_constraint(
      x, NamedSharding(current[0], _spec(axes_of(x.shape, *logical))))


def mesh() -> Mesh | None:
  """The mesh of the rules in use, if any."""
  current = _ruled()
  return None if current is None else current[0]


def axes_of(shape: Sequence[int], *logical: str | None
            ) -> tuple[tuple[str, ...], ...]:
  """The mesh axes by which `constrain` splits each dimension of a shape."""
  current = _ruled()
  if current is None:
    return ((),) * len(logical)
  mesh, rules = current
  ways = _shape_of(mesh).ways
  return tuple(axes if size % ways(axes) == 0 else ()
               for axes, size in zip(rules.axes(*logical), shape))


def ways(axes: Sequence[str]) -> int:
  """Into how many parts mesh axes split a dimension, on the mesh in use."""
  current = _ruled()
  return 1 if current is None else _shape_of(current[0]).ways(axes)


def in_order(*values: Any) -> Any:
  """The values, of which none is read before all are made; on a mesh only.

  Without that a compiler may cut a device's part out of an array long after the
  array was made, and keep the whole of it until then.
  """
  if _ruled() is None:
    return values
  return jax.lax.optimization_barrier(values)


def batch_ways() -> int:
  """Into how many parts the rules in use split a batch."""
  current = _ruled()
  if current is None:
    return 1
  mesh, rules = current
  return math.prod(mesh.shape[axis] for axis in rules.batch)


def take_local(table: jax.Array, index: jax.Array) -> jax.Array:
  """table[index], where every index stays within its own part of the batch.

  Args:
    table: [N, ...], split along N like a batch.
    index: int32 [b, ...], split along b; part i of it points into part i of
      the table. The compiler does not know that, and would move the table. A
      negative index takes any row.
  """
  ways = batch_ways()
  if ways == 1:
    return table[jnp.maximum(index, 0)]
  parts, places = _parts(table, index, ways)
  out = jax.vmap(lambda part, place: part[place])(
      parts, jnp.maximum(places, 0))
  return out.reshape(*index.shape, *table.shape[1:])


def add_local(table: jax.Array, index: jax.Array,
              values: jax.Array) -> jax.Array:
  """table.at[index].add(values), for an index [b] as of `take_local`."""
  ways = batch_ways()
  if ways == 1:
    return table.at[index].add(values)
  parts, places = _parts(table, index, ways)
  values = values.reshape(ways, -1, *values.shape[1:])
  out = jax.vmap(lambda part, place, value: part.at[place].add(value))(
      parts, places, values)
  return out.reshape(table.shape)


def _parts(table, index, ways):
  size = table.shape[0] // ways
  first = (size * jnp.arange(ways, dtype=index.dtype)).reshape(
      ways, *[1] * index.ndim)
  return (table.reshape(ways, size, *table.shape[1:]),
          index.reshape(ways, -1, *index.shape[1:]) - first)
