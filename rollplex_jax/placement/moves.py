"""Moves trees between a device and pinned host memory, as a plan says.

`jax.device_put` returns at once: a copy waits for its source and runs beside
programs that don't need it. What was moved is then deleted, which frees its
memory as soon as the copy is done. (A donation would say the same in one call,
but is not implemented across kinds of memory.)
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
from typing import Any, TypeVar

import jax

from rollplex_jax.placement.buffers import Buffer, Policy
from rollplex_jax.placement.ledger import Ledger
from rollplex_jax.placement.residency import ResidencyPlan

_T = TypeVar("_T")


def offload(tree: _T, *, keep: Any = ()) -> _T:
  """Moves a tree's arrays to pinned host memory; returns at once.

  The arrays on the device are deleted. A view of one (of the same bytes) is
  not, and holds the memory until it goes.

  Args:
    tree: of arrays; those in host memory already stay as they are.
    keep: arrays that are in use elsewhere: where the tree holds the same
      object, it stays on the device.
  """
  stay = {id(a) for a in jax.tree.leaves(keep)}
  return _move(tree, "pinned_host", stay, delete=True)


def onload(tree: _T, *, delete: bool = True) -> _T:
  """Moves a tree's arrays to their devices' own memory; returns at once.

  Args:
    tree: of arrays; those on the device already stay as they are.
    delete: the arrays in host memory. Without, offloading what was only read
      needs no copy: the caller still has one.
  """
  return _move(tree, None, set(), delete)


def _move(tree, kind: str | None, stay: set[int], delete: bool):
  """`kind` None is the devices' own memory. An array in two places goes once."""
  leaves, treedef = jax.tree.flatten(tree)
  going: dict[int, tuple[jax.Array, Any]] = {}
  for leaf in leaves:
    if isinstance(leaf, jax.Array) and id(leaf) not in stay:
      device = next(iter(leaf.sharding.device_set))
      target = kind or device.default_memory().kind
      if leaf.sharding.memory_kind != target:
        going[id(leaf)] = leaf, leaf.sharding.with_memory_kind(target)
  if not going:
    return tree
  moved = dict(zip(going, jax.device_put(
      [a for a, _ in going.values()], [to for _, to in going.values()])))
  if delete:
    for a, _ in going.values():
      a.delete()
  return treedef.unflatten([moved.get(id(a), a) for a in leaves])


class Keeper:
  """Holds a run's large trees, each where the plan has it in each phase.

    keeper.hold("optimizer", state)
    with keeper.phase("rollout"):
      ...
    with keeper.phase("update"):
      state = update(keeper.take("optimizer"))
      keeper.hold("optimizer", state)

  Attributes:
    plan: where trees go; a new step may have another.
  """

  def __init__(self, plan: ResidencyPlan, ledger: Ledger | None = None,
               lock: contextlib.AbstractContextManager | None = None):
    """Holds nothing yet.

    Args:
      plan: of a step.
      ledger: is told what is held, and checks each phase as it ends.
      lock: held while phases move trees, for threads that `peek`.
    """
    self.plan = plan
    self._ledger = ledger
    self._lock = lock or contextlib.nullcontext()
    self._trees: dict[str, Any] = {}
    self._keep: dict[str, Any] = {}
    # Copies in host memory of trees that are on the device to be read.
    self._on_host: dict[str, Any] = {}

  def hold(self, name: str, tree: Any, *, keep: Any = ()) -> None:
    """Takes a tree over; the caller drops its own references.

    Args:
      name: of its buffer in the plan.
      tree: of arrays, on the device or in host memory.
      keep: arrays in it that others use too and that stay on the device: under
        float32 the compute parameters are the master weights.
    """
    self._trees[name] = tree
    self._keep[name] = keep
    self._on_host.pop(name, None)
    self._tell(name)

  def names(self) -> list[str]:
    return sorted(self._trees)

  def get(self, name: str) -> Any:
    """A tree on the device, to be read.

    Raises:
      KeyError: if it is not held.
    """
    tree = self._trees[name]
    on_device = onload(tree, delete=self._rewritten(name))
    if on_device is not tree:
      if not self._rewritten(name):
        self._on_host[name] = tree
      self._trees[name] = on_device
      self._tell(name)
    return on_device

  def peek(self, name: str) -> Any:
    """A tree wherever it is."""
    return self._trees[name]

  def take(self, name: str) -> Any:
    """A tree on the device, handed over to be donated or dropped."""
    tree = onload(self._trees.pop(name))
    self._keep.pop(name)
    self._on_host.pop(name, None)
    if self._ledger is not None:
      self._ledger.register(name, tree)
    return tree

  def drop(self, name: str) -> None:
    """Lets a tree go, if it is held."""
    for trees in (self._trees, self._keep, self._on_host):
      trees.pop(name, None)

  @contextlib.contextmanager
  def phase(self, name: str) -> Iterator[None]:
    """Brings in what a phase uses, and afterwards puts away what it leaves.

    Trees whose last consumer it was are dropped. What the plan has return
    early comes in beside the phase before. With a ledger, it is checked at the
    end.
    """
    inside = self.plan.phases_of(name)
    wanted, after = self.plan.wanted(name), self.plan.after(name)
    with self._lock:
      for held in self.names():
        if held in wanted and self._moves(held):
          self.get(held)
    yield
    with self._lock:
      for held in self.names():
        found = self.plan.find(held)
        if found and all(b.last_consumer in inside for b in found):
          self.drop(held)
        elif held not in after and self._moves(held):
          self._put_away(held)
    if self._ledger is not None:
      self._ledger.check(name)

  def _put_away(self, name: str) -> None:
    if name in self._on_host:
      read, self._trees[name] = self._trees[name], self._on_host.pop(name)
      ours = zip(jax.tree.leaves(read), jax.tree.leaves(self._trees[name]))
      for a, there in ours:
        if a is not there:  # Nobody may hold the memory past the phase.
          a.delete()
    else:
      self._trees[name] = offload(self._trees[name], keep=self._keep[name])
    if not all(b.early for b in self._moves(name)):
      jax.block_until_ready(self._trees[name])
    self._tell(name)

  def _moves(self, name: str) -> list[Buffer]:
    return [b for b in self.plan.find(name) if b.policy == Policy.OFFLOAD]

  def _rewritten(self, name: str) -> bool:
    return any(b.rewritten_in for b in self.plan.find(name))

  def _tell(self, name: str) -> None:
    if self._ledger is not None:
      self._ledger.register(name, self._trees[name])
