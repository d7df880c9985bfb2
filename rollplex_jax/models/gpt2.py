"""GPT-2: LayerNorm, learned positions, one matrix for queries, keys, values.

Whole sequences only: nothing here splits them into prefix and suffix.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from rollplex_jax.models import config as config_lib
from rollplex_jax.models import layers
from rollplex_jax.models.config import ModelConfig
from rollplex_jax.models.weights import Init, Params, Weight

MODEL_TYPES = ("gpt2",)
_ACTIVATIONS = {
    "gelu_new": functools.partial(jax.nn.gelu, approximate=True),
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPT2Config:
  """A decoder of GPT-2's kind. `activation` is one of gelu_new, gelu, relu."""

  model_type = "gpt2"

  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_hidden_layers: int
  num_attention_heads: int
  max_position_embeddings: int
  activation: str = "gelu_new"
  layer_norm_eps: float = 1e-5
  tie_word_embeddings: bool = True
  initializer_range: float = 0.02

  def __post_init__(self):
    config_lib.positive(
        self, "vocab_size", "hidden_size", "intermediate_size",
        "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    config_lib.divides(self, "num_attention_heads", "hidden_size")

  @property
  def head_dim(self) -> int:
    return self.hidden_size // self.num_attention_heads

  @property
  def num_key_value_heads(self) -> int:
    return self.num_attention_heads

  @property
  def max_length(self) -> int:
    """Of a sequence, in tokens: there are no further positions."""
    return self.max_position_embeddings


def config_from_hf(raw: dict[str, Any], where: str) -> ModelConfig:
  """Reads a parsed config.json. Raises InputError."""
  for name, value in (("scale_attn_weights", True),
                      ("scale_attn_by_inverse_layer_idx", False),
                      ("add_cross_attention", False)):
    config_lib.expect(raw, name, value, where)
  activation = raw.get("activation_function", "gelu_new")
  if activation not in _ACTIVATIONS:
    config_lib.expect(raw, "activation_function", "gelu_new", where)
  need = lambda name: config_lib.need(raw, name, where)
  text = GPT2Config(
      vocab_size=need("vocab_size"), hidden_size=need("n_embd"),
      intermediate_size=raw.get("n_inner") or 4 * need("n_embd"),
      num_hidden_layers=need("n_layer"), num_attention_heads=need("n_head"),
      max_position_embeddings=raw.get("n_positions", 1024),
      activation=activation,
      layer_norm_eps=raw.get("layer_norm_epsilon", 1e-5),
      tie_word_embeddings=raw.get("tie_word_embeddings", True),
      initializer_range=raw.get("initializer_range", 0.02))
  return ModelConfig(
      text=text, bos_token_id=raw.get("bos_token_id"),
      eos_token_ids=config_lib.as_tuple(raw.get("eos_token_id")),
      pad_token_id=raw.get("pad_token_id"))


def weights(config: GPT2Config) -> Params:
  """Declares the parameters. Files hold matrices as [in, out]."""
  d, f, std = (config.hidden_size, config.intermediate_size,
               config.initializer_range)

  def vector(name, size, axis, init=Init.ZEROS):
    return Weight(shape=(size,), axes=(axis,), name=name, init=init)

  def norm(name):
    return {"scale": vector(f"{name}.weight", d, "embed", Init.ONES),
            "bias": vector(f"{name}.bias", d, "embed")}

  def layer(i):
    p = f"h.{i}"

    def dense(name, rows, axis, transposed):
      return Weight(shape=(rows, d), axes=(axis, "embed"), std=std,
                    name=f"{p}.{name}.weight", transposed=transposed)

    return {
        "attn_norm": norm(f"{p}.ln_1"),
        "qkv": dense("attn.c_attn", 3 * d, "heads", True),
        "qkv_bias": vector(f"{p}.attn.c_attn.bias", 3 * d, "heads"),
        "o": dense("attn.c_proj", d, "heads", False),
        "o_bias": vector(f"{p}.attn.c_proj.bias", d, "embed"),
        "mlp_norm": norm(f"{p}.ln_2"),
        "up": dense("mlp.c_fc", f, "mlp", True),
        "up_bias": vector(f"{p}.mlp.c_fc.bias", f, "mlp"),
        "down": dense("mlp.c_proj", f, "mlp", False),
        "down_bias": vector(f"{p}.mlp.c_proj.bias", d, "embed"),
    }

  table = lambda name, rows, axis: Weight(
      shape=(rows, d), axes=(axis, "embed"), std=std, name=name)
  tree = {
      "embed": table("wte.weight", config.vocab_size, "vocab"),
      "positions": table(
          "wpe.weight", config.max_position_embeddings, None),
      "layers": [layer(i) for i in range(config.num_hidden_layers)],
      "norm": norm("ln_f"),
  }
  if not config.tie_word_embeddings:
    tree["head"] = table("lm_head.weight", config.vocab_size, "vocab")
  return tree


def hidden_states(params: Params, config: GPT2Config, x: jax.Array,
                  positions: jax.Array, *, remat: bool = False) -> jax.Array:
  """Runs every layer over whole right-padded sequences, causally.

  Args:
    params: the decoder's parameters.
    config: its configuration.
    x: [B, T, D] embedded tokens.
    positions: int32 [3, B, T] (or [1, B, T]), below `max_length` where a token
      stands.
    remat: recompute each layer in the backward pass instead of keeping its
      activations.

  Returns:
    [B, T, D] after the final norm.
  """
  # Padding may stand beyond the last position.
  x = x + params["positions"].at[positions[0]].get(mode="clip").astype(x.dtype)
  run = functools.partial(_layer, config)
  if remat:
    run = layers.finish_backward(jax.checkpoint(run))
  for w in params["layers"]:
    x = run(w, x)
  return _norm(params["norm"], config, x)


def _layer(config: GPT2Config, w: Params, x: jax.Array) -> jax.Array:
  """One layer: x [B, T, D] -> [B, T, D]."""
  y = layers.dense_out_in(
      _norm(w["attn_norm"], config, x), w["qkv"], w["qkv_bias"])
  q, k, v = (part.reshape(*part.shape[:-1], -1, config.head_dim)
             for part in jnp.split(y, 3, axis=-1))
  x = x + layers.dense_in_out(
      layers.attend_causally(q, k, v), w["o"], w["o_bias"])
  y = layers.dense_out_in(
      _norm(w["mlp_norm"], config, x), w["up"], w["up_bias"])
  y = _ACTIVATIONS[config.activation](y)
  return x + layers.dense_in_out(y, w["down"], w["down_bias"])


def _norm(w: Params, config: GPT2Config, x: jax.Array) -> jax.Array:
  """LayerNorm over the last axis, computed in float32."""
  y = x.astype(jnp.float32)
  y = y - jnp.mean(y, axis=-1, keepdims=True)
  y = y * jax.lax.rsqrt(
      jnp.mean(y * y, axis=-1, keepdims=True) + config.layer_norm_eps)
  return y.astype(x.dtype) * w["scale"] + w["bias"]
