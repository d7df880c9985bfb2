"""A small world; light to import, for workers."""

import numpy as np

from rollplex_jax.data import environments
from rollplex_jax.errors import InputError


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
