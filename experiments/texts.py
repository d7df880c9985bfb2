"""Texts that models are evaluated on."""

from __future__ import annotations

import pathlib

from legolm_jax import benchmarks
from rollplex_jax.errors import InputError


def read_documents(path: str) -> list[str]:
  """The texts of a file: one, or one per line of JSONL. Raises InputError."""
  if path.endswith(".jsonl"):
    return [benchmarks.text_of(row, where)
            for where, row in benchmarks.read_objects(path)]
  try:
    text = pathlib.Path(path).read_text(encoding="utf-8")
  except UnicodeDecodeError as e:
    raise InputError(f"{path}: expected UTF-8 text ({e.reason})") from e
  except OSError as e:
    raise InputError(f"{path}: can't be read: {e.strerror}") from e
  if not text.strip():
    raise InputError(f"{path}: expected text, found none")
  return [text]
