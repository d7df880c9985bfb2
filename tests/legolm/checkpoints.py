"""Small checkpoint folders with weights of realistic shape."""

from __future__ import annotations

from collections.abc import Mapping
import json
import os
import pathlib
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

BF16 = np.dtype(ml_dtypes.bfloat16)
F16, F32 = np.dtype(np.float16), np.dtype(np.float32)


def weights(shape, dtype=BF16, seed: int = 0) -> np.ndarray:
  """Heavy-tailed weights, with rows of different scales."""
  rng = np.random.default_rng(seed)
  w = 0.02 * rng.standard_t(5, size=shape)
  w *= np.exp(0.5 * rng.normal(size=(shape[0],) + (1,) * (len(shape) - 1)))
  return w.astype(dtype)


def decoder(layers: int = 4, width: int = 64, inner: int = 192,
            dtype=BF16, tied: bool = False) -> dict[str, np.ndarray]:
  """Tensors of a Llama-like decoder."""
  tensors = {"model.embed_tokens.weight": weights((96, width), dtype, 1)}
  if not tied:
    tensors["lm_head.weight"] = weights((96, width), dtype, 2)
  for i in range(layers):
    block = f"model.layers.{i}."
    shapes = {"self_attn.q_proj": (width, width),
              "self_attn.k_proj": (width // 2, width),
              "self_attn.o_proj": (width, width),
              "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner)}
    for j, (name, shape) in enumerate(shapes.items()):
      tensors[f"{block}{name}.weight"] = weights(shape, dtype, 10 * i + j + 3)
    tensors[f"{block}input_layernorm.weight"] = np.ones(width, dtype)
  tensors["model.norm.weight"] = np.ones(width, dtype)
  return tensors


def gpt2(prefix: str = "transformer.", layers: int = 3, width: int = 64
         ) -> dict[str, np.ndarray]:
  """Tensors of GPT-2: matrices are [in, out], masks are stored too."""
  tensors = {f"{prefix}wte.weight": weights((96, width), F32, 1),
             f"{prefix}wpe.weight": weights((32, width), F32, 2)}
  for i in range(layers):
    block = f"{prefix}h.{i}."
    shapes = {"attn.c_attn": (width, 3 * width), "attn.c_proj": (width, width),
              "mlp.c_fc": (width, 4 * width), "mlp.c_proj": (4 * width, width)}
    for j, (name, shape) in enumerate(shapes.items()):
      tensors[f"{block}{name}.weight"] = weights(shape, F32, 10 * i + j)
      tensors[f"{block}{name}.bias"] = np.zeros(shape[1], F32)
    tensors[f"{block}attn.bias"] = np.tril(
        np.ones((1, 1, 32, 32), np.bool_))
    tensors[f"{block}attn.masked_bias"] = np.full((), -np.inf, F32)
  return tensors


def write(folder: str | os.PathLike, tensors: Mapping[str, np.ndarray],
          shards: int = 1, config: Mapping[str, Any] = {}) -> str:
  """Writes a folder; several shards get an index."""
  path = pathlib.Path(folder)
  path.mkdir(parents=True)
  config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama",
            "tie_word_embeddings": "lm_head.weight" not in tensors} | dict(config)
  (path / "config.json").write_text(json.dumps(config))
  (path / "tokenizer.json").write_text("{}")
  names = list(tensors)
  if shards == 1:
    save_file(dict(tensors), path / "model.safetensors")
    return str(path)
  where = {}
  for i in range(shards):
    file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
    part = names[i * len(names) // shards:(i + 1) * len(names) // shards]
    save_file({n: tensors[n] for n in part}, path / file)
    where |= dict.fromkeys(part, file)
  (path / "model.safetensors.index.json").write_text(
      json.dumps({"metadata": {}, "weight_map": where}))
  return str(path)
