"""`make_policy` writes what `train` starts from, and refuses in one line."""

import json
import pathlib
import tempfile

from absl.testing import absltest, parameterized

from rollplex_jax.data.processor import Processor
from rollplex_jax.data.rows import RowFile
from rollplex_jax.models import hf
from tests.experiments import commands
from tests.helpers import tiny_checkpoint

_SMALL = ("--hidden_size=32", "--num_layers=1", "--vision_hidden_size=16",
          "--vision_layers=1")


class MakePolicyTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = pathlib.Path(
        cls.enterClassContext(tempfile.TemporaryDirectory()))
    tiny_checkpoint.write_image(cls.folder / "a.png", 56, 28, 0)
    message, image = tiny_checkpoint.message, tiny_checkpoint.image
    cls.rows = tiny_checkpoint.write_rows(cls.folder / "rows.jsonl", [
        {"prompt": message(image("a.png"), "Which color?"),
         "answer": "vermilion", "response": "ultramarine"},
        {"prompt": "Which color?", "answer": "ochre"}])

  def run_command(self, output, *flags):
    return commands.run("make_policy", f"--rows={self.rows}",
                        f"--output_path={self.folder / output}", *_SMALL,
                        *flags)

  def test_a_checkpoint_that_knows_the_words_of_its_rows(self):
    result = self.run_command("new", f"--json={self.folder / 'new.json'}")
    self.assertEqual((result.status, result.err), (0, ""))
    found = json.loads((self.folder / "new.json").read_text())
    config, params = hf.load_checkpoint(self.folder / "new")
    self.assertEqual(found["vocab_size"], config.text.vocab_size)
    self.assertEqual(params["text"]["embed"].shape, (found["vocab_size"], 32))
    processor = Processor.from_checkpoint(self.folder / "new")
    for word in ("vermilion", " vermilion", "ultramarine", "ochre"):
      self.assertLen(processor.encode(word), 1, msg=word)
    row = RowFile(self.rows)[0]
    # An image of 4 x 2 patches, of which 2 x 2 make a token.
    self.assertEqual((processor.prompt(row).feature_index >= 0).sum(), 2)

  def test_seeds_and_what_is_there_already(self):
    self.run_command("a", "--seed=1")
    self.run_command("b", "--seed=2")
    a, b = (commands.tree(self.folder / name) for name in "ab")
    self.assertEqual({name for name in a if a[name] != b[name]},
                     {"model.safetensors"})
    self.assert_refused("a", ".*a: exists and is not an empty folder")
    self.assertEqual(commands.tree(self.folder / "a"), a)

  @parameterized.parameters(
      (("--hidden_size=40",), "hidden_size=40: expected a multiple of 32"),
      (("--vocab_size=8",), "vocab_size: expected at least 264"),
      (("--rows=nowhere.jsonl",), "nowhere.jsonl: can't read rows"))
  def test_refused(self, flags, message):
    self.assert_refused("refused", message, *flags)
    self.assertFalse((self.folder / "refused").exists())

  def assert_refused(self, output, message, *flags):
    result = self.run_command(output, *flags)
    self.assertEqual(result.status, 1)
    self.assertRegex(result.err, f"^error: {message}")
    self.assertEqual(result.err.count("\n"), 1)


if __name__ == "__main__":
  absltest.main()
