"""What a run learns: rows with a reward function, or an environment.

A task hands out random-access sets of rows (for training and for held-out
evaluation) and scores completions. The trainer knows nothing else of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
import functools
import threading
from typing import Any, Protocol

from rollplex_jax.config import DataConfig, EnvironmentConfig
from rollplex_jax.data.babyai import MiniGridEnvironment
from rollplex_jax.data.environments import PlanTask, Split
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
    may_skip: a training row that can't be made is left out; otherwise it is an
      error, since all rows were checked beforehand.
    report: lines a user should read before training, such as skipped rows.
  """

  train_rows: Sequence
  eval_rows: Sequence | None
  may_skip: bool
  report: list[str]

  def score(self, completions: Sequence[str], rows: Sequence[Mapping],
            row_indices: Sequence[int]) -> list[dict[str, float]]:
    """Scores of N completions, each with "overall"."""


class RowsTask:
  """Rows of JSONL files, scored by a plain function."""

  def __init__(self, config: DataConfig, processor: Processor, *,
               needs_reward: bool, needs_response: bool,
               progress: Callable[[Iterable], Iterable] = iter):
    """Reads and checks every row before anything is trained.

    Raises:
      InputError: naming the file, row or function that is wrong.
    """
    if not config.rows:
      raise InputError("data.rows is not set: expected a JSONL file, or a level "
                       "in data.environment.level")
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

  def __init__(self, make_task: Callable[[], PlanTask], split: Split,
               count: int, *, first: int = 0, demonstrations: bool = False,
               noise: float = 0.0, blind: bool = False):
    """Row i is the episode of seed `split.seed(first + i)`.

    Args:
      make_task: makes a task; each reading thread makes its own.
      split: whose seeds.
      count: number of rows.
      first: index of the first episode.
      demonstrations: add the teacher's "response".
      noise: see `PlanTask.demonstration`.
      blind: black frames in place of what is to be seen.
    """
    self._make_task = make_task
    self._local = threading.local()
    self._split, self._count, self._first = split, count, first
    self._demonstrations = demonstrations
    self._blind = blind
    # Demonstrations are asked for again in every epoch, and a teacher thinks
    # longer than a world takes to draw. Those without a plan count too.
    self._demonstration = functools.lru_cache(_CACHED_DEMONSTRATIONS)(
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
    if self._demonstrations:
      response = self._demonstration(seed)
      if response is None:
        raise RowError(self.where(index), "no demonstration",
                       "the teacher has no plan that is short enough")
      row["response"] = response
    return row

  def _task(self) -> PlanTask:
    """This thread's own task."""
    if not hasattr(self._local, "task"):
      self._local.task = self._make_task()
    return self._local.task


class EpisodesTask:
  """Episodes of an environment in which the completion is the whole plan."""

  def __init__(self, config: EnvironmentConfig, *,
               demonstrations: bool = False):
    """`demonstrations` adds the teacher's responses to the training rows.

    Raises:
      InputError: no such level, or a setting out of range.
    """
    splits = {split.name.lower(): split for split in Split}
    if config.train_split not in ("train", "warm_start"):
      raise InputError(
          f"data.environment.train_split={config.train_split!r}: expected train "
          "or warm_start")
    self._config = config
    self._task = self._make_task()
    # The teacher has no plan for some start states.
    self.may_skip = demonstrations
    self.report = []
    self.train_rows = EpisodeRows(
        self._make_task, splits[config.train_split], config.num_episodes,
        first=config.first_episode, demonstrations=demonstrations,
        noise=config.noise)
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

  def _make_task(self) -> PlanTask:
    c = self._config
    return PlanTask(
        MiniGridEnvironment(c.level, size=c.image_size),
        max_actions=c.max_actions, length_penalty=c.length_penalty,
        must_stop=c.must_stop)


def make_task(config: DataConfig, processor: Processor, *,
              supervised: bool) -> Task:
  """The task that a data config describes; `supervised` needs responses."""
  if config.environment.level:
    return EpisodesTask(config.environment, demonstrations=supervised)
  return RowsTask(config, processor, needs_reward=not supervised,
                  needs_response=supervised)
