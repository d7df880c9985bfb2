"""Texts that models are evaluated on."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
import pathlib
import re
import sysconfig

from legolm_jax import benchmarks
from rollplex_jax.errors import InputError

# Python's own library: a text that is wherever Python is.
LIBRARY_MODULES = ("argparse.py", "tarfile.py", "json/decoder.py", "textwrap.py",
           "statistics.py", "zipfile.py", "fractions.py", "ipaddress.py")
# Their documentation too; what else is installed differs between machines.
_PACKAGES = ("asyncio", "collections", "concurrent", "ctypes", "email",
             "encodings", "html", "http", "importlib", "json", "logging",
             "multiprocessing", "sqlite3", "unittest", "urllib", "wsgiref",
             "xml", "xmlrpc")
_TESTS = {"test", "tests"}
_WORDS = 20, 44  # Of a passage.
_PER_MODULE = 12
_LAST_WORD = re.compile(r"[a-z]{5,}")


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


def library_documents() -> list[str]:
  """The source of some modules, each whole."""
  return [_path(name).read_text(encoding="utf-8") for name in LIBRARY_MODULES]


def library_passages(count: int) -> list[str]:
  """Passages of the library's documentation, at most a few of each module.

  The last word is lower case, at least five letters long, stands at a
  sentence's end and earlier in its passage too.

  Raises:
    InputError: if there are fewer.
  """
  found: list[str] = []
  for path in sorted(set(_path("").glob("*.py")) | {
      p for package in _PACKAGES for p in _path(package).rglob("*.py")
      if not _TESTS & set(p.parts)}):
    of_module = []
    for text in _docstrings(path):
      of_module += _passages(text)
    found += of_module[:_PER_MODULE]
  found = list(dict.fromkeys(found))
  if len(found) < count:
    raise InputError(f"--items={count}: the library has {len(found)} passages")
  # Evenly over the modules, which are in order.
  return [found[i * len(found) // count] for i in range(count)]


def _path(name: str) -> pathlib.Path:
  return pathlib.Path(sysconfig.get_path("stdlib"), name)


def _docstrings(path: pathlib.Path) -> Iterator[str]:
  try:
    tree = ast.parse(path.read_text(encoding="utf-8"))
  except (SyntaxError, UnicodeDecodeError):
    return
  kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
  for node in ast.walk(tree):
    if isinstance(node, kinds) and (text := ast.get_docstring(node)):
      yield text


def _passages(text: str) -> Iterator[str]:
  """Of each paragraph of prose the first one that ends as it should."""
  for paragraph in re.split(r"\n\s*\n", text):
    words = paragraph.split()
    if ">>>" in paragraph or not words or not words[0][0].isalpha():
      continue
    for end in range(_WORDS[0], min(len(words), _WORDS[1]) + 1):
      last = words[end - 1]
      if (last.endswith(".") and _LAST_WORD.fullmatch(last[:-1])
          and _occurs(last[:-1], words[:end - 1])):
        yield " ".join([*words[:end - 1], last[:-1]])
        break


def _occurs(word: str, words: Sequence[str]) -> bool:
  return any(word == w.strip(".,;:()'\"`").lower() for w in words)
