"""A small world; light to import, for workers."""

import numpy as np

from rollplex_jax.data import environments
from rollplex_jax.errors import InputError

_PLACEHOLDER = "<|image_pad|>"


class UnreadableWorld:
  """Says what no policy can read at the start of every third episode."""

  actions = ("on", "win", "grow", "mumble")

  def reset(self, seed):
    return self._see(f"go {_PLACEHOLDER}" if seed % 3 == 1 else "go")

  def step(self, action):
    won = action == "win"
    said = _PLACEHOLDER if action == "mumble" else "go"
    return environments.Step(
      self._see(said, 56 if action == "grow" else 28), float(won), won)

  def _see(self, said, size=28):
    return environments.Observation(
      np.full((1, size, 28, 3), 9, np.uint8), said)


class MumblingWorld(UnreadableWorld):
  """Says what can't be read in every answer."""

  def step(self, action):
    return super().step("mumble")


class BadTeacherWorld(UnreadableWorld):

  def expert(self):
    raise KeyError("no\nplan")


class MumblingTeacherWorld(UnreadableWorld):
  """Has only such demonstrations as can't be read."""

  def reset(self, seed):
    self._time = 0
    return super().reset(0)

  def step(self, action):
    self._time += 1
    return super().step(action)

  def expert(self):
    return "win" if self._time else "mumble"


class CountingWorld:
  """Says a new number with every step and shows it; ends after six steps."""

  actions = ("on", "win", "same")

  def reset(self, seed):
    self.time, self.seed, self.said = 0, seed, 0
    return self._see()

  def step(self, action):
    self.time += 1
    if action != "same":
      self.said = self.time
    won = action == "win"
    return environments.Step(self._see(), float(won), won or self.time == 6)

  def expert(self):
    raise InputError("no teacher here")

  def _see(self):
    frame = np.full((2, 4, 4, 3), 10 * self.time + 1, np.uint8)
    return environments.Observation(frame, f"number {self.said}")
