"""`generate`: what it writes, and how it refuses bad input."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

from absl.testing import absltest, parameterized
import numpy as np

from rollplex_jax.data.processor import Processor
from tests.experiments import commands
from tests.helpers import devices, tiny_checkpoint

_KEYS = ["row", "completion", "token_ids", "logprobs", "finish_reason"]
_LENGTH = 8


def setUpModule():
  devices.use_virtual_devices()


class _Case(parameterized.TestCase):
  """A checkpoint and four rows: text, a picture, two pictures, a video."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.folder = pathlib.Path(folder)
    cls.model = tiny_checkpoint.write(
        cls.folder / "model", eos=tiny_checkpoint.EOS)
    names = [f"{name}.png" for name in "abcd"]
    for seed, name in enumerate(names):
      tiny_checkpoint.write_image(cls.folder / name, 56, 56, seed)
    message, image = tiny_checkpoint.message, tiny_checkpoint.image
    cls.rows = [
        {"prompt": "go to the red ball"},
        {"prompt": message(image("a.png"), "What does it show?")},
        {"prompt": message(image("b.png"), "and", image("c.png"))},
        {"prompt": message(tiny_checkpoint.video(names), "Where?")},
    ]
    cls.rows_file = tiny_checkpoint.write_rows(
        cls.folder / "rows.jsonl", cls.rows)

  def setUp(self):
    super().setUp()
    self.out = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

  def run_command(self, *args, rows=None, name="out.jsonl"):
    return commands.run(
        "generate", f"--model_path={self.model}",
        f"--rows={rows or self.rows_file}", f"--output={self.out / name}",
        f"--max_completion_length={_LENGTH}", *args)

  def generate(self, *args, **kwargs):
    """The lines that are written."""
    result = self.run_command(*args, **kwargs)
    self.assertEqual((result.status, result.err), (0, ""))
    return commands.read_lines(self.out / kwargs.get("name", "out.jsonl"))

  def assert_refused(self, message, *args, **kwargs):
    """One line on standard error, status 1, nothing left behind."""
    before = commands.tree(self.folder)
    result = self.run_command(*args, **kwargs)
    self.assertEqual(result.status, 1)
    self.assertRegex(result.err, f"^error: {message}")
    self.assertEqual(result.err.count("\n"), 1)
    self.assertEmpty(os.listdir(self.out))
    self.assertEqual(commands.tree(self.folder), before)
    return result


