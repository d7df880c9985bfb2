"""The prefix stage: per-layer keys and values of every prompt, and no more.

Nothing downstream reads a prefix token's last hidden state, so the last
layer's attention output and MLP, the final norm and the LM head are not
computed.
"""

from __future__ import annotations

import jax

from rollplex_jax.models import decoder, layers
from rollplex_jax.models.config import ModelConfig
from rollplex_jax.models.inputs import PromptInputs
from rollplex_jax.models.weights import Params

# Per layer, keys [B, K, h, P] and values [B, K, P, h]: the dimension that a
# decode step sums over comes first, so that it multiplies without transposing.
PrefixKV = list[tuple[jax.Array, jax.Array]]


def prefix_kv(params: Params, config: ModelConfig, prompts: PromptInputs,
              features: jax.Array | None) -> PrefixKV:
  """Keys and values of all prompt tokens, one copy per prompt.

  Args:
    params: {"text": ..., ...}.
    config: the model's configuration.
    prompts: B right-padded prompts of P tokens.
    features: merged vision features [f, D], or None.

  Returns:
    Per layer, keys [B, K, h, P] and values [B, K, P, h]. Readers mask
    positions from `prompts.lengths - 1` on: the last prompt token belongs to
    the suffix.
  """
  text = params["text"]
  x = decoder.embed(text, prompts.token_ids, features, prompts.feature_index)
  angles = decoder.rope(config.text, prompts.positions)
  mask = decoder.causal_mask(x.shape[1])
  kv = []
  for i, w in enumerate(text["layers"]):
    q, k, v = decoder.project_qkv(w, config.text, x, angles)
    kv.append((k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)))
    if i + 1 < len(text["layers"]):
      x = decoder.finish_layer(
          w, config.text, x, layers.attend(q, k, v, mask))
  return kv
