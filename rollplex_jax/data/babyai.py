"""BabyAI and MiniGrid levels as an `Environment`.

The view is the whole grid seen from above, cropped of its outer walls. Pixels
come from MiniGrid's own tiles. The package (and pygame, which it imports) is
loaded when the first level is made.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from rollplex_jax.data.environments import Observation, Step
from rollplex_jax.errors import InputError

# In the order of MiniGrid's action codes.
ACTIONS = ("left", "right", "forward", "pickup", "drop", "toggle", "done")
_PROBE_SEEDS = range(4)


class MiniGridEnvironment:
  """One level, from above, as square frames of `size` pixels.

  A frame is free of resampling when `size` is a multiple of the number of
  cells of the longer side (a 6x6 room has 4x4 cells inside its walls: 14-pixel
  tiles at size 56); other sizes are rendered larger and averaged down. A grid
  that isn't square is centered on black. What the agent carries is not drawn.
  """

  def __init__(
    self,
    level: str,
    *,
    size: int = 56,
    actions: Sequence[str] = ACTIONS,
    crop_walls: bool = True,
  ):
    """Makes the level.

    Args:
      level: a registered id, `BabyAI-*` or `MiniGrid-*`.
      size: height and width of a frame in pixels.
      actions: the words allowed, some of `ACTIONS`.
      crop_walls: leave out the outer ring of cells if it is only walls.

    Raises:
      InputError: no such level or action, or frames too small for the grid.
    """
    unknown = [word for word in actions if word not in ACTIONS]
    if unknown or not actions or len(set(actions)) < len(actions):
      raise InputError(
        f"actions of {level}: expected distinct words of {', '.join(ACTIONS)}, "
        f"found {', '.join(actions) or 'none'}"
      )
    self.level = level
    self.actions = tuple(actions)
    self._size = size
    self._crop_walls = crop_walls
    self._codes = {word: ACTIONS.index(word) for word in actions}
    self._world = _make_world(level)
    self._render_tile = type(self._world.grid).render_tile
    self._bot: Any = None
    self._advice: str | None = None
    self._running = False

    margin = int(crop_walls and _is_walled(self._world))
    self._left = self._top = margin
    self._columns = self._world.width - 2 * margin
    self._rows = self._world.height - 2 * margin
    cells = max(self._columns, self._rows)
    if size < cells:
      raise InputError(
        f"size of {level}: expected at least {cells} pixels for "
        f"{self._columns}x{self._rows} cells, found {size}"
      )
    self._tile = -(-size // cells)
    self._background = self._empty_canvas(cells)

  def __reduce__(self):
    return _restore, (self.level, self._size, self.actions, self._crop_walls)

  def reset(self, seed: int) -> Observation:
    """Starts the episode of `seed`; see `Environment.reset`."""
    self._world.reset(seed=int(seed))
    self._bot = None
    self._running = True
    return self._observe()

  def step(self, action: str) -> Step:
    """Takes one action; see `Environment.step`."""
    if action not in self._codes:
      raise InputError(
        f"action in {self.level}: expected one of {', '.join(self.actions)}, "
        f"found {action!r}"
      )
    if not self._running:
      raise RuntimeError(f"{self.level}: step without a running episode")
    code = self._codes[action]
    _, reward, terminated, truncated, _ = self._world.step(code)
    done = bool(terminated or truncated)
    self._running = not done
    if self._bot is not None and not done:
      self._advice = self._consult(code)
    success = float(terminated and reward > 0)
    return Step(self._observe(), success, done)

  def expert(self) -> str | None:
    """BabyAI's bot, which here sees the whole grid, as the policy does.

    It follows every action taken from the first call of an episode on, so that
    it can also advise a policy that strays.
    """
    if not self._running:
      raise RuntimeError(f"{self.level}: expert without a running episode")
    if self._bot is None:
      self._bot = _make_bot(self._world, self.level)
      self._advice = self._consult(None)
    return self._advice

  def _consult(self, taken: int | None) -> str | None:
    try:
      code = self._bot.replan(taken)
    except Exception:  # The bot gives up by assertions and errors of any type.
      return None
    word = ACTIONS[int(code)]
    return word if word in self._codes else None

  def _empty_canvas(self, cells: int) -> np.ndarray:
    """uint8 [cells * tile, cells * tile, 3]: empty cells, black around them."""
    tile = self._tile
    canvas = np.zeros((cells * tile, cells * tile, 3), np.uint8)
    self._x = (cells - self._columns) // 2 * tile
    self._y = (cells - self._rows) // 2 * tile
    empty = self._render_tile(None, tile_size=tile)
    grid = np.tile(empty, (self._rows, self._columns, 1))
    height, width, _ = grid.shape
    canvas[self._y : self._y + height, self._x : self._x + width] = grid
    return canvas

  def _observe(self) -> Observation:
    world, tile = self._world, self._tile
    canvas = self._background.copy()
    agent = (int(world.agent_pos[0]), int(world.agent_pos[1]))
    for row in range(self._rows):
      y = self._y + row * tile
      for column in range(self._columns):
        place = (self._left + column, self._top + row)
        thing = world.grid.grid[place[1] * world.grid.width + place[0]]
        direction = int(world.agent_dir) if place == agent else None
        if thing is None and direction is None:
          continue
        x = self._x + column * tile
        canvas[y : y + tile, x : x + tile] = self._render_tile(
          thing, agent_dir=direction, tile_size=tile
        )
    if canvas.shape[0] != self._size:
      image = Image.fromarray(canvas)
      canvas = np.asarray(
        image.resize((self._size, self._size), Image.Resampling.BOX)
      )
    return Observation(canvas[None], world.mission)


def _restore(level, size, actions, crop_walls) -> MiniGridEnvironment:
  return MiniGridEnvironment(
    level, size=size, actions=actions, crop_walls=crop_walls
  )


def _make_world(level: str) -> Any:
  """The bare level object, without gym's wrappers."""
  import gymnasium
  import minigrid  # Registers the levels.
  from minigrid.envs.babyai.core import roomgrid_level
  from minigrid.minigrid_env import MiniGridEnv

  del minigrid
  # It prints a line whenever it draws a start again; that would break up the
  # progress display, and it has no switch.
  roomgrid_level.print = _print_nothing
  try:
    world = gymnasium.make(level, disable_env_checker=True).unwrapped
  except gymnasium.error.Error as error:
    raise InputError(
      f"level {level}: expected a BabyAI or MiniGrid level, found none of that "
      f"name ({' '.join(str(error).split())})"
    ) from error
  if not isinstance(world, MiniGridEnv):
    raise InputError(
      f"level {level}: expected a BabyAI or MiniGrid level, found "
      f"{type(world).__name__}"
    )
  # The agent's own partial view is most of a step's time, and nobody looks.
  world.gen_obs = dict
  return world


def _print_nothing(*_, **__) -> None:
  pass


def _is_walled(world: Any) -> bool:
  """Whether the outer ring of cells is all wall, in a few episodes."""
  for seed in _PROBE_SEEDS:
    world.reset(seed=seed)
    grid = world.grid
    ring = [(x, y) for x in range(grid.width) for y in (0, grid.height - 1)]
    ring += [(x, y) for y in range(grid.height) for x in (0, grid.width - 1)]
    things = [grid.get(*place) for place in ring]
    if any(thing is None or thing.type != "wall" for thing in things):
      return False
  return True


def _make_bot(world: Any, level: str) -> Any:
  from minigrid.envs.babyai.core.roomgrid_level import RoomGridLevel
  from minigrid.utils.baby_ai_bot import BabyAIBot

  if not isinstance(world, RoomGridLevel):
    raise InputError(
      f"level {level}: expected a BabyAI level, the only ones with an expert"
    )

  class FullViewBot(BabyAIBot):
    """The bot with the whole grid explored from the start."""

    def _process_obs(self):
      self.vis_mask[:] = True

  return FullViewBot(world)
