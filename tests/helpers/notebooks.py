"""Reads notebooks, and runs their code without Jupyter.

`python -m tests.helpers.notebooks PATH` runs the code cells one after the other
in one namespace, as a kernel does, and stops at the first that raises. Notebooks
hold plain Python only (no magics), so nothing of Jupyter is missed.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import types


def cells(path: str | os.PathLike, kind: str) -> list[dict]:
  """A notebook's cells of a kind ("code" or "markdown"), sources joined."""
  notebook = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
  return [{**cell, "source": "".join(cell["source"])}
          for cell in notebook["cells"] if cell["cell_type"] == kind]


def run(path: str | os.PathLike) -> None:
  """Runs the code cells in a module of their own."""
  module = types.ModuleType("__main__")
  # Dataclasses and pickle look a module up by its name.
  sys.modules["__main__"] = module
  for i, cell in enumerate(cells(path, "code")):
    where = f"{pathlib.Path(path).name}, code cell {i}"
    exec(compile(cell["source"], where, "exec"), module.__dict__)
    if "matplotlib.pyplot" in sys.modules:  # A kernel shows and closes them.
      sys.modules["matplotlib.pyplot"].close("all")


if __name__ == "__main__":
  run(sys.argv[1])
