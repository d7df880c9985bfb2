"""What a run learns from: the `data` group of its configuration."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from rollplex_jax.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
  """A world in place of rows. No `level` and no `make`, no environment.

  Attributes:
    level: a MiniGrid or BabyAI id, such as BabyAI-GoToObjS6-v1.
    make: in place of a level "module:function" or "file.py:function", a class
      or function that, called without arguments, makes an
      `environments.Environment`.
    image_size: side of a level's square frames, in pixels.
    max_turns: responses of an episode, each followed by what is seen next; 1
      for a single response that is the whole plan.
    actions_per_turn: most actions of a response, with several turns.
    max_actions: longest plan that is executed, with one turn.
    length_penalty: share of the reward that an episode of the most actions
      loses.
    must_stop: a plan that goes on after success fails, with one turn.
    noise: probability that a demonstration has one wrong action; with several
      turns, for each action that it is a wrong one.
    num_episodes: start states to train on, each with its own seed.
    eval_episodes: held-out start states.
    first_episode: index of the first training start state.
    train_split: "train" or "warm_start": which seeds to train on.
    num_workers: worker processes in which plans and turns are played, with the
      limits of `DataConfig.reward_*`. None for one per core and 4 at most; 0 for
      this process, where nothing can be stopped.
  """

  level: str = ""
  make: str = ""
  image_size: int = 56
  max_turns: int = 1
  actions_per_turn: int = 1
  max_actions: int = 12
  length_penalty: float = 0.3
  must_stop: bool = False
  noise: float = 0.0
  num_episodes: int = 1 << 20
  eval_episodes: int = 512
  first_episode: int = 0
  train_split: str = "train"
  num_workers: int | None = None

  def __post_init__(self):
    check_least(self, 1, "image_size", "max_turns", "actions_per_turn",
                 "max_actions", "num_episodes")
    check_least(self, 0, "eval_episodes", "first_episode")
    if self.num_workers is not None:
      check_least(self, 0, "num_workers")
    if self.level and self.make:
      raise InputError(f"level={self.level}: expected no level beside "
                       f"make={self.make}")
    if self.max_turns > 1 and self.must_stop:
      raise InputError(
          f"must_stop=True with max_turns={self.max_turns}: expected "
          "must_stop=False; only a plan can go on after success")
    if self.max_turns == 1 and self.actions_per_turn > 1:
      raise InputError(
          f"actions_per_turn={self.actions_per_turn} with max_turns=1: expected "
          "several turns; a whole plan has max_actions")
    for name in ("length_penalty", "noise"):
      if not 0 <= getattr(self, name) <= 1:
        raise InputError(
            f"{name}={getattr(self, name)}: expected between 0 and 1")
    if self.train_split not in ("train", "warm_start"):
      raise InputError(
          f"train_split={self.train_split!r}: expected train or warm_start")

  @property
  def name(self) -> str:
    """The world's, for messages; empty where there is none."""
    return self.level or self.make


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
  """What is learned from: rows with a reward function, or an environment.

  Attributes:
    rows: JSONL file to train on.
    eval_rows: held-out JSONL file; empty for no evaluation.
    reward: "module:function" or "file.py:function"; for RL on rows.
    reward_fallback: reward of a completion whose reward function, or of an
      episode whose environment, fails in any way.
    reward_timeout: seconds that a reward function may take for a completion,
      and an environment for a turn.
    reward_memory_gb: memory that a worker process, which runs them, may
      allocate, in GiB; 0 for no limit.
    reward_num_workers: worker processes for a reward function. None for one per
      core and 4 at most; 0 for this process, as a debugger needs it, where
      nothing can be stopped.
    reward_max_timeouts: after so many timeouts in one step (or evaluation) its
      other completions get reward_fallback at once; 0 for never.
    reward_dry_run: before the first step, refuse a reward function that takes
      other arguments or fails on the first row.
    environment: a world in place of rows and reward.
    max_prompt_length: longest prompt in tokens; a longer one is refused, never
      cut. 0 for no limit.
    skip_bad_rows: leave bad rows out, counted by reason, instead of stopping.
  """

  rows: str = ""
  eval_rows: str = ""
  reward: str = ""
  reward_fallback: float = 0.0
  reward_timeout: float = 10.0
  reward_memory_gb: float = 1.0
  reward_num_workers: int | None = None
  reward_max_timeouts: int = 8
  reward_dry_run: bool = True
  environment: EnvironmentConfig = dataclasses.field(
      default_factory=EnvironmentConfig)
  max_prompt_length: int = 0
  skip_bad_rows: bool = False

  def __post_init__(self):
    check_least(self, 0, "max_prompt_length", "reward_memory_gb",
                 "reward_max_timeouts")
    if not 0 < self.reward_timeout < math.inf:
      raise InputError(f"reward_timeout={self.reward_timeout}: expected seconds "
                       "above 0")
    if not math.isfinite(self.reward_fallback):
      raise InputError(f"reward_fallback={self.reward_fallback}: expected a "
                       "finite number")
    if self.reward_num_workers is not None:
      check_least(self, 0, "reward_num_workers")
    if self.rows and self.environment.name:
      key = "level" if self.environment.level else "make"
      raise InputError(
          f"rows={self.rows}: expected no rows beside "
          f"environment.{key}={self.environment.name}")


def check_least(config: Any, least: int, *names: str) -> None:
  """Raises InputError for the first named value of a config below `least`."""
  for name in names:
    value = getattr(config, name)
    if not value >= least:  # NaN is refused too.
      raise InputError(f"{name}={value}: expected at least {least}")
