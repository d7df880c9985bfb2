"""README and docs are true: their commands run, their flags and files exist.

Every command of a page is run, scaled down by the flags of `_SCALED`, in a folder
with what the page speaks of, or stands in `_NOT_RUN` with the reason. A new
command that is in neither fails.
"""

import contextlib
import io
import pathlib
import re
import runpy
import sys
import tempfile
from unittest import mock
import warnings

from absl.testing import absltest, parameterized
import pytest

from experiments.quickstart_config import QuickstartConfig
from rollplex_jax import small_policy
from rollplex_jax.config import TrainConfig, to_config_dict
from tests.experiments import commands
from tests.helpers import devices, documents, tiny_checkpoint

# Under bazel the real one, for pages name files that no target needs.
_ROOT = pathlib.Path(__file__).resolve().parents[1]
_PAGES = {path.name: path for path in
          (_ROOT / "README.md", *sorted((_ROOT / "docs").glob("*.md")))}

# Flags that are appended to every command of a name. What takes minutes as it
# stands takes seconds with them; the last value of a flag counts.
_SCALED = {
    "compress": (),
    "decompress": (),
    "export": (),
    "evaluate": ("--window_length=24", "--limit=2", "--batch_size=2",
                 "--max_completion_length=4"),
    "generate": ("--max_completion_length=4",),
    "make_policy": ("--hidden_size=32", "--num_layers=1", "--vision_layers=1",
                    "--vision_hidden_size=16"),
    "plan": ("--estimate",),
    "score": (),
    "study": ("--model_path=CHECKPOINT", "--data=TEXT", "--window_length=24",
              "--num_windows=2", "--groups=recipe", "--num_centroids=64"),
    "train": ("--config.total_steps=2", "--config.train_batch_size=2",
              "--config.micro_batch_size=2", "--config.eval_batch_size=2",
              "--config.eval_every=0", "--config.rollout.num_generations=2",
              "--config.rollout.max_completion_length=4",
              "--config.policy.compute_dtype=float32",
              "--config.data.environment.eval_episodes=2",
              "--notensorboard", "--overwrite"),
}
# Beginnings of commands that are not run, and why.
_NOT_RUN = {
    "git clone": "needs the repository's address",
    "cd rollplex": "goes with the clone",
    "make quickstart": "minutes; tests/experiments/quickstart_test.py runs a "
                       "miniature of it",
    "make test": "runs this test",
    "make venv": "installs",
    "make api": "test_api_builds runs pdoc",
    ". .venv/bin/activate": "this test runs in that environment",
    "pip install": "installs",
    "make gpu-check": "needs a GPU; gpu_check_test.py runs what a CPU can",
    "python -m experiments.gpu_check": "see make gpu-check",
    "make bench": "measures for minutes",
    "python -m experiments.bench": "measures for minutes; bench_test.py runs its "
                                   "parts",
    "python -m experiments.quickstart": "see make quickstart",
    "sbatch": "needs a cluster",
    "python -m experiments.launch.ray_train": "needs Ray; ray_train_test.py "
                                              "stands in for it",
    "python -m experiments.train ...": "needs several hosts; processes_test.py "
                                       "runs two and four on one",
    "bazel": "builds; continuous integration runs it",
    "head": "prints what another command wrote",
    "python -m experiments.export --output_dir=RUN": "runs_test.py exports a run",
    "python -m experiments.kill_runs": "takes minutes; has a test of its own",
}
# Pages whose commands are minutes to hours of measurements each.
_MEASUREMENTS = ("measurements.md",)
# Flags of other programs.
_FOREIGN = {"nodes", "override_repository", "test_output"}
_ROWS = [
    ({"type": "image", "image": "a.png"}, "What is here?", "ball"),
    ({"type": "video", "video": ["a.png", "b.png"], "fps": 2.0}, "And now?", "left"),
    ({"type": "image", "image": "b.png"}, "Which color?", "key"),
    ({"type": "image", "image": "a.png"}, "Is it a door?", "no")]


def setUpModule():
  devices.use_virtual_devices()


class FlagsTest(parameterized.TestCase):

  @parameterized.parameters(*_PAGES)
  def test_flags_exist(self, page):
    text = _PAGES[page].read_text()
    known = documents.defined_flags(_ROOT) | _FOREIGN
    for flag in sorted(documents.flags(text)):
      if flag.startswith("config."):
        self.assert_key(flag.removeprefix("config."))
      elif not flag.startswith("xla_"):
        self.assertIn(flag.removeprefix("no") if flag not in known else flag,
                      known, msg=f"{page}: --{flag}")

  def test_a_flag_that_does_not_exist_is_found(self):
    known = documents.defined_flags(_ROOT)
    self.assertTrue({"output_dir", "training_tp", "hidden_size"} <= known)
    self.assertNotIn("outptu_dir", known)
    self.assertEqual(documents.flags("`--a.b=1`, --c-d and --e\n---f"),
                     {"a.b", "e"})

  def test_keys_beside_those_of_other_tools_exist(self):
    text = _PAGES["from_other_tools.md"].read_text()
    keys = {key.partition("=")[0]
            for cell in re.findall(r"^\| ([^|]*) \|", text, re.MULTILINE)
            for key in re.findall(r"`([a-z_.]+=?)", cell)}
    self.assertGreater(len(keys), 40)
    for key in sorted(keys - {"plan", "prompt", "images", "videos"}):
      self.assert_key(key)

  def assert_key(self, key):
    """A key of a run's configuration, such as rollout.temperature, or of the
    quick start's, such as rl.total_steps."""
    config = TrainConfig
    if key.partition(".")[0] in ("rl", "warm_start"):
      config = QuickstartConfig
    tree = to_config_dict(config())
    for part in key.split("."):
      self.assertIn(part, tree.keys(), msg=key)
      tree = tree[part]


