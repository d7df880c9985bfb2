"""Devices split between rollout and training, and what goes between them.

In a disaggregated run the rollout has devices of its own. After every update
they need the new weights, and the trainer needs the completions; the pools may
belong to one process or to several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
import math
from typing import Any, TypeVar

import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np

from rollplex_jax.errors import InputError

_T = TypeVar("_T")


class Pools:
  """A device for training and one for the rollout.

  Attributes:
    training: holds master weights, reference and gradients.
    rollout: holds a copy of the policy.
  """

  def __init__(self, devices: Sequence[jax.Device] | None = None):
    """Takes the first device for training, the last for the rollout.

    Args:
      devices: all there are by default, those of other processes included.

    Raises:
      InputError: if that is one device.
    """
    devices = list(devices or jax.devices())
    if len(devices) < 2:
      raise InputError(
          "schedule.name=disaggregated: expected at least 2 devices, found "
          f"{len(devices)}")
    self.training, self.rollout = devices[0], devices[-1]
    self._sent: dict[str, tuple[Any, Any]] = {}

  @property
  def several_processes(self) -> bool:
    return self.training.process_index != self.rollout.process_index

  def trains_here(self) -> bool:
    """Whether this process has the training device."""
    return self.training.process_index == jax.process_index()

  def rolls_out_here(self) -> bool:
    """Whether this process has the rollout's device."""
    return self.rollout.process_index == jax.process_index()

  def send_weights(self, name: str, tree: _T, version: Any) -> _T:
    """A part of the policy on the rollout's device.

    What was sent at the same version is not sent again: a frozen part goes
    once. All processes take part, each with a tree of the same shapes.

    Returns:
      The tree on the rollout's device; in a process without it, as given.
    """
    if name in self._sent and self._sent[name][0] == version:
      return self._sent[name][1]
    self._sent.pop(name, None)  # Never two copies on the rollout's device.
    if self.several_processes:
      flat, back = _pack(tree)
      sent = back(multihost_utils.broadcast_one_to_all(
          flat, is_source=self.trains_here()))
      if not self.rolls_out_here():
        sent = tree
    else:
      sent = tree
    if self.rolls_out_here():
      sent = jax.device_put(sent, self.rollout)
    self._sent[name] = version, sent
    return sent

  def share_completions(self, tree: _T) -> _T:
    """Host arrays of the rollout's process, in all processes.

    Others give a tree of the same shapes, whose values do not count.
    """
    if not self.several_processes:
      return tree
    return multihost_utils.broadcast_one_to_all(
        tree, is_source=self.rolls_out_here())


def sum_over_processes(tree: _T) -> _T:
  """The sum of each process's arrays, on one local device of each.

  One all-reduce, over the first device of every process.
  """
  if jax.process_count() == 1:
    return tree
  flat, back = _pack(tree)
  firsts = {}
  for device in jax.devices():
    firsts.setdefault(device.process_index, device)
  mesh = jax.sharding.Mesh(list(firsts.values()), "process")
  spec = jax.sharding.PartitionSpec
  split = jax.sharding.NamedSharding(mesh, spec("process"))
  whole = jax.sharding.NamedSharding(mesh, spec())
  here = firsts[jax.process_index()]

  def gather(a):
    a = jax.device_put(a, here)[None]
    return jax.make_array_from_single_device_arrays(
        (mesh.size, *a.shape[1:]), split, [a])

  total = _sum_first_axis(whole)(jax.tree.map(gather, flat))
  return back(jax.tree.map(lambda a: a.addressable_data(0), total))


def _pack(tree: _T) -> tuple[list[jax.Array], Callable[[Any], _T]]:
  """A tree as one vector for each dtype, and the way back.

  What goes between processes goes as few large arrays: each takes its time to
  set out.
  """
  leaves, structure = jax.tree.flatten(tree)
  by_dtype: dict[str, list[int]] = {}
  for i, leaf in enumerate(leaves):
    by_dtype.setdefault(str(leaf.dtype), []).append(i)
  flat = [_concatenate([leaves[i] for i in group])
          for group in by_dtype.values()]
  shapes = [tuple(leaves[i].shape for i in group)
            for group in by_dtype.values()]

  def back(vectors):
    out: list[Any] = [None] * len(leaves)
    for group, vector, own in zip(by_dtype.values(), vectors, shapes):
      for i, a in zip(group, _split(vector, own)):
        out[i] = a
    return structure.unflatten(out)

  return flat, back


@jax.jit
def _concatenate(leaves):
  return jnp.concatenate([a.reshape(-1) for a in leaves])


@functools.partial(jax.jit, static_argnames="shapes")
def _split(vector, shapes):
  ends = np.cumsum([math.prod(shape) for shape in shapes])
  return [part.reshape(shape) for part, shape in zip(
      jnp.split(vector, ends[:-1]), shapes)]


@functools.cache
def _sum_first_axis(sharding: jax.sharding.NamedSharding):
  return jax.jit(lambda tree: jax.tree.map(lambda a: a.sum(axis=0), tree),
                 out_shardings=sharding)