class OutputTest(_Case):

  def test_lines_and_summary(self):
    lines = self.generate("--num_generations=2", "--seed=1", "--batch_size=4",
                          f"--json={self.out / 'result.json'}")
    self.assertEqual([line["row"] for line in lines],
                     [0, 0, 1, 1, 2, 2, 3, 3])
    processor = Processor.from_checkpoint(self.model)
    config = processor.config
    stops = {*tiny_checkpoint.EOS, processor.tokenizer.eos_token_id}
    for line in lines:
      self.assertEqual(list(line), _KEYS)
      ids, logprobs = line["token_ids"], line["logprobs"]
      self.assertBetween(len(ids), 1, _LENGTH)
      self.assertLen(logprobs, len(ids))
      self.assertLess(max(logprobs), 0.0)
      self.assertEqual(line["completion"], processor.decode(ids))
      self.assertTrue(all(type(i) is int for i in ids))
      self.assertNoCommonElements(ids, config.vision_token_ids)
      # An EOS is the last token or none.
      self.assertNoCommonElements(ids[:-1], stops)
      ended = ids[-1] in stops
      self.assertEqual(line["finish_reason"], "stop" if ended else "length")
      if not ended:
        self.assertLen(ids, _LENGTH)
    reasons = {line["finish_reason"] for line in lines}
    self.assertEqual(reasons, {"stop", "length"})
    summary = json.loads((self.out / "result.json").read_text())
    self.assertEqual(summary["rows"], 4)
    self.assertEqual(summary["skipped_rows"], 0)
    self.assertEqual(
        summary["tokens"], sum(len(line["token_ids"]) for line in lines))
    self.assertGreater(summary["seconds"], 0)

  def assert_same(self, a, b):
    """The same tokens; log-probs up to rounding in programs of other shapes."""
    drop = lambda line: {k: v for k, v in line.items() if k != "logprobs"}
    self.assertEqual([drop(line) for line in a], [drop(line) for line in b])
    for x, y in zip(a, b):
      np.testing.assert_allclose(x["logprobs"], y["logprobs"], atol=1e-4)

  @parameterized.parameters(
      ("--temperature=0",), ("--temperature=0.7", "--seed=3"))
  def test_the_batch_decides_nothing(self, *args):
    rows = tiny_checkpoint.write_rows(
        self.folder / "three.jsonl", self.rows[:3])
    self.assert_same(self.generate("--batch_size=4", *args, rows=rows),
                     self.generate("--batch_size=1", *args, rows=rows))

  def test_seeds_and_samples_differ_and_repeat(self):
    args = ("--batch_size=4", "--num_generations=2")
    first = self.generate("--seed=1", *args)
    self.assertEqual(self.generate("--seed=1", *args), first)
    ids = lambda lines: [line["token_ids"] for line in lines]
    self.assertNotEqual(ids(self.generate("--seed=2", *args)), ids(first))
    self.assertNotEqual(ids(first[::2]), ids(first[1::2]))

  def test_greedy_takes_the_best_of_top_k_1(self):
    greedy = self.generate("--temperature=0", "--batch_size=4")
    sampled = self.generate("--top_k=1", "--batch_size=4", "--seed=9")
    self.assert_same(greedy, sampled)

  def test_rows_keep_their_numbers_when_others_are_skipped(self):
    rows = tiny_checkpoint.write_rows(self.folder / "mixed.jsonl", [
        {"prompt": "go"},
        {"prompt": tiny_checkpoint.message(
            tiny_checkpoint.image("missing.png"))},
        {"prompt": "<|image_pad|>"}, {"prompt": "the <|image_pad|>"},
        {"prompt": "ball"}, {"answer": "no prompt"}])
    result = self.run_command(
        "--skip_bad_rows", f"--json={self.out / 'r.json'}", rows=rows)
    self.assertEqual(result.status, 0, result.err)
    lines = commands.read_lines(self.out / "out.jsonl")
    self.assertEqual([line["row"] for line in lines], [0, 4])
    self.assertIn("skipped 4 of 6 rows\n  2 placeholder count; first: ",
                  result.out)
    self.assertIn(f"1 missing media file; first: {rows}:2: ", result.out)
    self.assertIn(f"1 invalid row; first: {rows}:6: ", result.out)
    summary = json.loads((self.out / "r.json").read_text())
    self.assertEqual((summary["rows"], summary["skipped_rows"]), (2, 4))


class BadRowsTest(_Case):

  def refuse_row(self, message, row, *args):
    rows = tiny_checkpoint.write_rows(
        self.folder / "bad.jsonl", [{"prompt": "fine"}, row])
    self.assert_refused(f"{rows}:2: {message}", *args, rows=rows)

  def refuse_file(self, content, message):
    path = self.folder / "bad_file"
    path.write_bytes(content)
    self.assert_refused(f"{path}{message}", rows=path)

  def test_media(self):
    message, image = tiny_checkpoint.message, tiny_checkpoint.image
    broken = self.folder / "broken.png"
    broken.write_bytes((self.folder / "a.png").read_bytes()[:2000])
    clip = self.folder / "broken.mp4"
    clip.write_bytes(b"\0" * 100)
    self.refuse_row("no such file: .*/none.png", {
        "prompt": message(image("none.png"))})
    self.refuse_row("can't read .*/broken.png", {
        "prompt": message(image("broken.png"))})
    self.refuse_row("can't read .*/broken.mp4", {
        "prompt": message(tiny_checkpoint.video("broken.mp4"))})
    self.refuse_row("can't read .*/rows.jsonl", {
        "prompt": message(tiny_checkpoint.video(["a.png", "rows.jsonl"]))})
    self.refuse_row("expected 1 image placeholder .*, found 0", {
        "prompt": "look", "images": ["a.png"]})
    self.refuse_row("expected 0 image placeholders, found 2", {
        "prompt": message("<|image_pad|>,<|image_pad|>")})
    self.refuse_row("prompt.0..content.0..image: expected a local path", {
        "prompt": message(image("https://host/a.png"))})

  def test_limit_and_schema(self):
    self.refuse_row("expected a prompt of at most 4 tokens, found", {
        "prompt": "go to the red ball, then pick up"}, "--max_prompt_length=4")
    self.refuse_row('the row has no "prompt"', {"messages": []})
    self.refuse_row("prompt.0..content.0..type: expected text, image or video",
                    {"prompt": tiny_checkpoint.message(
                        {"type": "image_url", "image_url": "x"})})

  def test_files_of_other_kinds(self):
    self.refuse_file(b"", ": expected JSON rows, found none")
    self.refuse_file(b'{"prompt": "a"}\n{"prom', ":2: not valid JSON .* one "
                     "JSON object per line")
    self.refuse_file(b'[{"prompt": "a"}]', ":1: row: expected a JSON object")
    self.refuse_file(b"prompt,answer\na,b\n", ":1: not valid JSON")
    self.refuse_file(b"\x1f\x8b\x08\x00", ":1: not valid JSON")
    self.assert_refused("/no/rows.jsonl: can't read rows: No such file",
                        rows="/no/rows.jsonl")
    self.assert_refused(f"{self.folder}: can't read rows: Is a directory",
                        rows=self.folder)

  def test_no_good_row_is_left(self):
    rows = tiny_checkpoint.write_rows(
        self.folder / "bad.jsonl", [{"prompt": "<|image_pad|>"}])
    self.assert_refused("no good row left: skipped 1 of 1 rows",
                        "--skip_bad_rows", rows=rows)


