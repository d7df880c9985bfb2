"""The Qwen2 / Qwen2.5 text decoder as functions of one layer at a time.

Attention is passed in: a caller gives `attend(q, k, v) -> (output, extra)` and
so decides what a token sees (a whole causal sequence, a shared prefix and its
own suffix, a decode cache) without another copy of the layer.
"""

from __future__ import annotations

from collections.abc import Callable
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from rollplex_jax.models import layers
from rollplex_jax.models.config import TextConfig
from rollplex_jax.models.weights import Init, Params, Weight

Rope = tuple[jax.Array, jax.Array]  # cos and sin, [B, T, h] each.
Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]


def weights(config: TextConfig) -> Params:
  """Declares the decoder's parameters."""
  d, f, h = config.hidden_size, config.intermediate_size, config.head_dim
  q_dim = config.num_attention_heads * h
  kv_dim = config.num_key_value_heads * h
  std = config.initializer_range

  def layer(i):
    p = f"model.layers.{i}"

    def dense(name, rows, columns, axes, transposed=False):
      return Weight(shape=(rows, columns), axes=axes, std=std,
                    name=f"{p}.{name}.weight", transposed=transposed)

    def vector(name, size, axis, init):
      return Weight(shape=(size,), axes=(axis,), name=f"{p}.{name}", init=init)

    return {
        "attn_norm": vector("input_layernorm.weight", d, "embed", Init.ONES),
        "q": dense("self_attn.q_proj", q_dim, d, ("heads", "embed")),
        "k": dense("self_attn.k_proj", kv_dim, d, ("kv_heads", "embed")),
        "v": dense("self_attn.v_proj", kv_dim, d, ("kv_heads", "embed")),
        "q_bias": vector("self_attn.q_proj.bias", q_dim, "heads", Init.ZEROS),
        "k_bias": vector(
            "self_attn.k_proj.bias", kv_dim, "kv_heads", Init.ZEROS),
        "v_bias": vector(
            "self_attn.v_proj.bias", kv_dim, "kv_heads", Init.ZEROS),
        "o": dense("self_attn.o_proj", q_dim, d, ("heads", "embed"), True),
        "mlp_norm": vector(
            "post_attention_layernorm.weight", d, "embed", Init.ONES),
        "gate": dense("mlp.gate_proj", f, d, ("mlp", "embed")),
        "up": dense("mlp.up_proj", f, d, ("mlp", "embed")),
        "down": dense("mlp.down_proj", f, d, ("mlp", "embed"), True),
    }

  tree = {
      "embed": Weight(
          shape=(config.vocab_size, d), axes=("vocab", "embed"), std=std,
          name="model.embed_tokens.weight"),
      "layers": [layer(i) for i in range(config.num_hidden_layers)],
      "norm": Weight(shape=(d,), axes=("embed",), init=Init.ONES,
                     name="model.norm.weight"),
  }
  if not config.tie_word_embeddings:
    tree["head"] = Weight(
        shape=(config.vocab_size, d), axes=("vocab", "embed"), std=std,
        name="lm_head.weight")
  return tree


def embed(params: Params, token_ids: jax.Array, features=None,
          feature_index=None) -> jax.Array:
  """Token embeddings with vision features in place of placeholders.

  Args:
    params: the decoder's parameters.
    token_ids: int32 [B, T].
    features: [f, D] merged vision features of the batch, or None.
    feature_index: int32 [B, T], a row of `features`, or -1 for text. Which
      token takes which feature is thus decided once, on the host, and a
      placeholder id that was sampled into a response stays a token.

  Returns:
    [B, T, D].
  """
  x = params["embed"][token_ids]
  if features is None:
    return x
  seen = features[jnp.maximum(feature_index, 0)].astype(x.dtype)
  return jnp.where((feature_index >= 0)[..., None], seen, x)


