"""A reward function in worker processes: nothing it does ends or hangs a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import os
from typing import Any

from rollplex_jax.data import rewards
from rollplex_jax.data.fallbacks import Fallbacks
from rollplex_jax.data.functions import load_function
from rollplex_jax.data.worker import WorkError
from rollplex_jax.data.workers import Failure, Limits, WorkerPool
from rollplex_jax.errors import InputError

_SIGNATURE = "signature"


def serve_reward(spec: str) -> Callable[[Any], Any]:
  """What a worker runs: answers (completion, row) with its scores."""
  reward = load_function(spec, "reward")
  refusal = None
  try:
    rewards.check_reward(reward, spec)
  except InputError as error:
    refusal = str(error)

  def handle(request):
    if request == _SIGNATURE:
      return refusal
    if refusal:
      raise WorkError("wrong_arguments", refusal)
    completion, row = request
    return rewards.normalize_score(reward(completion, row), "its value")

  return handle


class RewardWorkers:
  """Scores completions with a function that is called in workers only."""

  def __init__(self, spec: str, limits: Limits, fallback: float = 0.0):
    """Nothing is started or imported yet.

    Args:
      spec: "module:function" or "path/to/file.py:function".
      limits: of a call.
      fallback: reward of a completion for which the function fails.
    """
    self._name = f"reward {spec}"
    self._fallbacks = Fallbacks(self._name, fallback)
    self._place, colon, name = spec.rpartition(":")
    # A worker that starts later, elsewhere, finds the same file.
    is_file = self._place.endswith(".py")
    self._file = os.path.abspath(self._place) if is_file else self._place
    self._pool = WorkerPool(
      serve_reward, (f"{self._file}{colon}{name}",), limits
    )

  def check(
    self,
    row: Mapping[str, Any] | None = None,
    where: str = "",
    *,
    dry_run: bool = True,
  ) -> None:
    """Imports the function, and tries it.

    Args:
      row: to try it on, with an empty completion and with the row's "response"
        and "answer", where it has them; None for the signature alone.
      where: names the row.
      dry_run: without it, the function need only be there.

    Raises:
      InputError: naming the function, what it did and, if so, with which row.
    """
    failure = self._pool.start()
    if failure is not None:
      raise InputError(self._said(failure.reason))
    if not dry_run:
      return
    (refusal,) = self._pool.run([_SIGNATURE])
    if isinstance(refusal, Failure):
      refusal = refusal.reason
    if refusal:
      raise InputError(self._said(refusal))
    if row is None:
      return
    texts = dict.fromkeys(["", *(
      str(row[key]) for key in ("response", "answer")
      if isinstance(row.get(key), (str, int, float)))])
    for text, found in zip(texts, self._pool.run([(t, row) for t in texts])):
      if isinstance(found, Failure):
        raise InputError(
          f"{self._name}: dry run on {where} with completion {text!r:.60}: "
          f"{found.reason}; data.reward_dry_run=False lets the run go on"
        )

  def score(
    self,
    completions: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    row_indices: Sequence[int],
  ) -> list[dict[str, float]]:
    """Rewards of N completions.

    Args:
      completions: N texts.
      rows: the N rows they answer; a group repeats its row.
      row_indices: N numbers that name the rows.

    Returns:
      N dicts of finite floats, each with "overall", and 0.0 or 1.0 as
      "errors/KIND" for each of `fallbacks.KINDS`.
    """
    calls = list(zip(completions, rows, strict=True))
    return self._fallbacks.fill(
      self._pool.run(calls), [f"row {index}" for index in row_indices]
    )

  def close(self) -> None:
    """Ends the workers; without it they end with this object."""
    self._pool.close()

  def _said(self, reason: str) -> str:
    if self._file:
      reason = reason.replace(self._file, self._place)
    return reason if reason.startswith("reward ") else f"{self._name}: {reason}"
