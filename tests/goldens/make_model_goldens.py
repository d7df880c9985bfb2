"""Rebuilds tests/goldens/models: tiny checkpoints and what torch makes of them.

Each folder is a checkpoint as transformers writes it, plus `expected.npz` with
prompts, positions and logits, so that parity is tested where torch is missing.

    python -m tests.goldens.make_model_goldens
"""

from __future__ import annotations

import pathlib
import shutil

import numpy as np
import transformers

from rollplex_jax.models.config import ModelConfig
from tests.models import cases, reference

ROOT = pathlib.Path(__file__).parent / "models"
VISION_LANGUAGE = cases.flat_config(
    vocab=64, hidden=32, ffn=40, layers=2, heads=4, kv_heads=2,
    section=(1, 1, 2), eps=1e-5, theta=1e5, depth=3, hidden_size=16,
    intermediate_size=20, num_heads=2, patch_size=2, spatial_merge_size=2,
    temporal_patch_size=2, window_size=8, fullatt_block_indexes=[1],
    tokens_per_second=3)
TEXT = {
    "model_type": "qwen2", "vocab_size": 40, "hidden_size": 24,
    "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "tie_word_embeddings": True, "eos_token_id": [3, 4],
}


def write(name: str, model, arrays: dict[str, np.ndarray]) -> None:
  """Replaces one golden folder."""
  folder = ROOT / name
  shutil.rmtree(folder, ignore_errors=True)
  model.save_pretrained(folder)
  np.savez_compressed(folder / "expected.npz", **arrays)
  size = sum(p.stat().st_size for p in folder.iterdir())
  print(f"{folder}: {size} bytes, transformers {transformers.__version__}")


def main():
  """Rebuilds everything."""
  model = reference.build(VISION_LANGUAGE)
  config = ModelConfig.from_hf(VISION_LANGUAGE)
  arrays = {}
  for kind, prompt in cases.make_prompts(config).items():
    arrays |= {f"{kind}/{key}": value for key, value in {
        "token_ids": prompt.token_ids,
        "feature_index": prompt.feature_index,
        "patches": prompt.patches,
        "grids": np.array(prompt.grids, np.int32).reshape(-1, 3),
        "modalities": np.array(prompt.modalities, "U5"),
        "seconds": np.array(prompt.seconds, np.float64),
        "positions": reference.positions(model, prompt).astype(np.int32),
        "logits": reference.logits(model, prompt),
    }.items()}
  write("vision_language", model, arrays)

  model = reference.build(TEXT)
  tokens = np.random.default_rng(0).integers(0, 40, 24, np.int32)
  write("text", model, {
      "token_ids": tokens, "logits": reference.text_logits(model, tokens)})


if __name__ == "__main__":
  main()
