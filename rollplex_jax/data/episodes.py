"""Episodes of several turns: the policy acts, sees, and acts again.

A turn is a response of one action word, or a few, and the world's answer to it:
a message of what is seen after each of them. `TurnTask` is one environment's
episodes, `EpisodePlayer` plays many of them side by side for a trainer. The
single-turn counterpart, a whole plan at once, is `environments.PlanTask`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from rollplex_jax.data.environments import (
  Environment,
  Observation,
  check_options,
  prompt_row,
)
from rollplex_jax.errors import InputError

_NOISE_STREAM = 0x7475  # Keeps noise apart from other uses of a seed.

Message = dict[str, Any]


class TurnTask:
  """Step by step in one world: every response is answered by what follows.

  A response is 1 to `actions_per_turn` action words separated by white space;
  anything else (an unknown word, none at all, too many) is malformed, which
  ends the episode with 0. An episode scores
  success * (1 - length_penalty * actions / max_actions), where max_actions is
  max_turns * actions_per_turn.

  One instance plays one episode at a time and serves one thread. It pickles.
  """

  def __init__(
    self,
    environment: Environment,
    *,
    max_turns: int = 8,
    actions_per_turn: int = 1,
    length_penalty: float = 0.3,
    fps: float = 2.0,
    prompt: str = "{instruction}",
  ):
    """Makes the task.

    Args:
      environment: the world.
      max_turns: responses after which an episode that goes on is cut off.
      actions_per_turn: most actions in one response.
      length_penalty: share of the reward lost by an episode of max_actions.
      fps: rate given for the videos of what is seen.
      prompt: text of the first message; `{instruction}` stands for the mission.

    Raises:
      InputError: an argument is out of range.
    """
    for name, value in (
      ("max_turns", max_turns),
      ("actions_per_turn", actions_per_turn),
    ):
      if value < 1:
        raise InputError(f"{name}: expected at least 1, found {value}")
    check_options(length_penalty, fps, prompt)
    self.environment = environment
    self.max_turns = max_turns
    self.actions_per_turn = actions_per_turn
    self.length_penalty = length_penalty
    self.fps = fps
    self.prompt = prompt
    self.words = frozenset(environment.actions)

  @property
  def max_actions(self) -> int:
    """Actions of the longest episode there can be."""
    return self.max_turns * self.actions_per_turn

  def row(self, seed: int, *, blind: bool = False) -> dict[str, Any]:
    """The first message of one episode, as a row.

    Args:
      seed: the episode.
      blind: show black frames of the same size in place of the real ones, here
        and in everything that is seen later.

    Returns:
      {"prompt": one user message of a video (list of uint8 [h, w, 3] frames)
      and a text, "seed": seed}, and "blind": True if it is.
    """
    return prompt_row(
      self.environment.reset(seed), seed, self.prompt, self.fps, blind=blind
    )

  def start(self, seed: int, *, blind: bool = False) -> EpisodeInPlay:
    """Starts an episode; the one before it can't be played on."""
    return EpisodeInPlay(self, seed, blind=blind)

  def parse(self, completion: str) -> tuple[str, ...] | None:
    """The action words of `completion`, or None if it is malformed."""
    words = tuple(completion.split())
    known = self.words.issuperset(words)
    return words if known and 1 <= len(words) <= self.actions_per_turn else None

  def demonstration(
    self, seed: int, *, noise: float = 0.0
  ) -> list[dict[str, Any]] | None:
    """The teacher's episode, turn by turn.

    A wrong action is there for where it leads: the teacher goes on from there,
    so that the policy is taught to recover. It isn't taught itself.

    Args:
      seed: the episode.
      noise: probability that an action is replaced by another word, for each of
        them. Deterministic in the seed.

    Returns:
      For each turn {"response": action words, without an end token, "message":
      the world's answer as a user message, or None after the last response,
      "train": False where the response has a wrong action}. None where the
      teacher knows no way on or does not succeed in `max_turns`.

    Raises:
      InputError: `noise` is out of range, or this world has no teacher.
    """
    if not 0.0 <= noise <= 1.0:
      raise InputError(f"noise: expected 0 to 1, found {noise}")
    generator = np.random.default_rng((_NOISE_STREAM, seed))
    episode, turns = self.start(seed), []
    while not episode.over:
      words: list[str] = []
      right = True
      while len(words) < self.actions_per_turn and not episode.ended:
        advice = self.environment.expert()
        if advice is None:
          return None
        word = _disturbed(advice, self.environment.actions, noise, generator)
        right &= word == advice
        words.append(word)
        episode.act(word)
      message = episode.end_turn()
      turns.append(
        {"response": " ".join(words), "message": message, "train": right}
      )
    return turns if episode.scores()["success"] else None


