"""A tiny random policy and prompts of all kinds, made without files."""

from __future__ import annotations

import jax
import numpy as np

from rollplex_jax.data.processor import Prompt
from rollplex_jax.models import vlm
from rollplex_jax.models.config import ModelConfig, TextConfig, VisionConfig
from rollplex_jax.models.positions import rope_index

IMAGE, VIDEO, START, END = 56, 57, 58, 59


def config(**text) -> ModelConfig:
  """2 layers, grouped queries, a tower with a window and a full block."""
  defaults = dict(
      vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
      num_attention_heads=4, num_key_value_heads=2, mrope_section=(1, 1, 2),
      rope_theta=100.0, initializer_range=0.2)
  return ModelConfig(
      text=TextConfig(**{**defaults, **text}),
      vision=VisionConfig(
          depth=2, hidden_size=16, intermediate_size=24, num_heads=2,
          out_hidden_size=32, patch_size=2, window_size=8,
          fullatt_block_indexes=(1,), initializer_range=0.2),
      image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START,
      vision_end_token_id=END, eos_token_ids=(1,))


def params(model_config: ModelConfig, seed: int = 0):
  """Random parameters, biases and norms too."""
  out = vlm.init_params(model_config, jax.random.key(seed))
  leaves, tree = jax.tree.flatten(out)
  keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
  return tree.unflatten([
      leaf + 0.1 * jax.random.normal(key, leaf.shape)
      for leaf, key in zip(leaves, keys)])


def prompt(model_config: ModelConfig, media=(), text: int = 4,
           seed: int = 0) -> Prompt:
  """A prompt of media, each ("image" or "video", (t, h, w)), and text tokens.

  Videos are half a second per temporal patch.
  """
  rng = np.random.default_rng(seed)
  m = model_config.vision.spatial_merge_size
  ids = list(rng.integers(2, 50, 2))
  for kind, (t, h, w) in media:
    pad = IMAGE if kind == "image" else VIDEO
    ids += [START, *[pad] * (t * h * w // m**2), END]
  ids = np.array(ids + list(rng.integers(2, 50, text)), np.int32)
  grids = np.array([g for _, g in media], np.int64).reshape(-1, 3)
  kinds = tuple(k for k, _ in media)
  seconds = tuple(0.0 if k == "image" else 0.5 for k in kinds)
  seen = np.isin(ids, [IMAGE, VIDEO])
  return Prompt(
      token_ids=ids,
      positions=rope_index(ids, grids, kinds, seconds, model_config),
      feature_index=np.where(seen, np.cumsum(seen) - 1, -1).astype(np.int32),
      patches=rng.normal(size=(
          int(grids.prod(axis=1).sum()), model_config.vision.patch_dim,
      )).astype(np.float32),
      grids=grids, modalities=kinds, seconds_per_grid=seconds)


def prompts(model_config: ModelConfig) -> list[Prompt]:
  """Ragged prompts: video, text only, two images and a video, one image."""
  video, image = ("video", (3, 4, 6)), ("image", (1, 4, 4))
  return [
      prompt(model_config, [video], seed=1),
      prompt(model_config, [], text=3, seed=2),
      prompt(model_config, [("image", (1, 2, 6)), image, ("video", (2, 2, 2))],
             text=1, seed=3),
      prompt(model_config, [image], text=7, seed=4),
  ]


def video_prompts(model_config: ModelConfig) -> list[Prompt]:
  """Ragged prompts: a video, text only, an image and two videos, a long video.

  Frames differ in number and size, and some are no multiple of the tower's
  window.
  """
  image = ("image", (1, 2, 6))
  return [
      prompt(model_config, [("video", (3, 4, 6))], text=1, seed=1),
      prompt(model_config, [], text=5, seed=2),
      prompt(model_config, [image, ("video", (2, 4, 4)), ("video", (1, 6, 4))],
             text=1, seed=3),
      prompt(model_config, [("video", (5, 4, 4))], seed=4),
  ]
