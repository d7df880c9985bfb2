"""What a compressed checkpoint costs: the paper's ratio, and bytes on disk."""

from __future__ import annotations

import math

from legolm_jax import packing

_SCALE_BYTES, _CENTROID_BYTES, _OFFSET_BYTES = 2, 4, 4


def nominal_ratio(num_codes: int, percentile: float) -> float:
  """The published figure of merit, 32 / (p log2 K + (1 - p) 32).

  Against float32, with codes of log2 K bits and outliers of 32; it counts
  neither where outliers are, nor scales, nor what is not compressed.
  """
  p = percentile / 100
  return 32 / (p * math.log2(num_codes) + (1 - p) * 32)


def matrix_bytes(layout: packing.Layout, num_codes: int,
                 num_outliers: int | None, itemsize: int,
                 has_scale: bool) -> int:
  """Bytes on disk of one compressed matrix, its codebook and names left out.

  Args:
    layout: of the matrix.
    num_codes: K, escape included.
    num_outliers: None without an escape.
    itemsize: bytes of an outlier.
    has_scale: whether outputs have scales.
  """
  bits = packing.code_bits(num_codes)
  total = layout.out * layout.words * bits  # A word is `bits` bytes.
  if num_outliers is not None:
    total += num_outliers * itemsize
    total += layout.bands * layout.tiles * _OFFSET_BYTES
  if has_scale:
    total += layout.out * _SCALE_BYTES
  return total


def codebook_bytes(num_centroids: int) -> int:
  """Bytes on disk of a codebook."""
  return num_centroids * _CENTROID_BYTES
