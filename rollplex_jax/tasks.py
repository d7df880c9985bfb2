"""What a run learns: rows with a reward function, or an environment.

A task hands out random-access sets of rows (for training and for held-out
evaluation) and scores completions, or plays their episodes where these have
several turns. The trainer knows nothing else of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
import functools
import threading
from typing import Any, Protocol

from rollplex_jax.config import DataConfig, EnvironmentConfig
from rollplex_jax.data.babyai import MiniGridEnvironment
from rollplex_jax.data.environments import (
    Environment,
    PlanTask,
    Split,
    check_environment,
)
from rollplex_jax.data.episodes import EpisodePlayer, LocalPlayer, TurnTask
from rollplex_jax.data.functions import describe, load_function
from rollplex_jax.data.processor import Processor
from rollplex_jax.data.rewards import load_reward, score_completions
from rollplex_jax.data.row_schema import RowError
from rollplex_jax.data.rows import RowFile, select_rows
from rollplex_jax.errors import InputError

_CACHED_DEMONSTRATIONS = 1 << 16


class Task(Protocol):
  """Rows and their scores.

  Attributes:
    train_rows: random-access rows with `where(index)`.
    eval_rows: held-out ones, or None.
    max_turns: responses of an episode. 1: `score` is what is called; more:
      `player` is.
    may_skip: a training row that can't be made is left out; otherwise it is an
      error, since all rows were checked beforehand.
    report: lines a user should read before training, such as skipped rows.
  """

  train_rows: Sequence
  eval_rows: Sequence | None
  max_turns: int
  may_skip: bool
  report: list[str]

  def score(self, completions: Sequence[str], rows: Sequence[Mapping],
            row_indices: Sequence[int]) -> list[dict[str, float]]:
    """Scores of N completions, each with "overall"."""

  def player(self) -> EpisodePlayer:
    """Plays episodes; those of one player don't disturb another's."""


class RowsTask:
  """Rows of JSONL files, scored by a plain function."""

  max_turns = 1

  def __init__(self, config: DataConfig, processor: Processor, *,
               needs_reward: bool, needs_response: bool,
               progress: Callable[[Iterable], Iterable] = iter):
    """Reads and checks every row before anything is trained.

    Raises:
      InputError: naming the file, row or function that is wrong.
    """
    if not config.rows:
      raise InputError("data.rows is not set: expected a JSONL file, or a world "
                       "in data.environment.level or data.environment.make")
    self._reward = None
    if config.reward:
      self._reward = load_reward(config.reward)
    elif needs_reward:
      raise InputError(
          "data.reward is not set: expected module:function or file.py:function")

    if config.eval_rows and self._reward is None:
      raise InputError(f"data.eval_rows={config.eval_rows}: expected "
                       "data.reward to score their completions, which is not "
                       "set")

    def check_response(row, where):
      if "response" not in row and "response_token_ids" not in row:
        raise RowError(where, "response", "expected a response, found none")
      processor.check(row, where)

    select = lambda path, check: select_rows(
        RowFile(path), check, config.skip_bad_rows, progress)
    self.may_skip = False
    self.train_rows = select(
        config.rows, check_response if needs_response else processor.check)
    self.report = self.train_rows.report()
    self.eval_rows = None
    if config.eval_rows:
      self.eval_rows = select(config.eval_rows, processor.check)
      self.report += self.eval_rows.report()

  def score(self, completions, rows, row_indices):
    return score_completions(
        self._reward, completions, rows, row_indices=row_indices)


class EpisodeRows(Sequence):
  """Start states of an environment as rows, made when they are asked for."""

  def __init__(self, make_task: Callable[[], PlanTask | TurnTask],
               split: Split, count: int, *, first: int = 0,
               demonstration_key: str = "", noise: float = 0.0,
               blind: bool = False):
    """Row i is the episode of seed `split.seed(first + i)`.

    Args:
      make_task: makes a task; each reading thread makes its own.
      split: whose seeds.
      count: number of rows.
      first: index of the first episode.
      demonstration_key: add what the task's `demonstration` gives, under this
        key; none if it is empty.
      noise: of demonstrations.
      blind: black frames in place of what is to be seen.
    """
    self._make_task = make_task
    self._local = threading.local()
    self._split, self._count, self._first = split, count, first
    self._key = demonstration_key
    self._blind = blind
    # Plans are asked for again in every epoch, and a teacher thinks longer than
    # a world takes to draw. Those without a plan count too. Turns hold frames,
    # too much to keep.
    self._demonstration = functools.lru_cache(
        _CACHED_DEMONSTRATIONS if demonstration_key == "response" else 0)(
            lambda seed: self._task().demonstration(seed, noise=noise))
    split.seed(first + count - 1)  # Refuses what would run out of seeds.

  def __len__(self) -> int:
    return self._count

  def where(self, index: int) -> str:
    return f"episode {self._split.seed(self._first + index)}"

  def __getitem__(self, index: int) -> dict[str, Any]:
    if not 0 <= index < self._count:
      raise IndexError(index)
    seed = self._split.seed(self._first + index)
    row = self._task().row(seed, blind=self._blind)
    if self._key:
      demonstration = self._demonstration(seed)
      if demonstration is None:
        raise RowError(self.where(index), "no demonstration",
                       "the teacher has no plan that is short enough")
      row[self._key] = demonstration
    return row

  def _task(self) -> PlanTask | TurnTask:
    """This thread's own task."""
    if not hasattr(self._local, "task"):
      self._local.task = self._make_task()
    return self._local.task


