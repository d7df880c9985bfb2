"""Batches of tiny prompts, on the device."""

import jax
import jax.numpy as jnp

from rollplex_jax.data import batching
from rollplex_jax.models.inputs import PromptInputs, VisionInputs


def prompt_inputs(config, prompts, row_ids=None,
                  ) -> tuple[PromptInputs, VisionInputs | None]:
  """Device arrays of padded prompts and packed patches."""
  row_ids = range(len(prompts)) if row_ids is None else row_ids
  inputs = batching.stack_prompts(prompts, list(row_ids))
  vision = batching.pack_vision(prompts, config.vision)
  return jax.tree.map(jnp.asarray, (inputs, vision))
