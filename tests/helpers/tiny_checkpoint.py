"""A whole tiny checkpoint: tokenizer, preprocessors and random weights."""

from __future__ import annotations

import pathlib

import jax

from rollplex_jax.models import hf, vlm
from tests.helpers import tiny_tokenizer


def write(folder, *, with_vision: bool = True, seed: int = 0) -> str:
  """Writes a checkpoint that commands and trainers load; returns its path."""
  folder = pathlib.Path(folder)
  files = tiny_tokenizer.write_checkpoint(
      str(folder / "files"), with_vision=with_vision)
  config = hf.load_config(files)
  params = vlm.init_params(config, jax.random.key(seed))
  # Larger than the usual 0.02, so that what is read makes a difference.
  params = jax.tree.map(lambda w: w * 5 if w.ndim > 1 else w, params)
  path = folder / "checkpoint"
  hf.save_checkpoint(path, config, params, assets_from=files)
  return str(path)
