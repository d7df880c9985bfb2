"""The distribution of weights, counted in bins, and tables over those bins.

Weights are counted by an integer key. 16-bit weights are their own keys, so
that their distribution is exact; float32 weights and weights divided by a scale
fall into bins. The same keys look codes up: one table entry per bin.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math

import ml_dtypes
import numpy as np

from legolm_jax import codebook
from legolm_jax.errors import InputError

# What is fitted has at most so many points; neighbors in narrow bins are joined.
_MAX_POINTS = 1 << 14


class Bins(abc.ABC):
  """A numbering of weights.

  Attributes:
    size: number of keys.
    values: float64 [size], what a bin's weights are taken for.
    low, high: float64 [size], between which they lie.
    width: what is lost, in words; empty where nothing is.
  """

  size: int
  values: np.ndarray
  low: np.ndarray
  high: np.ndarray
  width: str = ""

  @abc.abstractmethod
  def keys(self, x: np.ndarray) -> np.ndarray:
    """The keys of weights, as unsigned integers in the shape of `x`."""

  def always_outliers(self) -> np.ndarray:
    """bool [size]: the bins whose weights no centroid stands for."""
    return np.zeros(self.size, bool)

  def count(self, x: np.ndarray) -> np.ndarray:
    """int64 [size]: how many weights have each key."""
    return np.bincount(self.keys(x).ravel(), minlength=self.size)

  def code_table(self, centroids: np.ndarray, threshold: float,
                 escape: int | None) -> tuple[np.ndarray, int]:
    """A table from key to code.

    Args:
      centroids: [k] ascending.
      threshold: bins of a larger magnitude are outliers.
      escape: the code of outliers; None if there may be none.

    Returns:
      The table [size], uint8 or wider, and the mark that it holds where the
      bin lies across the border of two centroids.
    """
    low = codebook.nearest(self.low, centroids)
    high = codebook.nearest(self.high, centroids)
    unsure = len(centroids) + 1
    table = np.where(low == high, low, unsure)
    if escape is not None:
      outlier = (np.abs(self.values) > threshold) | self.always_outliers()
      table[outlier] = escape
    return table.astype(np.uint8 if unsure < 256 else np.uint16), unsure


class ExactBins(Bins):
  """16-bit floats by their bits."""

  def __init__(self, dtype: np.dtype):
    self.size = 1 << 16
    bits = np.arange(self.size, dtype=np.uint16).view(dtype)
    with np.errstate(invalid="ignore"):  # NaN has keys too.
      self.values = self.low = self.high = bits.astype(np.float64)

  def keys(self, x):
    return x.view(np.uint16)


class FloatBins(Bins):
  """float32 by its sign, exponent and 11 bits of the mantissa."""

  _DROPPED = 12
  width = "2^-11 of the value"

  def __init__(self):
    self.size = 1 << (32 - self._DROPPED)
    bits = np.arange(self.size, dtype=np.uint32) << self._DROPPED
    last = bits | np.uint32((1 << self._DROPPED) - 1)
    with np.errstate(invalid="ignore"):  # Inf and NaN have keys too.
      near, far = (b.view(np.float32).astype(np.float64) for b in (bits, last))
      self.low, self.high = np.minimum(near, far), np.maximum(near, far)
      self.values = (near + far) / 2

  def keys(self, x):
    return x.view(np.uint32) >> np.uint32(self._DROPPED)


class ScaledBins(Bins):
  """float32 multiples of a scale, in equal steps.

  Weights of `LIMIT` scales and more share the outermost bins and are always
  outliers.
  """

  LIMIT = 16
  _STEPS = 1 << 11  # Per scale.
  width = "2^-11 scales"

  def __init__(self):
    self.size = 2 * self.LIMIT * self._STEPS
    self.values = (np.arange(self.size) - self.size // 2) / self._STEPS
    # Keys are rounded in float32, which is good to 1/256 of a bin there.
    half = (0.5 + 1 / 64) / self._STEPS
    self.low, self.high = self.values - half, self.values + half

  def keys(self, x):
    x = x * np.float32(self._STEPS)
    x += np.float32(self.size // 2 + 0.5)
    np.clip(x, 0, self.size - 1, out=x)
    return x.astype(np.uint16)

  def always_outliers(self):
    outermost = np.zeros(self.size, bool)
    outermost[[0, -1]] = True
    return outermost


@functools.cache
def bins_for(dtype: np.dtype, scaled: bool) -> Bins:
  """The bins of weights of a floating dtype, divided by a scale or not."""
  if scaled:
    return ScaledBins()
  if dtype == np.float32:
    return FloatBins()
  if dtype in (np.float16, ml_dtypes.bfloat16):
    return ExactBins(dtype)
  raise ValueError(f"no bins for {dtype}")


@dataclasses.dataclass(frozen=True)
class Distribution:
  """Distinct values, float64 [n] ascending, and how often each is found."""

  values: np.ndarray
  counts: np.ndarray

  @classmethod
  def of(cls, bins: Bins, counts: np.ndarray) -> Distribution:
    """From counts by key; +0 and -0 are one value."""
    keys = np.flatnonzero(counts)
    return cls._joined(bins.values[keys], counts[keys])

  @classmethod
  def merged(cls, parts: list[Distribution]) -> Distribution:
    """The distribution of all weights of the parts."""
    return cls._joined(np.concatenate([p.values for p in parts]),
                       np.concatenate([p.counts for p in parts]))

  @classmethod
  def _joined(cls, values, counts):
    order = np.argsort(values, kind="stable")
    values, counts = values[order], counts[order].astype(np.int64)
    if not values.size:
      return cls(values, counts)
    first = np.flatnonzero(np.diff(values, prepend=values[0] - 1) != 0)
    return cls(values[first], np.add.reduceat(counts, first))

  @property
  def total(self) -> int:
    return int(self.counts.sum())

  def threshold(self, percentile: float) -> float:
    """The smallest magnitude that `percentile` % of the weights don't exceed.

    inf at 100, where nothing is beyond.
    """
    if percentile >= 100:
      return math.inf
    sizes = Distribution._joined(np.abs(self.values), self.counts)
    reached = np.cumsum(sizes.counts)
    at = np.searchsorted(reached, percentile / 100 * self.total)
    return float(sizes.values[min(at, sizes.values.size - 1)])

  def within(self, threshold: float) -> Distribution:
    """The weights of no larger magnitude."""
    keep = np.abs(self.values) <= threshold
    return Distribution(self.values[keep], self.counts[keep])

  def fit(self, num_centroids: int, method: codebook.Fit) -> np.ndarray:
    """float32 centroids, ascending: what is stored.

    Raises:
      InputError: if there are fewer distinct values than centroids.
    """
    values, weights = self._points(num_centroids)
    centroids = codebook.fit(values, weights, num_centroids, method)
    rounded = np.unique(centroids.astype(np.float32))
    if rounded.size < num_centroids:
      raise InputError(f"expected {num_centroids} centroids that differ in "
                       f"float32, found {rounded.size}")
    return rounded

  def _points(self, at_least: int) -> tuple[np.ndarray, np.ndarray]:
    """The values to fit, joined with neighbors where there are too many."""
    if self.values.size <= max(_MAX_POINTS, at_least):
      return self.values, self.counts.astype(np.float64)
    low, high = self.values[0], self.values[-1]
    cell = ((self.values - low) * (_MAX_POINTS / (high - low))).astype(np.int64)
    first = np.flatnonzero(np.diff(cell, prepend=-1))
    weights = np.add.reduceat(self.counts, first).astype(np.float64)
    means = np.add.reduceat(self.values * self.counts, first) / weights
    if means.size < at_least:
      return self.values, self.counts.astype(np.float64)
    return means, weights
