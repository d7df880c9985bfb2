"""Which module computes which text decoder.

Each declares `weights(config)` and computes `hidden_states(params, config, x,
positions, remat)`; embedding and head are the same for all (see `decoder`).
"""

from __future__ import annotations

import types
from typing import Any

from rollplex_jax.errors import InputError
from rollplex_jax.models import config as config_lib
from rollplex_jax.models import decoder, gpt2, llama
from rollplex_jax.models.config import ModelConfig, TextConfig

_MODELS = {TextConfig: decoder, llama.LlamaConfig: llama, gpt2.GPT2Config: gpt2}
_READERS = {
    **dict.fromkeys(config_lib.MODEL_TYPES, ModelConfig.from_hf),
    **dict.fromkeys(llama.MODEL_TYPES, llama.config_from_hf),
    **dict.fromkeys(gpt2.MODEL_TYPES, gpt2.config_from_hf)}


def text_model(config: Any) -> types.ModuleType:
  """The module that computes a text decoder."""
  return _MODELS[type(config)]


def config_from_hf(raw: dict[str, Any], where: str = "config") -> ModelConfig:
  """Reads a parsed config.json.

  Raises:
    InputError: for an architecture or a variant of it that isn't supported, or
      a key that is missing; the message names it.
  """
  reader = _READERS.get(raw.get("model_type"))
  if reader is None:
    raise InputError(
        f"{where}: unsupported architecture {raw.get('model_type')!r}; "
        f"supported are {', '.join(sorted(_READERS))}")
  return reader(raw, where)


def check_decodes(config: ModelConfig, where: str) -> None:
  """Refuses a model that can only run whole sequences.

  Raises:
    InputError: beginning with `where`, if completions can't be drawn from it.
  """
  text = config.text
  if isinstance(text, gpt2.GPT2Config):
    what = "GPT-2"
  elif getattr(text, "sliding_window", None) is not None:
    what = f"a model with a sliding window ({text.sliding_window} tokens)"
  else:
    return
  raise InputError(f"{where}: completions of {what} can't be drawn; it can be "
                   "scored and evaluated")


def check_trains(config: ModelConfig, where: str) -> None:
  """Refuses a model that can't be trained. Raises InputError."""
  if not isinstance(config.text, TextConfig):
    raise InputError(
        f"{where}: a model of type {config.model_type} can't be trained; "
        f"expected one of {', '.join(sorted(config_lib.MODEL_TYPES))}")
