"""The extension stage: what happened since a turn began enters the history.

A turn of an episode adds a response and the observation that answers it. Both
run through the decoder once, all samples at a time, and leave their keys and
values in each sample's history, which the next turns of the rollout attend to.
Each turn has a stretch of the history of its own, as long as the longest
sample's needs; which entries exist is a mask, so samples stay aligned.
"""

from __future__ import annotations

from flax import struct
import jax
import jax.numpy as jnp

from rollplex_jax.models import decoder, shared_prefix
from rollplex_jax.models.config import TextConfig
from rollplex_jax.models.weights import Params


@struct.dataclass
class Chunk:
  """What a turn has added to each sample, but for its last token.

  Attributes:
    token_ids: int32 [B, G, C], right padded.
    lengths: int32 [B, G]; 0 for an episode that is over.
    positions: int32 [B, G, C, 3], M-RoPE rows.
    feature_index: int32 [B, G, C], row of the observations' merged features,
      -1 for text.
  """

  token_ids: jax.Array
  lengths: jax.Array
  positions: jax.Array
  feature_index: jax.Array


def empty_history(config: TextConfig, num_samples: int, length: int, dtype):
  """Per layer keys [N, K, h, S] and values [N, K, S, h], and bool [N, S]."""
  k, h = config.num_key_value_heads, config.head_dim
  return ([(jnp.zeros((num_samples, k, h, length), dtype),
            jnp.zeros((num_samples, k, length, h), dtype))
           for _ in range(config.num_hidden_layers)],
          jnp.zeros((num_samples, length), bool))


def extend(text: Params, config: TextConfig, chunk: Chunk, features,
           prefix_kv, prefix_lengths: jax.Array, history, exists: jax.Array,
           start: jax.Array):
  """Adds a turn to the history.

  Args:
    text: the decoder's parameters.
    config: its configuration.
    chunk: of C tokens.
    features: merged features of the turn's observations, or None.
    prefix_kv: per layer, the prompts' keys [B, K, h, P] and values
      [B, K, P, h].
    prefix_lengths: int32 [B].
    history: per layer, keys [N, K, h, S] and values [N, K, S, h], N = B * G.
    exists: bool [N, S].
    start: int32 scalar, where the turn's stretch of C entries begins.

  Returns:
    The history and its mask with the turn in them.
  """
  b, g, c = chunk.token_ids.shape
  x = decoder.embed(text, chunk.token_ids, features, chunk.feature_index)
  angles = decoder.sample_rope(config, chunk.positions)
  out = []
  for w, prefix, (keys, values) in zip(
      text["layers"], prefix_kv, history, strict=True):

    def attend(q, k, v, prefix=prefix, keys=keys, values=values):
      mixed = shared_prefix.attend_suffixes(
          q, k, v, prefix, prefix_lengths, chunk.lengths,
          (keys, values, exists))
      flat = lambda a: a.reshape(b * g, c, *a.shape[3:])
      at = (0, 0, 0, start), (0, 0, start, 0)
      new = (flat(k).transpose(0, 2, 3, 1), flat(v).transpose(0, 2, 1, 3))
      return mixed.reshape(b, g, c, -1), tuple(
          jax.lax.dynamic_update_slice(old, part, where)
          for old, part, where in zip((keys, values), new, at))

    # What the last layer gives beside keys and values, nothing reads.
    x, new = decoder.layer(w, config, x, angles, attend)
    out.append(new)
  added = jnp.arange(c) < chunk.lengths.reshape(-1)[:, None]
  return out, jax.lax.dynamic_update_slice(exists, added, (0, start))
