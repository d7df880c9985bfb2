"""The adapter for lm-evaluation-harness, alone and in the harness itself."""

import importlib.util
import itertools
import json
import pathlib
import tempfile
import types
import warnings

from absl.testing import absltest
import numpy as np

from legolm_jax import harness
from legolm_jax.errors import InputError
from tests.legolm import toy_models

HAS_HARNESS = importlib.util.find_spec("lm_eval") is not None


def requests(*args):
  return [types.SimpleNamespace(args=a) for a in args]


class RequestsTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    (self.table,) = toy_models.tables(1)
    self.p = toy_models.logprobs(self.table)

  def make(self, table=None, **kwargs):
    return harness.Requests(
        toy_models.bigram(self.table if table is None else table),
        toy_models.encode, toy_models.decode,
        **{"max_length": 100, "end_token_id": 0, **kwargs})

  def sum_of(self, text):
    ids = toy_models.encode(text)
    return sum(self.p[a, b] for a, b in itertools.pairwise(ids))

  def test_loglikelihood(self):
    found = self.make().loglikelihood(
        requests(("say", " no"), ("", "abc"), ("x ", "y")))
    for (logprob, greedy), text in zip(found, ("y no", "\0abc", "x y")):
      self.assertAlmostEqual(logprob, self.sum_of(text), places=3)
      self.assertFalse(greedy)

  def test_contexts_lose_their_beginning(self):
    (found,) = self.make(max_length=4).loglikelihood(
        requests(("abcdefg", "hi")))
    self.assertAlmostEqual(found[0], self.sum_of("ghi"), places=3)
    with self.assertRaisesRegex(InputError, "fewer than 4 tokens, found 4"):
      self.make(max_length=4).loglikelihood(requests(("a", "bcde")))

  def test_rolling_scores_every_token_once(self):
    text = "the whole of a text"
    for length in (2, 3, 7, 20, 100):
      found = self.make(max_length=length).loglikelihood_rolling(
          requests((text,), ("x",), ("",)))
      self.assertAlmostEqual(found[0], self.sum_of("\0" + text), places=3)
      self.assertAlmostEqual(found[1], self.sum_of("\0x"), places=3)
      self.assertEqual(found[2], 0)

  def test_generate_until(self):
    model = self.make(toy_models.says("abcdefgh"))
    for options, expected in (
        ({"until": ["e"]}, "bcd"), ({"until": "gh", "max_gen_toks": 9}, "bcdef"),
        ({"max_gen_toks": 3}, "bcd"), ({"until": ["zz", "fg", "de"]}, "bc"),
        ({}, "bcdefgh")):  # After h, the table is flat: token 0 ends it.
      self.assertEqual(
          model.generate_until(requests(("xa", options))), [expected])
    with self.assertRaisesRegex(InputError, "do_sample"):
      model.generate_until(requests(("a", {"do_sample": True})))

  def test_prefix(self):
    seen = []

    def logits(tokens):
      seen.append(np.array(tokens))
      return self.table[tokens]

    model = harness.Requests(logits, toy_models.encode, toy_models.decode,
                             max_length=9, end_token_id=0, prefix=[5])
    model.loglikelihood(requests(("a", "b")))
    np.testing.assert_array_equal(seen[0][0, :3], [5, 97, 98])


@absltest.skipUnless(
    HAS_HARNESS, "needs lm_eval: pip install -r requirements-test.txt")
class HarnessTest(absltest.TestCase):

  def test_a_local_task(self):
    folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps({"text": f"say {word}"}) + "\n"
                            for word in ("abc", "abd", "ab")))
    task = {
        "task": "local_lambada", "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "output_type": "loglikelihood", "test_split": "test",
        "doc_to_text": "{{text.split(' ')[:-1]|join(' ')}}",
        "doc_to_target": "{{' '+text.split(' ')[-1]}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean",
                         "higher_is_better": True}]}
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")
      import lm_eval

      model = harness.make_model(
          toy_models.bigram(toy_models.says("y abc")), toy_models.encode,
          toy_models.decode, max_length=100, end_token_id=0)
      found = lm_eval.simple_evaluate(
          model=model, tasks=[task], bootstrap_iters=0)
    self.assertAlmostEqual(
        found["results"]["local_lambada"]["acc,none"], 2 / 3)


if __name__ == "__main__":
  absltest.main()
