"""Every notebook runs from a fresh process, and holds code that belongs there.

They run as plain Python, cell after cell in one namespace, so that the tests need
no Jupyter: a notebook has no magics, which this file checks too.
"""

import ast
import pathlib
import subprocess
import sys
import tempfile

from absl.testing import absltest, parameterized
import pytest

from tests.experiments import commands
from tests.helpers import notebooks

_ROOT = pathlib.Path(__file__).parents[1]
_NAMES = ("compression", "one_step", "will_it_fit")
_PATHS = {name: _ROOT / "notebooks" / f"{name}.ipynb" for name in _NAMES}
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# Lines of the longest lambda: more is a function that belongs in the library.
_LAMBDA_LINES = 3
_SECONDS = 600  # Under two minutes where nothing else runs.


class NotebooksTest(parameterized.TestCase):

  def test_all_are_here(self):
    self.assertEqual({p.stem for p in (_ROOT / "notebooks").glob("*.ipynb")},
                     set(_NAMES))

  @parameterized.parameters(*_NAMES)
  def test_form(self, name):
    code = notebooks.cells(_PATHS[name], "code")
    self.assertIn("pip", code[0]["source"])
    self.assertIn("find_spec", code[0]["source"])
    for cell in code:
      self.assertEqual((cell["outputs"], cell["execution_count"]), ([], None))
      self.assertEqual(problems(cell["source"]), [])
    prose = notebooks.cells(_PATHS[name], "markdown")
    self.assertStartsWith(prose[0]["source"], "# ")
    self.assertGreater(len(prose), len(code) / 2)

  def test_what_does_not_belong_is_found(self):
    for source, problem in (
        ("def f(x):\n  return x", "defines f"),
        ("class A:\n  pass", "defines A"),
        ("f = lambda x: (\n x,\n x,\n x)", "a lambda of 4 lines"),
        ("%pip install rollplex", "no plain Python"),
        ("x = 1\n" * 41, "41 lines")):
      self.assertEqual([problem], problems(source))
    self.assertEqual(problems("f = lambda x: x\nf(1)"), [])

  @parameterized.parameters(*_NAMES)
  @pytest.mark.slow
  def test_runs(self, name):
    with tempfile.TemporaryDirectory() as folder:
      environment = commands.process_environment(MPLBACKEND="agg")
      done = subprocess.run(
          [sys.executable, "-m", "tests.helpers.notebooks",
           str(_PATHS[name])], cwd=folder, env=environment, text=True,
          capture_output=True, timeout=_SECONDS)
    self.assertEqual(done.returncode, 0, msg=done.stderr[-3000:])
    self.assertNotEmpty(done.stdout)


def problems(source: str) -> list[str]:
  """What of a code cell belongs elsewhere."""
  try:
    tree = ast.parse(source)
  except SyntaxError:
    return ["no plain Python"]
  found = []
  for node in ast.walk(tree):
    if isinstance(node, _DEFINITIONS):
      found.append(f"defines {node.name}")
    elif isinstance(node, ast.Lambda):
      lines = node.end_lineno - node.lineno + 1
      if lines > _LAMBDA_LINES:
        found.append(f"a lambda of {lines} lines")
  lines = len(source.splitlines())
  return found + ([f"{lines} lines"] if lines > 40 else [])


if __name__ == "__main__":
  absltest.main()
