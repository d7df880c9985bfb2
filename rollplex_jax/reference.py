"""The reference model of a run: the policy as it began, or a checkpoint.

A reference is only ever read, so that it may be compressed: it then takes a
fraction of the policy's memory, and its own share of the KL to it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from rollplex_jax.artifacts import Model
from rollplex_jax.config import TrainConfig
from rollplex_jax.errors import InputError
from rollplex_jax.models import architectures, hf, tensor_files, vlm
from rollplex_jax.models.config import ModelConfig
from rollplex_jax.models.weights import Params, num_parameters
from rollplex_jax.placement.mesh import Places
from rollplex_jax.placement.sharding import Placement
from rollplex_jax.policy import Policy

# What tells nothing about how the model computes.
_FREE = dict(initializer_range=0.0, max_position_embeddings=1)


def check(config: TrainConfig) -> None:
  """Checks policy and reference by their files, before any weight is loaded.

  Raises:
    InputError: if the policy is compressed, the reference is another model, or
      nothing would read it.
  """
  policy = hf.load_config(config.policy.path)
  architectures.check_trains(policy, f"policy.path={config.policy.path}")
  if tensor_files.is_compressed(config.policy.path):
    raise InputError(
        f"policy.path={config.policy.path}: is compressed, and can't be "
        "trained; expected an ordinary checkpoint (see experiments.decompress)")
  path = config.reference.path
  if not path:
    return
  if not config.has_reference:
    raise InputError(
        f"reference.path={path} with objective.beta="
        f"{config.objective.beta:g}, algorithm={config.algorithm}: expected RL "
        "with beta above 0, for nothing reads a reference otherwise")
  found = hf.load_config(path)
  for name in ("text", "vision", "image_token_id", "video_token_id"):
    ours, theirs = (_comparable(getattr(c, name)) for c in (policy, found))
    if ours != theirs:
      raise InputError(
          f"reference.path={path}: is another model than policy.path="
          f"{config.policy.path}: {_difference(name, ours, theirs)}")


def make(config: TrainConfig, policy: Policy) -> Model:
  """The reference of a run in which there is one.

  Args:
    config: of the run, checked.
    policy: before its first update. A frozen tower is shared.

  Raises:
    InputError: naming the file or tensor that is wrong, or if the tower isn't
      the policy's frozen one.
  """
  path = config.reference.path
  if not path:
    # A copy: the first update donates the master weights.
    return policy.copy()
  declared = vlm.weights(policy.config)
  storage = finest = None
  if policy.places is not None:
    storage = policy.places.compute_weights(declared)
    finest = _finer(policy.places).storage(declared)
  _, params = hf.load_checkpoint(
      path, jnp.dtype(config.policy.compute_dtype), policy.config,
      shardings=storage, finest=finest)
  for part, tree in policy.frozen.items():
    if not _same(params.pop(part), tree):
      raise InputError(
          f"reference.path={path}: its vision tower differs from the one of "
          f"policy.path={config.policy.path}, which is frozen and serves both; "
          "expected the same, not compressed")
  return Model({**policy.frozen, **params}, 0)


def summary(config: TrainConfig, model: ModelConfig,
            reference: Model | None, frozen: Params,
            first_kl: float | None) -> dict[str, Any] | None:
  """What it takes and adds.

  Returns:
    "path"; "compressed"; "bytes" of its own weights, and "plain_bytes", what
    they are in the compute dtype; and "first_kl", the mean KL estimate of the
    first step, which is all compression's while the policy has not moved. None
    for a run without a reference.
  """
  if reference is None:
    return None
  path = config.reference.path
  own = [part for part in reference.params if part not in frozen]
  declared = vlm.weights(model)
  return {
      "path": path,
      "compressed": bool(path) and tensor_files.is_compressed(path),
      "bytes": sum(leaf.nbytes for part in own
                   for leaf in jax.tree.leaves(reference.params[part])),
      "plain_bytes": jnp.dtype(config.policy.compute_dtype).itemsize * sum(
          num_parameters(declared[part]) for part in own),
      "first_kl": first_kl}


def _finer(places: Places) -> Placement:
  """The rules of the stage that splits matrices finer."""
  ways = lambda p: p.mesh.size // p.batch_ways
  if ways(places.rollout) <= ways(places.training):
    return places.training
  # The rollout gathers no weights, but training may split them so.
  return dataclasses.replace(places.rollout, text=dataclasses.replace(
      places.rollout.text, embed=places.training.text.embed))


def _same(one: Params, other: Params) -> bool:
  if jax.tree.structure(one) != jax.tree.structure(other):
    return False  # LegoArrays have a structure of their own.
  return all(
      bool(jnp.array_equal(a.astype(b.dtype), b))
      for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other)))


def _comparable(value: Any) -> Any:
  if not dataclasses.is_dataclass(value):
    return value
  names = {f.name for f in dataclasses.fields(value)}
  return dataclasses.replace(
      value, **{k: v for k, v in _FREE.items() if k in names})


def _difference(name: str, ours: Any, theirs: Any) -> str:
  """The first field that differs."""
  if type(ours) is type(theirs) and dataclasses.is_dataclass(ours):
    for field in dataclasses.fields(ours):
      a, b = getattr(ours, field.name), getattr(theirs, field.name)
      if a != b:
        return f"{name} has {field.name} {b}, expected {a}"
  kind = lambda v: type(v).__name__ if dataclasses.is_dataclass(v) else v
  return f"{name} is {kind(theirs)}, expected {kind(ours)}"
