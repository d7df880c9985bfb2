"""The quick start's policy compressed without data, and played once more."""

from __future__ import annotations

import pathlib
from typing import Any

import jax.numpy as jnp

from experiments import common
from legolm_jax import checkpoint_writer
from legolm_jax.compress import CompressionConfig, Compressor
from legolm_jax.rules import Rules
from legolm_jax.safetensors_files import CheckpointFolder
from rollplex_jax.evaluation import Evaluation
from rollplex_jax.models import hf
from rollplex_jax.trainer import Trainer

_NUM_CENTROIDS = 64


def compress(policy: pathlib.Path, output: pathlib.Path, trainer: Trainer,
             before: Evaluation) -> dict[str, Any]:
  """Compresses the policy and evaluates what comes of it.

  Args:
    policy: its checkpoint.
    output: a folder to make.
    trainer: that trained it, with its held-out episodes.
    before: its evaluation on these.

  Returns:
    "num_centroids"; "nominal_ratio", "true_ratio", "bits_per_compressed_weight"
    and "bits_per_parameter"; "compressed_share" of the parameters; "success"
    with "interval"; and "same_plans", the share of episodes with the same plan
    as before.
  """
  # Of one or two blocks, nothing would be left between first and last.
  is_shallow = trainer.model_config.text.num_hidden_layers < 3
  rules = Rules(protected_blocks=()) if is_shallow else Rules()
  compressor = Compressor(CheckpointFolder(policy), CompressionConfig(
      num_centroids=_NUM_CENTROIDS, rules=rules))
  compressor.fit()
  account = checkpoint_writer.save(output, compressor)
  _, params = hf.load_checkpoint(
      str(output), jnp.dtype(trainer.config.policy.compute_dtype), decode=True)
  found = trainer.evaluate(trainer.task.eval_rows, params=params,
                           progress=common.progress("compressed"))
  success, *interval = found.success
  same = sum(a == b for a, b in zip(found.completions, before.completions,
                                    strict=True))
  sizes = {name: account[name] for name in (
      "nominal_ratio", "true_ratio", "bits_per_compressed_weight",
      "bits_per_parameter")}
  compressed = sum(d.info.size for d in compressor.compressed)
  return {"num_centroids": _NUM_CENTROIDS, **sizes,
          "compressed_share": compressed / compressor.folder.num_parameters,
          "success": success, "interval": interval,
          "same_plans": same / len(found.completions)}


def describe(found: dict[str, Any], success_before: float) -> str:
  """The result in three lines."""
  low, high = found["interval"]
  return (
      f"Compressed without data (K={found['num_centroids']}, "
      f"{found['compressed_share']:.0%} of the parameters, "
      f"{found['bits_per_compressed_weight']:.2f} bits each): success "
      f"{success_before:.1%} before,\n{found['success']:.1%} after "
      f"({low:.0%} to {high:.0%}), {found['same_plans']:.0%} of the plans the "
      f"same; nominal ratio {found['nominal_ratio']:.2f}, true ratio of\nthe "
      f"whole checkpoint {found['true_ratio']:.2f}.")
