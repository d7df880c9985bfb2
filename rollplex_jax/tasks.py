"""What a run learns: rows with a reward function, or an environment.

A task hands out random-access sets of rows (for training and for held-out
evaluation) and scores completions, or plays their episodes where these have
several turns. The trainer knows nothing else of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
import functools
from typing import Any, Protocol

from rollplex_jax.data.environments import Split
from rollplex_jax.data.episode_rows import EpisodeRows, LevelRows
from rollplex_jax.data.episode_workers import EpisodeWorkers, failed_episodes
from rollplex_jax.data.episodes import EpisodePlayer
from rollplex_jax.data.processor import Processor
from rollplex_jax.data.reward_workers import RewardWorkers
from rollplex_jax.data.row_schema import RowError
from rollplex_jax.data.rows import RowFile, select_rows
from rollplex_jax.data.settings import DataConfig
from rollplex_jax.data.workers import Failure, Limits, default_num_workers
from rollplex_jax.data.worlds import World
from rollplex_jax.errors import InputError

# Episodes of which one must have a demonstration for a run to begin.
_TRIED = 16


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
      self._reward = RewardWorkers(
          config.reward, limits(config, config.reward_num_workers),
          config.reward_fallback)
      self._reward.check(dry_run=config.reward_dry_run)
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
    if self._reward is not None and config.reward_dry_run:
      self._reward.check(self.train_rows[0], self.train_rows.where(0))
    self.report = self.train_rows.report()
    self.eval_rows = None
    if config.eval_rows:
      self.eval_rows = select(config.eval_rows, processor.check)
      self.report += self.eval_rows.report()

  def score(self, completions, rows, row_indices):
    return self._reward.score(completions, rows, row_indices)


def limits(config: DataConfig, num_workers: int | None) -> Limits:
  """What other people's code may take, by a run's configuration."""
  if num_workers is None:
    num_workers = default_num_workers()
  return Limits(
      num_workers=num_workers, timeout=config.reward_timeout,
      memory_gb=config.reward_memory_gb,
      max_timeouts=config.reward_max_timeouts)


class EpisodesTask:
  """Episodes of an environment.

  With one turn the completion is a whole plan, which `score` executes. With
  several, `player` plays them, and demonstrations are rows' "turns".
  """

  def __init__(self, config: DataConfig, processor: Processor | None = None, *,
               demonstrations: bool = False):
    """Tries the world out.

    Args:
      config: names it.
      processor: of the policy. An episode that starts with what it refuses is
        shown black and fails. None lets everything pass.
      demonstrations: add the teacher's responses to the training rows.

    Raises:
      InputError: no such world, one that does not work, one that shows what the
        processor refuses, or one without the demonstrations that are wanted.
    """
    world = config.environment
    splits = {split.name.lower(): split for split in Split}
    self._count = world.eval_episodes
    self._world = World.of(world)
    self._workers = _episode_workers(
        self._world, limits(config, world.num_workers))
    self._processor = processor
    row, answer = self._workers.check()
    self._check_seen(row, [answer], self._workers.name)
    self._fallbacks = failed_episodes(
        self._workers.name, config.reward_fallback)
    self.max_turns = world.max_turns
    # The teacher has no plan for some start states.
    self.may_skip = demonstrations
    self.report = []
    key = "response" if self.max_turns == 1 else "turns"
    train = functools.partial(
        EpisodeRows,
        self._rows(key if demonstrations else "", world.noise, False),
        splits[world.train_split], world.num_episodes,
        first=world.first_episode)
    if demonstrations:
      self._check_demonstrations(train())
    self.train_rows = train(tell=functools.partial(
        self._fallbacks.tell, then="is left out"))
    self.eval_rows = None
    if self._count:
      self.eval_rows = self.held_out()

  def held_out(self, *, blind: bool = False) -> EpisodeRows:
    """The held-out episodes, with black frames if `blind`."""
    return EpisodeRows(self._rows("", 0.0, blind), Split.EVAL, self._count)

  def score(self, completions, rows, row_indices):
    del row_indices
    return self._workers.score(
        completions, rows, self._fallbacks)

  def player(self) -> EpisodePlayer:
    return self._workers.player(self._fallbacks)

  def _rows(self, key: str, noise: float, blind: bool) -> Callable:
    make = LevelRows(self._world, key, noise, blind)
    if self._world.make:
      make = lambda seed: self._workers.row(seed, blind, key, noise)
    return make if key else lambda seed: self._shown(seed, make(seed))

  def _shown(self, seed: int, row: dict[str, Any] | Failure) -> dict[str, Any]:
    """A row as it is, or a black one in place of what can't be shown."""
    if isinstance(row, Failure):
      self._fallbacks.tell(row, f"episode {seed}", then="is shown black")
      return self._workers.blank(seed)
    if self._processor is not None:
      try:
        self._processor.check(row, "what is seen first")
      except RowError as error:
        return self._workers.blank(seed, str(error))
    return row

  def _check_seen(self, row: dict[str, Any],
                  answers: Iterable[dict[str, Any] | None], where: str) -> None:
    """Raises RowError if the processor refuses a row or what follows it."""
    if self._processor is None:
      return
    self._processor.check(row, f"{where}: what is seen first")
    for answer in answers:
      if answer is not None:
        self._processor.continuation(
            answer, f"{where}: what is seen next", after_end=True)

  def _check_demonstrations(self, rows: EpisodeRows) -> None:
    """Raises InputError if none of the first rows can be learned from."""
    errors = []
    for i in range(min(_TRIED, len(rows))):
      try:
        row = rows[i]
        self._check_seen(row, [turn["message"] for turn in row.get("turns", ())],
                         rows.where(i))
        return
      except RowError as error:
        errors.append(error)
    raise InputError(
        f"{self._workers.name}: expected demonstrations of its expert to learn "
        f"from, found none in {len(errors)} episodes; {errors[0]}")


@functools.lru_cache(2)
def _episode_workers(world: World, limits: Limits) -> EpisodeWorkers:
  """Workers are kept for the next task on the same world: they start slowly."""
  return EpisodeWorkers(world, limits)


def make_task(config: DataConfig, processor: Processor, *,
              supervised: bool) -> Task:
  """The task that a data config describes; `supervised` needs responses."""
  if config.environment.name:
    return EpisodesTask(config, processor, demonstrations=supervised)
  return RowsTask(config, processor, needs_reward=not supervised,
                  needs_response=supervised)
