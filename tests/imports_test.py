"""Imports go down; BUILD files and requirements say what is imported."""

import pathlib
import tempfile

from absl.testing import absltest, parameterized

from tests.helpers import import_rules, source_tree

ROOT = pathlib.Path(__file__).resolve().parents[1]


def write_tree(root: pathlib.Path, files: dict[str, str]) -> None:
  for name, text in files.items():
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


class ThisTreeTest(absltest.TestCase):
  def test_imports_go_down(self):
    imports = source_tree.imports(ROOT)
    self.assertNotEmpty(imports)
    self.assertEqual([], import_rules.direction_errors(imports))

  def test_build_files_name_what_is_imported(self):
    self.assertEqual([], import_rules.build_errors(ROOT))

  def test_requirements_name_what_is_imported(self):
    self.assertEqual([], import_rules.requirement_errors(
        source_tree.imports(ROOT), (ROOT / "requirements.txt").read_text()))


class BrokenTreeTest(parameterized.TestCase):
  """Every rule is seen to fail on a tree that breaks it."""

  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(
        self.enter_context(tempfile.TemporaryDirectory()))

  def direction_errors(self, files):
    write_tree(self.root, files)
    return import_rules.direction_errors(source_tree.imports(self.root))

  @parameterized.named_parameters(
      ("package", "legolm_jax/array.py", "import rollplex_jax",
       "legolm_jax is below rollplex_jax"),
      ("launcher", "rollplex_jax/trainer.py", "from experiments import train",
       "rollplex_jax is below experiments"),
      ("floor", "rollplex_jax/models/vlm.py",
       "from rollplex_jax.data import rows", "models is below data"),
      ("neighbor", "rollplex_jax/stages/rollout.py",
       "import rollplex_jax.data.rows", "stages and data are on one floor"),
      ("trainer", "rollplex_jax/schedule.py",
       "from rollplex_jax import trainer", "schedule is below trainer"),
      ("stage", "rollplex_jax/stages/rollout.py",
       "from rollplex_jax.stages import prefix",
       "stages don't import one another"),
      ("torch", "rollplex_jax/models/hf.py", "def f():\n  import torch.nn",
       "torch is for tests only"),
      ("eager_peer", "experiments/bench.py", "import torch",
       "torch is imported inside functions only"),
      ("triton", "legolm_jax/matmul.py", "def f():\n  import triton",
       "triton is for its kernels only"),
      ("triton_kernel", "pallas_kernels/codebook_matmul/api.py",
       "from pallas_kernels.codebook_matmul import triton_kernel",
       "kernels in Triton are imported inside functions only"),
      ("tests", "experiments/train.py", "from tests.helpers import devices",
       "tests are imported by tests only"),
  )
  def test_import_is_refused(self, path, source, reason):
    errors = self.direction_errors({
        "rollplex_jax/trainer.py": "",
        "rollplex_jax/data/rows.py": "",
        "rollplex_jax/stages/prefix.py": "",
        "experiments/train.py": "",
        "pallas_kernels/codebook_matmul/triton_kernel.py": "import triton",
        path: source,
    })
    line = source.count("\n") + 1
    self.assertLen(errors, 1)
    self.assertStartsWith(errors[0], f"{path}:{line}: ")
    self.assertEndsWith(errors[0], reason)

  def test_import_is_allowed(self):
    errors = self.direction_errors({
        "legolm_jax/matmul.py": "import pallas_kernels",
        "rollplex_jax/trainer.py": (
            "from rollplex_jax import config, errors, schedule\n"
            "from rollplex_jax.data import rows\n"),
        "rollplex_jax/config.py": "",
        "rollplex_jax/schedule.py": "from rollplex_jax.stages import window",
        "rollplex_jax/stages/window.py": (
            "from rollplex_jax.stages import prefix, rollout"),
        "rollplex_jax/stages/prefix.py": (
            "from rollplex_jax.models import vlm\n"
            "from rollplex_jax.stages import objectives\n"),
        "experiments/bench.py": "def peer():\n  import torch\n",
        "tests/models/vlm_test.py": "import torch",
    })
    self.assertEqual([], errors)

  def test_build_file_disagrees(self):
    library = (
        'py_library(name = "{}", srcs = glob(["*.py"]), deps = [{}])\n')
    write_tree(self.root, {
        "rollplex_jax/models/BUILD": library.format("models", ""),
        "rollplex_jax/models/vlm.py": "import jax",
        "rollplex_jax/placement/BUILD": library.format("placement", ""),
        "rollplex_jax/placement/layout.py": "",
        "rollplex_jax/stages/BUILD": library.format(
            "stages", '"//rollplex_jax/placement"'),
        "rollplex_jax/stages/rollout.py": (
            "import math\nfrom rollplex_jax.models import vlm"),
        "rollplex_jax/trainer.py": "",
        "tests/stages/BUILD": (
            'load("//tests:defs.bzl", "py_tests")\n'
            'py_tests(deps = ["//rollplex_jax/models"])\n'),
        "tests/stages/rollout_test.py": (
            "from rollplex_jax.stages import rollout"),
    })
    models = "//rollplex_jax/models:models"
    stages = "//rollplex_jax/stages:stages"
    self.assertEqual([
        "rollplex_jax/trainer.py: no py_library holds it",
        f"rollplex_jax/stages/BUILD: {stages} lacks {models}, imported at"
        " rollplex_jax/stages/rollout.py:2",
        f"rollplex_jax/stages/BUILD: {stages} has"
        " //rollplex_jax/placement:placement, but imports nothing from it",
        f"tests/stages/BUILD: //tests/stages:py_tests lacks {stages}, imported"
        " at tests/stages/rollout_test.py:1",
    ], import_rules.build_errors(self.root))

  def test_requirement_is_missing(self):
    write_tree(self.root, {
        "rollplex_jax/data/media.py": "import av\nimport PIL.Image\n",
        "rollplex_jax/metrics.py": "def log():\n  import wandb\n",
    })
    self.assertEqual(
        ["rollplex_jax/data/media.py:1: av is not in requirements.txt"],
        import_rules.requirement_errors(
            source_tree.imports(self.root), "# Images.\npillow>=11\n"))


if __name__ == "__main__":
  absltest.main()