class LinksTest(parameterized.TestCase):

  @parameterized.parameters(*_PAGES)
  def test_files_that_are_linked_or_named_exist(self, page):
    path = _PAGES[page]
    text = path.read_text()
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
      if not re.match(r"https?://|#", link):
        self.assertTrue((path.parent / link.partition("#")[0]).exists(),
                        msg=f"{page}: {link}")
    names = r"`((?:rollplex_jax|legolm_jax|pallas_kernels|experiments|tests|docs|"
    for name in re.findall(names + r"notebooks|tools)/[\w/.]*)`", text):
      self.assertTrue((_ROOT / name).exists(), msg=f"{page}: {name}")


class ApiTest(absltest.TestCase):

  @pytest.mark.slow
  def test_api_builds(self):
    pdoc = pytest.importorskip("pdoc", reason="needs pdoc, see "
                               "requirements-test.txt")
    modules = ("rollplex_jax.config", "rollplex_jax.schedule",
               "legolm_jax.compress", "pallas_kernels")
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
      warnings.simplefilter("ignore")  # Of annotations in other packages.
      pdoc.render.configure(docformat="google", show_source=False)
      pdoc.pdoc(*modules, output_directory=pathlib.Path(folder))
      page = pathlib.Path(folder, "rollplex_jax", "config.html").read_text()
    self.assertIn("freeze_vision_tower", page)


class CommandsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(
        self.enterContext(tempfile.TemporaryDirectory()))
    self.enterContext(contextlib.chdir(self.folder))

  @parameterized.parameters(*(p for p in _PAGES if p not in _MEASUREMENTS))
  @pytest.mark.slow
  def test_page(self, page):
    pieces = list(documents.pieces(_PAGES[page].read_text()))
    if any(isinstance(p, documents.Python) or p.experiment for p in pieces):
      prepare(self.folder)
    namespace = {}
    for piece in pieces:
      if isinstance(piece, documents.Command):
        self.run_command(piece)
      elif piece.name:
        pathlib.Path(piece.name).write_text(piece.source)
        compile(piece.source, piece.name, "exec")
      else:
        with contextlib.redirect_stdout(io.StringIO()):
          exec(compile(piece.source, page, "exec"), namespace)

  def run_command(self, command):
    reason = reason_not_to_run(command)
    if reason:
      return
    if command.words[0] == "python" and command.words[1] != "-m":
      with contextlib.redirect_stdout(io.StringIO()), own_modules(self.folder):
        if command.words[1] == "-c":
          exec(command.words[2], {})
        else:
          runpy.run_path(command.words[1], run_name="__main__")
      return
    self.assertIn(command.experiment, _SCALED, msg=(
        f"{command}: say in _SCALED how it is run, or in _NOT_RUN why not"))
    result = commands.run(
        command.experiment, *command.words[3:], *_SCALED[command.experiment])
    self.assertEqual(result.status, 0, msg=f"{command}\n{result.err}")

  def test_a_command_that_nobody_knows_is_found(self):
    with self.assertRaisesRegex(AssertionError, "say in _SCALED"):
      self.run_command(documents.Command(("python", "-m", "experiments.nothing")))
    with self.assertRaisesRegex(AssertionError, "no such file|can't read"):
      self.run_command(documents.Command((
          "python", "-m", "experiments.make_policy", "--rows=none.jsonl",
          "--output_path=none")))


def reason_not_to_run(command: documents.Command) -> str | None:
  """Why a command isn't run, or None."""
  for beginning, reason in _NOT_RUN.items():
    if str(command).startswith(beginning):
      return reason
  return None


@contextlib.contextmanager
def own_modules(folder: pathlib.Path):
  """Modules of the folder can be imported, and are forgotten afterwards."""
  before = set(sys.modules)
  with mock.patch.object(sys, "path", [str(folder), *sys.path]):
    yield
  for name in set(sys.modules) - before:
    if (folder / f"{name}.py").exists():
      del sys.modules[name]


def prepare(folder: pathlib.Path) -> None:
  """What pages take for granted: a checkpoint, rows, a text, the repository."""
  (folder / "experiments").symlink_to(_ROOT / "experiments")
  for seed, name in enumerate("ab"):
    tiny_checkpoint.write_image(folder / f"{name}.png", 28, 28, seed)
  rows = [{"prompt": tiny_checkpoint.message(medium, text),
           "answer": answer, "response": f"the {answer}"}
          for medium, text, answer in _ROWS]
  for name in ("train", "held_out", "with_responses"):
    tiny_checkpoint.write_rows(folder / f"{name}.jsonl", rows)
  text = "It is said that nobody reads what is written here. " * 20
  (folder / "TEXT").write_text(text)
  (folder / "my_reward.py").write_text(
      "def reward(completion, row):\n  return float(len(completion) % 3)\n")
  small_policy.write(
      folder / "CHECKPOINT", [text, *map(str, rows)],
      small_policy.ShapeConfig(
          hidden_size=32, num_layers=3, vision_hidden_size=16, vision_layers=1))


if __name__ == "__main__":
  absltest.main()
