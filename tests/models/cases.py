"""Small configurations and prompts on which models are compared.

Configurations are written as published Qwen2.5-VL files are (flat), and differ
from one another in every dimension. Needs no torch, so that golden files can be
checked anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np

from rollplex_jax.models import decoder, inputs, positions, vlm
from rollplex_jax.models.config import ModelConfig

SPECIAL_TOKENS = 4  # The last ids of every vocabulary here.


def flat_config(*, vocab: int, hidden: int, ffn: int, layers: int, heads: int,
                kv_heads: int, section: Sequence[int], eps: float = 1e-6,
                theta: float = 1e4, tied: bool = False,
                **vision) -> dict[str, Any]:
  """A config.json as published; `vision` holds vision_config's own keys."""
  return {
      "model_type": "qwen2_5_vl",
      "architectures": ["Qwen2_5_VLForConditionalGeneration"],
      "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": ffn,
      "num_hidden_layers": layers, "num_attention_heads": heads,
      "num_key_value_heads": kv_heads, "rms_norm_eps": eps,
      "rope_theta": theta, "tie_word_embeddings": tied,
      "rope_scaling": {"type": "mrope", "mrope_section": list(section)},
      "hidden_act": "silu", "use_sliding_window": False,
      "max_position_embeddings": 4096,
      "image_token_id": vocab - 4, "video_token_id": vocab - 3,
      "vision_start_token_id": vocab - 2, "vision_end_token_id": vocab - 1,
      "bos_token_id": 0, "eos_token_id": 1,
      "vision_config": {
          "hidden_act": "silu", "out_hidden_size": hidden,
          "in_chans": vision.get("in_channels", 3), **vision},
  }


# What each one is there for, and the merged patches along a window's side.
CONFIGS = {
    # The published proportions; windows of 2 x 2.
    "published_like": flat_config(
        vocab=120, hidden=64, ffn=96, layers=2, heads=2, kv_heads=1,
        section=(4, 6, 6), theta=1e6, depth=4, hidden_size=32,
        intermediate_size=44, num_heads=2, patch_size=4, spatial_merge_size=2,
        temporal_patch_size=2, window_size=16, fullatt_block_indexes=[1, 3],
        tokens_per_second=2),
    # Tied, no merging, single frames, only full attention, 25 positions/s.
    "merge_1_all_full": flat_config(
        vocab=90, hidden=24, ffn=40, layers=1, heads=2, kv_heads=1,
        section=(2, 2, 2), eps=1e-5, tied=True, depth=2, hidden_size=24,
        intermediate_size=32, num_heads=3, patch_size=3, spatial_merge_size=1,
        temporal_patch_size=1, window_size=9, fullatt_block_indexes=[0, 1],
        tokens_per_second=25),
    # As many key as query heads, three frames a patch, only windows of 2 x 2.
    "merge_3_no_full": flat_config(
        vocab=101, hidden=40, ffn=56, layers=3, heads=4, kv_heads=4,
        section=(1, 2, 2), eps=1e-3, theta=500.0, depth=2, hidden_size=40,
        intermediate_size=24, num_heads=2, patch_size=2, spatial_merge_size=3,
        temporal_patch_size=3, window_size=14, fullatt_block_indexes=[],
        tokens_per_second=4),
    # One channel, windows of 3 x 3 that no picture here fills evenly.
    "ragged_windows": flat_config(
        vocab=77, hidden=96, ffn=64, layers=2, heads=6, kv_heads=2,
        section=(2, 3, 3), eps=1e-5, theta=1e5, tied=True, depth=3,
        hidden_size=16, intermediate_size=20, num_heads=1, in_channels=1,
        patch_size=5, spatial_merge_size=2, temporal_patch_size=2,
        window_size=31, fullatt_block_indexes=[2], tokens_per_second=3),
    # Windows of one merged patch, and of 4 x 4 patches in it.
    "merge_4_window_1": flat_config(
        vocab=66, hidden=32, ffn=72, layers=2, heads=4, kv_heads=2,
        section=(2, 1, 1), depth=2, hidden_size=12, intermediate_size=16,
        num_heads=1, in_channels=2, patch_size=2, spatial_merge_size=4,
        temporal_patch_size=1, window_size=8, fullatt_block_indexes=[0],
        tokens_per_second=2),
}


@dataclasses.dataclass(frozen=True)
class Medium:
  """A picture or video, `height` x `width` in merged patches."""

  height: int
  width: int
  frames: int = 1
  fps: float | None = None  # None is a picture.


