"""Artefacts of a step: by name, and tagged with what they depend on.

Every artefact carries, on the host, the version of the parameters it was made
with. Reading one at another version is an error, never a silent stale read.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from rollplex_jax.models.weights import Params


class StaleArtifactError(RuntimeError):
  """An artefact was read at parameters other than those it was made with."""


@dataclasses.dataclass(frozen=True)
class Model:
  """Parameters at a version.

  Attributes:
    params: {"text": ..., "visual": ...}.
    version: number of updates behind the text decoder.
    tower_version: number of updates behind the vision tower; does not move
      while the tower is frozen.
  """

  params: Params
  version: int
  tower_version: int = 0


class Store:
  """Artefacts by name, each tagged with the version it depends on."""

  def __init__(self):
    self._items: dict[str, tuple[Any, Any]] = {}

  def put(self, name: str, value: Any, version: Any) -> None:
    self._items[name] = (value, version)

  def get(self, name: str, version: Any) -> Any:
    """The artefact.

    Raises:
      StaleArtifactError: if it was made at another version.
      KeyError: if there is none.
    """
    value, made = self._items[name]
    if made != version:
      raise StaleArtifactError(
          f"{name} was made at version {made} and is read at {version}")
    return value

  def drop(self, name: str) -> None:
    self._items.pop(name, None)

  def names(self) -> list[str]:
    return sorted(self._items)