def rope(config: TextConfig, positions: jax.Array) -> Rope:
  """Rotary angles of positions int32 [3, B, T] (or [1, B, T] for text).

  M-RoPE: frequency pair i turns with the temporal, height or width position,
  as `mrope_section` divides the pairs (Qwen2-VL, arXiv:2409.12191).
  """
  if positions.ndim != 3 or positions.shape[0] not in (1, 3):
    raise ValueError(
        f"positions must be [3, B, T] (or [1, B, T]), found {positions.shape}")
  inverse = layers.inverse_frequencies(config.rope_theta, config.head_dim // 2)
  angles = positions[..., None].astype(jnp.float32) * inverse
  if config.mrope_section is None or positions.shape[0] == 1:
    angles = angles[0]
  else:
    cuts = [0]
    for size in config.mrope_section:
      cuts.append(cuts[-1] + size)
    angles = jnp.concatenate(
        [angles[i, ..., a:b] for i, (a, b) in enumerate(itertools.pairwise(cuts))],
        axis=-1)
  angles = jnp.concatenate([angles, angles], axis=-1)
  return jnp.cos(angles), jnp.sin(angles)


def project_qkv(w: Params, config: TextConfig, x: jax.Array, angles: Rope):
  """Normed and rotated q [B,T,H,h], k [B,T,K,h] and v [B,T,K,h] of a layer."""
  y = layers.rms_norm(x, w["attn_norm"], config.rms_norm_eps)
  cos, sin = (a.astype(x.dtype) for a in angles)

  def split(name):
    z = layers.dense_out_in(y, w[name], w[f"{name}_bias"])
    return z.reshape(*z.shape[:-1], -1, config.head_dim)

  q, k, v = split("q"), split("k"), split("v")
  return layers.rotate(q, cos, sin), layers.rotate(k, cos, sin), v


def finish_layer(w: Params, config: TextConfig, x: jax.Array,
                 attended: jax.Array) -> jax.Array:
  """Adds attention's output [B, T, H*h] and the MLP to the residual x."""
  x = x + layers.dense_in_out(attended, w["o"])
  y = layers.rms_norm(x, w["mlp_norm"], config.rms_norm_eps)
  return x + layers.swiglu(y, w["gate"], w["up"], w["down"])


def layer(w: Params, config: TextConfig, x: jax.Array, angles: Rope,
          attend: Attend):
  """One decoder layer: x [B, T, D] -> (x [B, T, D], attend's extra)."""
  attended, extra = attend(*project_qkv(w, config, x, angles))
  return finish_layer(w, config, x, attended), extra


def causal_mask(length: int) -> jax.Array:
  """[T, T]: query t sees keys up to t. Enough for right-padded batches."""
  return jnp.tril(jnp.ones((length, length), bool))


def hidden_states(params: Params, config: TextConfig, x: jax.Array,
                  positions: jax.Array, *, remat: bool = False) -> jax.Array:
  """Runs every layer over whole right-padded sequences, causally.

  Args:
    params: the decoder's parameters.
    config: its configuration.
    x: [B, T, D] embedded tokens.
    positions: int32 [3, B, T] (or [1, B, T] for text).
    remat: recompute each layer in the backward pass instead of keeping its
      activations.

  Returns:
    [B, T, D] after the final norm. Rows past a sequence's length hold numbers
    without meaning; no row within it depends on them.

  Raises:
    ValueError: if the positions have another layout.
  """
  if positions.shape[1:] != x.shape[:2]:
    raise ValueError(
        f"positions must be [3, B, T] with B, T = {x.shape[:2]}, found "
        f"{positions.shape}")
  mask = causal_mask(x.shape[1])
  angles = rope(config, positions)

  def run(w, x, angles):
    return layer(w, config, x, angles,
                 lambda q, k, v: (layers.attend(q, k, v, mask), None))[0]

  if remat:
    run = jax.checkpoint(run)
  for w in params["layers"]:
    x = run(w, x, angles)
  return layers.rms_norm(x, params["norm"], config.rms_norm_eps)


def logits(params: Params, hidden: jax.Array) -> jax.Array:
  """float32 [..., V] from final hidden states [..., D]."""
  head = params.get("head", params["embed"])
  return layers.dense_out_in(hidden, head, dtype=jnp.float32)


def token_logprobs(params: Params, hidden: jax.Array, targets: jax.Array,
                   temperature: float = 1.0, *, chunk: int = 1024,
                   with_entropy: bool = False):
  """Log-probabilities of targets under softmax(logits / temperature).

  The vocabulary is large (152k), so logits are formed for `chunk` tokens at a
  time and formed again in the backward pass.

  Args:
    params: the decoder's parameters.
    hidden: [..., D] final hidden states.
    targets: int32 [...].
    temperature: divides the logits; the full vocabulary normalizes.
    chunk: tokens per block of logits.
    with_entropy: also return the entropy of each distribution.

  Returns:
    float32 [...] log-probabilities, and float32 [...] entropies or None.
  """
  shape, d = targets.shape, hidden.shape[-1]
  hidden, targets = hidden.reshape(-1, d), targets.reshape(-1)
  count = targets.shape[0]
  chunk = min(chunk, count)
  pad = -count % chunk
  hidden = jnp.pad(hidden, ((0, pad), (0, 0))).reshape(-1, chunk, d)
  targets = jnp.pad(targets, (0, pad)).reshape(-1, chunk)

  @jax.checkpoint
  def block(args):
    x, y = args
    scores = jax.nn.log_softmax(logits(params, x) / temperature, axis=-1)
    picked = jnp.take_along_axis(scores, y[:, None], axis=-1)[:, 0]
    if not with_entropy:
      return picked, None
    return picked, -jnp.sum(jnp.exp(scores) * scores, axis=-1)

  if hidden.shape[0] == 1:
    picked, entropy = block((hidden[0], targets[0]))
  else:
    picked, entropy = jax.lax.map(block, (hidden, targets))
  cut = lambda a: a.reshape(-1)[:count].reshape(shape)
  return cut(picked), None if entropy is None else cut(entropy)
