"""A stated score in place of one that could not be had, counted and told of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import types

from absl import logging

from rollplex_jax.data.workers import Failure

# What can go wrong with a call; a run reports the share of each kind.
KINDS = (
  "timeout",
  "exception",
  "exit",
  "memory",
  "wrong_arguments",
  "wrong_type",
  "not_finite",
  "skipped",
)
PREFIX = "errors/"
_NONE = {PREFIX + kind: 0.0 for kind in KINDS}


class Fallbacks:
  """Puts a score where a call failed; tells of the first of each kind."""

  def __init__(
    self,
    name: str,
    value: float,
    rest: Mapping[str, float] = types.MappingProxyType({}),
  ):
    """Nothing has failed yet.

    Args:
      name: of what is called, such as "reward rewards.py:mine".
      value: the reward in place of one that failed.
      rest: other scores of what failed.
    """
    self._name, self._value, self._rest = name, value, rest
    self._told: set[tuple[str, str]] = set()

  def fill(
    self,
    found: Sequence[Mapping[str, float] | Failure],
    where: Sequence[str],
  ) -> list[dict[str, float]]:
    """N scores, each with "overall" and, under "errors/KIND", 0.0 or 1.0.

    Args:
      found: N scores or failures.
      where: N names of what they are for, such as "row 12".
    """
    rest = dict(self._rest)
    # Where others tell of success, what failed is none.
    if any("success" in s for s in found if not isinstance(s, Failure)):
      rest["success"] = 0.0
    scores = []
    for score, place in zip(found, where, strict=True):
      if not isinstance(score, Failure):
        scores.append({**score, **_NONE})
        continue
      self.tell(score, place)
      scores.append(
        {"overall": self._value, **rest, **_NONE, PREFIX + score.kind: 1.0}
      )
    return scores

  def tell(self, failure: Failure, place: str, *, then: str = "") -> None:
    """Warns in one line of the first failure of its kind.

    Args:
      failure: what happened.
      place: where, such as "row 12".
      then: what becomes of that place, where it isn't a score in its stead.
    """
    if (failure.kind, then) in self._told:
      return
    self._told.add((failure.kind, then))
    rest = f"{place} {then}; further ones are not told of" if then else (
      f"it scores {self._value:g}, and further ones are only counted, as "
      f"reward/{PREFIX}{failure.kind}"
    )
    logging.warning(
      "%s", f"{self._name}, {place}: {failure.reason}; {rest}"
    )


def split(
  scores: Mapping[str, float],
) -> tuple[dict[str, float], str | None]:
  """What `fill` has made: scores without errors, and the kind of error."""
  rest = {k: v for k, v in scores.items() if not k.startswith(PREFIX)}
  kinds = [k for k in KINDS if scores.get(PREFIX + k)]
  return rest, kinds[0] if kinds else None
