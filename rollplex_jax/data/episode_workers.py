"""Environments in worker processes, which play many episodes side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import itertools
from typing import Any

from rollplex_jax.data.environments import PlanTask
from rollplex_jax.data.episodes import EpisodeInPlay, Message, TurnTask
from rollplex_jax.data.fallbacks import Fallbacks
from rollplex_jax.data.workers import Failure, Limits, WorkerPool
from rollplex_jax.data.worlds import World
from rollplex_jax.errors import InputError

_FAILED = {"success": 0.0, "malformed": 0.0}
_REFUSED = "wrong_type"
_tokens = itertools.count()


class EpisodeWorkers:
  """One world in several processes: scores plans, plays episodes, makes rows.
  """

  def __init__(self, world: World, limits: Limits):
    """Nothing is started yet.

    Args:
      world: its settings.
      limits: of a call, which is a turn, a plan or a row.
    """
    self.name = f"environment {world.level or world.make}"
    self._pool = WorkerPool(serve_episodes, (world,), limits)
    # Rows are read ahead while plans and turns are played.
    self._rows = WorkerPool(
      serve_episodes,
      (world,),
      dataclasses.replace(limits, num_workers=min(limits.num_workers, 1)),
    )
    self._blank: dict[str, Any] | None = None

  def check(self) -> tuple[dict[str, Any], Message | None]:
    """Starts a worker, which tries the world out.

    Returns:
      A first row, and what answers an action if that is shown to the policy;
      all in black.

    Raises:
      InputError: naming the world and what is wrong.
    """
    failure = self._pool.start()
    if failure is None:
      (seen,) = self._pool.run([("first", 0)])
      failure = seen if isinstance(seen, Failure) else None
    if failure is not None:
      known = failure.reason.startswith(("environment ", "level ", "size of "))
      reason = failure.reason
      raise InputError(reason if known else f"{self.name}: {reason}")
    self._blank, _ = seen
    return seen

  def score(
    self,
    completions: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    fallbacks: Fallbacks,
  ) -> list[dict[str, float]]:
    """Scores of N plans; see `PlanTask.reward` and `Fallbacks.fill`.

    Args:
      completions: the plans.
      rows: of their episodes, as of `EpisodePlayer.start`.
      fallbacks: for those that fail.
    """
    # A group's samples start from one seed and often agree; playing is pure.
    plans = [(text, row["seed"])
             for text, row in zip(completions, rows, strict=True)]
    refused = [_refused(row) for row in rows]
    calls = list(dict.fromkeys(
      plan for plan, failure in zip(plans, refused) if failure is None))
    found = dict(zip(calls, self._pool.run([("plan", *c) for c in calls])))
    return fallbacks.fill(
      [failure or found[plan] for plan, failure in zip(plans, refused)],
      [f"episode {seed}" for _, seed in plans],
    )

  def player(self, fallbacks: Fallbacks) -> WorkerPlayer:
    """An `EpisodePlayer`; several may be used in turn."""
    return WorkerPlayer(self._pool, fallbacks)

  def row(
    self, seed: int, blind: bool, key: str, noise: float
  ) -> dict[str, Any] | Failure | None:
    """The row of a seed, a demonstration under `key` if that isn't empty.

    Returns:
      The row, None where the teacher has no demonstration, or what went wrong.
    """
    (row,) = self._rows.run([("row", seed, blind, key, noise)])
    return row

  def blank(self, seed: int, refused: str = "") -> dict[str, Any]:
    """A black row, after `check`.

    Args:
      seed: of the episode whose start can't be shown.
      refused: why the episode fails in any case; empty where that is seen when
        it is played.
    """
    row = {**self._blank, "seed": seed}
    return {**row, "refused": refused} if refused else row


class WorkerPlayer:
  """Plays the episodes of an `EpisodeWorkers`' pool; see `EpisodePlayer`.

  What a worker has to know of an episode is told in every call, so that one
  that was replaced plays it again up to where it was.
  """

  def __init__(self, pool: WorkerPool, fallbacks: Fallbacks):
    self._pool, self._fallbacks = pool, fallbacks
    self._episodes: list[_Played] = []
    self._timeouts = 0

  def start(self, rows: Sequence[Mapping[str, Any]]) -> None:
    token = next(_tokens)
    self._timeouts = 0
    self._episodes = [
      _Played(token, int(row["seed"]), bool(row.get("blind"))) for row in rows
    ]
    for i, row in enumerate(rows):
      if (failure := _refused(row)) is not None:
        self.fail(i, failure.reason)
    self._play([None] * len(rows), [
      i for i, episode in enumerate(self._episodes) if not episode.over
    ])

  def step(self, completions: Sequence[str | None]) -> list[Message | None]:
    if len(completions) != len(self._episodes):
      raise ValueError(
        f"{len(completions)} completions for {len(self._episodes)} episodes"
      )
    return self._play(completions, [
      i for i, text in enumerate(completions)
      if text is not None and not self._episodes[i].over
    ])

  def _play(self, completions, acting) -> list[Message | None]:
    messages: list[Message | None] = [None] * len(completions)
    calls = [
      ("turn", i, *self._episodes[i].request(completions[i])) for i in acting
    ]
    found = self._pool.run(calls, homes=acting, timeouts=self._timeouts)
    for i, result in zip(acting, found):
      episode = self._episodes[i]
      if isinstance(result, Failure):
        self._timeouts += result.kind == "timeout"
        episode.over, episode.result = True, result
        continue
      messages[i], episode.over, episode.result = result
      if completions[i] is not None:
        episode.history.append(completions[i])
    return messages

  def fail(self, index: int, reason: str) -> None:
    episode = self._episodes[index]
    # A row's error names the episode, as the warning does.
    reason = " ".join(reason.split()).removeprefix(f"episode {episode.seed}, ")
    episode.over, episode.result = True, Failure(_REFUSED, reason)

  def scores(self) -> list[dict[str, float]]:
    return self._fallbacks.fill(
      [e.result for e in self._episodes],
      [f"episode {e.seed}" for e in self._episodes],
    )


@dataclasses.dataclass
class _Played:
  """What the player knows of an episode: enough to play it again."""

  token: int
  seed: int
  blind: bool
  over: bool = False
  history: list[str] = dataclasses.field(default_factory=list)
  result: Any = None

  def request(self, completion: str | None) -> tuple:
    key = (self.token, self.seed, self.blind)
    return key, tuple(self.history), completion


def _refused(row: Mapping[str, Any]) -> Failure | None:
  """The failure of an episode whose start the policy can't be shown."""
  return Failure(_REFUSED, row["refused"]) if "refused" in row else None


