"""What README and docs tell a reader to type: commands, flags, Python."""

from __future__ import annotations

import ast
from collections.abc import Iterator
import dataclasses
import pathlib
import re
import shlex

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?<=\n\n)(?:^    .*\n|^\n(?=\n*    ))+", re.MULTILINE)
_SPAN = re.compile(r"`(python\s-m\s[^`]+)`")
# The words with which a line begins that is to be typed into a shell.
_PROGRAMS = ("python", "make", "pip", "git", "bazel", "sbatch", "head", ".")
_FLAG = re.compile(r"(?<![\w-])--([a-z][\w.]*)(?:[ =`'\],;)\n]|$)")


@dataclasses.dataclass(frozen=True)
class Command:
  """A line to be typed, continuation lines joined."""

  words: tuple[str, ...]

  @property
  def experiment(self) -> str | None:
    """NAME of `python -m experiments.NAME`."""
    if self.words[:2] == ("python", "-m"):
      return self.words[2].removeprefix("experiments.")
    return None

  def __str__(self) -> str:
    return " ".join(self.words)


@dataclasses.dataclass(frozen=True)
class Python:
  """A block of Python; `name` is the file that its first line says it is."""

  source: str
  name: str | None


def pieces(text: str) -> Iterator[Command | Python]:
  """Commands and Python of a page, in order."""
  found = []
  for match in _FENCE.finditer(text):
    if match[1] == "python":
      found.append((match.start(), _python(match[2])))
    elif match[1] in ("", "sh", "bash"):
      found += [(match.start(), c) for c in commands(match[2])]
  # What is fenced is not read twice, and nothing moves.
  rest = _FENCE.sub(lambda m: re.sub(r"[^\n]", " ", m[0]).replace(" " * 4, "   "),
                    text)
  for match in _INDENTED.finditer(rest):
    block = re.sub(r"^    ", "", match[0], flags=re.MULTILINE)
    if re.match(r"# \w+\.py\n", block):
      found.append((match.start(), _python(block)))
    else:
      found += [(match.start(), c) for c in commands(block)]
  found += [(match.start(), Command(tuple(shlex.split(match[1]))))
            for match in _SPAN.finditer(rest)]
  yield from (piece for _, piece in sorted(found, key=lambda pair: pair[0]))


def commands(block: str) -> Iterator[Command]:
  """The lines of a block that are commands."""
  for line in block.replace("\\\n", " ").splitlines():
    if line.split(" ")[0] in _PROGRAMS:
      for part in line.split("&&"):
        yield Command(tuple(shlex.split(part, comments=True)))


def flags(text: str) -> set[str]:
  """Names of all flags in a page, without dashes and values."""
  return {name.rstrip(".") for name in _FLAG.findall(text)}


def defined_flags(root: pathlib.Path) -> set[str]:
  """Flags that the commands define, read from their sources."""
  found = set()
  for path in (root / "experiments").rglob("*.py"):
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
      if (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
          and re.match("DEFINE|add_argument", node.func.attr)
          and isinstance(node.args[0], ast.Constant)):
        found.add(node.args[0].value.lstrip("-"))
    # Flags that are defined in a loop over a dict(name=help, ...).
    for node in ast.walk(tree):
      if isinstance(node, ast.DictComp) and "DEFINE" in ast.dump(node.value):
        found |= {keyword.arg for call in ast.walk(node.generators[0].iter)
                  if isinstance(call, ast.Call) for keyword in call.keywords}
  return found


def _python(source: str) -> Python:
  name = re.match(r"# (\w+\.py)\n", source)
  return Python(source, name and name[1])
