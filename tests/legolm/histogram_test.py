"""Counting weights: exact for 16 bits, to a stated width otherwise."""

import math

from absl.testing import absltest, parameterized
import numpy as np

from legolm_jax import codebook, histogram
from legolm_jax.codebook import Fit, nearest
from legolm_jax.errors import InputError
from legolm_jax.histogram import Distribution
from tests.legolm import checkpoints

_BINS = (
    (checkpoints.BF16, False), (checkpoints.F16, False),
    (checkpoints.F32, False), (checkpoints.F32, True))


class BinsTest(parameterized.TestCase):

  @parameterized.parameters(*_BINS)
  def test_values_lie_in_their_bins(self, dtype, scaled):
    x = (50 if scaled else 1) * checkpoints.weights((40, 50), dtype)
    x = x.astype(dtype)
    bins = histogram.bins_for(dtype, scaled)
    keys = bins.keys(x)
    inside = ~bins.always_outliers()[keys]
    self.assertTrue(np.all(x[inside] >= bins.low[keys][inside]))
    self.assertTrue(np.all(x[inside] <= bins.high[keys][inside]))
    self.assertEqual(bins.count(x).sum(), x.size)
    self.assertTrue(np.all(np.abs(x[~inside]) >= histogram.ScaledBins.LIMIT - 1e-3))

  @parameterized.parameters(checkpoints.BF16, checkpoints.F16)
  def test_16_bits_are_exact(self, dtype):
    x = checkpoints.weights((40, 50), dtype)
    bins = histogram.bins_for(dtype, False)
    found = Distribution.of(bins, bins.count(x))
    values, counts = np.unique(x.astype(np.float64), return_counts=True)
    np.testing.assert_array_equal(found.values, values)
    np.testing.assert_array_equal(found.counts, counts)

  @parameterized.parameters(*_BINS)
  def test_code_table(self, dtype, scaled):
    x = (50 if scaled else 1) * checkpoints.weights((40, 50), dtype)
    x = x.astype(dtype).ravel()
    bins = histogram.bins_for(dtype, scaled)
    d = Distribution.of(bins, bins.count(x))
    threshold = d.threshold(95)
    centroids = d.within(threshold).fit(20, Fit.EXACT)
    table, unsure = bins.code_table(centroids, threshold, escape=20)
    codes = table[bins.keys(x)]
    outlier = codes == 20
    sure = ~outlier & (codes != unsure)
    np.testing.assert_array_equal(
        codes[sure], nearest(x[sure].astype(np.float64), centroids))
    self.assertGreater(sure.mean(), 0.9)
    self.assertBetween(outlier.mean(), 0.03, 0.05)
    width = 2.0 ** -10 * max(1, threshold)
    self.assertLess(np.abs(x[~outlier].astype(np.float64)).max(),
                    threshold + width)


class DistributionTest(parameterized.TestCase):

  def test_signed_zeros_are_one_value(self):
    bins = histogram.bins_for(checkpoints.BF16, False)
    x = np.array([0.0, -0.0, 1.0], checkpoints.BF16)
    found = Distribution.of(bins, bins.count(x))
    np.testing.assert_array_equal(found.values, [0, 1])
    np.testing.assert_array_equal(found.counts, [2, 1])

  @parameterized.parameters(1, 50, 80, 99, 99.9)
  def test_threshold(self, percentile):
    x = checkpoints.weights((100, 100), checkpoints.BF16).ravel()
    bins = histogram.bins_for(checkpoints.BF16, False)
    threshold = Distribution.of(bins, bins.count(x)).threshold(percentile)
    sizes = np.sort(np.abs(x.astype(np.float64)))
    self.assertEqual(
        threshold, sizes[math.ceil(percentile / 100 * x.size) - 1])

  def test_percentile_of_more_than_2_to_the_24(self):
    # What torch.quantile refuses; in counts, not in weights.
    d = Distribution(np.array([-2.0, -1.0, 1.0, 3.0]),
                     np.array([1 << 33, 1 << 40, 1 << 40, 1 << 32]))
    self.assertEqual(d.threshold(50), 1.0)
    self.assertEqual(d.threshold(99.3), 1.0)
    self.assertEqual(d.threshold(99.7), 2.0)
    self.assertEqual(d.threshold(99.9), 3.0)
    self.assertEqual(d.threshold(100), math.inf)
    self.assertEqual(d.total, (1 << 41) + (1 << 33) + (1 << 32))

  def test_joined_points_lose_little(self):
    x = np.sort(np.random.default_rng(0).normal(size=50_000))
    d = Distribution(x, np.ones(x.size, np.int64))
    joined = d.fit(64, Fit.EXACT)
    exact = codebook.fit(x, np.ones(x.size), 64)
    error = lambda c: codebook.squared_error(x, np.ones(x.size), c)
    self.assertLess(error(joined) / error(exact) - 1, 1e-4)

  def test_too_few_values(self):
    d = Distribution(np.arange(3.0), np.ones(3, np.int64))
    with self.assertRaisesRegex(InputError, "4 distinct values.*found 3"):
      d.fit(4, Fit.EXACT)
    close = Distribution(1 + 1e-12 * np.arange(4.0), np.ones(4, np.int64))
    with self.assertRaisesRegex(InputError, "differ in float32, found 1"):
      close.fit(4, Fit.EXACT)


if __name__ == "__main__":
  absltest.main()
