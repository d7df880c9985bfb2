"""Where a checkpoint is: folders go before the hub."""

import os
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized
import huggingface_hub

from rollplex_jax.errors import InputError
from rollplex_jax.models import hub

_ID = "Qwen/Qwen2.5-VL-3B-Instruct"


class ResolveTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.download = self.enter_context(mock.patch.object(
        huggingface_hub, "snapshot_download", return_value="/cache/snapshot"))
    folder = self.enterContext(tempfile.TemporaryDirectory())
    self.addCleanup(os.chdir, os.getcwd())
    os.chdir(folder)

  def test_id(self):
    self.assertEqual(hub.resolve(_ID), "/cache/snapshot")
    ((name,), kwargs) = self.download.call_args
    self.assertEqual(name, _ID)
    # Nothing that runs, and no second copy of the weights.
    self.assertCountEqual(kwargs["allow_patterns"], [
        "*.safetensors", "*.json", "*.txt", "*.jinja"])

  def test_a_folder_goes_first(self):
    pathlib.Path(_ID).mkdir(parents=True)
    self.assertEqual(hub.resolve(_ID), _ID)
    # A slip in the name of a run is not looked for in the world.
    self.assertEqual(hub.resolve("Qwen/policy"), "Qwen/policy")
    self.download.assert_not_called()

  @parameterized.parameters(
      "/no/model", "./model", "../a/model", "model", "a/b/c", "runs/x/policy",
      "C:\\models", "a b/c")
  def test_paths(self, path):
    self.assertEqual(hub.resolve(path), path)
    self.assertEqual(hub.resolve(pathlib.PurePosixPath(path)),
                     str(pathlib.PurePosixPath(path)))
    self.download.assert_not_called()

  @parameterized.parameters(
      (ConnectionError("Got: ConnectError: no name\nTry again."),
       "ConnectError: no name"),
      (OSError("No space left on device"), "No space left on device"),
      (RuntimeError(), "RuntimeError"))
  def test_errors_are_one_line(self, error, reason):
    self.download.side_effect = error
    with self.assertRaises(InputError) as caught:
      hub.resolve(_ID)
    self.assertEqual(
        str(caught.exception), f"{_ID}: no such checkpoint folder, and the hub "
        f"does not give it ({reason})")


if __name__ == "__main__":
  absltest.main()
