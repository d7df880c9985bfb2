"""A run's checkpoint as one of `transformers`."""

from __future__ import annotations

import os
import pathlib

import jax
import jax.numpy as jnp

from rollplex_jax import resume
from rollplex_jax.checkpoint import Checkpoint, Checkpoints, named
from rollplex_jax.errors import InputError
from rollplex_jax.models import hf, vlm
from rollplex_jax.models.config import ModelConfig
from rollplex_jax.models.weights import Params

# A run that is going on removes old checkpoints while they are read.
_TRIES = 3


def export(run: str | os.PathLike, output_path: str | os.PathLike, *,
           step: int | None = None, policy_path: str = "") -> int:
  """Writes what a run would write as its policy after a step.

  Args:
    run: the run's folder; it may be going on.
    output_path: folder to make, or a checkpoint to replace.
    step: of a checkpoint in the folder; None for the newest.
    policy_path: where the model that the run began with lies now, if it was
      moved; it has what isn't trained: frozen parts, tokenizer, preprocessors.

  Returns:
    The step.

  Raises:
    InputError: there is no such checkpoint, it is damaged, or the model is
      another one.
  """
  checkpoints = Checkpoints(pathlib.Path(run) / "checkpoints")
  found = _read(checkpoints, step, run)
  policy = found.facts["config"]["policy"]
  path = policy_path or policy["path"]
  resume.check_models(found, policy=path)
  config = hf.load_config(path)
  for tries_left in reversed(range(_TRIES)):
    try:
      params = _trained(checkpoints, found, config)
      break
    except InputError:
      newer = _read(checkpoints, step, run)
      if not tries_left or newer.step == found.step:
        raise
      found = newer
  if config.vision is not None and "visual" not in params:
    _, start = hf.load_checkpoint(path, jnp.float32, config)
    params["visual"] = start["visual"]
  # In the model's own order of parts.
  params = {part: params[part] for part in vlm.weights(config)}
  hf.save_checkpoint(output_path, config, params, assets_from=path,
                     dtype=jnp.dtype(policy["compute_dtype"]))
  return found.step


def _read(checkpoints: Checkpoints, step: int | None, run) -> Checkpoint:
  found = checkpoints.read(step)
  if found is None:
    raise InputError(f"{run}: holds no checkpoint of a run")
  return found


def _trained(checkpoints: Checkpoints, found: Checkpoint,
             config: ModelConfig) -> Params:
  """Master weights in the host's memory."""
  parts = {name.split("/")[0] for name in found.tensors["params"]}
  place = jax.sharding.SingleDeviceSharding(_host())
  shapes = jax.eval_shape(lambda: vlm.init_params(config, jax.random.key(0)))
  like = {part: jax.tree.map(lambda a: jax.ShapeDtypeStruct(
      a.shape, jnp.float32, sharding=place), shapes[part])
          for part in sorted(parts & shapes.keys())}
  arrays = checkpoints.restore_part(found, "params", named(like))
  return jax.tree.structure(like).unflatten(
      [arrays[name] for name in named(like)])


def _host() -> jax.Device:
  try:
    return jax.local_devices(backend="cpu")[0]
  except RuntimeError:  # JAX_PLATFORMS leaves it out.
    return jax.local_devices()[0]
