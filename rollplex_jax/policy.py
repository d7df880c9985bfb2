"""The policy in training: its master weights, its compute copies, their places.

Three copies of the trained weights exist at most, each in a layout of its own:
float32 master weights and moments, sharded over all devices; the weights that
training reads, in the compute dtype; and during a rollout what `LayoutPlan`
must rebuild of them for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rollplex_jax.artifacts import Model
from rollplex_jax.models import hf, vlm
from rollplex_jax.models.config import ModelConfig
from rollplex_jax.models.weights import Params
from rollplex_jax.placement.layout import LayoutPlan
from rollplex_jax.placement.mesh import Places
from rollplex_jax.stages import update
from rollplex_jax.stages.update import OptimizerConfig, TrainState


class Policy:
  """A policy that learns.

  Attributes:
    config: the model's configuration.
    places: rules of its stages on the run's mesh, or None on one device.
    layout: how its weights come to the rollout, or None if it reads them as
      training does.
    state: master weights, moments and step counts; None while somebody else
      holds them.
    frozen: compute parameters of the parts that do not learn.
    trained: compute parameters of the parts that do.
    version: updates so far, those that were skipped among them: an artefact of
      before a skipped update is made again, which is never wrong.
    lock: held while state or version change or the state moves. Another thread
      that holds it may read them.
  """

  def __init__(self, path: str, config: ModelConfig, places: Places | None, *,
               optimizer: OptimizerConfig, dtype: str,
               freeze_vision_tower: bool):
    """Loads a checkpoint onto the mesh.

    Raises:
      InputError: naming the file or tensor that is wrong.
    """
    self.config = config
    self.places = places
    self.lock = threading.RLock()
    self._dtype = jnp.dtype(dtype)
    declared = vlm.weights(config)
    master = storage = None
    if places is not None:
      master = places.training.master(declared)
      storage = places.compute_weights(declared)
    _, loaded = hf.load_checkpoint(
        path, jnp.float32, self.config, shardings=master)
    self.frozen: Params = {}
    if "visual" in loaded and freeze_vision_tower:
      frozen = {"visual": loaded.pop("visual")}
      self.frozen = _lay_out(frozen, _part(storage, frozen), self._dtype)
    self._optimizer = update.make_optimizer(optimizer)
    self.state: TrainState | None = update.create_state(
        loaded, self._optimizer)
    if places is not None:
      self.state = _replicate_scalars(self.state, places)
    self._storage = _part(storage, loaded)
    self.trained = self._compute_copy()
    self.version = 0
    self.layout: LayoutPlan | None = places and places.plan_layout(
        declared["text"], self._dtype)

  @property
  def params(self) -> Params:
    """{"text": ..., "visual": ...} in the compute dtype."""
    return {**self.frozen, **self.trained}

  def model(self) -> Model:
    """The current parameters with the number of updates behind them."""
    return Model(self.params, self.version,
                 self.version if "visual" in self.trained else 0)

  def copy(self) -> Model:
    """The policy as it is now, for good. A frozen tower is shared."""
    return Model({**self.frozen, **jax.tree.map(jnp.copy, self.trained)}, 0)

  def update(self, grads: Params,
             loss: jax.Array | None = None) -> dict[str, jax.Array]:
    """One step of the optimizer.

    Args:
      grads: float32 gradients of the trained parts; deleted.
      loss: float32 [], theirs; the update is skipped where it is not finite.

    Returns:
      Metrics of `update.apply_gradients`.
    """
    dtype = self._dtype if self._storage is None else jnp.float32
    with self.lock:
      # Weights of the old version go before those of the new one come.
      self._delete_trained()
      self.state, trained, metrics = update.apply_gradients(
          self.state, grads, self._optimizer, dtype, loss)
      # No result is as large as they are, so their donation was not carried
      # out.
      for a in jax.tree.leaves(grads):
        a.delete()
      self.trained = (
          trained if self._storage is None else self._compute_copy())
      self.version += 1
    return metrics

  def restore(self, read: Callable[[TrainState], TrainState],
              version: int) -> None:
    """Replaces weights and optimizer state by others of the same model.

    The present ones are deleted first: there is room for one state only.

    Args:
      read: gives the state for one of `jax.ShapeDtypeStruct`s, whose shardings
        it is to have.
      version: updates that led to it.
    """
    with self.lock:
      wanted = jax.tree.map(lambda a: jax.ShapeDtypeStruct(
          a.shape, a.dtype, sharding=a.sharding), self.state)
      committed = [a.committed for a in jax.tree.leaves(self.state)]
      for a in jax.tree.leaves((self.state, self.trained)):
        if not a.is_deleted():  # A compute parameter may be the master weight.
          a.delete()
      self.state = self.trained = None
      self.state = _commit_only(committed, read(wanted))
      self.trained = self._compute_copy()
      self.version = version

  def _delete_trained(self) -> None:
    """Gives up the compute copies, but for those that are master weights."""
    masters = set()
    if self._dtype == jnp.float32:
      masters = {pointer for a in jax.tree.leaves(self.state.params)
                 for pointer in _pointers(a)}
    for a in jax.tree.leaves(self.trained):
      if masters.isdisjoint(_pointers(a)):
        a.delete()
    self.trained = None

  def _compute_copy(self) -> Params:
    """Master weights as training reads them."""
    return _lay_out(self.state.params, self._storage, self._dtype)


def _replicate_scalars(tree: Any, places: Places) -> Any:
  """Counters, made on one device, on all of a mesh."""
  everywhere = places.training.replicated

  def spread(a):
    if a.ndim:
      return a
    value = jax.device_get(a)
    return jax.make_array_from_callback((), everywhere, lambda _: value)

  return jax.tree.map(spread, tree)


def _pointers(a: jax.Array) -> set[int]:
  return {shard.data.unsafe_buffer_pointer() for shard in a.addressable_shards}


def _commit_only(committed: Sequence[bool], state: TrainState) -> TrainState:
  """A state of which only these leaves, in order, are committed to devices.

  What is read from files is committed. Programs for that are other programs:
  all of them would be compiled again when a run goes on.
  """
  leaves, structure = jax.tree.flatten(state)
  del state  # So that each leaf goes when the next one has its copy.
  for i, keep in enumerate(committed):
    if leaves[i].committed and not keep:
      leaves[i] = jnp.array(np.asarray(leaves[i]))
  return structure.unflatten(leaves)


def _part(shardings: Params | None, params: Params) -> Params | None:
  return shardings and {part: shardings[part] for part in params}


def _lay_out(params: Params, shardings: Any, dtype: jnp.dtype) -> Params:
  """A tree in another dtype and where `shardings` say; None for as it lies.

  What is there already stays the same array.
  """
  if shardings is None:
    return update.cast_params(params, dtype)
  arrays, tree = jax.tree.flatten(params)
  places = tree.flatten_up_to(shardings)
  moving = [i for i, (a, place) in enumerate(zip(arrays, places))
            if a.dtype != dtype or not a.sharding.is_equivalent_to(
                place, a.ndim)]
  cast = _cast_program(tuple(places[i] for i in moving), dtype)
  for i, array in zip(moving, cast([arrays[i] for i in moving])):
    arrays[i] = array
  return tree.unflatten(arrays)


@functools.cache
def _cast_program(places, dtype):
  return jax.jit(lambda arrays: [a.astype(dtype) for a in arrays],
                 out_shardings=list(places))
