"""Every file has its bazel target, and CI runs targets that exist."""

import pathlib
import re
import tempfile

from absl.testing import absltest

from tests.helpers import source_tree

ROOT = pathlib.Path(__file__).resolve().parents[1]

# As in tests/defs.bzl and the Makefile.
_SLOW_MARKS = re.compile(
    r"^ *(@|pytestmark = )pytest\.mark\.(slow|gpu|real_model)\b", re.MULTILINE)


def target_errors(root: pathlib.Path) -> list[str]:
  """One line for each file without a target, or that is wrongly listed."""
  targets = source_tree.targets(root)
  held = {module for target in targets for module in target.modules}
  slow = {module for target in targets for module in target.slow}
  errors = []
  known = source_tree.modules(root)
  for module, path in known.items():
    where = path.relative_to(root)
    if module not in held and path.read_text():
      errors.append(f"{where}: no bazel target has it")
    if not path.name.endswith("_test.py"):
      continue
    marked = bool(_SLOW_MARKS.search(path.read_text()))
    if marked != (module in slow):
      errors.append(f"{where}: " + (
          "has slow tests; list it as slow in the BUILD file beside it"
          if marked else "is listed as slow and has no slow tests"))
  return errors + [f"{module}: is listed as slow and does not exist"
                   for module in sorted(slow - known.keys())]


def suite_errors(root: pathlib.Path, name: str) -> list[str]:
  """One line for each test of a test_suite of tests/BUILD that isn't there."""
  suite = re.search(rf'test_suite\(\s*name = "{name}",.*?\n\)',
                    (root / "tests/BUILD").read_text(), re.DOTALL)
  labels = re.findall(r'"(//[^"]*)"', suite.group())
  known = {module for target in source_tree.targets(root) if target.is_test
           for module in target.modules}
  errors = [f"{label}: is no test" for label in labels
            if re.sub("[/:]", ".", label[2:]) not in known]
  return errors or ([] if labels else [f"{name}: has no tests"])


class ThisTreeTest(absltest.TestCase):

  def test_every_file_has_a_target(self):
    self.assertEqual([], target_errors(ROOT))

  def test_what_ci_runs_is_there(self):
    self.assertEqual([], suite_errors(ROOT, "ci"))
    self.assertIn("//tests:ci", (ROOT / ".ci/run").read_text())

  def test_suite_of_ci_meets_every_package(self):
    build = (ROOT / "tests/BUILD").read_text()
    for folder in (ROOT / "tests").iterdir():
      if any(folder.glob("*_test.py")):
        self.assertIn(f'"//tests/{folder.name}:', build)


class BrokenTreeTest(absltest.TestCase):
  """Each rule is seen to fail."""

  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))

  def write(self, path: str, text: str) -> None:
    (self.root / path).parent.mkdir(parents=True, exist_ok=True)
    (self.root / path).write_text(text)

  def test_targets(self):
    self.write("legolm_jax/BUILD",
               'py_library(name = "legolm_jax", srcs = ["array.py"])')
    self.write("legolm_jax/array.py", "import jax")
    self.write("legolm_jax/matmul.py", "import jax")
    self.write("tests/BUILD", 'py_tests(deps = [], slow = ["a_test.py", '
                              '"b_test.py", "gone_test.py"])')
    self.write("tests/a_test.py", "@pytest.mark.slow")
    self.write("tests/b_test.py", "@pytest.mark.torch")
    self.write("tests/c_test.py", "@pytest.mark.gpu")
    self.write("tests/more/d_test.py", "import jax")
    self.assertCountEqual(target_errors(self.root), [
        "legolm_jax/matmul.py: no bazel target has it",
        "tests/b_test.py: is listed as slow and has no slow tests",
        "tests/c_test.py: has slow tests; list it as slow in the BUILD file "
        "beside it",
        "tests/more/d_test.py: no bazel target has it",
        "tests.gone_test: is listed as slow and does not exist"])

  def test_suite(self):
    self.write("tests/BUILD", 'py_tests(deps = [])\ntest_suite(\n  name = "ci",'
               '\n  tests = ["//tests:a_test", "//tests/data:rows_test"],\n)\n')
    self.write("tests/a_test.py", "")
    self.assertEqual(suite_errors(self.root, "ci"),
                     ["//tests/data:rows_test: is no test"])


if __name__ == "__main__":
  absltest.main()