def serve_episodes(world: World) -> Callable[[Any], Any]:
  """What a worker runs: answers calls of (method of `_Stage`, arguments)."""
  stage = _Stage(world)
  return lambda call: getattr(stage, call[0])(*call[1:])


class _Seat:
  """One environment and the episode that is played in it, if any."""

  def __init__(self, task: TurnTask):
    self.task = task
    self.key: tuple | None = None
    self.turns = 0
    self.episode: EpisodeInPlay | None = None


class _Stage:
  """The environments of one worker, kept from call to call."""

  def __init__(self, world: World):
    self._world = world
    self._task: PlanTask | TurnTask = world.task()
    self._seats: dict[int, _Seat] = {}

  def plan(self, completion: str, seed: int) -> dict[str, float]:
    """Scores of a plan."""
    return self._task.reward(completion, {"seed": seed})

  def row(self, seed: int, blind: bool, key: str, noise: float):
    """See `EpisodeWorkers.row`."""
    row = self._task.row(seed, blind=blind)
    if key:
      row[key] = self._task.demonstration(seed, noise=noise)
      if row[key] is None:
        return None
    return row

  def first(self, seed: int):
    """See `EpisodeWorkers.check`."""
    row, message = self._task.row(seed, blind=True), None
    if isinstance(self._task, TurnTask):
      episode = self._task.start(seed, blind=True)
      message = episode.step(self._task.environment.actions[0])
    return row, message

  def turn(self, place: int, key: tuple, history, completion: str | None):
    """One turn of an episode, or its start where `completion` is None.

    Args:
      place: number of the episode among those that are played side by side.
      key: which episode, its seed and whether it is blind.
      history: completions of the turns before.
      completion: of this one.

    Returns:
      The next message, whether the episode is over, and its scores.
    """
    # One that fails is not used again.
    seat = self._seats.pop(place, None) or _Seat(self._world.task())
    if seat.key != key or seat.turns != len(history):
      _, seed, blind = key
      seat.episode = seat.task.start(seed, blind=blind)
      for text in history:
        seat.episode.step(text)
    message = None if completion is None else seat.episode.step(completion)
    seat.key, seat.turns = key, len(history) + (completion is not None)
    self._seats[place] = seat
    return message, seat.episode.over, seat.episode.scores()


def failed_episodes(name: str, value: float) -> Fallbacks:
  """What stands in place of the scores of episodes that fail."""
  return Fallbacks(name, value, _FAILED)
