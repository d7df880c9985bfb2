"""LAMBADA and HellaSwag files, and what models answer."""

import json
import pathlib
import tempfile

from absl.testing import absltest, parameterized
import numpy as np

from legolm_jax import benchmarks
from legolm_jax.errors import InputError
from tests.legolm import toy_models

HELLASWAG = {
    "ind": 4, "activity_label": "Removing ice", "ctx_a": "A man [header] sits.",
    "ctx_b": "he", "ctx": "unused", "label": "1", "source_id": "x",
    "endings": ["ab ab", "abc [title] d", "zz", "q"]}


class BenchmarksTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.file = pathlib.Path(
        self.enter_context(tempfile.TemporaryDirectory()), "data.jsonl")

  def write(self, *rows):
    self.file.write_text("".join(json.dumps(r) + "\n\n" for r in rows))
    return self.file

  def test_lambada(self):
    questions = benchmarks.read_lambada(self.write(
        {"text": "say abc"}, {"text": "say abd"}, {"text": "abc abcabc"}))
    self.assertEqual(questions[0].context, "say")
    self.assertEqual(questions[0].choices, (" abc",))
    # After y comes a space, after that a, b, c, and a again.
    model = toy_models.bigram(toy_models.says("y abca") + toy_models.says("c "))
    scores = benchmarks.ask(model, questions, toy_models.encode)
    found = benchmarks.lambada_outcomes(scores)
    np.testing.assert_array_equal(found["accuracy"], [1, 0, 0])
    table = toy_models.logprobs(
        toy_models.says("y abca") + toy_models.says("c "))
    self.assertAlmostEqual(
        found["loss"][0], -sum(table[ord(a), ord(b)] for a, b in zip(
            "y ab", " abc")), places=4)
    summary = benchmarks.summary(found, {
        k: np.ones_like(v) for k, v in found.items()})
    self.assertAlmostEqual(summary["accuracy"], 1 / 3)
    self.assertAlmostEqual(summary["accuracy_change"], -2 / 3)
    self.assertAlmostEqual(summary["accuracy_stderr"], 1 / 3)
    self.assertEqual(summary["items"], 3)

  def test_hellaswag(self):
    (question,) = benchmarks.read_hellaswag(self.write(HELLASWAG))
    self.assertEqual(question.context, "Removing ice: A man sits. He")
    self.assertEqual(
        question.choices, (" ab ab", " abc. d", " zz", " q"))
    self.assertEqual(question.answer, 1)

  def test_hellaswag_norms_by_characters(self):
    """A long ending loses by its sum and wins by its mean."""
    questions = benchmarks.read_hellaswag(self.write(
        HELLASWAG | {"endings": ["q", "abababababababab"], "label": 1}))
    table = np.zeros((128, 128), np.float32)
    for a, b in ("ab", "ba"):
      table[ord(a), ord(b)] = 3
    scores = benchmarks.ask(
        toy_models.bigram(table), questions, toy_models.encode)
    self.assertLess(scores[0][1].logprob, scores[0][0].logprob)
    found = benchmarks.hellaswag_outcomes(questions, scores)
    self.assertEqual((found["acc"][0], found["acc_norm"][0]), (0, 1))

  def test_prefix_stands_before_every_context(self):
    seen = []

    def model(tokens):
      seen.append(np.array(tokens))
      return np.zeros((*tokens.shape, 128), np.float32)

    questions = benchmarks.read_lambada(self.write({"text": "a b"}))
    benchmarks.ask(model, questions, toy_models.encode, prefix=[1],
                   batch_size=1)
    np.testing.assert_array_equal(seen[0][0, :4], [1, 97, 32, 98])

  def test_limit(self):
    rows = [{"text": f"a {i}"} for i in range(5)]
    self.assertLen(benchmarks.read_lambada(self.write(*rows), 2), 2)

  @parameterized.parameters(
      ("read_lambada", {"text": "one"}, ":1: text: expected several words"),
      ("read_lambada", {"text": "a b "}, ":1: text: expected several words"),
      ("read_lambada", {"txt": "a b"}, ":1: text: expected a string, found None"),
      ("read_lambada", [1], ":1: expected a JSON object"),
      ("read_hellaswag", HELLASWAG | {"label": ""}, "label: expected 0 to 3"),
      ("read_hellaswag", HELLASWAG | {"label": 4}, "label: .*found 4"),
      ("read_hellaswag", HELLASWAG | {"endings": ["a"]}, "two or more strings"),
      ("read_hellaswag", HELLASWAG | {"ctx_b": 3}, "ctx_b: expected a string"))
  def test_bad_lines(self, read, row, message):
    with self.assertRaisesRegex(InputError, message) as caught:
      getattr(benchmarks, read)(self.write(row))
    self.assertIn(str(self.file), str(caught.exception))

  def test_bad_files(self):
    for content, message in ((b"", "found none"), (b"{", ":1: not valid JSON"),
                             (b"\xff", "not UTF-8")):
      self.file.write_bytes(content)
      with self.assertRaisesRegex(InputError, message):
        benchmarks.read_lambada(self.file)
    with self.assertRaisesRegex(InputError, "No such file"):
      benchmarks.read_lambada(self.file.with_name("nothing"))

  def test_too_long(self):
    questions = benchmarks.read_lambada(self.write({"text": "a b c d"}))
    with self.assertRaisesRegex(InputError, "at most 5 tokens, found 7"):
      benchmarks.ask(toy_models.bigram(toy_models.tables(1)[0]), questions,
                     toy_models.encode, max_length=5)


if __name__ == "__main__":
  absltest.main()
