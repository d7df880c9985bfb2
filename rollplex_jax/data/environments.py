"""Worlds that a policy sees as video and acts in with words.

`Environment` is the whole interface: `reset` and `step` return what the policy
sees, `expert` returns what a teacher would do. A single-turn episode writes its
whole plan at once (`PlanTask`); for one of several turns see `episodes`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import dataclasses
import enum
import functools
import math
import numbers
from typing import Any, NamedTuple, Protocol

import numpy as np

from rollplex_jax.data.functions import (
  NotFiniteError,
  WrongTypeError,
  describe,
)
from rollplex_jax.errors import InputError

SEEDS_PER_SPLIT = 1 << 30
_NOISE_STREAM = 0x6E6F  # Keeps a plan's noise apart from other uses of a seed.
_CACHED_PLANS = 1 << 14


@dataclasses.dataclass(frozen=True)
class Observation:
  """What the policy sees at one moment.

  Attributes:
    frames: uint8 [frames, height, width, 3], oldest first.
    instruction: what is asked for, in words.
  """

  frames: np.ndarray
  instruction: str


class Step(NamedTuple):
  """The world's answer to one action.

  Attributes:
    observation: what is seen after the action.
    reward: 1.0 when the action completes the mission, else 0.0. Shaping, such
      as a price per action, belongs to the task and not to the world.
    done: the episode is over, by success, failure or the step limit.
  """

  observation: Observation
  reward: float
  done: bool


class Environment(Protocol):
  """An episodic world. One instance serves one thread; it can be pickled."""

  @property
  def actions(self) -> tuple[str, ...]:
    """The words that `step` takes; each is one word without white space."""

  def reset(self, seed: int) -> Observation:
    """Starts the episode that `seed`, a non-negative integer, determines."""

  def step(self, action: str) -> Step:
    """Takes one action.

    Raises:
      InputError: `action` is not one of `actions`.
      RuntimeError: the episode has not been started or is over.
    """

  def expert(self) -> str | None:
    """The teacher's next action, or None where it knows none in `actions`.

    Raises:
      InputError: this world has no teacher.
    """


def check_environment(environment: Any, name: str) -> None:
  """Looks at a world's words, and tries a reset and a step.

  Args:
    environment: what is to be an `Environment`.
    name: of it, for errors.

  Raises:
    InputError: naming what was expected and what was found.
  """

  def try_out(what, method, argument):
    try:
      return getattr(environment, method)(argument)
    except Exception as error:
      raise InputError(
        f"environment {name}: {what} raised {describe(error)}"
      ) from error

  words = getattr(environment, "actions", None)
  if (
    not isinstance(words, (tuple, list))
    or not words
    or any(not isinstance(w, str) or w.split() != [w] for w in words)
    or len(set(words)) < len(words)
  ):
    raise InputError(
      f"environment {name}: actions: expected distinct words without white "
      f"space, found {words!r}"
    )
  seen = try_out("reset(0)", "reset", 0)
  check_observation(seen, f"environment {name}: reset(0)")
  step = try_out(f"step({words[0]!r})", "step", words[0])
  check_step(step, f"environment {name}: step({words[0]!r})")


def check_observation(seen: Any, where: str) -> None:
  """Raises WrongTypeError if `seen` isn't an `Observation` as it should be."""
  frames = getattr(seen, "frames", None)
  if (
    not isinstance(frames, np.ndarray)
    or frames.dtype != np.uint8
    or frames.ndim != 4
    or frames.shape[-1] != 3
    or not frames.size
  ):
    found = type(seen).__name__
    if isinstance(frames, np.ndarray):
      found = f"{frames.dtype} {list(frames.shape)}"
    raise WrongTypeError(
      f"{where}: expected an Observation with frames uint8 "
      f"[frames, height, width, 3], found {found}"
    )
  if not isinstance(seen.instruction, str):
    raise WrongTypeError(
      f"{where}: expected an instruction in words, found "
      f"{type(seen.instruction).__name__}"
    )


def check_step(step: Any, where: str) -> None:
  """Raises WrongTypeError or NotFiniteError if `step` is no good `Step`."""
  if not isinstance(step, tuple) or len(step) != 3:
    raise WrongTypeError(
      f"{where}: expected a Step (observation, reward, done), found "
      f"{type(step).__name__}"
    )
  observation, reward, _ = step
  check_observation(observation, where)
  if not isinstance(reward, numbers.Real):
    raise WrongTypeError(
      f"{where}: expected a number as reward, found {type(reward).__name__}"
    )
  if not math.isfinite(reward):
    raise NotFiniteError(
      f"{where}: expected a finite number as reward, found {reward}"
    )