# Numbers are runs of text tokens.
PROMPTS: dict[str, list[int | Medium]] = {
    "text": [9],
    "image": [3, Medium(3, 5), 4],
    "images": [Medium(1, 1), 2, Medium(5, 2), 1, Medium(3, 4), 3],
    "video_1_fps_odd": [2, Medium(2, 3, frames=5, fps=1.0), 3],
    "video_2_fps": [2, Medium(3, 2, frames=4, fps=2.0), 2],
    "video_4_fps_odd": [1, Medium(2, 2, frames=7, fps=4.0), 4],
    "mixed": [2, Medium(2, 3), 1, Medium(3, 4, frames=3, fps=2.0), 2,
              Medium(4, 1), Medium(1, 2, frames=2, fps=1.0), 3],
    "ends_in_video": [1, Medium(4, 4, frames=2, fps=30.0)],
}


@dataclasses.dataclass(frozen=True)
class Prompt:
  """One prompt as a processor would hand it over (see `PROMPTS`)."""

  token_ids: np.ndarray  # int32 [T]
  feature_index: np.ndarray  # int32 [T]
  patches: np.ndarray  # float32 [n, patch_dim]
  grids: tuple[tuple[int, int, int], ...]
  modalities: tuple[str, ...]
  seconds: tuple[float, ...]

  def positions(self, config: ModelConfig) -> np.ndarray:
    return positions.rope_index(
        self.token_ids, self.grids, self.modalities, self.seconds, config)


def make_prompt(parts: Sequence[int | Medium], config: ModelConfig,
                rng: np.random.Generator) -> Prompt:
  """Draws text tokens and patches for `parts`."""
  vision = config.vision
  merge, stride = vision.spatial_merge_size, vision.temporal_patch_size
  words = config.text.vocab_size - SPECIAL_TOKENS
  tokens, grids, modalities, seconds = [], [], [], []
  for part in parts:
    if isinstance(part, int):
      tokens += rng.integers(2, words, part).tolist()
      continue
    video = part.fps is not None
    # A processor repeats the last frame until frames fill their patches.
    grids.append((math.ceil(part.frames / stride), part.height * merge,
                  part.width * merge))
    modalities.append("video" if video else "image")
    seconds.append(stride / part.fps if video else 0.0)
    run = grids[-1][0] * part.height * part.width
    tokens += [config.vision_start_token_id,
               *[config.video_token_id if video
                 else config.image_token_id] * run,
               config.vision_end_token_id]
  token_ids = np.array(tokens, np.int32)
  seen = np.isin(token_ids, [config.image_token_id, config.video_token_id])
  index = np.where(seen, np.cumsum(seen) - 1, -1).astype(np.int32)
  count = sum(math.prod(g) for g in grids)
  patches = rng.normal(size=(count, vision.patch_dim)).astype(np.float32)
  return Prompt(token_ids, index, patches, tuple(grids), tuple(modalities),
                tuple(seconds))


def make_prompts(config: ModelConfig, seed: int = 0) -> dict[str, Prompt]:
  """Every prompt of `PROMPTS` for a configuration."""
  rng = np.random.default_rng(seed)
  return {name: make_prompt(p, config, rng) for name, p in PROMPTS.items()}


def round_up(n: int) -> int:
  """A bucket that no merge size divides, to show that none has to."""
  return -(-n // 10) * 10


def batch_logits(params, config: ModelConfig, prompts: Sequence[Prompt],
                 bucket=round_up) -> list[np.ndarray]:
  """Logits [T, V] of each prompt, computed as one right-padded batch."""
  length = bucket(max(len(p.token_ids) for p in prompts))
  token_ids = np.zeros((len(prompts), length), np.int32)
  places = np.zeros((3, len(prompts), length), np.int32)
  index = np.full((len(prompts), length), -1, np.int32)
  first = 0
  for row, prompt in enumerate(prompts):
    real = slice(len(prompt.token_ids))
    token_ids[row, real] = prompt.token_ids
    places[:, row, real] = prompt.positions(config)
    index[row, real] = np.where(
        prompt.feature_index >= 0, prompt.feature_index + first, -1)
    first += int(prompt.feature_index.max(initial=-1)) + 1
  grids = [g for p in prompts for g in p.grids]
  vision = None
  if grids:
    vision = inputs.plan_vision(
        np.concatenate([p.patches for p in prompts]), grids, config.vision,
        bucket)
  out = np.asarray(_logits(params, config, token_ids, places, vision, index))
  return [row[:len(p.token_ids)] for row, p in zip(out, prompts)]


@functools.partial(jax.jit, static_argnums=1)
def _logits(params, config, token_ids, places, vision, index):
  features = vlm.vision_features(params, config, vision)
  hidden = vlm.forward(params, config, token_ids, places, features, index)
  return decoder.logits(params["text"], hidden)
