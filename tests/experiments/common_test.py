"""What all commands share: outputs, errors in one line, the display."""

import contextlib
import io
import os
import pathlib
import subprocess
import sys
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized

from experiments import common
from experiments.display import TrainDisplay
from rollplex_jax.config import TrainConfig
from rollplex_jax.errors import InputError
from rollplex_jax.loop import Progress
from tests.experiments import commands


class OutputTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(
        self.enterContext(tempfile.TemporaryDirectory()))

  def test_a_file_appears_when_it_is_whole(self):
    path = self.folder / "out.jsonl"
    path.write_text("old")
    with self.assertRaises(KeyboardInterrupt):
      with common.whole_file(str(path)) as file:
        file.write("half of the new")
        raise KeyboardInterrupt
    self.assertEqual(commands.tree(self.folder), {"out.jsonl": b"old"})
    with common.whole_file(str(path)) as file:
      file.write("new")
      self.assertEqual(path.read_text(), "old")
    self.assertEqual(commands.tree(self.folder), {"out.jsonl": b"new"})

  def test_check_output(self):
    (self.folder / "file").write_text("")
    common.check_output("output", str(self.folder / "file"))
    common.check_output("output", str(self.folder / "new"))
    common.check_output(
        "json", str(self.folder / "a" / "b" / "new"), make_folder=True)
    for path, message in (
        (self.folder, "expected a file, found a folder"),
        (self.folder / "a" / "new", "there is no folder .*/a"),
        (self.folder / "file" / "new", "there is no folder .*/file")):
      with self.assertRaisesRegex(InputError, f"^--x={path}: {message}"):
        common.check_output("x", str(path))
    with mock.patch.object(os, "access", return_value=False):
      with self.assertRaisesRegex(InputError, "the folder .* is not writable"):
        common.check_output("x", str(self.folder / "new"))
    self.assertEqual(os.listdir(self.folder), ["file"])


class ConfigTest(parameterized.TestCase):

  @parameterized.parameters(
      ("--config.optimizer.learn_rate=1", "--config.optimizer.learn_rate: no "
       "such key; did you mean learning_rate?"),
      ("--config.total_step=1", "--config.total_step: no such key; did you mean "
       "total_steps?"))
  def test_unknown_keys_of_a_command_with_defaults(self, flag, message):
    err = io.StringIO()
    with (mock.patch.object(sys, "argv", ["quickstart", flag]),
          contextlib.redirect_stderr(err), self.assertRaises(SystemExit) as end):
      common.check_config_keys(TrainConfig)
    self.assertEqual((end.exception.code, err.getvalue()),
                     (1, f"error: {message}\n"))


class RunTest(parameterized.TestCase):

  def run_main(self, main, *args):
    err = io.StringIO()
    argv = ["x", "--compilation_cache_dir=", *args]
    with (mock.patch.object(commands.importlib, "import_module",
                            return_value=mock.Mock(main=main)),
          contextlib.redirect_stderr(err)):
      result = commands.run("train", *argv[1:])
    return result

  @parameterized.parameters(
      (InputError("rows:3: bad\n  row"), 1, "error: rows:3: bad row\n"),
      (PermissionError(13, "Permission denied", "/root/x"), 1,
       "error: /root/x: Permission denied\n"),
      (OSError(28, "No space left on device"), 1,
       "error: No space left on device\n"),
      (KeyboardInterrupt(), 130, "error: interrupted\n"))
  def test_errors_are_one_line(self, error, status, line):
    result = self.run_main(mock.Mock(side_effect=error))
    self.assertEqual((result.status, result.err), (status, line))

  def test_mistakes_of_ours_keep_their_traceback(self):
    with self.assertRaises(ZeroDivisionError):
      self.run_main(lambda: 1 // 0)

  def test_result_goes_to_json(self):
    folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    path = folder / "new" / "r.json"
    result = self.run_main(lambda: {"a": 1}, f"--json={path}")
    self.assertEqual((result.status, result.err), (0, ""))
    self.assertEqual(path.read_text(), '{\n  "a": 1\n}\n')
    main = mock.Mock()
    result = self.run_main(main, f"--json={folder}")
    self.assertEqual(result.err, f"error: --json={folder}: expected a file, "
                     "found a folder\n")
    main.assert_not_called()


class ProcessTest(absltest.TestCase):
  """A process of its own, in which jax has yet to look for devices."""

  def test_absent_devices_are_not_reported(self):
    done = subprocess.run(
        [sys.executable, "-c", "from experiments import common; import jax; "
         "common.run(lambda: print(len(jax.devices()) > 0))"],
        capture_output=True, text=True, check=False,
        cwd=pathlib.Path(__file__).parents[2])
    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertEqual(done.stdout, "True\n")
    self.assertEqual(done.stderr, "")


class DisplayTest(absltest.TestCase):

  def test_lines_off_a_terminal(self):
    out = io.StringIO()
    with mock.patch.object(sys, "stdout", out):
      with TrainDisplay("training", 3) as display:
        for step in (1, 2, 3):
          display(Progress(step, 3, {
              "critic/score/mean": 0.5, "actor/entropy": 1.25, "x": 9.0}))
    # The first two come sooner than a line is due; the last is always shown.
    self.assertEqual(
        out.getvalue(), "training 3/3  reward 0.500  entropy 1.25\n")

  def test_bar_on_a_terminal(self):
    class Terminal(io.StringIO):
      isatty = lambda self: True

    out = Terminal()
    with mock.patch.object(sys, "stdout", out):
      with TrainDisplay("training", 2) as display:
        display(Progress(1, 2, {"train/loss": 0.5}))
    self.assertIn("1/2", out.getvalue())
    self.assertIn("loss 0.500", out.getvalue())


if __name__ == "__main__":
  absltest.main()
