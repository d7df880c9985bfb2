"""Episodes of several turns: what is seen, scores, the teacher, and players."""

import pickle

from absl.testing import absltest, parameterized
import numpy as np

from rollplex_jax.data import babyai, environments, episodes, fallbacks
from rollplex_jax.data.episode_workers import EpisodeWorkers, failed_episodes
from rollplex_jax.data.settings import DataConfig, EnvironmentConfig
from rollplex_jax.data.workers import Limits
from rollplex_jax.data.worlds import World
from rollplex_jax.errors import InputError
from rollplex_jax.tasks import EpisodesTask
from tests.data.counting_world import CountingWorld

_LEVEL = "BabyAI-GoToLocalS6N2-v0"
_MOVES = ("left", "right", "forward")


def _task(**options):
  world = babyai.MiniGridEnvironment(_LEVEL, actions=_MOVES)
  return episodes.TurnTask(world, **options)


def _frames(message):
  (video, *_) = message["content"]
  return np.stack(video["video"])


class EpisodeTest(parameterized.TestCase):

  def test_each_message_shows_the_world_after_the_action(self):
    task = _task(max_turns=4, fps=3.0)
    peer = babyai.MiniGridEnvironment(_LEVEL, actions=_MOVES)
    row = task.row(7)
    np.testing.assert_array_equal(
      _frames(row["prompt"][0]), peer.reset(7).frames
    )
    episode = task.start(7)
    for word in ("left", "right", "left"):
      message = episode.step(f" {word}\n")
      self.assertEqual(message["role"], "user")
      (video,) = message["content"]  # The mission is no news.
      self.assertEqual((video["type"], video["fps"]), ("video", 3.0))
      np.testing.assert_array_equal(
        _frames(message), peer.step(word).observation.frames
      )

  def test_a_turn_of_several_actions_shows_all_of_them(self):
    task = episodes.TurnTask(CountingWorld(), max_turns=2, actions_per_turn=3)
    episode = task.start(0)
    message = episode.step("on same on")
    np.testing.assert_array_equal(
      _frames(message)[:, 0, 0, 0], [11, 11, 21, 21, 31, 31]
    )
    # A new instruction is told, an old one is not.
    self.assertEqual(
      message["content"][1:], [{"type": "text", "text": "number 3"}]
    )
    episode = task.start(0)
    self.assertLen(episode.step("same same")["content"], 1)

  def test_success_is_paid_by_the_actions_taken(self):
    task = episodes.TurnTask(
      CountingWorld(), max_turns=4, actions_per_turn=2, length_penalty=0.4
    )
    episode = task.start(0)
    self.assertIsNotNone(episode.step("on on"))
    # What comes after the end of the episode in a turn isn't executed.
    self.assertIsNone(episode.step("win on"))
    self.assertTrue(episode.over)
    self.assertEqual(episode.scores(), dict(
      overall=1.0 - 0.4 * 3 / 8, success=1.0, turns=2.0, actions=3.0,
      malformed=0.0, truncated=0.0))
    with self.assertRaisesRegex(RuntimeError, "over"):
      episode.step("on")

  @parameterized.parameters("", "jump", "on jump", "on on on", "on, win", "Win")
  def test_a_malformed_turn_ends_the_episode_with_nothing(self, completion):
    task = episodes.TurnTask(CountingWorld(), max_turns=4, actions_per_turn=2)
    episode = task.start(0)
    episode.step("on")
    self.assertIsNone(episode.step(completion))
    scores = episode.scores()
    self.assertEqual(
      (scores["overall"], scores["success"], scores["malformed"]), (0, 0, 1)
    )
    self.assertEqual((scores["turns"], scores["truncated"]), (2, 0))

  def test_an_episode_is_cut_off_or_ends_in_failure(self):
    task = episodes.TurnTask(CountingWorld(), max_turns=2)
    episode = task.start(0)
    self.assertIsNotNone(episode.step("on"))
    self.assertIsNone(episode.step("on"))
    self.assertEqual(episode.scores()["truncated"], 1.0)
    episode = episodes.TurnTask(CountingWorld(), max_turns=9).start(0)
    for _ in range(5):
      self.assertIsNotNone(episode.step("on"))
    self.assertIsNone(episode.step("on"))
    scores = episode.scores()
    self.assertEqual((scores["truncated"], scores["overall"]), (0.0, 0.0))

  def test_blind_episodes_show_nothing_all_along(self):
    task = _task()
    self.assertTrue(task.row(3, blind=True)["blind"])
    self.assertNotIn("blind", task.row(3))
    message = task.start(3, blind=True).step("left")
    self.assertFalse(_frames(message).any())
    self.assertEqual(_frames(message).shape, (1, 56, 56, 3))

  @parameterized.parameters(
    (dict(max_turns=0), "max_turns"),
    (dict(actions_per_turn=0), "actions_per_turn"),
    (dict(length_penalty=1.5), "length_penalty"),
    (dict(prompt="go"), "prompt"),
  )
  def test_bad_options(self, options, named):
    with self.assertRaisesRegex(InputError, named):
      _task(**options)


