"""`score`: the log-probs of given responses, and rows without any."""

import json
import os
import pathlib
import tempfile

from absl.testing import absltest
import jax
import numpy as np

from rollplex_jax.data.processor import Processor
from rollplex_jax.data.row_schema import validate_row
from rollplex_jax.models import decoder, hf, vlm
from rollplex_jax.samples import make_batch
from tests.experiments import commands
from tests.helpers import devices, tiny_checkpoint


def setUpModule():
  devices.use_virtual_devices()


class ScoreTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.folder = pathlib.Path(folder)
    cls.model = tiny_checkpoint.write(
        cls.folder / "model", eos=tiny_checkpoint.EOS)
    for seed, name in enumerate("abc"):
      tiny_checkpoint.write_image(cls.folder / f"{name}.png", seed=seed)
    message, image = tiny_checkpoint.message, tiny_checkpoint.image
    cls.prompts = [
        {"prompt": "go to the red ball"},
        {"prompt": message(image("a.png"), "What does it show?")},
        {"prompt": message(tiny_checkpoint.video(["b.png", "c.png"]), "?")},
    ]

  def setUp(self):
    super().setUp()
    self.out = pathlib.Path(
        self.enterContext(tempfile.TemporaryDirectory()))

  def run_command(self, rows, *args):
    path = tiny_checkpoint.write_rows(self.folder / "rows.jsonl", rows)
    return commands.run(
        "score", f"--model_path={self.model}", f"--rows={path}",
        f"--output={self.out / 'scores.jsonl'}", "--batch_size=4", *args)

  def score(self, rows, *args):
    result = self.run_command(rows, *args)
    self.assertEqual((result.status, result.err), (0, ""))
    return commands.read_lines(self.out / "scores.jsonl")

  def test_equals_the_model_called_row_by_row(self):
    rows = [row | {"response": text} for row, text in zip(
        self.prompts, ("a ball", "the blue key, then", "x"))]
    lines = self.score(rows, f"--json={self.out / 'result.json'}")
    processor = Processor.from_checkpoint(self.model)
    config, params = hf.load_checkpoint(self.model)
    for row, line in zip(rows, lines, strict=True):
      self.assertEqual(list(line), ["token_ids", "logprobs"])
      ids = processor.encode(row["response"])
      self.assertEqual(line["token_ids"], ids)
      # As it is, nothing appended.
      self.assertEqual(processor.decode(ids, False), row["response"])
      expected = self.reference(processor, config, params, row, ids)
      np.testing.assert_allclose(line["logprobs"], expected, atol=1e-4)
    result = json.loads((self.out / "result.json").read_text())
    values = np.concatenate([line["logprobs"] for line in lines])
    self.assertEqual(result["tokens"], len(values))
    self.assertAlmostEqual(result["mean_logprob"], values.mean(), places=5)
    self.assertEqual((result["rows"], result["skipped_rows"]), (3, 0))

  def reference(self, processor, config, params, row, ids):
    """One forward over one unpadded sequence, without any batching."""
    row = validate_row(row, "row", str(self.folder))
    prompt = processor.prompt(row)
    batch = make_batch(config, [prompt], [0], length=len(prompt.token_ids))
    n = len(ids)
    token_ids = np.concatenate([prompt.token_ids, ids])[None]
    after = batch.inputs.next_position[0] + np.arange(n)
    positions = np.concatenate(
        [prompt.positions, np.broadcast_to(after, (3, n))], axis=1)
    index = np.concatenate([prompt.feature_index, np.full(n, -1)])
    hidden = vlm.forward(
        params, config, token_ids.astype(np.int32),
        positions[:, None].astype(np.int32),
        vlm.vision_features(params, config, batch.vision), index[None].astype(np.int32))
    logprobs = jax.nn.log_softmax(
        decoder.logits(params["text"], hidden[0]), axis=-1)
    first = len(prompt.token_ids) - 1
    return np.asarray(logprobs)[first + np.arange(n), ids]

  def test_agrees_with_generate_token_by_token(self):
    path = tiny_checkpoint.write_rows(self.folder / "p.jsonl", self.prompts)
    args = (f"--model_path={self.model}", f"--rows={path}", "--batch_size=4",
            f"--output={self.out / 'completions.jsonl'}", "--num_generations=2",
            "--max_completion_length=6")
    for extra in (("--top_p=0.8", "--seed=5"), ("--temperature=0",)):
      result = commands.run("generate", *args, *extra)
      self.assertEqual((result.status, result.err), (0, ""))
      lines = commands.read_lines(self.out / "completions.jsonl")
      scores = self.score([
          self.prompts[line["row"]] | {"response_token_ids": line["token_ids"]}
          for line in lines])
      for line, score in zip(lines, scores, strict=True):
        self.assertEqual(score["token_ids"], line["token_ids"])
        np.testing.assert_allclose(
            score["logprobs"], line["logprobs"], atol=1e-4)

  def test_token_ids_win_and_come_back_as_they_went_in(self):
    # No text encodes to these: a byte of its own, a special token, an unused id.
    ids = [200, 301, 319, 5, 5]
    (line, empty) = self.score([
        {"prompt": "go", "response": "ball", "response_token_ids": ids},
        {"prompt": "go", "response": ""}])
    self.assertEqual(line["token_ids"], ids)
    self.assertLen(line["logprobs"], len(ids))
    self.assertEqual(empty, {"token_ids": [], "logprobs": []})

  def test_text_only_checkpoint(self):
    folder = self.enterContext(tempfile.TemporaryDirectory())
    model = tiny_checkpoint.write(folder, with_vision=False)
    (line,) = self.score([{"prompt": "go to", "response": " the ball"}],
                         f"--model_path={model}")
    self.assertLess(max(line["logprobs"]), 0)
    result = self.run_command(
        [self.prompts[1] | {"response": "a"}], f"--model_path={model}")
    self.assertRegex(result.err, "is a text-only checkpoint, found 1 images")

  def test_bad_rows(self):
    for row, message in (
        ({"prompt": "go"},
         "expected response or response_token_ids, found neither"),
        ({"prompt": "go", "response": 3}, "response: expected a string"),
        ({"prompt": "go", "response_token_ids": [320]},
         "response_token_ids: expected ids below 320, found 320")):
      result = self.run_command([{"prompt": "a", "response": "b"}, row])
      self.assertEqual(result.status, 1)
      self.assertStartsWith(
          result.err, f"error: {self.folder}/rows.jsonl:2: {message}")
      self.assertEqual(result.err.count("\n"), 1)
      self.assertEmpty(os.listdir(self.out))

  def test_rows_without_response_can_be_skipped(self):
    result = self.run_command(
        [{"prompt": "go"}, {"prompt": "go", "response": " to"},
         {"prompt": "the"}], "--skip_bad_rows")
    self.assertEqual(result.status, 0)
    self.assertIn("skipped 2 of 3 rows\n  2 response; first:", result.out)
    self.assertLen(commands.read_lines(self.out / "scores.jsonl"), 1)


if __name__ == "__main__":
  absltest.main()
