"""Reward functions in workers: same values, stated fallbacks, dry runs."""

import os
import pathlib
import tempfile

from absl.testing import absltest, parameterized

from rollplex_jax.data import fallbacks, rewards
from rollplex_jax.data.reward_workers import RewardWorkers
from rollplex_jax.data.workers import Limits
from rollplex_jax.errors import InputError

_REWARDS = """\
import dataclasses, time

@dataclasses.dataclass
class Score:
  value: float

def by_word(completion, row):
  if completion == "raise":
    return row["missing"]
  if completion == "nan":
    return {"overall": 1.0, "part": float("nan")}
  if completion == "string":
    return "1.0"
  if completion == "hang":
    while True:
      pass
  return {"overall": Score(len(completion)).value, "success": True}

def plain(completion, row):
  return float(completion == "hang")

def no_row(completion):
  return 1.0

def fails_on_nothing(completion, row):
  return float(completion.split()[0] == "a")

def fails_on_answers(completion, row):
  return 1.0 if completion != "7" else None
"""


class RewardWorkersTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = self.enterContext(tempfile.TemporaryDirectory())
    self.path = os.path.join(self.folder, "mine.py")
    pathlib.Path(self.path).write_text(_REWARDS)

  def _workers(self, name, fallback=0.0, **limits):
    return RewardWorkers(
      f"{self.path}:{name}",
      Limits(**{"num_workers": 2, "timeout": 0.5, **limits}), fallback)

  @parameterized.parameters(0, 2)
  def test_scores_are_those_of_the_function_itself(self, num_workers):
    texts = ["7", "8", "it is 7", "", "7.5", "\\boxed{7}"]
    rows = [{"prompt": "x", "answer": 7}] * len(texts)
    workers = RewardWorkers("rollplex_jax.data.rewards:number_match",
                            Limits(num_workers=num_workers))
    found = [fallbacks.split(s)
             for s in workers.score(texts, rows, range(len(texts)))]
    expected = rewards.score_completions(rewards.number_match, texts, rows)
    self.assertEqual(found, [(score, None) for score in expected])

  def test_failures_score_the_fallback_and_are_told_once_for_each_kind(self):
    texts = ["a", "raise", "nan", "bb", "raise", "string", "hang"]
    workers = self._workers("by_word", fallback=-0.5)
    with self.assertLogs("absl", "WARNING") as logs:
      found = workers.score(texts, [{}] * 7, [4, 4, 5, 5, 6, 6, 7])
    kinds = [None, "exception", "not_finite", None, "exception", "wrong_type",
             "timeout"]
    for text, scores, kind in zip(texts, found, kinds, strict=True):
      self.assertEqual(
        {f"errors/{k}" for k in fallbacks.KINDS}, set(scores) - {
          "overall", "success"})
      rest, error = fallbacks.split(scores)
      self.assertEqual(error, kind)
      # A failure is no success, where others tell of it.
      self.assertEqual(rest, {"overall": len(text), "success": 1.0}
                       if kind is None else {"overall": -0.5, "success": 0.0})
    lines = [record.getMessage() for record in logs.records]
    self.assertLen(lines, 4)
    (line,) = [line for line in lines if "KeyError" in line]
    self.assertRegex(
      line, rf"^reward {self.path}:by_word, row 4: raised KeyError: 'missing' "
      r"\(mine.py:9\); it scores -0.5, .*reward/errors/exception$")
    self.assertNotIn("\n", "".join(lines))

  def test_success_is_made_up_for_nobody(self):
    with self.assertLogs("absl", "WARNING"):
      scores = self._workers("fails_on_nothing").score(
        ["", "a"], [{}] * 2, [0, 1])
    self.assertEqual([set(fallbacks.split(s)[0]) for s in scores],
                     [{"overall"}] * 2)

  @parameterized.parameters(
    ("nope", "has no function nope$"),
    ("no_row", r"expected a function of \(completion, row\), found"),
    ("fails_on_nothing", r"dry run on rows.jsonl:1 with completion '': raised "
     r"IndexError: list index out of range \(mine.py:\d+\); data.reward_dry"),
    ("fails_on_answers", "completion '7': its value: expected a number"),
    ("by_word", "with completion 'hang': took more than 0.5 s"),
  )
  def test_what_does_not_work_is_refused_before_anything(self, name, message):
    row = {"prompt": "x", "answer": 7, "response": "hang"}
    with self.assertRaisesRegex(InputError, message) as caught:
      self._workers(name).check(row, "rows.jsonl:1")
    self.assertIn(f"reward {self.path}:{name}: ", str(caught.exception))
    self.assertNotIn("\n", str(caught.exception))

  def test_what_works_is_not_refused(self):
    workers = self._workers("plain")
    workers.check({"prompt": "x", "answer": ["a"], "response": "b"}, "it")
    self.assertEqual(workers.score(["hang"], [{}], [0])[0]["overall"], 1.0)

  def test_without_a_dry_run_wrong_arguments_are_counted(self):
    workers = self._workers("no_row")
    workers.check({"prompt": "x"}, "it", dry_run=False)
    with self.assertLogs("absl", "WARNING"):
      (scores,) = workers.score(["a"], [{}], [0])
    self.assertEqual(fallbacks.split(scores)[1], "wrong_arguments")

  @parameterized.parameters("raise SystemExit(2)", "import os; os._exit(3)",
                            "1 / 0", "def f(:")
  def test_files_that_can_not_be_imported(self, text):
    pathlib.Path(self.path).write_text(text)
    with self.assertRaisesRegex(InputError, f"^reward {self.path}:f: "):
      self._workers("f").check(dry_run=False)

  def test_a_file_named_from_here_is_found_from_elsewhere(self):
    there = os.getcwd()
    self.addCleanup(os.chdir, there)
    os.chdir(self.folder)
    workers = RewardWorkers("mine.py:plain", Limits(num_workers=1))
    os.chdir(there)
    workers.check()
    with self.assertRaisesRegex(InputError, "^reward mine.py:nope: mine.py has"):
      os.chdir(self.folder)
      RewardWorkers("mine.py:nope", Limits(num_workers=1)).check()


if __name__ == "__main__":
  absltest.main()
