"""Centroids of a weight distribution: optimal 1-D k-means, and Lloyd-Max.

Both take the distribution as sorted distinct values with weights, which for
16-bit weights is exact: they have at most 65,536 distinct values.
"""

from __future__ import annotations

import enum

import numpy as np

from legolm_jax.errors import InputError

# Where the error of the optimum is so small a part of the second moment, float64
# prefix sums no longer tell candidates apart.
_CANCELLATION = 1e-5
_POLISH_STEPS = 20
_LLOYD_STEPS = 500
_LLOYD_TOLERANCE = 1e-7


class Fit(enum.Enum):
  """How centroids are found.

  EXACT is the global optimum of the squared error, LLOYD_MAX the fixed point
  that Lloyd's iteration reaches from a companded start.
  """

  EXACT = "exact"
  LLOYD_MAX = "lloyd_max"


def fit(values: np.ndarray, weights: np.ndarray, num_centroids: int,
        method: Fit = Fit.EXACT) -> np.ndarray:
  """Finds centroids that minimize the weighted squared error.

  Args:
    values: [n] distinct, ascending.
    weights: [n] positive; counts, say.
    num_centroids: from 1 to n.
    method: see `Fit`.

  Returns:
    float64 [num_centroids], ascending.

  Raises:
    InputError: if there are fewer values than centroids.
    ValueError: if `values` and `weights` are not as described.
  """
  values = np.asarray(values, np.float64)
  weights = np.asarray(weights, np.float64)
  if values.ndim != 1 or values.shape != weights.shape:
    raise ValueError(f"values {values.shape} and weights {weights.shape} must "
                     "be of one dimension and length")
  if not (np.all(np.diff(values) > 0) and np.all(weights > 0)):
    raise ValueError("values must ascend and weights be positive")
  if num_centroids < 1:
    raise ValueError(f"num_centroids is {num_centroids}")
  if values.size < num_centroids:
    raise InputError(f"expected at least {num_centroids} distinct values for "
                     f"as many centroids, found {values.size}")
  center = np.average(values, weights=weights)
  centered = values - center
  if method is Fit.EXACT:
    starts = _optimal_starts(centered, weights, num_centroids)
    steps, tolerance = _POLISH_STEPS, 0.0
  else:
    starts = _companded_starts(centered, weights, num_centroids)
    steps, tolerance = _LLOYD_STEPS, _LLOYD_TOLERANCE
  return _lloyd(centered, weights, starts, steps, tolerance) + center


def nearest(values: np.ndarray, centroids: np.ndarray) -> np.ndarray:
  """Index of the centroid next to each value; the lower one at a tie.

  Args:
    values: any shape.
    centroids: [k] ascending.

  Returns:
    intp, the shape of `values`.
  """
  c = np.asarray(centroids, np.float64)
  return np.searchsorted((c[1:] + c[:-1]) / 2, values, side="left")


def squared_error(values: np.ndarray, weights: np.ndarray,
                  centroids: np.ndarray) -> float:
  """Weighted sum of squared distances to the nearest centroid."""
  c = np.asarray(centroids, np.float64)
  return float(np.sum(weights * (values - c[nearest(values, c)]) ** 2))


def _optimal_starts(x: np.ndarray, w: np.ndarray, k: int) -> np.ndarray:
  """First index of every cluster of the optimum, [k]."""
  starts = _dynamic_program(x, w, k)
  cost = _cluster_cost(x, w, starts)
  if cost < _CANCELLATION * np.sum(w * x * x):
    # A few times slower, and 2,000 times finer where long doubles are 80 bits.
    wide = _dynamic_program(
        x.astype(np.longdouble), w.astype(np.longdouble), k)
    if _cluster_cost(x, w, wide) < cost:
      return wide
  return starts


def _dynamic_program(x: np.ndarray, w: np.ndarray, k: int) -> np.ndarray:
  """Optimal 1-D k-means in O(k n log n).

  best[m][i], the cost of the first i points in m clusters, is the minimum over
  j of best[m-1][j] + cost(j, i). The cost of a cluster obeys the quadrangle
  inequality, so the minimizing j grows with i and with m. Rows i are solved
  from coarse to fine: between two solved rows only the j between their
  minimizers can be minimal, about n candidates for all rows of one level,
  which numpy compares at once.
  """
  n = x.size
  # Sums are added up in long double: a sum of n rounded terms is off by more
  # than the difference between candidates.
  sums = [np.concatenate([[0], np.cumsum(a.astype(np.longdouble))]).astype(
      x.dtype) for a in (w, w * x, w * x * x)]
  s0, s1, s2 = sums
  best = np.zeros_like(s2)
  best[1:] = s2[1:] - s1[1:] ** 2 / s0[1:]
  choice = np.zeros((k, n + 1), np.int32)
  for m in range(2, k + 1):
    # Later clusters need a point each; the last layer needs its last row only.
    first, last = (n if m == k else m), n - (k - m)
    base = best - s2
    best, choice[m - 1] = _layer(
        base, s0, s1, s2, choice[m - 2], m, first, last)
  starts = np.zeros(k, np.intp)
  i = n
  for m in range(k, 1, -1):
    i = choice[m - 1, i]
    starts[m - 1] = i
  return starts