class EpisodesTask:
  """Episodes of an environment.

  With one turn the completion is a whole plan, which `score` executes. With
  several, `player` plays them, and demonstrations are rows' "turns".
  """

  def __init__(self, config: EnvironmentConfig, *,
               demonstrations: bool = False):
    """`demonstrations` adds the teacher's responses to the training rows.

    Raises:
      InputError: no such world, or a setting out of range.
    """
    splits = {split.name.lower(): split for split in Split}
    if config.train_split not in ("train", "warm_start"):
      raise InputError(
          f"data.environment.train_split={config.train_split!r}: expected train "
          "or warm_start")
    self._config = config
    self._make_task = functools.partial(make_episode_task, config)
    self._task = self._make_task()
    self.max_turns = config.max_turns
    # The teacher has no plan for some start states.
    self.may_skip = demonstrations
    self.report = []
    key = "response" if self.max_turns == 1 else "turns"
    self.train_rows = EpisodeRows(
        self._make_task, splits[config.train_split], config.num_episodes,
        first=config.first_episode,
        demonstration_key=key if demonstrations else "", noise=config.noise)
    self.eval_rows = None
    if config.eval_episodes:
      self.eval_rows = self.held_out()

  def held_out(self, *, blind: bool = False) -> EpisodeRows:
    """The held-out episodes, with black frames if `blind`."""
    return EpisodeRows(self._make_task, Split.EVAL,
                       self._config.eval_episodes, blind=blind)

  def score(self, completions, rows, row_indices):
    return score_completions(
        self._task.reward, completions, rows, row_indices=row_indices)

  def player(self) -> EpisodePlayer:
    return LocalPlayer(self._make_task)


def make_environment(config: EnvironmentConfig) -> Environment:
  """The world that a config describes; one of the user's own is tried out.

  Raises:
    InputError: naming it and what is wrong.
  """
  if not config.make:
    return MiniGridEnvironment(config.level, size=config.image_size)
  make = load_function(config.make, "environment")
  try:
    environment = make()
  except Exception as error:
    raise InputError(f"environment {config.make}: expected to be called without "
                     f"arguments, but it raised {describe(error)}") from error
  check_environment(environment, config.make)
  return environment


def make_episode_task(config: EnvironmentConfig) -> PlanTask | TurnTask:
  """The task of a world, with its settings: plans, or turns."""
  c = config
  environment = make_environment(c)
  if c.max_turns > 1:
    return TurnTask(
        environment, max_turns=c.max_turns, actions_per_turn=c.actions_per_turn,
        length_penalty=c.length_penalty)
  return PlanTask(
      environment, max_actions=c.max_actions, length_penalty=c.length_penalty,
      must_stop=c.must_stop)


def make_task(config: DataConfig, processor: Processor, *,
              supervised: bool) -> Task:
  """The task that a data config describes; `supervised` needs responses."""
  if config.environment.name:
    return EpisodesTask(config.environment, demonstrations=supervised)
  return RowsTask(config, processor, needs_reward=not supervised,
                  needs_response=supervised)