class BadSettingsTest(_Case):

  @parameterized.parameters(
      ("--temperature=-1", "temperature must be 0 or positive, found -1.0"),
      ("--temperature=nan", "temperature .*nan"),
      ("--top_p=1.5", "top_p .*1.5"), ("--top_k=-1", "top_k .*-1"),
      ("--max_completion_length=0", "max_completion_length .*0"),
      ("--max_prompt_length=-1", ".*max_prompt_length=-1"),
      ("--batch_size=0", ".*batch_size=0"), ("--dtype=int8", ".*dtype=int8"),
      ("--num_generations=x", ".*num_generations=x"),
      ("--tempreature=1", "Unknown command line flag 'tempreature'. Did you"),
      ("rows.jsonl", "unexpected argument 'rows.jsonl'"),
      ("--rows=", "--rows is not set"))
  def test_flags(self, arg, message):
    self.assert_refused(message, arg)

  def write_other(self, **kwargs):
    return tiny_checkpoint.write(
        self.enterContext(tempfile.TemporaryDirectory()), **kwargs)

  def test_outputs(self):
    for flag in ("output", "json"):
      self.assert_refused(f"--{flag}={self.folder}: expected a file, found a f",
                          f"--{flag}={self.folder}")
    self.assert_refused("--output=/no/out.jsonl: there is no folder /no",
                        "--output=/no/out.jsonl")
    self.assert_refused(f"--json={self.rows_file}/x.json: there is no folder",
                        f"--json={self.rows_file}/x.json")
    self.assert_refused(f"--output={self.rows_file}: is the file of rows",
                        f"--output={self.rows_file}")

  def test_checkpoints(self):
    self.assert_refused("/no/model: no such checkpoint folder",
                        "--model_path=/no/model")
    self.assert_refused(".*/config.json: cannot be read",
                        f"--model_path={self.folder}")

  @parameterized.parameters(
      ("config.json", {"model_type": "mamba"},
       "unsupported architecture 'mamba'; supported are"),
      ("config.json", {"num_hidden_layers": 3}, "12 tensors are missing"),
      ("generation_config.json", {"eos_token_id": [1, 900]},
       "eos_token_id: expected a token of the vocabulary of 320, found 900"))
  def test_checkpoint_contents(self, name, changes, message):
    model = self.write_other(eos=[1])
    path = pathlib.Path(model, name)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    self.assert_refused(f".*{message}", f"--model_path={model}")

  def test_truncated_weights(self):
    model = self.write_other()
    path = pathlib.Path(model, "model.safetensors")
    os.truncate(path, path.stat().st_size // 2)
    self.assert_refused(f"{path}: not a whole safetensors file",
                        f"--model_path={model}")


class ProcessTest(_Case):
  """The same in a process of its own."""

  def test_error(self):
    before = commands.tree(self.folder)
    done = subprocess.run(
        [sys.executable, "-m", "experiments.generate",
         f"--model_path={self.model}", "--rows=/no/rows.jsonl",
         f"--output={self.out / 'out.jsonl'}", "--compilation_cache_dir="],
        capture_output=True, text=True, check=False,
        cwd=pathlib.Path(__file__).parents[2])
    self.assertEqual(done.returncode, 1)
    self.assertEqual(done.stdout, "")
    self.assertEqual(
        done.stderr, "error: /no/rows.jsonl: can't read rows: No such file or "
        "directory\n")
    self.assertEmpty(os.listdir(self.out))
    self.assertEqual(commands.tree(self.folder), before)


if __name__ == "__main__":
  absltest.main()
