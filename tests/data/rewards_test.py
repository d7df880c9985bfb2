"""Reward functions on hand-made answers, and the checks around them."""

import os
import tempfile

from absl.testing import absltest, parameterized
import numpy as np

from rollplex_jax.data import functions, rewards
from rollplex_jax.errors import InputError


class ExactMatchTest(parameterized.TestCase):

  @parameterized.parameters(
    ("Paris", "paris", 1.0),
    ("  the  Red\nball. ", "The red ball", 1.0),
    ("<think>x</think><answer> Paris </answer>", "Paris", 1.0),
    ("<answer>Rome</answer><answer>Paris</answer>", "Paris", 1.0),
    ("\uff30aris", "Paris", 1.0),
    ("Paris", ["Lyon", "Paris"], 1.0),
    ("It is Paris", "Paris", 0.0),
    ("", "Paris", 0.0),
    ("7", 7, 1.0),
  )
  def test_value(self, completion, answer, expected):
    row = {"answer": answer}
    self.assertEqual(rewards.exact_match(completion, row), expected)

  @parameterized.parameters(
    rewards.exact_match, rewards.multiple_choice, rewards.number_match
  )
  def test_missing_answer(self, reward):
    with self.assertRaisesRegex(InputError, "'answer'"):
      reward("x", {"prompt": "x"})


class MultipleChoiceTest(parameterized.TestCase):

  @parameterized.parameters(
    ("B", 1.0),
    ("b", 1.0),
    ("(B)", 1.0),
    ("B.", 1.0),
    ("B) the cat", 1.0),
    ("B: the cat,\nas A is wrong", 1.0),
    ("(B) the cat", 1.0),
    ("<answer>B. cat</answer>", 1.0),
    ("A first, but \\boxed{B}", 1.0),
    ("\\boxed{\\text{B}}", 1.0),
    ("I think that the answer is (B).", 1.0),
    ("Answer: B", 1.0),
    ("The answer is **B**", 1.0),
    ("Not (A) but (B)", 1.0),
    ("The answer is A. No: the answer is B", 1.0),
    ("A", 0.0),
    ("A cat in a Box", 0.0),
    ("Because", 0.0),
    ("The answer is Barcelona", 0.0),
    ("", 0.0),
  )
  def test_value(self, completion, expected):
    for answer in ("B", "(B)", "b", "B. a cat"):
      score = rewards.multiple_choice(completion, {"answer": answer})
      self.assertEqual(score, expected)

  def test_bad_answer(self):
    with self.assertRaisesRegex(InputError, "found 'cat'"):
      rewards.multiple_choice("B", {"answer": "cat"})


class NumberMatchTest(parameterized.TestCase):

  @parameterized.parameters(
    ("42", "42", 1.0),
    ("so 3 + 4 = 7.", 7, 1.0),
    ("x = -3", "-3", 1.0),
    ("x = \u22123", "-3", 1.0),
    ("10-3", "3", 1.0),  # a difference, not a negative number
    ("it costs $1,234.50", 1234.5, 1.0),
    ("1{,}000", 1000, 1.0),
    ("in total 1,2,3", 3, 1.0),
    ("\\boxed{12} and not 13", "12", 1.0),
    ("\\boxed{\\frac{3}{4}}", "0.75", 1.0),
    ("\\boxed{-\\dfrac{3}{4}}", "-3/4", 1.0),
    ("3/4", "0.75", 1.0),
    ("1e-3", 0.001, 1.0),
    (".5", "1/2", 1.0),
    ("<answer>5</answer> after 7 tries", "5", 1.0),
    ("72", "48 + 24 = 72\n#### 72", 1.0),
    ("71.9", "72", 0.0),
    ("1/0", "1", 0.0),
    ("no number", "1", 0.0),
    ("", "0", 0.0),
    ("\\boxed{7", "7", 1.0),
    ("v2", "2", 0.0),
  )
  def test_value(self, completion, answer, expected):
    row = {"answer": answer}
    self.assertEqual(rewards.number_match(completion, row), expected)

  def test_tolerance(self):
    row = {"answer": "200"}
    self.assertEqual(rewards.number_match("201", row), 0.0)
    self.assertEqual(rewards.number_match("201", row, tolerance=0.01), 1.0)

  def test_bad_answer(self):
    with self.assertRaisesRegex(InputError, "expected a number, found 'cat'"):
      rewards.number_match("1", {"answer": "cat"})


class FormatRewardTest(parameterized.TestCase):

  @parameterized.parameters(
    ("<think>a\nb</think>\n<answer>7</answer>\n", 1.0),
    ("<think>a</think><answer> </answer>", 0.0),
    ("<think></think><answer>7</answer>", 0.0),
    ("<think>a</think> so <answer>7</answer>", 0.0),
    ("<think>a</think><answer>7</answer> indeed", 0.0),
    ("<think>a</think><think>b</think><answer>7</answer>", 0.0),
    ("<answer>7</answer>", 0.0),
    ("", 0.0),
  )
  def test_value(self, completion, expected):
    self.assertEqual(rewards.format_reward(completion, {}), expected)


