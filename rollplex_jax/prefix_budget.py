"""Which saving policy the prefixes of a rollplex step leave room for.

Under rollplex all prompts' prefixes are in memory from the decode window to
the last backward pass: the rollout's keys and values, the reference's, the
policy's where the window makes them again, and what the backward stage reads.
Where that exceeds a stated budget, the next saving policy is taken, which
keeps less and computes more, to the same gradient.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from rollplex_jax import programs
from rollplex_jax.errors import InputError
from rollplex_jax.models import decoder
from rollplex_jax.models.config import ModelConfig, TextConfig
from rollplex_jax.models.inputs import PromptInputs
from rollplex_jax.models.weights import abstract_params
from rollplex_jax.schedule import (
  Facts,
  PrefixSource,
  ScheduleConfig,
  ScheduleName,
)
from rollplex_jax.stages.prefix import SavePolicy

# From what keeps the most to what keeps the least.
SAVE_ORDER = (SavePolicy.ACTIVATIONS, SavePolicy.LAYER_INPUTS,
              SavePolicy.OFFLOAD, SavePolicy.NOTHING)


def artifact_bytes(config: ModelConfig, schedule: ScheduleConfig, facts: Facts,
                   shape: tuple[int, int], num_features: int, dtype,
                   save: SavePolicy) -> int:
  """Bytes of device memory that a rollplex step's prefixes take.

  Args:
    config: of the model.
    schedule: says where the training prefix comes from.
    facts: of the step.
    shape: B prompts, padded to P tokens.
    num_features: rows of merged vision features.
    dtype: of the parameters.
    save: the saving policy.
  """
  copies = 1 + facts.has_reference
  copies += schedule.prefix_source == PrefixSource.WINDOW
  return (copies * _kv_bytes(config.text, shape, dtype)
          + saved_bytes(config, shape, num_features, jnp.dtype(dtype), save))


def within_budget(config: ModelConfig, schedule: ScheduleConfig, facts: Facts,
                  shape: tuple[int, int], num_features: int,
                  dtype) -> tuple[ScheduleConfig, str | None]:
  """The schedule with a saving policy that its budget holds.

  Args: as of `artifact_bytes`.

  Returns:
    The schedule, and one line that says what was changed and why, or None.

  Raises:
    InputError: if keys and values alone exceed the budget.
  """
  if schedule.name != ScheduleName.ROLLPLEX or not schedule.prefix_budget_gb:
    return schedule, None
  need = functools.partial(
      artifact_bytes, config, schedule, facts, shape, num_features, dtype)
  budget = schedule.prefix_budget_gb * 1e9
  sizes = {}
  for save in SAVE_ORDER[SAVE_ORDER.index(schedule.save):]:
    sizes[save] = need(save)
    if sizes[save] <= budget:
      if save == schedule.save:
        return schedule, None
      return dataclasses.replace(schedule, save=save), (
          f"schedule.save={schedule.save} needs {_gb(sizes[schedule.save])} for "
          f"{shape[0]} prefixes of {shape[1]} tokens, more than "
          f"schedule.prefix_budget_gb={schedule.prefix_budget_gb:g}: saving "
          f"{save} instead ({_gb(sizes[save])})")
  raise InputError(
      f"schedule.prefix_budget_gb={schedule.prefix_budget_gb:g}: the keys and "
      f"values alone of {shape[0]} prefixes of {shape[1]} tokens need "
      f"{_gb(min(sizes.values()))}; expected a larger budget, fewer prompts a "
      "step, or schedule.name=serial")


def _gb(count: float) -> str:
  return f"{count / 1e9:.3g} GB"


def _kv_bytes(config: TextConfig, shape, dtype) -> int:
  per_token = 2 * config.num_key_value_heads * config.head_dim
  return (config.num_hidden_layers * per_token * shape[0] * shape[1]
          * jnp.dtype(dtype).itemsize)


@functools.cache
def saved_bytes(config: ModelConfig, shape, num_features: int, dtype,
                save: SavePolicy) -> int:
  """Bytes that the device keeps of what prefixes of [B, P] = `shape` save.

  What is offloaded waits elsewhere.
  """
  if save in (SavePolicy.NOTHING, SavePolicy.OFFLOAD):
    return 0
  b, p = shape
  int32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
  prompts = PromptInputs(
      token_ids=int32(b, p), lengths=int32(b), positions=int32(3, b, p),
      feature_index=int32(b, p), next_position=int32(b), row_ids=int32(b))
  features = None
  if num_features:
    features = jax.ShapeDtypeStruct(
        (num_features, config.text.hidden_size), dtype)
  text = abstract_params(decoder.weights(config.text), dtype)
  _, saved = jax.eval_shape(
      lambda text, prompts, features: programs.prefix_forward(
          text, config, prompts, features, save), text, prompts, features)
  return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(saved))
