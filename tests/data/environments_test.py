"""Worlds: determinism, pixels, the plan task's rewards, expert and splits."""

import contextlib
import io
import itertools
import pickle
import subprocess
import sys

from absl.testing import absltest, parameterized
import numpy as np

from rollplex_jax.data import babyai, environments
from rollplex_jax.errors import InputError

_LEVEL = "BabyAI-GoToLocalS6N2-v0"
_MOVES = ("left", "right", "forward")


def _task(level=_LEVEL, **options):
  world = babyai.MiniGridEnvironment(level, actions=_MOVES)
  return environments.PlanTask(world, **options)


class MiniGridEnvironmentTest(parameterized.TestCase):

  @parameterized.parameters(
    (_LEVEL, 56),
    ("BabyAI-GoToRedBallGrey-v0", 56),  # 6x6 cells: 60 pixels, averaged down
    ("BabyAI-MoveTwoAcrossS5N2-v0", 56),  # 7x3 cells: black above and below
    ("MiniGrid-Empty-Random-6x6-v0", 28),
    ("MiniGrid-GoToDoor-5x5-v0", 40),  # doors in its outer walls
  )
  def test_frames_have_the_size_asked_for(self, level, size):
    world = babyai.MiniGridEnvironment(level, size=size)
    seen = world.reset(3)
    self.assertEqual(seen.frames.shape, (1, size, size, 3))
    self.assertEqual(seen.frames.dtype, np.uint8)
    self.assertGreater(len(np.unique(seen.frames)), 4)
    self.assertNotEmpty(seen.instruction)

  def test_pixels_are_minigrids_own_without_the_walls(self):
    import gymnasium
    import minigrid  # Registers the levels.

    del minigrid
    peer = gymnasium.make(_LEVEL, disable_env_checker=True).unwrapped
    world = babyai.MiniGridEnvironment(_LEVEL)
    for seed in range(10):
      with contextlib.redirect_stdout(io.StringIO()):
        peer.reset(seed=seed)
      seen = world.reset(seed)
      for code in (0, 2, 2, 1, 2):
        whole = peer.get_frame(highlight=False, tile_size=14)
        np.testing.assert_array_equal(seen.frames[0], whole[14:-14, 14:-14])
        self.assertEqual(seen.instruction, peer.mission)
        _, _, terminated, _, _ = peer.step(code)
        step = world.step(babyai.ACTIONS[code])
        self.assertEqual(step.done, terminated)
        self.assertEqual(step.reward, float(terminated))
        if step.done:
          break
        seen = step.observation

  def test_padding_is_black_and_centered(self):
    world = babyai.MiniGridEnvironment("BabyAI-MoveTwoAcrossS5N2-v0", size=56)
    frame = world.reset(0).frames[0]
    self.assertFalse(frame[:16].any())
    self.assertFalse(frame[-16:].any())
    self.assertTrue(frame[16:40].any(axis=(1, 2)).all())

  def test_a_seed_determines_the_episode(self):
    first = babyai.MiniGridEnvironment(_LEVEL)
    second = pickle.loads(pickle.dumps(first))
    second.reset(99)
    second.step("forward")
    plan = ("forward", "left", "forward", "right", "forward")
    for seed in (0, 7, (1 << 31) + 5):
      ours = environments.play(first, seed, plan)
      theirs = environments.play(second, seed, plan)
      np.testing.assert_array_equal(ours.frames, theirs.frames)
      self.assertEqual(ours.actions, theirs.actions)
      self.assertEqual(ours.reward, theirs.reward)

  def test_observations_stay_as_they_were(self):
    world = babyai.MiniGridEnvironment(_LEVEL)
    seen = world.reset(0)
    kept = seen.frames.copy()
    world.step("left")
    np.testing.assert_array_equal(seen.frames, kept)

  def test_nothing_is_printed_when_a_start_is_drawn_again(self):
    world = babyai.MiniGridEnvironment("BabyAI-GoToLocalS5N2-v0")
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
      for seed in range(50):
        world.reset(seed)
    self.assertEqual(output.getvalue(), "")

  def test_bad_input(self):
    with self.assertRaisesRegex(InputError, "level BabyAI-Nowhere-v0"):
      babyai.MiniGridEnvironment("BabyAI-Nowhere-v0")
    with self.assertRaisesRegex(InputError, "level CartPole-v1.*CartPole"):
      babyai.MiniGridEnvironment("CartPole-v1")
    with self.assertRaisesRegex(InputError, "actions of .*found jump"):
      babyai.MiniGridEnvironment(_LEVEL, actions=("jump",))
    with self.assertRaisesRegex(InputError, "size of .*at least 4.*found 3"):
      babyai.MiniGridEnvironment(_LEVEL, size=3)
    world = babyai.MiniGridEnvironment(_LEVEL, actions=_MOVES)
    with self.assertRaisesRegex(RuntimeError, "without a running episode"):
      world.step("left")
    world.reset(0)
    with self.assertRaisesRegex(InputError, "found 'pickup'"):
      world.step("pickup")

  def test_steps_after_the_end_are_refused(self):
    world = babyai.MiniGridEnvironment(_LEVEL, actions=_MOVES)
    world.reset(0)
    while True:
      step = world.step(world.expert())
      if step.done:
        break
    self.assertEqual(step.reward, 1.0)
    with self.assertRaisesRegex(RuntimeError, "without a running episode"):
      world.step("left")

  def test_importing_loads_no_game_library(self):
    code = (
      "import sys; import rollplex_jax.data.babyai; "
      "print([m for m in ('minigrid', 'pygame', 'jax', 'torch') "
      "if m in sys.modules])"
    )
    result = subprocess.run(
      [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    self.assertEqual(result.stdout.strip(), "[]")


class ExpertTest(absltest.TestCase):

  def test_recovers_when_the_policy_strays(self):
    world = babyai.MiniGridEnvironment(_LEVEL, actions=_MOVES)
    rng = np.random.default_rng(0)
    for seed in range(30):
      world.reset(seed)
      reward, done, steps = 0.0, False, 0
      while not done:
        advice = world.expert()
        action = _MOVES[rng.integers(3)] if steps % 3 == 1 else advice
        _, reward, done = world.step(action)
        steps += 1
      self.assertEqual(reward, 1.0)

  def test_levels_without_an_expert_say_so(self):
    world = babyai.MiniGridEnvironment("MiniGrid-Empty-Random-6x6-v0")
    world.reset(0)
    with self.assertRaisesRegex(InputError, "MiniGrid-Empty-Random-6x6-v0"):
      world.expert()

  def test_knows_nothing_where_the_words_are_missing(self):
    world = babyai.MiniGridEnvironment("BabyAI-PickupDist-v0", actions=_MOVES)
    task = environments.PlanTask(world, max_actions=40)
    self.assertIsNone(task.demonstration(0))
    world = babyai.MiniGridEnvironment("BabyAI-PickupDist-v0")
    plan = environments.PlanTask(world, max_actions=40).demonstration(0)
    self.assertEndsWith(plan, "pickup")


class PlanTaskTest(parameterized.TestCase):

  def test_row_is_a_video_and_the_mission(self):
    task = _task(prompt="Do: {instruction}.", fps=4.0)
    row = task.row(5)
    self.assertEqual(row["seed"], 5)
    (message,) = row["prompt"]
    self.assertEqual(message["role"], "user")
    video, text = message["content"]
    seen = task.environment.reset(5)
    self.assertEqual(text, {"type": "text", "text": f"Do: {seen.instruction}."})
    self.assertEqual((video["type"], video["fps"]), ("video", 4.0))
    np.testing.assert_array_equal(np.stack(video["video"]), seen.frames)

  def test_blind_rows_show_nothing_but_say_the_same(self):
    task = _task()
    seeing, blind = task.row(5), task.row(5, blind=True)
    contents = [row["prompt"][0]["content"] for row in (seeing, blind)]
    self.assertEqual(contents[0][1], contents[1][1])
    frames = [np.stack(content[0]["video"]) for content in contents]
    self.assertEqual(frames[0].shape, frames[1].shape)
    self.assertFalse(frames[1].any())

  @parameterized.parameters(True, False)
  def test_the_experts_plan_succeeds_and_is_paid_by_its_length(self, must_stop):
    task = _task(must_stop=must_stop)
    for seed in range(100):
      plan = task.demonstration(seed)
      length = len(plan.split())
      score = task.reward(plan, {"seed": seed})
      self.assertEqual((score["success"], score["malformed"]), (1.0, 0.0))
      self.assertEqual(score["length"], length)
      self.assertAlmostEqual(score["overall"], 1.0 - 0.3 * length / 12)

  def test_overlong_plans_cost_or_fail(self):
    seed = 0
    plan = _task().demonstration(seed)
    longer = f" {plan}\nleft left"
    length = len(longer.split())
    score = _task().reward(longer, {"seed": seed})
    self.assertAlmostEqual(score["overall"], 1.0 - 0.3 * length / 12)
    score = _task(must_stop=True).reward(longer, {"seed": seed})
    self.assertEqual(score["overall"], 0.0)
    self.assertEqual(score["success"], 0.0)
    self.assertEqual(score["malformed"], 0.0)

  @parameterized.parameters(
    "", "   ", "jump", "left, right", "Forward", "left<|im_end|>",
    "go left", "pickup", " ".join(["left"] * 13),
  )
  def test_malformed_plans_score_nothing(self, completion):
    score = _task().reward(completion, {"seed": 1})
    self.assertEqual(score["overall"], 0.0)
    self.assertEqual(score["success"], 0.0)
    self.assertEqual(score["malformed"], 1.0)
    self.assertEqual(score["length"], len(completion.split()))

  def test_the_wrong_object_earns_nothing(self):
    task = _task()
    for seed in range(40):
      plan = task.demonstration(seed).split()
      if len(plan) > 1:
        score = task.reward(" ".join(plan[:-1]), {"seed": seed})
        self.assertEqual((score["overall"], score["malformed"]), (0.0, 0.0))

  def test_repeated_plans_and_copies_score_the_same(self):
    task = _task(must_stop=True, max_actions=8)
    copy = pickle.loads(pickle.dumps(task))
    self.assertEqual((copy.must_stop, copy.max_actions), (True, 8))
    for seed in range(10):
      for plan in ("forward", "left forward forward", "left forward forward"):
        row = {"seed": seed}
        self.assertEqual(task.reward(plan, row), copy.reward(plan, row))

  def test_a_row_of_another_task_is_refused(self):
    with self.assertRaisesRegex(InputError, "'seed'"):
      _task().reward("left", {"prompt": "x"})

  def test_demonstrations_are_deterministic_and_cover_the_level(self):
    task = _task()
    rows = list(task.demonstrations(range(300)))
    self.assertLen(rows, 300)
    self.assertEqual(
      [row["response"] for row in rows],
      [task.demonstration(seed) for seed in range(300)],
    )
    lengths = [len(row["response"].split()) for row in rows]
    # The teacher sees the whole room: its plans are the shortest there are in
    # all but a few starts (mean 3.50 over many).
    self.assertBetween(np.mean(lengths), 3.2, 3.8)
    self.assertLessEqual(max(lengths), 8)

  def test_plans_over_the_limit_are_left_out(self):
    task = _task(max_actions=3)
    rows = list(task.demonstrations(range(100)))
    self.assertBetween(len(rows), 30, 80)
    self.assertLessEqual(max(len(r["response"].split()) for r in rows), 3)

  def test_noise_replaces_one_action_of_its_share_of_plans(self):
    task = _task()
    changed = 0
    for seed in range(200):
      clean = task.demonstration(seed).split()
      noisy = task.demonstration(seed, noise=0.5).split()
      self.assertEqual(noisy, task.demonstration(seed, noise=0.5).split())
      different = sum(a != b for a, b in zip(clean, noisy, strict=True))
      self.assertLessEqual(different, 1)
      changed += different
      fully = task.demonstration(seed, noise=1.0).split()
      self.assertEqual(sum(a != b for a, b in zip(clean, fully)), 1)
    self.assertBetween(changed, 75, 125)

  @parameterized.parameters(
    (dict(max_actions=0), "max_actions"),
    (dict(length_penalty=1.5), "length_penalty"),
    (dict(fps=0.0), "fps"),
    (dict(prompt="go"), "prompt"),
  )
  def test_bad_options(self, options, named):
    with self.assertRaisesRegex(InputError, named):
      _task(**options)


class SplitTest(absltest.TestCase):

  def test_splits_never_meet(self):
    last = environments.SEEDS_PER_SPLIT - 1
    ranges = sorted((s.seed(0), s.seed(last)) for s in environments.Split)
    self.assertLen(ranges, 3)
    for (_, end), (start, _) in itertools.pairwise(ranges):
      self.assertLess(end, start)
    for index in (-1, last + 1):
      with self.assertRaisesRegex(InputError, "episode index"):
        environments.Split.EVAL.seed(index)

  def test_held_out_starts_are_new(self):
    task = _task()

    def starts(split):
      for index in range(500):
        video, text = task.row(split.seed(index))["prompt"][0]["content"]
        yield video["video"][0].tobytes(), text["text"]

    splits = environments.Split
    trained = {*starts(splits.WARM_START), *starts(splits.TRAIN)}
    self.assertEmpty(trained.intersection(starts(splits.EVAL)))


if __name__ == "__main__":
  absltest.main()