def _load(spec):
  reward = functions.load_function(spec, "reward")
  rewards.check_reward(reward, spec)
  return reward


class LoadRewardTest(parameterized.TestCase):

  def _file(self, text):
    folder = self.enterContext(tempfile.TemporaryDirectory())
    path = os.path.join(folder, "my_reward.py")
    with open(path, "w", encoding="utf-8") as file:
      file.write(text)
    return path

  def test_from_a_module(self):
    loaded = _load("rollplex_jax.data.rewards:exact_match")
    self.assertIs(loaded, rewards.exact_match)

  def test_from_a_file_with_a_dataclass(self):
    path = self._file(
      "from __future__ import annotations\nimport dataclasses\n"
      "@dataclasses.dataclass\nclass Score:\n  value: float\n"
      "def reward(completion, row, *, scale=2.0):\n"
      "  return Score(scale * len(completion)).value\n"
    )
    self.assertEqual(_load(f"{path}:reward")("abc", {}), 6.0)

  def test_two_files_of_one_name_stay_apart(self):
    paths = [
      self._file(f"def reward(completion, row):\n  return {value}\n")
      for value in (1.0, 2.0)
    ]
    loaded = [_load(f"{path}:reward") for path in paths]
    self.assertEqual([one("", {}) for one in loaded], [1.0, 2.0])

  @parameterized.parameters(
    ("exact_match", "expected module:function"),
    (":exact_match", "expected module:function"),
    ("no.such.module:f", "importing no.such.module failed: ModuleNotFound"),
    ("nowhere.py:f", "file nowhere.py not found"),
    ("rollplex_jax.data.rewards:nope", "has no function nope"),
    ("rollplex_jax.data.rewards:__name__", "expected a function, found str"),
  )
  def test_what_is_not_there(self, spec, message):
    with self.assertRaisesRegex(InputError, message) as caught:
      _load(spec)
    self.assertIn(f"reward {spec}:", str(caught.exception))
    self.assertNotIn("\n", str(caught.exception))

  @parameterized.parameters(
    ("def f(completion): return 1.0\n", r"\(completion, row\), found"),
    ("def f(a, b, c): return 1.0\n", r"\(completion, row\), found"),
    ("def f(a, b, *, c): return 1.0\n", r"\(completion, row\), found"),
    ("async def f(a, b): return 1.0\n", "found async"),
    ("def f(a, b) return 1.0\n", "failed: SyntaxError"),
    ("raise RuntimeError('a\\nb')\n", "failed: RuntimeError: a b"),
  )
  def test_what_can_not_be_called(self, text, message):
    with self.assertRaisesRegex(InputError, message) as caught:
      _load(f"{self._file(text)}:f")
    self.assertNotIn("\n", str(caught.exception))


class ScoreCompletionsTest(parameterized.TestCase):

  @parameterized.parameters(
    (1, {"overall": 1.0}),
    (True, {"overall": 1.0}),
    (np.float32(0.5), {"overall": 0.5}),
    (np.array(0.25), {"overall": 0.25}),
    ({"overall": 1, "success": True}, {"overall": 1.0, "success": 1.0}),
  )
  def test_numbers_of_every_kind(self, value, expected):
    (score,) = rewards.score_completions(lambda c, r: value, ["x"], [{}])
    self.assertEqual(score, expected)
    self.assertTrue(all(type(part) is float for part in score.values()))

  @parameterized.parameters(
    (None, "a number or a dict of numbers, found NoneType"),
    ("1.0", "found str"),
    ((1.0,), "found tuple"),
    (np.ones(2), r"found ndarray of float64 \[2\]"),
    (1j, "found complex"),
    (float("nan"), "found nan"),
    (float("inf"), "found inf"),
    ({}, "'overall', found no keys"),
    ({"reward": 1.0}, "'overall', found reward"),
    ({"overall": 1.0, "why": "good"}, "a number as 'why', found str"),
    ({"overall": float("nan")}, "a number as 'overall', found nan"),
  )
  def test_wrong_returns_name_the_row(self, value, message):
    def mine(completion, row):
      return value if row["bad"] else 0.0

    rows = [{"bad": False}, {"bad": True}]
    with self.assertRaisesRegex(InputError, message) as caught:
      rewards.score_completions(mine, ["x", "y"], rows)
    self.assertIn("mine, row 1:", str(caught.exception))
    with self.assertRaisesRegex(InputError, "mine, row 70:"):
      rewards.score_completions(mine, ["x", "y"], rows, row_indices=[3, 70])

  def test_exceptions_name_the_row(self):
    with self.assertRaisesRegex(
      InputError, "row 0: raised KeyError: 'missing'"
    ) as caught:
      rewards.score_completions(lambda c, r: r["missing"], ["x"], [{}])
    self.assertIsInstance(caught.exception.__cause__, KeyError)
    with self.assertRaisesRegex(InputError, "exact_match, row 0: .*'answer'"):
      rewards.score_completions(rewards.exact_match, ["x"], [{}])


if __name__ == "__main__":
  absltest.main()
