"""A small checkpoint with random weights, and files of rows for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
import json
import os
import pathlib
from typing import Any

import jax
import numpy as np
import PIL.Image
from safetensors.numpy import save_file

from rollplex_jax.models import hf, vlm, weights
from rollplex_jax.models.config import ModelConfig
from tests.helpers import tiny_tokenizer

# So many that a random policy ends most completions before their limit.
EOS = tuple(range(40, 100))


def write(folder: str | os.PathLike, *, with_vision: bool = True,
          eos: Iterable[int] = (), seed: int = 0, std: float = 0.2) -> str:
  """Writes two layers of 32 with a tower of one block.

  Args:
    folder: made if it isn't there.
    with_vision: Qwen2.5-VL, or text-only Qwen2.
    eos: for generation_config.json, beside <|im_end|>.
    seed: of the weights.
    std: of the weights, biases and norms (around 1) included. Large enough for
      every token to have its say in the logits.

  Returns:
    `folder` as a string.
  """
  folder = tiny_tokenizer.write_checkpoint(os.fspath(folder), with_vision)
  path = pathlib.Path(folder, "config.json")
  raw = json.loads(path.read_text()) | {"num_hidden_layers": 2}
  path.write_text(json.dumps(raw))
  if eos:
    pathlib.Path(folder, "generation_config.json").write_text(
        json.dumps({"eos_token_id": list(eos)}))
  config = hf.load_config(folder)
  hf.save_checkpoint(folder, config, random_params(config, seed, std),
                     assets_from=folder)
  return folder


def write_text(folder: str | os.PathLike, raw: Mapping[str, Any], *,
               seed: int = 0, std: float = 0.2) -> str:
  """Writes a text-only model of any architecture, of 320 tokens.

  Args:
    folder: made if it isn't there.
    raw: its config.json, but for the vocabulary.
    seed: of the weights.
    std: of the weights.

  Returns:
    `folder` as a string.
  """
  folder = tiny_tokenizer.write_checkpoint(os.fspath(folder), False)
  pathlib.Path(folder, "config.json").write_text(
      json.dumps({**raw, "vocab_size": 320}))
  rng = np.random.default_rng(seed)
  declared = jax.tree.leaves(
      vlm.weights(hf.load_config(folder)), is_leaf=weights.is_weight)
  save_file({
      w.name: ((w.init == weights.Init.ONES) + std * rng.normal(
          size=w.checkpoint_shape)).astype(np.float32) for w in declared},
            pathlib.Path(folder, "model.safetensors"))
  return folder


def random_params(config: ModelConfig, seed: int = 0, std: float = 0.2):
  """float32 parameters in which nothing is 0 or 1."""
  rng = np.random.default_rng(seed)
  fresh = jax.eval_shape(
      lambda: vlm.init_params(config, jax.random.key(0)))
  return jax.tree.map(
      lambda w: ((w.ndim == 1) + std * rng.normal(size=w.shape)).astype(
          np.float32), fresh)


def write_image(path: str | os.PathLike, height: int = 56, width: int = 84,
                seed: int = 0) -> str:
  """Writes random pixels as a PNG; 56 x 84 are 24 patches, 6 features."""
  pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3))
  PIL.Image.fromarray(pixels.astype(np.uint8)).save(path)
  return os.fspath(path)


def write_rows(path: str | os.PathLike,
               rows: Iterable[Mapping[str, Any]]) -> str:
  """Writes JSONL."""
  pathlib.Path(path).write_text(
      "".join(json.dumps(row) + "\n" for row in rows))
  return os.fspath(path)


def message(*parts: Mapping[str, Any] | str) -> list[dict[str, Any]]:
  """One user message; strings are its text parts."""
  return [{"role": "user", "content": [
      {"type": "text", "text": part} if isinstance(part, str) else dict(part)
      for part in parts]}]


def image(path: str) -> dict[str, str]:
  return {"type": "image", "image": path}


def video(paths, fps: float = 2.0) -> dict[str, Any]:
  return {"type": "video", "video": paths, "fps": fps}
