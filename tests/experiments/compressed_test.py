"""generate and score on compressed checkpoints as they are."""

import pathlib
import tempfile

from absl.testing import absltest
import numpy as np

from legolm_jax.rules import Rules
from tests.experiments import commands
from tests.helpers import compressed, tiny_checkpoint


class CompressedCheckpointTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = pathlib.Path(
        cls.enterClassContext(tempfile.TemporaryDirectory()))
    tiny_checkpoint.write(cls.folder / "model", eos=tiny_checkpoint.EOS)
    compressed.compress(cls.folder / "model", cls.folder / "small")
    compressed.decompress(cls.folder / "small", cls.folder / "plain")
    tiny_checkpoint.write_image(cls.folder / "a.png")
    prompts = ["go to the red ball", tiny_checkpoint.message(
        tiny_checkpoint.image("a.png"), "What does it show?")]
    cls.rows = tiny_checkpoint.write_rows(
        cls.folder / "rows.jsonl",
        [{"prompt": p, "response": "the blue key"} for p in prompts])

  def run_command(self, name, model, *args):
    out = self.folder / f"{name}_{model}.jsonl"
    result = commands.run(
        name, f"--model_path={self.folder / model}", f"--rows={self.rows}",
        f"--output={out}", *args)
    self.assertEqual((result.status, result.err), (0, ""))
    return commands.read_lines(out)

  def test_score(self):
    small, plain, model = (
        self.run_command("score", m) for m in ("small", "plain", "model"))
    for a, b, c in zip(small, plain, model, strict=True):
      np.testing.assert_allclose(a["logprobs"], b["logprobs"], atol=1e-5)
      self.assertGreater(
          np.abs(np.subtract(a["logprobs"], c["logprobs"])).max(), 1e-3)

  def test_generate(self):
    args = ("--num_generations=3", "--max_completion_length=8")
    small, plain = (
        self.run_command("generate", m, *args) for m in ("small", "plain"))
    packed = self.run_command(
        "generate", "small", "--compressed_weights=packed", *args)
    for a, b, c in zip(small, packed, plain, strict=True):
      self.assertEqual(a["token_ids"], c["token_ids"])
      self.assertEqual(b["token_ids"], c["token_ids"])
      # Once decoded, the same numbers in the same program.
      self.assertEqual(a["logprobs"], c["logprobs"])
      np.testing.assert_allclose(b["logprobs"], c["logprobs"], atol=1e-5)

  def test_embedding(self):
    """A table of tokens that is compressed too, and the head with it."""
    small = compressed.compress(
        self.folder / "model", self.folder / "all",
        rules=Rules(protected_blocks=(), embedding=True))
    compressed.decompress(small, self.folder / "all_plain")
    args = ("--num_generations=2", "--max_completion_length=8")
    for name, more in (("score", ()), ("generate", args)):
      a, b = (self.run_command(name, m, *more) for m in ("all", "all_plain"))
      for found, wanted in zip(a, b, strict=True):
        self.assertEqual(found["token_ids"], wanted["token_ids"])
        np.testing.assert_allclose(
            found["logprobs"], wanted["logprobs"], atol=1e-5)

  def test_damage(self):
    small = pathlib.Path(
        compressed.compress(self.folder / "model", self.folder / "damaged"))
    (small / "legolm.json").write_text("{}")
    result = commands.run(
        "score", f"--model_path={small}", f"--rows={self.rows}",
        f"--output={self.folder / 'x.jsonl'}")
    self.assertEqual(result.status, 1)
    self.assertRegex(result.err, r"^error: .*legolm.json: is damaged.*\n$")


if __name__ == "__main__":
  absltest.main()
