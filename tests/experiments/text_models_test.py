"""generate, score and train on architectures other than a policy's."""

import pathlib
import tempfile

from absl.testing import absltest, parameterized
import numpy as np

from tests.experiments import commands
from tests.helpers import tiny_checkpoint

_CONFIG = pathlib.Path(__file__).parents[2] / "experiments/configs/supervised.py"
_LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "eos_token_id": 5}
_RAW = {
    "llama": _LLAMA,
    "mistral": _LLAMA | {"model_type": "mistral", "sliding_window": 4},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2,
             "n_positions": 16},
}


class TextModelsTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = pathlib.Path(
        cls.enterClassContext(tempfile.TemporaryDirectory()))
    for name, raw in _RAW.items():
      tiny_checkpoint.write_text(cls.folder / name, raw)

  def run_command(self, command, name, rows, *args):
    rows = tiny_checkpoint.write_rows(self.folder / "rows.jsonl", rows)
    out = self.folder / "out.jsonl"
    out.unlink(missing_ok=True)
    return commands.run(
        command, f"--model_path={self.folder / name}", f"--rows={rows}",
        f"--output={out}", *args), out

  def score(self, name, rows):
    result, out = self.run_command("score", name, rows)
    self.assertEqual((result.status, result.err), (0, ""))
    return commands.read_lines(out)

  @parameterized.parameters(*_RAW)
  def test_score(self, name):
    """A token's log-prob depends on what stands before it, not on its batch."""
    ids = [10, 20, 30, 40, 50, 60]
    whole, part = self.score(name, [
        {"prompt": "a", "response_token_ids": ids},
        {"prompt": "a", "response_token_ids": ids[:2]}])
    np.testing.assert_allclose(
        whole["logprobs"][:2], part["logprobs"], atol=1e-5)
    (other,) = self.score(name, [
        {"prompt": "b", "response_token_ids": ids}])
    difference = np.abs(np.subtract(whole["logprobs"], other["logprobs"]))
    self.assertGreater(difference[:3].min(), 1e-4)

  def test_llama_draws_what_it_scores(self):
    result, out = self.run_command(
        "generate", "llama", [{"prompt": "go to"}], "--num_generations=3",
        "--max_completion_length=6")
    self.assertEqual((result.status, result.err), (0, ""))
    drawn = commands.read_lines(out)
    scores = self.score("llama", [
        {"prompt": "go to", "response_token_ids": line["token_ids"]}
        for line in drawn])
    for line, score in zip(drawn, scores, strict=True):
      np.testing.assert_allclose(
          line["logprobs"], score["logprobs"], atol=1e-4)

  @parameterized.parameters(
      ("generate", "gpt2", "completions of GPT-2 can't be drawn"),
      ("generate", "mistral", "a sliding window .4 tokens. can't be drawn"),
      ("score", "gpt2", "rows.jsonl:1: expected at most the model's 16 tokens, "
       "found 21"))
  def test_refuses(self, command, name, message):
    result, out = self.run_command(
        command, name, [{"prompt": "a", "response_token_ids": [9] * 20}])
    self.assertEqual(result.status, 1)
    self.assertRegex(result.err, f"^error: .*{message}.*\n$")
    self.assertFalse(out.exists())

  def test_no_policy(self):
    rows = tiny_checkpoint.write_rows(
        self.folder / "train.jsonl", [{"prompt": "a", "response": "b"}])
    result = commands.run(
        "train", f"--config={_CONFIG}",
        f"--config.policy.path={self.folder / 'gpt2'}",
        f"--config.data.rows={rows}", f"--output_dir={self.folder / 'run'}")
    self.assertEqual(result.status, 1)
    self.assertRegex(result.err, "type gpt2 can't be trained")


if __name__ == "__main__":
  absltest.main()
