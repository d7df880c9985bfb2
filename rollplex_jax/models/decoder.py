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

from legolm_jax import matmul
from rollplex_jax.models import layers
from rollplex_jax.models.config import TextConfig
from rollplex_jax.models.weights import Init, Params, Weight
from rollplex_jax.placement import sharding

Rope = tuple[jax.Array, jax.Array]  # cos and sin, [B, T, h] each.
Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]
# Mesh axes over which heads, MLP and vocabulary are split, in code that runs
# under `shard_map`; None where arrays are whole (or the compiler splits them).
Axis = str | tuple[str, ...] | None


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


def total(x: jax.Array, axis: Axis) -> jax.Array:
  """The sum over a mesh axis of what each device holds a share of."""
  return x if axis is None else jax.lax.psum(x, axis)


def embed(params: Params, token_ids: jax.Array, features=None,
          feature_index=None, *, axis: Axis = None) -> jax.Array:
  """Token embeddings with vision features in place of placeholders.

  Args:
    params: the decoder's parameters.
    token_ids: int32 [B, T].
    features: [f, D] merged vision features of the batch, or None.
    feature_index: int32 [B, T], a row of `features`, or -1 for text. Which
      token takes which feature is thus decided once, on the host, and a
      placeholder id that was sampled into a response stays a token.
    axis: mesh axis that splits the vocabulary.

  Returns:
    [B, T, D].
  """
  return put_features(
      _look_up(params["embed"], token_ids, axis), features, feature_index)


def put_features(x: jax.Array, features: jax.Array | None,
                 feature_index: jax.Array | None) -> jax.Array:
  """x [..., D] with rows of `features` where the index [...] is not -1."""
  if features is None:
    return x
  seen = sharding.take_local(features, feature_index).astype(x.dtype)
  return jnp.where((feature_index >= 0)[..., None], seen, x)


def _look_up(table, token_ids: jax.Array, axis: Axis) -> jax.Array:
  if axis is None:
    return matmul.take_rows(table, token_ids)
  held = table.shape[0]
  local = token_ids - jax.lax.axis_index(axis) * held
  rows = matmul.take_rows(table, jnp.clip(local, 0, held - 1))
  here = (local >= 0) & (local < held)
  return total(jnp.where(here[..., None], rows, jnp.zeros_like(rows)), axis)


def rope(config: TextConfig, positions: jax.Array) -> Rope:
  """Rotary angles of positions int32 [3, B, T] (or [1, B, T] for text).

  M-RoPE: frequency pair i turns with the temporal, height or width position,
  as `mrope_section` divides the pairs (Qwen2-VL, arXiv:2409.12191).
  """
  if positions.ndim != 3 or positions.shape[0] not in (1, 3):
    raise ValueError(
        f"positions must be [3, B, T] (or [1, B, T]), found {positions.shape}")
  inverse = layers.inverse_frequencies(
      config.rope_theta, config.head_dim // 2, config.rope_scaling)
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


def sample_rope(config: TextConfig, positions: jax.Array) -> Rope:
  """`rope` [B, G, S, h] where every sample has positions int32 [B, G, S, 3]."""
  b, g, s, _ = positions.shape
  angles = rope(config, jnp.moveaxis(positions, -1, 0).reshape(3, b, g * s))
  return tuple(a.reshape(b, g, s, -1) for a in angles)


def project_qkv(w: Params, config: TextConfig, x: jax.Array, angles: Rope,
                num_queries: int | None = None):
  """Normed and rotated q [B,T,H,h], k [B,T,K,h] and v [B,T,K,h] of a layer.

  With `num_queries`, queries are made for so many first tokens only.
  """
  y = layers.rms_norm(x, w["attn_norm"], config.rms_norm_eps)
  cos, sin = (a.astype(x.dtype) for a in angles)

  def split(name, y, axis):
    z = layers.dense_out_in(
        y, w[name], w.get(f"{name}_bias"), axis=axis)
    z = z.reshape(*z.shape[:-1], -1, config.head_dim)
    return sharding.constrain(z, "batch", *[None] * (z.ndim - 3), axis, None)

  cut = lambda a: a[:, :num_queries]
  q = split("q", cut(y), "heads")
  k, v = split("k", y, "kv_heads"), split("v", y, "kv_heads")
  return layers.rotate(q, cut(cos), cut(sin)), layers.rotate(k, cos, sin), v


def attention_half(w: Params, config: TextConfig, x: jax.Array, angles: Rope,
                   attend: Attend, num_queries: int | None = None):
  """What attention adds to the residual x [B, T, D], and attend's extra.

  Where heads are split over devices, each holds a partial sum. With
  `num_queries`, only so many first tokens attend: [B, num_queries, D].
  """
  attended, extra = attend(*project_qkv(w, config, x, angles, num_queries))
  return layers.dense_in_out(attended, w["o"], axis="heads"), extra


def mlp_half(w: Params, config: TextConfig, x: jax.Array) -> jax.Array:
  """What the MLP adds to x [B, T, D]; a partial sum where F is split."""
  y = layers.rms_norm(x, w["mlp_norm"], config.rms_norm_eps)
  return layers.swiglu(y, w["gate"], w["up"], w["down"])


def layer(w: Params, config: TextConfig, x: jax.Array, angles: Rope,
          attend: Attend, *, axis: Axis = None):
  """One decoder layer: x [B, T, D] -> (x [B, T, D], attend's extra)."""
  whole = lambda x: sharding.constrain(x, "batch", *[None] * (x.ndim - 1))
  half, extra = attention_half(w, config, x, angles, attend)
  x = whole(x + total(half, axis))
  return whole(x + total(mlp_half(w, config, x), axis)), extra


def prefix_layer(w: Params, x: jax.Array, *, config: TextConfig, angles: Rope,
                 only_kv: bool):
  """One layer over prefixes, with the keys and values that suffixes read.

  Args:
    w: the layer's parameters.
    x: [B, P, D].
    config: the decoder's configuration.
    angles: rotary angles of the prefix.
    only_kv: leave out attention and MLP, whose results nothing reads in the
      last layer.

  Returns:
    x [B, P, D], or None if `only_kv`; keys [B, K, h, P] and values
    [B, K, P, h]: what a product sums over comes first.
  """
  def attend(q, k, v):
    kv = tuple(
        sharding.constrain(a, "batch", "kv_heads", None, None)
        for a in (k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)))
    return None if only_kv else layers.attend_causally(q, k, v), kv

  if only_kv:
    return attend(*project_qkv(w, config, x, angles))
  return layer(w, config, x, angles, attend)


