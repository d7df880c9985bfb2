"""Environments in workers: what fails ends its own episode and nothing else."""

import tempfile
import time

from absl.testing import absltest, parameterized
import numpy as np

from rollplex_jax.data import fallbacks
from rollplex_jax.data.environments import Split
from rollplex_jax.data.processor import Processor
from rollplex_jax.data.settings import DataConfig, EnvironmentConfig
from rollplex_jax.errors import InputError
from rollplex_jax.tasks import EpisodesTask
from tests.helpers import tiny_tokenizer

_MAKE = "tests.data.misbehavior:World"
_UNREADABLE = "tests.data.counting_world:UnreadableWorld"


def _task(num_workers=2, demonstrations=False, processor=None, **options):
  world = {"make": _MAKE, "max_turns": 4, "num_episodes": 100,
           "num_workers": num_workers, **options}
  return EpisodesTask(
    DataConfig(
      environment=EnvironmentConfig(**world), reward_timeout=0.5,
      reward_fallback=-1.0, reward_max_timeouts=6),
    processor,
    demonstrations=demonstrations)


def _shown(message):
  """The first pixel of what a message shows, which tells the time."""
  return message and int(message["content"][0]["video"][0][0, 0, 0]) - 100


class PlayerTest(parameterized.TestCase):

  def test_a_failing_step_ends_its_own_episode_and_no_other(self):
    player = _task().player()
    bad = [("forever", "timeout"), ("raises", "exception"),
           ("exits_hard", "exit"), ("allocates", "memory"),
           ("nothing", "wrong_type"), ("nan", "not_finite")]
    player.start([{"seed": i} for i in range(12)])
    self.assertEqual([_shown(m) for m in player.step(["on"] * 12)], [1] * 12)
    texts = [word for word, _ in bad] + ["on"] * 6
    with self.assertLogs("absl", "WARNING") as logs:
      messages = player.step(texts)
      self.assertEqual([_shown(m) for m in messages], [None] * 6 + [2] * 6)
      # Those on a worker that was killed go on where they were.
      messages = player.step(["win"] * 6 + ["on"] * 5 + ["win"])
      self.assertEqual([_shown(m) for m in messages],
                       [None] * 6 + [3] * 5 + [None])
      player.step([None] * 6 + ["win"] * 5 + [None])
      scores = player.scores()
    for (_, kind), found in zip(bad, scores[:6]):
      rest, error = fallbacks.split(found)
      self.assertEqual(error, kind)
      self.assertEqual(rest, {"overall": -1.0, "success": 0.0, "malformed": 0.0})
    for found, turns in zip(scores[6:], [4] * 5 + [3]):
      rest, error = fallbacks.split(found)
      self.assertIsNone(error)
      self.assertEqual((rest["success"], rest["turns"]), (1.0, turns))
    self.assertLen(logs.output, 6)
    self.assertRegex(
      "\n".join(logs.output), rf"environment {_MAKE}, episode 0: took more")

  def test_a_start_that_fails_is_an_episode_that_fails(self):
    player = _task(num_workers=0).player()
    player.start([{"seed": 12}, {"seed": 13}, {"seed": 14}])
    with self.assertLogs("absl", "WARNING"):
      self.assertEqual([_shown(m) for m in player.step(["on"] * 3)],
                       [1, None, None])
      kinds = [fallbacks.split(s)[1] for s in player.scores()]
    self.assertEqual(kinds, [None, "exception", "wrong_type"])

  def test_a_world_that_failed_is_not_used_again(self):
    player = _task(num_workers=0).player()
    player.start([{"seed": 1}])
    with self.assertLogs("absl", "WARNING"):
      player.step(["raises"])
      player.scores()
    player.start([{"seed": 1}])
    self.assertEqual(_shown(player.step(["on"])[0]), 1)

  def test_two_players_do_not_disturb_one_another(self):
    task = _task()
    one, other = task.player(), task.player()
    one.start([{"seed": 1}, {"seed": 2}])
    one.step(["on", "on"])
    other.start([{"seed": 3}])
    self.assertEqual(_shown(other.step(["on"])[0]), 1)
    self.assertEqual([_shown(m) for m in one.step(["on", "on"])], [2, 2])
    self.assertEqual(_shown(other.step(["on"])[0]), 2)

  def test_a_world_that_hangs_can_not_take_hours(self):
    player = _task(max_turns=30).player()
    player.start([{"seed": i} for i in range(20, 60)])
    start = time.monotonic()
    with self.assertLogs("absl", "WARNING"):
      player.step(["forever"] * 40)
      scores = player.scores()
    self.assertLess(time.monotonic() - start, 6.0)
    kinds = [fallbacks.split(s)[1] for s in scores]
    self.assertBetween(kinds.count("timeout"), 6, 7)
    self.assertEqual(kinds.count("skipped"), 40 - kinds.count("timeout"))


class PlanTest(absltest.TestCase):

  def test_failing_plans_score_the_fallback(self):
    task = _task(max_turns=1)
    plans = ["on win", "forever", "jump", "on raises", "forever"]
    rows = [{"seed": 5}] * 5
    with self.assertLogs("absl", "WARNING"):
      found = [fallbacks.split(s) for s in task.score(plans, rows, range(5))]
    self.assertEqual([kind for _, kind in found],
                     [None, "timeout", None, "exception", "timeout"])
    self.assertEqual([s["overall"] for s, _ in found], [0.95, -1, 0, -1, -1])


