"""The implementation in transformers (torch, CPU, float32) to compare with."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import numpy as np
import transformers

try:
  import torch
except ImportError:  # Golden files alone serve then.
  torch = None

MISSING = "needs torch: pip install -r requirements-test.txt on Python 3.11"

transformers.utils.logging.disable_progress_bar()


def build(raw: dict[str, Any], seed: int = 0):
  """A model for a flat config with random weights, biases and norms."""
  kind = raw["model_type"]
  model = _class_of(kind)(transformers.CONFIG_MAPPING[kind].from_dict(raw))
  generator = torch.Generator().manual_seed(seed)
  for name, weight in model.named_parameters():
    noise = torch.randn(weight.shape, generator=generator)
    if weight.ndim > 1:
      # Far from uniform attention, yet not so sharp that it magnifies rounding:
      # at twice this gain float32 torch is 3e-4 from float64 torch.
      weight.data = noise / weight[0].numel() ** 0.5
    else:
      weight.data = noise * 0.3 + (0 if name.endswith("bias") else 1)
  model.tie_weights()
  return model.eval()


def load(path: str | os.PathLike):
  """Loads a checkpoint folder with the class its config names."""
  kind = transformers.AutoConfig.from_pretrained(path).model_type
  return _class_of(kind).from_pretrained(path, dtype="auto").eval()


def _class_of(kind: str):
  if kind == "qwen2_5_vl":
    return transformers.Qwen2_5_VLForConditionalGeneration
  config = transformers.CONFIG_MAPPING[kind]
  return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[config]


def _arguments(model, prompt) -> dict[str, Any]:
  """What the reference processor would pass for one prompt."""
  tokens = torch.tensor(prompt.token_ids, dtype=torch.long)[None]
  kinds = torch.zeros_like(tokens)
  kinds[tokens == model.config.image_token_id] = 1
  kinds[tokens == model.config.video_token_id] = 2
  out = {"input_ids": tokens, "mm_token_type_ids": kinds,
         "attention_mask": torch.ones_like(tokens)}
  start, split = 0, {"image": [], "video": []}
  for medium in zip(prompt.grids, prompt.modalities, prompt.seconds):
    (t, h, w), modality, seconds = medium
    patches = prompt.patches[start:start + t * h * w]
    start += t * h * w
    split[modality].append(((t, h, w), seconds, patches))
  for modality, pixels in (("image", "pixel_values"),
                           ("video", "pixel_values_videos")):
    if not split[modality]:
      continue
    grids, seconds, patches = zip(*split[modality])
    out[f"{modality}_grid_thw"] = torch.tensor(grids)
    out[pixels] = torch.tensor(np.concatenate(patches))
    if modality == "video":
      out["second_per_grid_ts"] = torch.tensor(seconds)
  return out


def positions(model, prompt) -> np.ndarray:
  """int64 [3, T]; the reference itself counts text on its own."""
  arguments = _arguments(model, prompt)
  for pixels in ("pixel_values", "pixel_values_videos"):
    arguments.pop(pixels, None)
  return model.model.get_rope_index(**arguments)[0][:, 0].numpy()


def logits(model, prompt) -> np.ndarray:
  """float32 [T, V] of one prompt."""
  with torch.no_grad():
    return model(**_arguments(model, prompt)).logits[0].numpy()


def text_logits(model, token_ids, position_ids=None) -> np.ndarray:
  """float32 [T, V] of text tokens [T], at positions [..., 1, T] if given."""
  tokens = torch.tensor(token_ids, dtype=torch.long)[None]
  arguments = {}
  if position_ids is not None:
    arguments["position_ids"] = torch.tensor(position_ids, dtype=torch.long)
  with torch.no_grad():
    return model(input_ids=tokens, **arguments).logits[0].numpy()


@contextlib.contextmanager
def on_meta():
  """Models made inside have shapes but no memory."""
  with torch.device("meta"):
    yield


def features(model, prompt) -> np.ndarray:
  """Merged features [f, D] of a prompt that holds pictures only."""
  arguments = _arguments(model, prompt)
  with torch.no_grad():
    parts = model.model.get_image_features(
        arguments["pixel_values"], arguments["image_grid_thw"]).pooler_output
    return torch.cat(parts).numpy()
