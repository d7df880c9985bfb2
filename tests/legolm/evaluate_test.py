"""Numbers of models that are small enough to count by hand."""

import itertools
import math

from absl.testing import absltest, parameterized
import numpy as np

from legolm_jax import evaluate
from legolm_jax.errors import InputError
from tests.legolm import toy_models


class WindowsTest(parameterized.TestCase):

  def test_no_window_spans_documents(self):
    found = evaluate.windows([range(7), range(10, 13), range(20, 22)], 3)
    np.testing.assert_array_equal(
        found, [[0, 1, 2], [3, 4, 5], [10, 11, 12]])
    self.assertEqual(found.dtype, np.int32)

  def test_prefix_counts(self):
    np.testing.assert_array_equal(
        evaluate.windows([range(5)], 3, [9]), [[9, 0, 1], [9, 2, 3]])

  @parameterized.parameters(
      ([], 4, (), "found 0 tokens in 0 documents"),
      ([range(3), range(2)], 4, (), "of 4 tokens, found 5 tokens in 2"),
      ([range(9)], 1, (), "expected at least 2"),
      ([range(9)], 2, (1, 1), "expected at least 3"))
  def test_refuses(self, documents, length, prefix, message):
    with self.assertRaisesRegex(InputError, message):
      evaluate.windows(documents, length, prefix)


class CompareTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.ours, self.theirs = toy_models.tables(2)
    self.tokens = np.random.default_rng(1).integers(
        0, toy_models.VOCAB, (7, 9)).astype(np.int32)

  def by_hand(self, first=1):
    """float64, one token at a time."""
    p, q = map(toy_models.logprobs, (self.ours, self.theirs))
    rows = []
    for row in self.tokens:
      pairs = [(row[t - 1], row[t]) for t in range(first, len(row))]
      rows.append((
          np.mean([-p[a, b] for a, b in pairs]),
          np.mean([-q[a, b] for a, b in pairs]),
          np.mean([np.sum(np.exp(q[a]) * (q[a] - p[a])) for a, _ in pairs]),
          np.mean([p[a].argmax() == q[a].argmax() for a, _ in pairs])))
    return np.array(rows).T

  @parameterized.product(batch_size=(1, 3, 7), num_prefix=(0, 1, 3))
  def test_equals_counting(self, batch_size, num_prefix):
    found = evaluate.compare(
        toy_models.bigram(self.ours), self.tokens,
        reference=toy_models.bigram(self.theirs), batch_size=batch_size,
        num_prefix=num_prefix)
    first = max(num_prefix, 1)
    loss, reference, kl, agreement = self.by_hand(first)
    np.testing.assert_allclose(found.loss, loss, rtol=1e-5)
    np.testing.assert_allclose(found.reference_loss, reference, rtol=1e-5)
    np.testing.assert_allclose(found.kl, kl, rtol=1e-4)
    np.testing.assert_allclose(found.agreement, agreement, rtol=1e-6)
    self.assertEqual(found.tokens, 7 * (9 - first))

  def test_summary(self):
    found = evaluate.compare(
        toy_models.bigram(self.ours), self.tokens,
        reference=toy_models.bigram(self.theirs)).summary()
    loss, reference, kl, _ = self.by_hand()
    ours, theirs = math.exp(loss.mean()), math.exp(reference.mean())
    self.assertAlmostEqual(found["perplexity"], ours, places=4)
    self.assertAlmostEqual(found["reference_perplexity"], theirs, places=4)
    self.assertAlmostEqual(
        found["change_percent"], 100 * (ours / theirs - 1), places=3)
    # A change of log-perplexity by 1 % of itself is one of about 1 percent.
    paired = np.std(loss - reference, ddof=1) / math.sqrt(7)
    self.assertAlmostEqual(found["change_percent_stderr"],
                           100 * paired * ours / theirs, places=3)
    self.assertAlmostEqual(
        found["mean_kl_stderr"], np.std(kl, ddof=1) / math.sqrt(7), places=5)
    self.assertEqual((found["tokens"], found["windows"]), (56, 7))

  def test_paired_error_is_below_unpaired(self):
    """Two models that differ little, on windows that differ much."""
    near = self.ours + 1e-3 * self.theirs
    found = evaluate.compare(
        toy_models.bigram(near), self.tokens,
        reference=toy_models.bigram(self.ours)).summary()
    self.assertLess(found["change_percent_stderr"],
                    found["perplexity_stderr"] / found["perplexity"])
    same = evaluate.compare(
        toy_models.bigram(self.ours), self.tokens,
        reference=toy_models.bigram(self.ours)).summary()
    self.assertEqual(
        [same[k] for k in ("change_percent", "change_percent_stderr",
                           "mean_kl", "top1_agreement")], [0, 0, 0, 1])

  def test_one_window_has_no_error(self):
    found = evaluate.compare(
        toy_models.bigram(self.ours), self.tokens[:1]).summary()
    self.assertIsNone(found["perplexity_stderr"])
    self.assertNotIn("mean_kl", found)

  def test_not_finite(self):
    self.ours[3] = np.nan
    self.tokens[:] = 1
    self.tokens[4, 2] = 3
    with self.assertRaisesRegex(InputError, "window 4.*model are not finite"):
      evaluate.compare(toy_models.bigram(self.ours), self.tokens, batch_size=2)


class ContinuationsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    (self.table,) = toy_models.tables(1)
    rng = np.random.default_rng(2)
    self.requests = [
        (rng.integers(0, 20, a).tolist(), rng.integers(0, 20, b).tolist())
        for a, b in ((3, 2), (80, 1), (1, 5), (2, 70), (1, 1))]
    best = self.table.argmax(axis=1)
    self.requests.append(([4], [int(best[4]), int(best[best[4]])]))

  @parameterized.parameters(1, 2, 10)
  def test_equals_counting(self, batch_size):
    p = toy_models.logprobs(self.table)
    found = evaluate.score_continuations(
        toy_models.bigram(self.table), self.requests, batch_size=batch_size)
    for (context, continuation), score in zip(self.requests, found, strict=True):
      ids = [context[-1], *continuation]
      pairs = list(itertools.pairwise(ids))
      self.assertAlmostEqual(
          score.logprob, sum(p[a, b] for a, b in pairs), places=3)
      self.assertEqual(
          score.is_greedy, all(p[a].argmax() == b for a, b in pairs))
    self.assertTrue(found[-1].is_greedy)

  def test_refuses(self):
    model = toy_models.bigram(self.table)
    for request, message in ((([], [1]), "0 and 1 tokens"),
                             (([1], []), "1 and 0 tokens"),
                             (([1, 2], [3]), "at most 2 tokens, found 3")):
      with self.assertRaisesRegex(ValueError, f"request 1: .*{message}"):
        evaluate.score_continuations(
            model, [([1], [1]), request], max_length=2)

  def test_spaces_belong_to_the_word_after_them(self):
    encode = lambda text: [ord(c) for c in text]
    self.assertEqual(evaluate.split_pair(encode, "a ", "b"),
                     ([97], [32, 98]))
    self.assertEqual(evaluate.split_pair(encode, "", " b"), ([], [32, 98]))


if __name__ == "__main__":
  absltest.main()
