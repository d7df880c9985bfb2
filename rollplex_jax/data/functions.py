"""Functions and classes of the user's own, found by name."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import types
from typing import Any

from rollplex_jax.errors import InputError


class WrongTypeError(InputError):
  """What such a function returned is of another type than it should be."""


class NotFiniteError(InputError):
  """What such a function returned is NaN or infinite."""


def load_function(spec: str, kind: str) -> Any:
  """Finds what a setting names.

  Args:
    spec: "module:name" or "path/to/file.py:name".
    kind: what it is, for errors: "reward".

  Raises:
    InputError: there is no such module, file or name, or importing it fails.
  """
  place, _, name = spec.rpartition(":")
  if not place or not name:
    raise InputError(
      f"{kind} {spec}: expected module:function or path/to/file.py:function"
    )
  is_file = place.endswith(".py")
  if is_file and not os.path.isfile(place):
    raise InputError(f"{kind} {spec}: file {place} not found")
  try:
    module = _import_file(place) if is_file else importlib.import_module(place)
  except (Exception, SystemExit) as error:
    raise InputError(
      f"{kind} {spec}: importing {place} failed: {describe(error)}"
    ) from error
  found = getattr(module, name, None)
  if found is None:
    raise InputError(f"{kind} {spec}: {place} has no function {name}")
  return found


def describe(error: BaseException) -> str:
  """The type and message of `error` on one line."""
  return " ".join(f"{type(error).__name__}: {error}".split())


def _import_file(path: str) -> types.ModuleType:
  stem = re.sub(r"\W", "_", os.path.abspath(path))
  name = f"user_file_{stem}"
  spec = importlib.util.spec_from_file_location(name, path)
  module = importlib.util.module_from_spec(spec)
  # Before it runs: dataclasses and pickle look their module up by name.
  sys.modules[name] = module
  try:
    spec.loader.exec_module(module)
  except BaseException:
    del sys.modules[name]
    raise
  return module