class Split(enum.Enum):
  """Uses of episodes; the seeds of two splits never meet."""

  WARM_START = 0
  TRAIN = 1
  EVAL = 2

  def seed(self, index: int) -> int:
    """The seed of this split's episode number `index`.

    Raises:
      InputError: `index` is outside [0, SEEDS_PER_SPLIT).
    """
    if not 0 <= index < SEEDS_PER_SPLIT:
      raise InputError(
        f"episode index of split {self.name.lower()}: expected 0 to "
        f"{SEEDS_PER_SPLIT - 1}, found {index}"
      )
    return self.value * SEEDS_PER_SPLIT + int(index)


class Episode(NamedTuple):
  """An episode that was played.

  Attributes:
    observations: the first one and one after every action taken.
    actions: the actions taken; the episode may end before all were needed.
    reward: sum over the steps, 1.0 for success.
    done: the world ended the episode.
  """

  observations: tuple[Observation, ...]
  actions: tuple[str, ...]
  reward: float
  done: bool

  @property
  def frames(self) -> np.ndarray:
    """uint8 [all frames in order, height, width, 3]."""
    return np.concatenate([seen.frames for seen in self.observations])


def play(
  environment: Environment, seed: int, actions: Iterable[str]
) -> Episode:
  """Plays `actions` from the start that `seed` gives, until they or it end."""
  observations = [environment.reset(seed)]
  taken: list[str] = []
  total, done = 0.0, False
  for action in actions:
    observation, reward, done = environment.step(action)
    observations.append(observation)
    taken.append(action)
    total += reward
    if done:
      break
  return Episode(tuple(observations), tuple(taken), total, done)


def check_options(length_penalty: float, fps: float, prompt: str) -> None:
  """Checks what every task on an environment takes.

  Raises:
    InputError: naming the one that is out of range.
  """
  if not 0.0 <= length_penalty <= 1.0:
    raise InputError(f"length_penalty: expected 0 to 1, found {length_penalty}")
  if not fps > 0.0:
    raise InputError(f"fps: expected more than 0, found {fps}")
  if "{instruction}" not in prompt:
    raise InputError(
      f"prompt: expected {{instruction}} in it, found {prompt!r}"
    )


def prompt_row(
  observation: Observation,
  seed: int,
  prompt: str,
  fps: float,
  *,
  blind: bool = False,
) -> dict[str, Any]:
  """A row whose prompt is what is seen at the start of an episode."""
  frames = observation.frames
  if blind:
    frames = np.zeros_like(frames)
  text = prompt.replace("{instruction}", observation.instruction)
  content = [
    {"type": "video", "video": list(frames), "fps": fps},
    {"type": "text", "text": text},
  ]
  row = {"prompt": [{"role": "user", "content": content}], "seed": seed}
  return {**row, "blind": True} if blind else row


