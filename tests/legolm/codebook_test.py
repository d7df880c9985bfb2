"""Centroids against exhaustive search and a plain dynamic program."""

import itertools
import time

from absl.testing import absltest, parameterized
import numpy as np

from legolm_jax import codebook
from legolm_jax.codebook import Fit
from legolm_jax.errors import InputError


def cost_of(x, w, starts):
  total = 0.0
  for part, weight in zip(np.split(x, starts[1:]), np.split(w, starts[1:])):
    mean = np.average(part, weights=weight)
    total += np.sum(weight * (part - mean) ** 2)
  return total


def brute_force(x, w, k):
  return min(cost_of(x, w, np.array((0, *cut)))
             for cut in itertools.combinations(range(1, len(x)), k - 1))


def plain_program(x, w, k):
  """O(k n^2), every cluster's cost summed around its own mean."""
  n = len(x)
  cost = np.full((n + 1, n + 1), np.inf)
  for i in range(n):
    mean, weight, error = 0.0, 0.0, 0.0
    for j in range(i, n):  # Welford's update.
      weight += w[j]
      delta = x[j] - mean
      mean += delta * w[j] / weight
      error += w[j] * delta * (x[j] - mean)
      cost[i, j + 1] = error
  best = cost[0]
  for _ in range(k - 1):
    best = np.min(best[:, None] + cost, axis=0)
  return best[n]


class ExactFitTest(parameterized.TestCase):

  @parameterized.product(
      offset=(0.0, 1e3), unit=(1.0, 1e-6), seed=tuple(range(8)))
  def test_brute_force(self, offset, unit, seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 11))
    k = int(rng.integers(1, n + 1))
    x = np.sort(rng.choice(1000, n, replace=False)) * unit + offset
    w = rng.integers(1, 50, n).astype(np.float64)
    found = codebook.fit(x, w, k)
    self.assertLen(found, k)
    # An offset costs the digits that the values themselves have lost.
    rounding = n * 50 * np.spacing(offset + 1000 * unit) ** 2
    self.assertLessEqual(
        codebook.squared_error(x, w, found),
        brute_force(x, w, k) * (1 + 1e-9) + rounding)

  @parameterized.parameters(2, 7, 32, 100)
  def test_plain_program(self, k):
    rng = np.random.default_rng(k)
    x = np.sort(rng.standard_t(3, size=400))
    w = rng.integers(1, 1000, x.size).astype(np.float64)
    found = codebook.squared_error(x, w, codebook.fit(x, w, k))
    self.assertLessEqual(found, plain_program(x, w, k) * (1 + 1e-9))

  def test_clusters_far_apart(self):
    # Their width is 1e-8 of their distance: float64 sums of squares can't see
    # it.
    x = np.sort(np.concatenate(
        [c + 1e-8 * np.arange(4) for c in (-1.0, 0.5, 3.0)]))
    w = np.array([1.0, 2, 1, 5, 1, 1, 3, 1, 2, 1, 1, 1])
    found = codebook.fit(x, w, 6)
    self.assertLessEqual(codebook.squared_error(x, w, found),
                         brute_force(x, w, 6) * (1 + 1e-6))

  def test_as_many_centroids_as_values(self):
    x = np.array([-1.0, 0.0, 0.5, 4.0])
    np.testing.assert_allclose(codebook.fit(x, np.ones(4), 4), x, rtol=1e-12,
                               atol=1e-15)

  def test_fast_enough(self):
    x = np.linspace(-3, 3, 16384)
    start = time.perf_counter()
    codebook.fit(x, np.exp(-x * x / 2), 128)
    # A third of a second on an idle core.
    self.assertLess(time.perf_counter() - start, 10)

  def test_bad_input(self):
    x = np.arange(3.0)
    with self.assertRaisesRegex(
        InputError, "expected at least 4 distinct values.* found 3"):
      codebook.fit(x, np.ones(3), 4)
    for values, weights in ((x[::-1], np.ones(3)), (x, np.zeros(3)),
                            (x, np.ones(2))):
      with self.assertRaises(ValueError):
        codebook.fit(values, weights, 2)


class LloydMaxTest(parameterized.TestCase):

  @parameterized.parameters(2, 16, 127)
  def test_near_the_optimum_and_not_below(self, k):
    x = np.sort(np.random.default_rng(0).normal(size=5000))
    w = np.ones(x.size)
    best = codebook.squared_error(x, w, codebook.fit(x, w, k))
    lloyd = codebook.squared_error(x, w, codebook.fit(x, w, k, Fit.LLOYD_MAX))
    self.assertGreaterEqual(lloyd, best * (1 - 1e-12))
    self.assertLess(lloyd, 1.1 * best)

  def test_fixed_point(self):
    x = np.sort(np.random.default_rng(1).normal(size=300))
    w = np.ones(x.size)
    c = codebook.fit(x, w, 4, Fit.LLOYD_MAX)
    of = codebook.nearest(x, c)
    np.testing.assert_allclose(
        c, [x[of == i].mean() for i in range(4)], atol=2e-2)

  @parameterized.parameters(*range(1, 7))
  def test_every_cluster_has_a_point(self, k):
    x = np.array([0.0, 1e-9, 2e-9, 1.0, 50.0, 51.0])
    self.assertLen(codebook.fit(x, np.ones(6), k, Fit.LLOYD_MAX), k)


class NearestTest(absltest.TestCase):

  def test_against_all_distances(self):
    rng = np.random.default_rng(0)
    c = np.sort(rng.normal(size=17))
    x = rng.normal(size=1000)
    np.testing.assert_array_equal(
        codebook.nearest(x, c), np.abs(x[:, None] - c).argmin(1))


if __name__ == "__main__":
  absltest.main()
