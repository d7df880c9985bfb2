"""Sizes of the published Qwen2.5-VL models, to plan with before a download.

3B and 7B are as in the published configurations; 32B and 72B are as described.
"""

from __future__ import annotations

import json
import os
import pathlib

from rollplex_jax.errors import InputError
from rollplex_jax.models import hf
from rollplex_jax.models.config import ModelConfig, TextConfig, VisionConfig

_SIZES = pathlib.Path(__file__).with_name("published.json")


def names() -> list[str]:
  """Names that `config_of` knows."""
  return sorted(_read())


def config_of(name_or_path: str) -> ModelConfig:
  """The configuration of a published size, a folder or a config.json.

  Raises:
    InputError: naming what is known, or the file that is wrong.
  """
  sizes = _read()
  if name_or_path in sizes:
    return _config(sizes[name_or_path])
  if os.path.basename(name_or_path) == "config.json":
    name_or_path = os.path.dirname(name_or_path) or "."
  if os.path.isdir(name_or_path):
    return hf.load_config(name_or_path)
  raise InputError(
      f"model={name_or_path}: expected {', '.join(sorted(sizes))} or a folder "
      "with a config.json, found neither")


def _read() -> dict[str, dict]:
  return json.loads(_SIZES.read_text())


def _config(sizes: dict) -> ModelConfig:
  """What the family has in common, with one member's sizes."""
  sizes = dict(sizes)
  vision_intermediate = sizes.pop("vision_intermediate_size")
  return ModelConfig(
      text=TextConfig(
          mrope_section=(16, 24, 24), rope_theta=1e6, rms_norm_eps=1e-6,
          max_position_embeddings=128000, **sizes),
      vision=VisionConfig(
          depth=32, hidden_size=1280, intermediate_size=vision_intermediate,
          num_heads=16, out_hidden_size=sizes["hidden_size"]),
      image_token_id=151655, video_token_id=151656,
      vision_start_token_id=151652, vision_end_token_id=151653,
      bos_token_id=151643, eos_token_ids=(151645,))
