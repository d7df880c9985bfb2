"""Tiny checkpoints, compressed, for tests of what reads them."""

from __future__ import annotations

import os
from typing import Any

from legolm_jax import checkpoint_writer
from legolm_jax.compress import CompressionConfig, Compressor
from legolm_jax.rules import Rules
from legolm_jax.safetensors_files import CheckpointFolder


def compress(source: str | os.PathLike, output: str | os.PathLike, *,
             rules: Rules | None = None, **kwargs: Any) -> str:
  """Compresses a folder, every block of it by default.

  Args:
    source: a checkpoint folder.
    output: a folder to make.
    rules: which tensors.
    **kwargs: of `CompressionConfig`; 16 codes and 5 % outliers by default.

  Returns:
    `output` as a string.
  """
  config = CompressionConfig(**{
      "num_centroids": 16, "percentile": 95.0,
      "rules": rules or Rules(protected_blocks=()), **kwargs})
  compressor = Compressor(CheckpointFolder(source), config, threads=1)
  compressor.fit()
  checkpoint_writer.save(output, compressor)
  return os.fspath(output)


def decompress(source: str | os.PathLike, output: str | os.PathLike) -> str:
  """The ordinary checkpoint of a compressed one."""
  checkpoint_writer.decompress(source, output)
  return os.fspath(output)