def hidden_states(params: Params, config: TextConfig, x: jax.Array,
                  positions: jax.Array, *, remat: bool = False,
                  window: int | None = None) -> jax.Array:
  """Runs every layer over whole right-padded sequences, causally.

  Args:
    params: the decoder's parameters.
    config: its configuration.
    x: [B, T, D] embedded tokens.
    positions: int32 [3, B, T] (or [1, B, T] for text).
    remat: recompute each layer in the backward pass instead of keeping its
      activations.
    window: how many keys a query sees, its own the last; None for all.

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
  angles = rope(config, positions)

  def attend(q, k, v):
    return layers.attend_causally(q, k, v, window=window), None

  def run(w, x, angles):
    return layer(w, config, x, angles, attend)[0]

  if remat:
    run = layers.finish_backward(jax.checkpoint(run))
  for w in params["layers"]:
    x = run(w, x, angles)
  return layers.rms_norm(x, params["norm"], config.rms_norm_eps)


def logits(params: Params, hidden: jax.Array, *,
           axis: Axis = None) -> jax.Array:
  """float32 [..., V] from final hidden states [..., D].

  `axis` splits the vocabulary; every device gets all logits.
  """
  head = params["head"] if "head" in params else params["embed"]
  scores = layers.dense_out_in(
      hidden, head, dtype=jnp.float32, axis="vocab")
  if axis is None:
    return scores
  return jax.lax.all_gather(scores, axis, axis=scores.ndim - 1, tiled=True)


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
  # Blocks cut each part of the batch alike, so that all devices work on each.
  ways = sharding.batch_ways()
  hidden, targets = hidden.reshape(ways, -1, d), targets.reshape(ways, -1)
  count = targets.shape[1]
  chunk = min(max(chunk // ways, 1), count)
  pad = ((0, 0), (0, -count % chunk))
  hidden = jnp.pad(hidden, (*pad, (0, 0))).reshape(ways, -1, chunk, d)
  hidden = hidden.swapaxes(0, 1)
  targets = jnp.pad(targets, pad).reshape(ways, -1, chunk).swapaxes(0, 1)

  @jax.checkpoint
  def block(args):
    x, y = args
    scores = jax.nn.log_softmax(logits(params, x) / temperature, axis=-1)
    picked = jnp.take_along_axis(scores, y[..., None], axis=-1)[..., 0]
    if not with_entropy:
      return picked, None
    return picked, -jnp.sum(jnp.exp(scores) * scores, axis=-1)

  if hidden.shape[0] == 1:
    picked, entropy = block((hidden[0], targets[0]))
    picked = picked[None]
    entropy = None if entropy is None else entropy[None]
  else:
    picked, entropy = jax.lax.map(block, (hidden, targets))
  cut = lambda a: (
      a.swapaxes(0, 1).reshape(ways, -1)[:, :count].reshape(shape))
  return cut(picked), None if entropy is None else cut(entropy)