class EpisodeInPlay:
  """An episode that is being played.

  Attributes:
    ended: the world ended it.
    over: nothing more can be done: it has ended, a turn was malformed, or there
      have been `max_turns`.
  """

  def __init__(self, task: TurnTask, seed: int, *, blind: bool = False):
    self.ended = self.over = False
    self._task = task
    self._blind = blind
    self._instruction = task.environment.reset(seed).instruction
    self._seen: list[Observation] = []
    self._turns = self._actions = 0
    self._success = self._malformed = False

  def step(self, completion: str) -> Message | None:
    """Takes one turn.

    Args:
      completion: the policy's text, without special tokens.

    Returns:
      The next user message: a video of the frames seen after each action, and
      the instruction where it is another one than before. None where the
      episode is over.

    Raises:
      RuntimeError: it was over already.
    """
    if self.over:
      raise RuntimeError("the episode is over")
    words = self._task.parse(completion)
    if words is None:
      self._turns += 1
      self._malformed = self.over = True
      return None
    for word in words:
      if not self.ended:
        self.act(word)
    return self.end_turn()

  def act(self, word: str) -> None:
    """Takes one action of the present turn."""
    step = self._task.environment.step(word)
    self._actions += 1
    self._seen.append(step.observation)
    self._success |= step.reward > 0.0
    self.ended = step.done

  def end_turn(self) -> Message | None:
    """The message that answers the actions since the last one; see `step`."""
    self._turns += 1
    self.over = self.ended or self._turns == self._task.max_turns
    seen, self._seen = self._seen, []
    if self.over:
      return None
    frames = [frame for observation in seen for frame in observation.frames]
    if self._blind:
      frames = [np.zeros_like(frame) for frame in frames]
    content = [{"type": "video", "video": frames, "fps": self._task.fps}]
    instruction = seen[-1].instruction
    if instruction != self._instruction:
      content.append({"type": "text", "text": instruction})
      self._instruction = instruction
    return {"role": "user", "content": content}

  def scores(self) -> dict[str, float]:
    """What the episode so far is worth.

    Returns:
      "overall": the reward, in [0, 1]. "success": 0 or 1. "turns" and
      "actions": how many were taken. "malformed": 0 or 1. "truncated": 1 where
      neither the world nor a malformed turn ended it.
    """
    task = self._task
    success = float(self._success and not self._malformed)
    price = task.length_penalty * self._actions / task.max_actions
    return dict(
      overall=success * (1.0 - price),
      success=success,
      turns=float(self._turns),
      actions=float(self._actions),
      malformed=float(self._malformed),
      truncated=float(not (self.ended or self._malformed)),
    )


class EpisodePlayer(Protocol):
  """Plays N episodes side by side."""

  def start(self, rows: Sequence[Mapping[str, Any]]) -> None:
    """Starts the episodes of N rows of a task; earlier ones are given up.

    Args:
      rows: each with the "seed" of its episode, "blind" if what it shows is
        black and, if it is to fail at once, "refused": why. Several may have
        one seed: a group.
    """

  def step(self, completions: Sequence[str | None]) -> list[Message | None]:
    """Takes one turn in each episode.

    Args:
      completions: N texts; None where an episode is not to act.

    Returns:
      N user messages, of what is seen next; None where an episode did not act
      or is over.
    """

  def fail(self, index: int, reason: str) -> None:
    """Ends an episode that showed what can't be used, for `reason`.

    In place of its scores there is the fallback; it counts as a failure of kind
    "wrong_type".
    """

  def scores(self) -> list[dict[str, float]]:
    """Scores of the N episodes; see `EpisodeInPlay.scores`."""


def _disturbed(
  word: str,
  words: Sequence[str],
  noise: float,
  generator: np.random.Generator,
) -> str:
  """`word`, or with probability `noise` another of `words`."""
  if generator.random() >= noise or len(words) < 2:
    return word
  others = [other for other in words if other != word]
  return others[int(generator.integers(len(others)))]
