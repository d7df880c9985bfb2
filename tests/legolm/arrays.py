"""LegoArrays of small random matrices."""

from __future__ import annotations

import numpy as np

from legolm_jax import codebook as codebook_lib
from legolm_jax import compress, encoding, histogram, packing
from legolm_jax.array import Storage
from legolm_jax.encoding import Codebook, Matrix
from tests.legolm import checkpoints
from tests.legolm.checkpoints import BF16


def make(shape, *, dtype=BF16, storage=Storage.OUT_IN, num_codes=16,
         percentile=95.0, scaled=False, keep=0):
  """A matrix [out, in] with its codebook, scale, and LegoArray."""
  w = checkpoints.weights(shape, dtype)
  scale = compress.rms_scale(w) if scaled else None
  bins = histogram.bins_for(dtype, scaled)
  d = histogram.Distribution.of(bins, bins.count(encoding.scaled(w, scale)))
  threshold, has_escape = d.threshold(percentile), percentile < 100
  codebook = Codebook(
      name="test", threshold=threshold, has_escape=has_escape,
      centroids=d.within(threshold).fit(
          num_codes - has_escape, codebook_lib.Fit.EXACT))
  data = w if storage is Storage.OUT_IN else np.ascontiguousarray(w.T)
  kept = np.random.default_rng(5).choice(w.size, keep, replace=False)
  array = encoding.encode(Matrix(data, storage), codebook, scale, kept)
  return w, codebook, scale, kept, array


def escapes(array):
  """bool [out, in]."""
  array = array if array.storage is Storage.OUT_IN else array.T
  codes = packing.unpack(
      [np.ascontiguousarray(p) for p in array.planes], array.bits)
  codes = array.layout.unfill(codes)
  has = array.outliers is not None
  return (codes == array.num_codes - 1) & has
