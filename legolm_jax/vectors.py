"""Codebooks of vectors: k-means on pairs or quadruples of weights.

What the paper finds to fail: with K the same, the bits per weight fall by d, and
no K mends the mismatch between one codebook and all matrices.
"""

from __future__ import annotations

import numpy as np
import scipy.spatial

from legolm_jax.errors import InputError

_ITERATIONS = 12
# Where an iteration gains less than this share, more of them are idle.
_TOLERANCE = 1e-4


def fit(sample: np.ndarray, num_centroids: int, *, seed: int = 0,
        threads: int = 1) -> np.ndarray:
  """Lloyd's iteration on a sample.

  Args:
    sample: float32 [n, d].
    num_centroids: K, at most n.
    seed: of the start, K of the vectors.
    threads: that search.

  Returns:
    float32 [K, d]. A centroid that loses all its vectors moves to one of those
    that are farthest from theirs.

  Raises:
    InputError: if there are fewer distinct vectors than centroids.
  """
  distinct = np.unique(sample, axis=0)
  if len(distinct) < num_centroids:
    raise InputError(f"expected at least {num_centroids} distinct vectors for "
                     f"as many centroids, found {len(distinct)}")
  rng = np.random.default_rng(seed)
  centroids = distinct[
      rng.choice(len(distinct), num_centroids, replace=False)]
  error = np.inf
  for _ in range(_ITERATIONS):
    distance, of = scipy.spatial.cKDTree(centroids).query(
        sample, workers=threads)
    counts = np.bincount(of, minlength=num_centroids)
    sums = np.stack([np.bincount(of, column, num_centroids)
                     for column in sample.T], axis=1)
    used = counts > 0
    centroids = centroids.copy()
    centroids[used] = sums[used] / counts[used, None]
    farthest = np.argsort(distance)[::-1]
    centroids[~used] = sample[farthest[:np.count_nonzero(~used)]]
    last, error = error, float(np.mean(distance ** 2))
    if last - error <= _TOLERANCE * error:
      break
  return centroids.astype(np.float32)


class Quantizer:
  """Replaces vectors by the nearest centroid."""

  def __init__(self, centroids: np.ndarray, threads: int = 1):
    self._centroids = centroids
    self._tree = scipy.spatial.cKDTree(centroids)
    self._threads = threads

  def __call__(self, x: np.ndarray) -> np.ndarray:
    """float32 [rows, columns] -> the same shape; `d` divides the columns."""
    blocks = x.reshape(-1, self._centroids.shape[1])
    _, of = self._tree.query(blocks, workers=self._threads)
    return self._centroids[of].reshape(x.shape)