class PlanTask:
  """One turn per episode: the completion is the whole plan.

  The policy sees the start of an episode and writes at most `max_actions`
  action words separated by white space. The plan runs in the world open loop
  and scores success * (1 - length_penalty * length / max_actions), where
  length counts every word written. Anything else (an unknown word, none at
  all, too many) is malformed and scores 0.

  In a small room a fixed sweep passes every object sooner or later. Two things
  keep that from paying: a `max_actions` near the teacher's longest plan, and
  `must_stop`, under which a plan that goes on after the mission is complete
  fails, so that the policy has to know where it is and what was asked for.

  One instance serves one thread. It pickles, for use in worker processes.
  """

  def __init__(
    self,
    environment: Environment,
    *,
    max_actions: int = 12,
    length_penalty: float = 0.3,
    must_stop: bool = False,
    prompt: str = "{instruction}",
    fps: float = 2.0,
  ):
    """Makes the task.

    Args:
      environment: the world.
      max_actions: longest plan that is executed.
      length_penalty: share of the reward lost by a plan of `max_actions`.
      must_stop: a plan longer than the episode fails.
      prompt: text of the user's turn; `{instruction}` stands for the mission.
      fps: rate that rows give for their video.

    Raises:
      InputError: an argument is out of range.
    """
    if max_actions < 1:
      raise InputError(f"max_actions: expected at least 1, found {max_actions}")
    check_options(length_penalty, fps, prompt)
    self.environment = environment
    self.max_actions = max_actions
    self.length_penalty = length_penalty
    self.must_stop = must_stop
    self.prompt = prompt
    self.fps = fps
    self._words = frozenset(environment.actions)
    # A group's samples start from one seed and often agree; playing is pure.
    self._succeeds = functools.lru_cache(_CACHED_PLANS)(self._play)

  def __reduce__(self):
    options = dict(
      max_actions=self.max_actions,
      length_penalty=self.length_penalty,
      must_stop=self.must_stop,
      prompt=self.prompt,
      fps=self.fps,
    )
    return functools.partial(PlanTask, **options), (self.environment,)

  def row(self, seed: int, *, blind: bool = False) -> dict[str, Any]:
    """The prompt of one episode, as a row.

    Args:
      seed: the episode.
      blind: show black frames of the same size in place of the real ones.

    Returns:
      {"prompt": one user message of a video (list of uint8 [h, w, 3] frames)
      and a text, "seed": seed}, and "blind": True if it is.
    """
    return prompt_row(
      self.environment.reset(seed), seed, self.prompt, self.fps, blind=blind
    )

  def parse(self, completion: str) -> tuple[str, ...] | None:
    """The action words of `completion`, or None if it is malformed."""
    plan = tuple(completion.split())
    known = self._words.issuperset(plan)
    return plan if known and 1 <= len(plan) <= self.max_actions else None

  def reward(self, completion: str, row: Mapping[str, Any]) -> dict[str, float]:
    """Plays a plan.

    Args:
      completion: the policy's text, without special tokens.
      row: a row of this task; only its "seed" is read.

    Returns:
      "overall": the reward, in [0, 1]. "success": 0 or 1. "length": number of
      words written. "malformed": 0 or 1.

    Raises:
      InputError: the row has no seed.
    """
    if "seed" not in row:
      raise InputError("plan task: expected a row with a 'seed', found none")
    plan = self.parse(completion)
    if plan is None:
      length = len(completion.split())
      return dict(overall=0.0, success=0.0, length=float(length), malformed=1.0)
    success = float(self._succeeds(int(row["seed"]), plan))
    price = self.length_penalty * len(plan) / self.max_actions
    return dict(
      overall=success * (1.0 - price),
      success=success,
      length=float(len(plan)),
      malformed=0.0,
    )

  def _play(self, seed: int, plan: tuple[str, ...]) -> bool:
    episode = play(self.environment, seed, plan)
    overrun = len(episode.actions) < len(plan)
    return episode.reward > 0.0 and not (self.must_stop and overrun)

  def demonstration(self, seed: int, *, noise: float = 0.0) -> str | None:
    """The teacher's plan as a response, without an end token.

    Args:
      seed: the episode.
      noise: probability that one action of the plan, chosen at random, is
        replaced by another word. Deterministic in the seed.

    Returns:
      The plan, or None where the teacher has none of at most `max_actions`.
    """
    if not 0.0 <= noise <= 1.0:
      raise InputError(f"noise: expected 0 to 1, found {noise}")
    self.environment.reset(seed)
    plan: list[str] = []
    done, reward = False, 0.0
    while not done:
      action = self.environment.expert()
      if action is None or len(plan) == self.max_actions:
        return None
      plan.append(action)
      _, reward, done = self.environment.step(action)
    if reward <= 0.0:
      return None
    if noise:
      _corrupt(plan, self.environment.actions, noise, (_NOISE_STREAM, seed))
    return " ".join(plan)

  def demonstrations(
    self, seeds: Iterable[int], *, noise: float = 0.0
  ) -> Iterator[dict[str, Any]]:
    """Rows with the teacher's "response"; seeds it can't solve are left out."""
    for seed in seeds:
      response = self.demonstration(seed, noise=noise)
      if response is not None:
        yield {**self.row(seed), "response": response}


def _corrupt(
  plan: list[str], words: Sequence[str], noise: float, key: tuple[int, int]
) -> None:
  """Replaces, with probability `noise`, one action of `plan` in place."""
  generator = np.random.default_rng(key)
  if len(words) < 2 or generator.random() >= noise:
    return
  place = int(generator.integers(len(plan)))
  others = [word for word in words if word != plan[place]]
  plan[place] = others[int(generator.integers(len(others)))]
