"""A small policy to start from where there is no checkpoint to train.

Its architecture is Qwen2.5-VL's and so are its files; its weights are random
and its tokenizer knows the words of the texts it is made from. It has to be
taught, by supervised learning, before RL has anything to reward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
import dataclasses
import os
import tempfile
from typing import Any

import jax

from rollplex_jax.data import tokenizer as tokenizer_lib
from rollplex_jax.errors import InputError
from rollplex_jax.models import hf, vlm
from rollplex_jax.models.config import ModelConfig, TextConfig, VisionConfig

_HEADS = 4
# Roles of a chat; a word that is seen twice becomes a token.
_ROLES = ("user", "assistant") * 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShapeConfig:
  """The size of the policy.

  Attributes:
    hidden_size: of the decoder; its MLP is 3 times as wide.
    num_layers: of the decoder.
    vision_hidden_size: of the vision tower; its MLP is 2 times as wide.
    vision_layers: of the tower; the last one attends over whole frames.
    patch_size: side of a patch in pixels, here that of a tile.
    merge_size: side of the square of patches that make one token.
    vocab_size: most tokens of the tokenizer.
  """

  hidden_size: int = 64
  num_layers: int = 4
  vision_hidden_size: int = 96
  vision_layers: int = 2
  patch_size: int = 14
  merge_size: int = 1
  vocab_size: int = 512

  def __post_init__(self):
    # Heads of 8 at least, for M-RoPE turns three kinds of pairs.
    for name, unit in (("hidden_size", 8 * _HEADS),
                       ("vision_hidden_size", 4 * _HEADS)):
      if getattr(self, name) < unit or getattr(self, name) % unit:
        raise InputError(f"{name}={getattr(self, name)}: expected a multiple of "
                         f"{unit}")
    for name in ("num_layers", "vision_layers", "patch_size", "merge_size"):
      if getattr(self, name) < 1:
        raise InputError(f"{name}={getattr(self, name)}: expected at least 1")


def write(folder: str | os.PathLike, texts: Iterable[str],
          shape: ShapeConfig, *, seed: int = 0,
          **pixels: Any) -> ModelConfig:
  """Writes a checkpoint with fresh float32 weights and a tokenizer.

  Args:
    folder: for the checkpoint; replaced if it holds one.
    texts: what the tokenizer learns its words from.
    shape: size of the policy.
    seed: of the weights.
    **pixels: settings of `build_tokenizer` for images, such as `image_mean`.

  Returns:
    The model's configuration.

  Raises:
    InputError: a setting out of range, or a folder that holds something else.
  """
  with tempfile.TemporaryDirectory() as assets:
    tokens = tokenizer_lib.build_tokenizer(
        [*_ROLES, *texts], shape.vocab_size, assets,
        patch_size=shape.patch_size, merge_size=shape.merge_size, **pixels)
    config = model_config(shape, tokens)
    hf.save_checkpoint(
        folder, config, vlm.init_params(config, jax.random.key(seed)),
        assets_from=assets)
  return config


def model_config(shape: ShapeConfig, tokens: Mapping[str, int]) -> ModelConfig:
  """The configuration of a policy whose tokenizer has these tokens.

  Args:
    shape: its size.
    tokens: what `build_tokenizer` returns.
  """
  d, v = shape.hidden_size, shape.vision_hidden_size
  pairs = d // _HEADS // 2  # That M-RoPE turns by time, row and column.
  section = 3 * pairs // 8
  return ModelConfig(
      text=TextConfig(
          vocab_size=tokens["vocab_size"], hidden_size=d,
          intermediate_size=3 * d, num_hidden_layers=shape.num_layers,
          num_attention_heads=_HEADS, num_key_value_heads=_HEADS // 2,
          # The published 1e6 spreads turns over a million positions, time
          # first and columns last, and would leave the neighbors in a room of
          # a few tiles a thousandth of a turn apart.
          rope_theta=2.0,
          mrope_section=(pairs - 2 * section, section, section),
          tie_word_embeddings=True, initializer_range=0.05),
      vision=VisionConfig(
          depth=shape.vision_layers, hidden_size=v, intermediate_size=2 * v,
          num_heads=_HEADS, out_hidden_size=d, patch_size=shape.patch_size,
          spatial_merge_size=shape.merge_size,
          window_size=max(4, shape.merge_size) * shape.patch_size,
          fullatt_block_indexes=(shape.vision_layers - 1,),
          initializer_range=0.05),
      image_token_id=tokens["<|image_pad|>"],
      video_token_id=tokens["<|video_pad|>"],
      vision_start_token_id=tokens["<|vision_start|>"],
      vision_end_token_id=tokens["<|vision_end|>"],
      eos_token_ids=(tokens["<|im_end|>"],))


def texts_of(row: Mapping[str, Any]) -> Iterator[str]:
  """What is written in a row: its prompt, response and answer.

  Each response and answer also comes with a space before it and as two, so
  that its words become tokens wherever they stand, though they occur once.
  """
  prompt = row["prompt"]
  messages = ([{"content": prompt}] if isinstance(prompt, str) else prompt)
  for message in messages:
    yield message.get("role", "")
    content = message["content"]
    parts = ([{"text": content}] if isinstance(content, str) else content)
    yield from (part["text"] for part in parts if "text" in part)
  for key in ("response", "answer"):
    if isinstance(row.get(key), str):
      yield from (row[key], f" {row[key]}") * 2