class DemonstrationTest(parameterized.TestCase):

  @parameterized.parameters((1, 0.0), (1, 0.3), (2, 0.0), (2, 0.3))
  def test_playing_the_responses_gives_the_messages(self, per_turn, noise):
    task = _task(actions_per_turn=per_turn)
    copy = pickle.loads(pickle.dumps(task))
    wrong = shown = 0
    for seed in range(40):
      turns = task.demonstration(seed, noise=noise)
      again = copy.demonstration(seed, noise=noise)
      if turns is None:
        self.assertIsNone(again)
        self.assertGreater(noise, 0.0)
        continue
      shown += 1
      episode = copy.start(seed)
      for turn, same in zip(turns, again, strict=True):
        self.assertEqual(turn["response"], same["response"])
        message = episode.step(turn["response"])
        self.assertEqual(message is None, turn["message"] is None)
        if message is not None:
          np.testing.assert_array_equal(
            _frames(message), _frames(turn["message"])
          )
        wrong += not turn["train"]
      self.assertEqual(episode.scores()["success"], 1.0)
    self.assertGreater(shown, 25)
    self.assertEqual(wrong > 0, noise > 0)

  def test_only_the_teachers_own_advice_is_taught(self):
    task = _task()
    world = task.environment
    for seed in range(30):
      turns = task.demonstration(seed, noise=0.5) or []
      world.reset(seed)
      for turn in turns:
        self.assertEqual(turn["response"] == world.expert(), turn["train"])
        world.step(turn["response"])

  def test_starts_without_a_way_are_left_out(self):
    task = _task(max_turns=2)
    found = [task.demonstration(seed) for seed in range(60)]
    self.assertIn(None, found)
    self.assertEqual(max(len(turns) for turns in found if turns), 2)


class PlayerTest(parameterized.TestCase):

  @parameterized.parameters(0, 2)
  def test_episodes_side_by_side_are_those_played_alone(self, num_workers):
    rng = np.random.default_rng(0)
    world = babyai.MiniGridEnvironment(_LEVEL)
    task = episodes.TurnTask(world, max_turns=5)
    rows = [task.row(seed, blind=seed == 2) for seed in (1, 2, 2, 3, 1)]
    rows[2] = task.row(2)
    workers = EpisodeWorkers(
      World(level=_LEVEL, max_turns=5), Limits(num_workers=num_workers)
    )
    player = workers.player(failed_episodes("it", 0.0))
    for _ in range(2):  # The second start replaces the first.
      player.start(rows)
      player.step(["left"] * 5)
    player.start(rows)
    said = [[] for _ in rows]
    for turn in range(6):
      texts = [str(rng.choice([*_MOVES, "jump"], p=[0.3, 0.3, 0.3, 0.1]))
               for _ in rows]
      if turn == 1:
        texts[3] = None  # Isn't asked to act.
      messages = player.step(texts)
      for i, (text, message) in enumerate(zip(texts, messages)):
        if text is None:
          self.assertIsNone(message)
          continue
        said[i].append((text, message))
    for row, turns, scores in zip(rows, said, player.scores(), strict=True):
      alone = task.start(row["seed"], blind=bool(row.get("blind")))
      for text, message in turns:
        expected = None if alone.over else alone.step(text)
        self.assertEqual(message is None, expected is None)
        if message is not None:
          np.testing.assert_array_equal(_frames(message), _frames(expected))
      self.assertEqual(fallbacks.split(scores), (alone.scores(), None))


