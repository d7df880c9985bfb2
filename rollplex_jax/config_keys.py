"""The keys of a tree of config dataclasses, and the one that was meant."""

from __future__ import annotations

import dataclasses
import difflib
import typing

# As in difflib: 1 is equal. Below, two words have little to do with each other.
_SIMILAR = 0.5


def key_paths(cls: type, prefix: str = "") -> list[str]:
  """Dotted paths of all keys, groups before their members."""
  hints = typing.get_type_hints(cls)
  out = []
  for field in dataclasses.fields(cls):
    path = prefix + field.name
    out.append(path)
    if dataclasses.is_dataclass(hints[field.name]):
      out += key_paths(hints[field.name], path + ".")
  return out


def no_such_key(cls: type, path: str, where: str) -> str:
  """What to say of a key that does not exist: one line with the nearest one.

  Args:
    cls: the dataclass of the whole tree.
    path: dotted, from its root.
    where: what stands for the root in messages, such as "config".
  """
  nearest = _nearest(key_paths(cls), path)
  group, _, name = nearest.rpartition(".")
  if group != path.rpartition(".")[0]:
    name = f"{where}.{nearest}"
  return f"{where}.{path}: no such key; did you mean {name}?"


def _nearest(known: list[str], path: str) -> str:
  """The key of the same group that is spelled most alike, or of another."""
  group, _, name = path.rpartition(".")
  siblings = [k for k in known if k.rpartition(".")[0] == group]
  if group in known and not siblings:
    return group  # A value has no keys.
  last = {k: k.rpartition(".")[2] for k in known}
  for keys, spelled, wanted in (
      (siblings, last, name),
      # Of a group that is misspelled, or a key that is in another group.
      ([k for k in known if last[k] == name], {k: k for k in known}, path),
      (known, last, name)):
    found = max(keys, default=None, key=lambda k: _likeness(spelled[k], wanted))
    if found and (_likeness(spelled[found], wanted) >= _SIMILAR
                  or last[found] == name):
      return found
  return max(siblings or known, key=lambda k: _likeness(last[k], name))


def _likeness(a: str, b: str) -> float:
  return difflib.SequenceMatcher(None, a, b).ratio()