class RowsTest(absltest.TestCase):

  def test_rows_come_from_workers_too(self):
    rows = _task().train_rows
    self.assertEqual(rows[3]["seed"], Split.TRAIN.seed(3))
    (video, text) = rows[3]["prompt"][0]["content"]
    self.assertEqual(text["text"], f"seed {Split.TRAIN.seed(3)}")
    self.assertEqual(np.stack(video["video"]).shape, (1, 4, 4, 3))

  def test_a_start_that_can_not_be_shown_is_black(self):
    rows = _task().train_rows
    bad = next(i for i in range(100) if rows._split.seed(i) % 100 == 13)
    with self.assertLogs("absl", "WARNING"):
      row = rows[bad]
    self.assertEqual(row["seed"], Split.TRAIN.seed(bad))
    self.assertFalse(np.stack(row["prompt"][0]["content"][0]["video"]).any())
    shown = _task(demonstrations=True).train_rows
    self.assertLen(shown[bad + 5]["turns"], 2)
    with self.assertLogs("absl", "WARNING") as logs:
      with self.assertRaisesRegex(
          InputError, f"{Split.TRAIN.seed(bad)}: raised ValueError"):
        shown[bad]
    self.assertRegex(logs.output[0], "raised ValueError.*is left out; further")
    self.assertNotIn("score", logs.output[0])

  def test_what_does_not_work_is_refused_at_once(self):
    for make, message in (
      ("tests.data.misbehavior:Nothing", "^environment .* has no function Noth"),
      ("tests.data.misbehavior:raises", "called without arguments"),
      ("tests.data.misbehavior:handler", "called without arguments"),
      ("tests.data.misbehavior:exits_hard", "called without arguments"),
      ("no_such_module:World", "^environment .*importing no_such_module failed"),
    ):
      with self.assertRaisesRegex(InputError, message):
        _task(make=make)
    with self.assertRaisesRegex(InputError, "^level Nowhere: expected"):
      _task(make="", level="Nowhere")


class RefusedTest(parameterized.TestCase):
  """What a policy's processor refuses."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.processor = Processor.from_checkpoint(
      tiny_tokenizer.write_checkpoint(folder, True))

  def task(self, make=_UNREADABLE, **options):
    return _task(0, make=make, processor=self.processor, **options)

  @parameterized.parameters(1, 4)
  def test_an_episode_that_starts_with_it_fails_and_no_other(self, max_turns):
    task = self.task(max_turns=max_turns)
    rows = [task.train_rows[i] for i in range(6)]
    for row in rows:
      self.processor.prompt(row)
    bad = [i for i, row in enumerate(rows) if row["seed"] % 3 == 1]
    self.assertLen(bad, 2)
    with self.assertLogs("absl", "WARNING") as logs:
      if max_turns == 1:
        scores = task.score(["win"] * 6, rows, range(6))
      else:
        player = task.player()
        player.start(rows)
        messages = player.step(["on"] * 6)
        self.assertEqual([i for i, m in enumerate(messages) if m is None], bad)
        player.step(["win"] * 6)
        scores = player.scores()
    for i, found in enumerate(scores):
      rest, kind = fallbacks.split(found)
      self.assertEqual(kind, "wrong_type" if i in bad else None)
      self.assertEqual(rest["success"], float(i not in bad))
    self.assertLen(logs.output, 1)
    self.assertRegex(
      logs.output[0],
      rf"World, episode {rows[bad[0]]['seed']}: what is seen first: .*scores -1")

  def test_an_episode_that_shows_it_later_can_be_failed(self):
    player = self.task(actions_per_turn=2).player()
    player.start([{"seed": 0}, {"seed": 2}, {"seed": 3}])
    messages = player.step(["on grow", "on on", "mumble"])
    for i in (0, 2):
      with self.assertRaises(InputError) as caught:
        self.processor.continuation(
          messages[i], f"episode {i}, turn 1", after_end=True)
      player.fail(i, str(caught.exception))
    self.assertEqual(
      [m is None for m in player.step(["on"] * 3)], [True, False, True])
    player.step(["win"] * 3)
    with self.assertLogs("absl", "WARNING") as logs:
      found = [fallbacks.split(s) for s in player.scores()]
    self.assertEqual(
      [kind for _, kind in found], ["wrong_type", None, "wrong_type"])
    self.assertEqual(
      found[0][0], {"overall": -1.0, "success": 0.0, "malformed": 0.0})
    self.assertEqual(found[1][0]["success"], 1.0)
    self.assertLen(logs.output, 1)
    self.assertRegex(logs.output[0], r"World, episode 0: turn 1: frame 2")

  def test_a_world_that_only_shows_such_is_refused(self):
    make = "tests.data.counting_world:MumblingWorld"
    self.task(make=make, max_turns=1)
    with self.assertRaisesRegex(
        InputError, "^environment .*MumblingWorld: what is seen next: "):
      self.task(make=make)
    with self.assertRaisesRegex(
        InputError, "^environment .*misbehavior:World: what is seen first: "):
      self.processor.max_prompt_length = 3
      self.addCleanup(setattr, self.processor, "max_prompt_length", None)
      self.task(make=_MAKE)

  @parameterized.parameters(
    ("UnreadableWorld", "has no expert"),
    ("BadTeacherWorld", "raised KeyError"),
    ("MumblingTeacherWorld", "what is seen next"),
  )
  def test_a_world_without_demonstrations_teaches_nothing(self, name, reason):
    with self.assertNoLogs("absl", "WARNING"):
      with self.assertRaisesRegex(
          InputError, f"{name}: expected demonstrations .*none in 16 episodes; "
          f"episode {Split.TRAIN.seed(0)}: .*{reason}") as caught:
        self.task(make=f"tests.data.counting_world:{name}", demonstrations=True)
    self.assertNotIn("\n", str(caught.exception))


if __name__ == "__main__":
  absltest.main()