class TurnsTaskTest(parameterized.TestCase):

  def _make(self, demonstrations=False, **options):
    world = EnvironmentConfig(**{
      "level": _LEVEL, "max_turns": 6, "num_episodes": 20, "eval_episodes": 4,
      **options})
    return EpisodesTask(
      DataConfig(environment=world), demonstrations=demonstrations
    )

  def test_rows_and_player_are_of_the_same_episodes(self):
    task = self._make()
    self.assertEqual(task.max_turns, 6)
    row = task.train_rows[3]
    self.assertNotIn("turns", row)
    player = task.player()
    player.start([row, task.held_out(blind=True)[1]])
    messages = player.step(["left", "left"])
    self.assertTrue(_frames(messages[0]).any())
    self.assertFalse(_frames(messages[1]).any())
    self.assertLen(player.scores(), 2)

  def test_training_rows_hold_the_teachers_turns(self):
    rows = self._make(True, train_split="warm_start").train_rows
    turns = rows[0]["turns"]
    self.assertEqual(
      [set(turn) for turn in turns], [{"response", "message", "train"}] * len(turns)
    )
    self.assertIsNone(turns[-1]["message"])
    self.assertEqual(rows[0]["seed"], environments.Split.WARM_START.seed(0))

  def test_one_turn_stays_a_plan(self):
    task = self._make(True, max_turns=1)
    self.assertEqual(task.max_turns, 1)
    self.assertIsInstance(task.train_rows[0]["response"], str)

  @parameterized.parameters(
    (dict(must_stop=True), "must_stop=True with max_turns=6"),
    (dict(max_turns=1, actions_per_turn=2), "actions_per_turn=2 with max_tur"),
    (dict(make="x:y"), "level=.* beside make=x:y"),
  )
  def test_settings_that_contradict_one_another(self, options, message):
    with self.assertRaisesRegex(InputError, message):
      self._make(**options)


class OwnEnvironmentTest(parameterized.TestCase):

  def test_takes_the_place_of_a_level(self):
    world = EnvironmentConfig(
      make="tests.data.counting_world:CountingWorld", max_turns=3
    )
    player = EpisodesTask(DataConfig(environment=world)).player()
    player.start([{"seed": 0}, {"seed": 1}])
    player.step(["on", "win"])
    self.assertEqual([s["success"] for s in player.scores()], [0.0, 1.0])

  @parameterized.parameters(
    (dict(actions=("a b",)), "actions: expected distinct words"),
    (dict(actions=()), "actions: expected distinct words"),
    (dict(reset=lambda seed: 1 / 0), r"reset\(0\) raised ZeroDivisionError"),
    (dict(reset=lambda seed: None), "expected an Observation .* found NoneType"),
    (dict(step=lambda action: 3), r"step\('on'\): expected a Step .* found int"),
    (dict(step=lambda a: (CountingWorld().reset(0), float("nan"), False)),
     "expected a finite number as reward, found nan"),
    (dict(step=lambda a: (environments.Observation(
      np.zeros((1, 4, 4), np.uint8), ""), 0.0, False)),
     r"found uint8 \[1, 4, 4\]"),
  )
  def test_what_is_wrong_with_it_is_told_in_one_line(self, parts, message):
    world = CountingWorld()
    for name, value in parts.items():
      setattr(world, name, value)
    with self.assertRaisesRegex(InputError, message) as caught:
      environments.check_environment(world, "mine:World")
    self.assertIn("environment mine:World: ", str(caught.exception))
    self.assertNotIn("\n", str(caught.exception))


if __name__ == "__main__":
  absltest.main()
