"""Texts from Python's standard library, for checkpoints that write code.

    python -m experiments.library_texts --lambada=passages.jsonl --text=text.jsonl

They are there wherever Python is; which version writes them is printed, since
numbers on them hold for that one. --lambada makes a file in LAMBADA's format:
passages of documentation whose last word has come up before, to be guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
import json
import platform
from typing import Any

from absl import flags

from experiments import common, texts
from rollplex_jax.errors import InputError

_LAMBADA = flags.DEFINE_string("lambada", None, "File of passages to make.")
_TEXT = flags.DEFINE_string("text", None, "File of whole modules to make.")
_ITEMS = flags.DEFINE_integer("items", 320, "Passages.", lower_bound=1)


def main() -> dict[str, Any]:
  """Runs the command."""
  if not (_LAMBADA.value or _TEXT.value):
    raise InputError("--lambada and --text are not set: expected one of them")
  for name, path in (("lambada", _LAMBADA.value), ("text", _TEXT.value)):
    if path:
      common.check_output(name, path)
  result: dict[str, Any] = {"python": platform.python_version()}
  if _LAMBADA.value:
    items = texts.library_passages(_ITEMS.value)
    _write(_LAMBADA.value, items)
    result["passages"] = len(items)
  if _TEXT.value:
    _write(_TEXT.value, texts.library_documents())
    result["documents"] = len(texts.LIBRARY_MODULES)
  print(", ".join(f"{name}: {value}" for name, value in result.items()))
  return result


def _write(path: str, documents: Sequence[str]) -> None:
  with common.whole_file(path) as file:
    for text in documents:
      file.write(json.dumps({"text": text}) + "\n")


if __name__ == "__main__":
  common.run(main)
