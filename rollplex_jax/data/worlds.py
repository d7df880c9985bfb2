"""The world of a run and its episodes, from settings.

Light to import: worker processes make their worlds with it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from rollplex_jax.data.babyai import MiniGridEnvironment
from rollplex_jax.data.environments import (
  Environment,
  Observation,
  PlanTask,
  Step,
  check_environment,
  check_observation,
  check_step,
)
from rollplex_jax.data.episodes import TurnTask
from rollplex_jax.data.functions import describe, load_function
from rollplex_jax.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class World:
  """Which environment, and how it is played; see `config.EnvironmentConfig`."""

  level: str = ""
  make: str = ""
  image_size: int = 56
  max_turns: int = 1
  actions_per_turn: int = 1
  max_actions: int = 12
  length_penalty: float = 0.3
  must_stop: bool = False

  @classmethod
  def of(cls, settings: Any) -> World:
    """The world of an `EnvironmentConfig`, which has these fields and more."""
    return cls(**{field.name: getattr(settings, field.name)
                  for field in dataclasses.fields(cls)})

  def environment(self) -> Environment:
    """A new one. One of the user's own is tried out first.

    Raises:
      InputError: naming it and what is wrong.
    """
    if not self.make:
      return MiniGridEnvironment(self.level, size=self.image_size)
    make = load_function(self.make, "environment")
    try:
      environment = make()
    except Exception as error:
      raise InputError(
        f"environment {self.make}: expected to be called without arguments, but "
        f"it raised {describe(error)}"
      ) from error
    check_environment(environment, self.make)
    return CheckedEnvironment(environment, self.make)

  def task(self) -> PlanTask | TurnTask:
    """A new environment's episodes: plans, or turns."""
    if self.max_turns > 1:
      return TurnTask(
        self.environment(),
        max_turns=self.max_turns,
        actions_per_turn=self.actions_per_turn,
        length_penalty=self.length_penalty,
      )
    return PlanTask(
      self.environment(),
      max_actions=self.max_actions,
      length_penalty=self.length_penalty,
      must_stop=self.must_stop,
    )


class CheckedEnvironment:
  """Somebody's environment, with a look at everything that it returns."""

  def __init__(self, environment: Environment, name: str):
    self._environment, self._name = environment, name
    self.actions = tuple(environment.actions)

  def reset(self, seed: int) -> Observation:
    """Raises WrongTypeError where it returns no `Observation`."""
    seen = self._environment.reset(seed)
    check_observation(seen, f"environment {self._name}: reset({seed})")
    return seen

  def step(self, action: str) -> Step:
    """Raises WrongTypeError where it returns no `Step`."""
    step = self._environment.step(action)
    check_step(step, f"environment {self._name}: step({action!r})")
    return Step(step[0], float(step[1]), bool(step[2]))

  def expert(self) -> str | None:
    """Raises InputError where it has no teacher."""
    expert: Any = getattr(self._environment, "expert", None)
    if expert is None:
      raise InputError(f"environment {self._name}: has no expert")
    return expert()
