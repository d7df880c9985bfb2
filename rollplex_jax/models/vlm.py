"""The policy as a whole: vision tower and text decoder in one tree."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from rollplex_jax.models import architectures, decoder, vision
from rollplex_jax.models import weights as weights_lib
from rollplex_jax.models.config import ModelConfig
from rollplex_jax.models.inputs import VisionInputs
from rollplex_jax.models.weights import Params
from rollplex_jax.placement import sharding


def weights(config: ModelConfig) -> Params:
  """Declares all parameters: {"text": ..., "visual": ...}."""
  model = architectures.text_model(config.text)
  tree = {"text": model.weights(config.text)}
  if config.vision is not None:
    tree["visual"] = vision.weights(config.vision)
  return tree


def axis_sizes(config: ModelConfig) -> dict[str, dict[str, int]]:
  """How much there is of each logical axis to split, by part of the model.

  Heads are counted in heads: a device holds whole ones.
  """
  t, v = config.text, config.vision
  out = {"text": {
      "vocab": t.vocab_size, "heads": t.num_attention_heads,
      "kv_heads": t.num_key_value_heads, "mlp": t.intermediate_size,
      "embed": t.hidden_size}}
  if v is not None:
    # The merger's MLP and model dimension are multiples of the tower's.
    out["visual"] = {
        "heads": v.num_heads,
        "mlp": math.gcd(v.intermediate_size, v.hidden_size),
        "embed": v.hidden_size}
  return out


def init_params(config: ModelConfig, key: jax.Array,
                dtype=jnp.float32) -> Params:
  """Draws fresh parameters."""
  return weights_lib.init_params(weights(config), key, dtype)


def vision_features(params: Params, config: ModelConfig,
                    inputs: VisionInputs | None) -> jax.Array | None:
  """Merged features [f, D] of a batch's media, or None without media.

  Media packed in parts (see `VisionInputs`) give features part after part.
  """
  if inputs is None:
    return None
  run = functools.partial(vision.features, params["visual"], config.vision)
  if inputs.patches.ndim == 2:
    return run(inputs)
  out = jax.vmap(run)(inputs)
  return sharding.constrain(out.reshape(-1, out.shape[-1]), "batch", None)


def num_features(config: ModelConfig, inputs: VisionInputs) -> int:
  """How many merged features a batch's patches give, padding included."""
  count = math.prod(inputs.patches.shape[:-1])
  return count // config.vision.spatial_merge_size ** 2


def forward(params: Params, config: ModelConfig, token_ids: jax.Array,
            positions: jax.Array, features=None, feature_index=None,
            observed=None, observed_index=None, *, remat: bool = False) -> jax.Array:
  """Final hidden states [B, T, D] of whole right-padded sequences.

  Args:
    params: {"text": ..., "visual": ...}.
    config: the model's configuration.
    token_ids: int32 [B, T].
    positions: int32 [3, B, T].
    features: merged vision features [f, D], or None.
    feature_index: int32 [B, T], a row of `features`, -1 for text.
    observed: features of another table, or None.
    observed_index: the same of a row in that one.
    remat: recompute layers in the backward pass.
  """
  x = decoder.embed(params["text"], token_ids, features, feature_index)
  x = decoder.put_features(x, observed, observed_index)
  return architectures.text_model(config.text).hidden_states(
      params["text"], config.text, x, positions, remat=remat)
