"""Llama and Mistral: the decoder without biases, maybe with a sliding window.

Layers are those of `decoder`. Without a window so is all the rest; with one,
whole sequences can be run, but prefixes and suffixes know nothing of it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from rollplex_jax.errors import InputError
from rollplex_jax.models import config as config_lib
from rollplex_jax.models import decoder
from rollplex_jax.models.config import ModelConfig
from rollplex_jax.models.layers import RopeScaling
from rollplex_jax.models.weights import Params

MODEL_TYPES = ("llama", "mistral")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
  """A decoder of Llama's kind.

  Attributes:
    head_dim: size of a head, which need not be hidden_size over heads.
    sliding_window: keys that a query sees, its own among them; None for all.
    rope_scaling: of Llama 3.1 and later, or None.
  """

  model_type = "llama"
  max_length = None
  mrope_section = None

  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_hidden_layers: int
  num_attention_heads: int
  num_key_value_heads: int
  head_dim: int
  rms_norm_eps: float = 1e-6
  rope_theta: float = 1e4
  rope_scaling: RopeScaling | None = None
  sliding_window: int | None = None
  tie_word_embeddings: bool = False
  max_position_embeddings: int = 2048
  initializer_range: float = 0.02

  def __post_init__(self):
    config_lib.positive(
        self, "vocab_size", "hidden_size", "intermediate_size", "head_dim",
        "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config_lib.divides(self, "num_key_value_heads", "num_attention_heads")
    if self.head_dim % 2:
      raise InputError(
          f"config: head_dim must be even for rotary, found {self.head_dim}")
    if self.sliding_window is not None:
      config_lib.positive(self, "sliding_window")


def config_from_hf(raw: dict[str, Any], where: str) -> ModelConfig:
  """Reads a parsed config.json of either generation. Raises InputError."""
  need = lambda name: config_lib.need(raw, name, where)
  config_lib.expect(raw, "hidden_act", "silu", where)
  for name in ("attention_bias", "mlp_bias"):
    config_lib.expect(raw, name, False, where)
  heads = need("num_attention_heads")
  rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
  mistral = raw["model_type"] == "mistral"
  kv_heads = raw.get("num_key_value_heads", 8 if mistral else None)
  text = LlamaConfig(
      vocab_size=need("vocab_size"), hidden_size=need("hidden_size"),
      intermediate_size=need("intermediate_size"),
      num_hidden_layers=need("num_hidden_layers"),
      num_attention_heads=heads,
      num_key_value_heads=kv_heads or heads,
      head_dim=raw.get("head_dim") or need("hidden_size") // heads,
      rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
      rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta", 1e4)),
      rope_scaling=_scaling(rope, where),
      # A key that Llama's files don't have, and Mistral's default.
      sliding_window=raw.get("sliding_window", 4096) if mistral else None,
      tie_word_embeddings=bool(raw.get("tie_word_embeddings")),
      max_position_embeddings=raw.get("max_position_embeddings", 2048),
      initializer_range=raw.get("initializer_range", 0.02))
  return ModelConfig(
      text=text, bos_token_id=raw.get("bos_token_id"),
      eos_token_ids=config_lib.as_tuple(raw.get("eos_token_id")),
      pad_token_id=raw.get("pad_token_id"))


def _scaling(rope: dict[str, Any], where: str) -> RopeScaling | None:
  kind = rope.get("rope_type", rope.get("type", "default"))
  if kind == "default":
    return None
  if kind != "llama3":
    raise InputError(f"{where}: rotary type {kind!r} is not supported; "
                     "supported are default and llama3")
  names = [f.name for f in dataclasses.fields(RopeScaling)]
  return RopeScaling(**{
      name: config_lib.need(rope, name, f"{where}: rope_scaling")
      for name in names})


def weights(config: LlamaConfig) -> Params:
  """Declares the decoder's parameters."""
  tree = decoder.weights(config)
  for layer in tree["layers"]:
    for name in ("q_bias", "k_bias", "v_bias"):
      del layer[name]
  return tree


def hidden_states(params: Params, config: LlamaConfig, x: jax.Array,
                  positions: jax.Array, *, remat: bool = False) -> jax.Array:
  """As `decoder.hidden_states`, each query within its window."""
  return decoder.hidden_states(params, config, x, positions, remat=remat,
                               window=config.sliding_window)