def _layer(base, s0, s1, s2, previous, m, first, last):
  """One m of the recursion, for rows first..last.

  Args:
    base: best[m-1] - s2, [n + 1].
    s0, s1, s2: prefix sums of weight, first and second moment.
    previous: minimizers of m - 1.
    m: number of clusters.
    first, last: the rows to solve.

  Returns:
    best[m] and its minimizers, both [n + 1], valid in first..last.
  """
  best, choice = np.zeros_like(s2), np.zeros(s2.size, np.int32)
  count = last - first + 1
  stride = 1 << int(count).bit_length()
  solved_low, solved_high = first - 1, last + 1
  while stride:
    # Rows first - 1 + odd multiples of the stride.
    rows = np.arange(solved_low + stride, solved_high, 2 * stride)
    if rows.size:
      below, above = rows - stride, rows + stride
      low = np.where(below >= first, choice[below], m - 1)
      low = np.maximum(np.maximum(low, previous[rows]), m - 1)
      high = np.where(above <= last, choice[np.minimum(above, last)], rows - 1)
      high = np.maximum(np.minimum(high, rows - 1), low)
      best[rows], choice[rows] = _minimize(base, s0, s1, s2, rows, low, high)
    stride >>= 1
  return best, choice


def _minimize(base, s0, s1, s2, rows, low, high):
  """Minimum and first minimizer j in low..high of every row's cost."""
  sizes = high - low + 1
  begin = np.concatenate([[0], np.cumsum(sizes)[:-1]])
  j = np.arange(sizes.sum()) + np.repeat(low - begin, sizes)
  cost = np.repeat(s1[rows], sizes)
  cost -= s1[j]
  cost *= cost
  weight = np.repeat(s0[rows], sizes)
  weight -= s0[j]
  cost /= weight
  np.subtract(base[j], cost, out=cost)
  lowest = np.minimum.reduceat(cost, begin)
  hits = np.flatnonzero(cost == np.repeat(lowest, sizes))
  return lowest + s2[rows], j[hits[np.searchsorted(hits, begin)]]


def _companded_starts(x: np.ndarray, w: np.ndarray, k: int) -> np.ndarray:
  """Clusters of equal integral of density^(1/3), each with a point, [k].

  The best spacing in the limit of many centroids (Panter and Dite, 1951).
  """
  width = np.gradient(x) if x.size > 1 else np.ones(1)
  total = np.cumsum(np.cbrt(w / width) * width)
  starts = np.searchsorted(total, total[-1] * np.arange(k) / k, side="right")
  starts = np.maximum.accumulate(starts - np.arange(k)) + np.arange(k)
  # From the right, so that the last clusters keep a point too.
  starts = np.minimum(starts, w.size - k + np.arange(k))
  starts[0] = 0
  return starts


def _cluster_means(x, w, starts):
  return np.add.reduceat(w * x, starts) / np.add.reduceat(w, starts)


def _cluster_cost(x, w, starts) -> float:
  sizes = np.diff(starts, append=x.size)
  means = np.repeat(_cluster_means(x, w, starts), sizes)
  return float(np.sum(w * (x - means) ** 2))


def _lloyd(x, w, starts, steps, tolerance) -> np.ndarray:
  """Lloyd's iteration from a partition, as long as the error falls."""
  cost = _cluster_cost(x, w, starts)
  for _ in range(steps):
    means = _cluster_means(x, w, starts)
    moved = np.searchsorted(x, (means[1:] + means[:-1]) / 2, side="right")
    moved = np.concatenate([[0], moved])
    if np.any(np.diff(moved, append=x.size) <= 0):
      break  # A cluster would be empty; the one before stands.
    moved_cost = _cluster_cost(x, w, moved)
    if moved_cost >= cost:
      break
    gain, starts, cost = cost - moved_cost, moved, moved_cost
    if gain <= tolerance * cost:
      break
  return _cluster_means(x, w, starts)
