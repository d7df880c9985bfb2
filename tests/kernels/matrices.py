"""Random compressed matrices, with the dense ones in float64."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np

from legolm_jax import encoding, packing
from legolm_jax.array import LegoArray, Storage

BF16 = np.dtype(ml_dtypes.bfloat16)


def random(seed: int, out: int, inputs: int, num_codes: int, *,
           storage: Storage = Storage.OUT_IN, escapes: float | None = 0.05,
           scaled: bool = False, dtype=BF16, crowded: bool = False
           ) -> tuple[LegoArray, np.ndarray]:
  """A matrix made of random codes.

  Args:
    seed: of all that is random.
    out, inputs: dimensions.
    num_codes: K, escape included.
    storage: of the matrix.
    escapes: share of the escapes; None for a matrix that has none.
    scaled: whether it has a scale per output.
    dtype: of the outliers.
    crowded: whether one tile has nothing but outliers and the next none.

  Returns:
    The compressed matrix and the dense one, float64, both as stored.
  """
  rng = np.random.default_rng(seed)
  layout = packing.Layout.of(out, inputs)
  bits = packing.code_bits(num_codes)
  codebook = np.sort(rng.standard_normal(num_codes)).astype(np.float32)
  last = num_codes - (escapes is not None)
  codes = rng.integers(0, last, (out, inputs)).astype(np.uint8)
  scale = None
  if scaled:
    scale = rng.uniform(0.5, 2, out).astype(BF16)
  outliers = offsets = None
  if escapes is not None:
    codebook[-1] = 0
    is_escape = rng.random((out, inputs)) < escapes
    if crowded:
      is_escape[:packing.BAND, :packing.TILE_INPUTS] = True
      is_escape[:packing.BAND, packing.TILE_INPUTS:2 * packing.TILE_INPUTS] = (
          False)
    codes[is_escape] = num_codes - 1
  dense = codebook.astype(np.float64)[codes]
  if scaled:
    dense *= scale.astype(np.float64)[:, None]
  if escapes is not None:
    values = (5 * rng.standard_normal((out, inputs))).astype(dtype)
    dense[is_escape] = values[is_escape].astype(np.float64)
    flat = np.flatnonzero(is_escape)
    ordered, offsets = packing.order_outliers(
        layout, flat, values.ravel()[flat])
    outliers = encoding.at_least_one(ordered)[None, None]
  array = LegoArray(
      planes=tuple(packing.pack(layout.fill(codes), bits)), codebook=codebook,
      scale=scale, outliers=outliers, offsets=offsets,
      section_out=layout.section_out, section_inputs=layout.section_inputs,
      num_codes=num_codes, dtype=dtype, storage=Storage.OUT_IN)
  if storage is Storage.OUT_IN:
    return array, dense
  return encoding.contiguous(array.T), dense.T


def abstract(out: int, inputs: int, num_codes: int, *,
             storage: Storage = Storage.OUT_IN, escapes: float | None = 0.01,
             scaled: bool = True, dtype=BF16) -> LegoArray:
  """The shapes and dtypes of such a matrix, not its values."""
  layout = packing.Layout.of(out, inputs)
  stored = lambda *dims: dims if storage is Storage.OUT_IN else (
      dims[1], dims[0], *dims[2:])
  array = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype)
  has = escapes is not None
  return LegoArray(
      planes=tuple(array(stored(out, layout.words), d) for d in
                   packing.plane_dtypes(packing.code_bits(num_codes))),
      codebook=array((num_codes,), np.float32),
      scale=array((out,), BF16) if scaled else None,
      outliers=array(
          (1, 1, max(1, int(out * inputs * escapes))), dtype) if has else None,
      offsets=array(stored(layout.bands, layout.tiles), np.uint32)
      if has else None,
      section_out=layout.section_out, section_inputs=layout.section_inputs,
      num_codes=num_codes, dtype=dtype, storage=storage)


def error(found, expected: np.ndarray) -> float:
  """Of the norm."""
  difference = np.asarray(found, np.float64) - expected
  return np.linalg.norm(difference) / np.linalg.norm(expected)
