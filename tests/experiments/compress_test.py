"""compress and decompress as commands: results, and errors in one line."""

import json
import pathlib
import tempfile

from absl.testing import absltest, parameterized
import numpy as np

from experiments import bench_compress
from legolm_jax import checkpoint
from tests.experiments import commands
from tests.legolm import checkpoints


class CompressCommandTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(
        self.enter_context(tempfile.TemporaryDirectory()))
    self.source = checkpoints.write(
        self.root / "source", checkpoints.decoder())
    self.out = str(self.root / "out")

  def run_compress(self, *flags, out=None):
    return commands.run("compress", f"--model_path={self.source}",
                        f"--output_path={out or self.out}", *flags)

  def assert_refused(self, result, message):
    self.assertEqual(result.status, 1)
    self.assertRegex(result.err, message)
    self.assertLen(result.err.strip().splitlines(), 1)
    self.assertStartsWith(result.err, "error: ")

  def test_there_and_back(self):
    result = self.run_compress(
        f"--json={self.root}/r.json", "--num_centroids=64", "--percentile=99",
        "--row_scale=rms")
    self.assertEqual(result.status, 0, result.err)
    self.assertIn("nominal ratio 5.11", result.out)
    found = json.loads((self.root / "r.json").read_text())
    for key in ("nominal_ratio", "true_ratio", "bits_per_compressed_weight",
                "bits_per_parameter", "bytes_in", "bytes_out", "seconds",
                "tensors"):
      self.assertIn(key, found)
    self.assertAlmostEqual(
        found["true_ratio"], found["bytes_in"] / found["bytes_out"])
    self.assertCountEqual([t["name"] for t in found["tensors"]],
                          checkpoints.decoder())
    self.assertTrue(checkpoint.is_compressed(self.out))
    back = commands.run(
        "decompress", f"--model_path={self.out}",
        f"--output_path={self.root}/plain", f"--json={self.root}/d.json")
    self.assertEqual(back.status, 0, back.err)
    self.assertEqual(json.loads((self.root / "d.json").read_text())["tensors"],
                     len(checkpoints.decoder()))
    self.assertFalse(checkpoint.is_compressed(self.root / "plain"))

  def test_dry_run_lists_every_tensor(self):
    result = commands.run(
        "compress", f"--model_path={self.source}", "--dry_run",
        "--protected_blocks=last,0,1", "--keep_tensors=o_proj",
        f"--json={self.root}/r.json")
    self.assertEqual(result.status, 0, result.err)
    found = {t["name"]: t for t in json.loads(
        (self.root / "r.json").read_text())["tensors"]}
    self.assertCountEqual(found, checkpoints.decoder())
    for name in found:
      self.assertIn(name, result.out)
    compressed = {n for n, t in found.items() if t["decision"] == "compressed"}
    self.assertEqual(compressed, {
        n for n in found if n.startswith("model.layers.2.")
        and n.endswith("proj.weight") and "o_proj" not in n})

  @parameterized.parameters(
      ("--num_centroids=1000", "num_centroids: expected 3 to 256, found 1000"),
      ("--percentile=101", "percentile: .*found 101"),
      ("--protected_blocks=middle", "protected_blocks=middle: expected numbers"),
      ("--protected_blocks=9", "there is no block 9 of 4"),
      ("--keep_tensors=nothing", "no tensor's name fits 'nothing'"),
      ("--codebook_scope=row", "codebook_scope"),
      ("--model_path=/nowhere", "/nowhere"))
  def test_bad_flags(self, flag, message):
    self.assert_refused(self.run_compress(flag), message)
    self.assertEqual([p.name for p in self.root.iterdir()], ["source"])

  def test_flags_are_required(self):
    self.assert_refused(
        commands.run("compress", f"--model_path={self.source}"),
        "--output_path is not set")
    self.assert_refused(
        commands.run("decompress", f"--output_path={self.out}"),
        "--model_path is not set")

  def test_bad_tensor(self):
    tensors = checkpoints.decoder()
    name = "model.layers.2.mlp.up_proj.weight"
    tensors[name][3, 4] = np.nan
    self.source = checkpoints.write(self.root / "bad", tensors)
    self.assert_refused(
        self.run_compress(), rf"tensor {name} has 1 values.*\[3, 4\]: nan")
    self.assertFalse((self.root / "out").exists())

  def test_compressed_twice(self):
    self.assertEqual(self.run_compress().status, 0)
    self.assert_refused(self.run_compress(), "output folder is not empty")
    self.source = self.out
    self.assert_refused(
        self.run_compress(out=f"{self.root}/again"), "quantized already")

  def test_decompress_of_a_plain_checkpoint(self):
    result = commands.run("decompress", f"--model_path={self.source}",
                          f"--output_path={self.out}")
    self.assert_refused(result, "expected a compressed checkpoint")
    self.assertFalse((self.root / "out").exists())


class BenchCompressTest(absltest.TestCase):

  def test_result(self):
    result = bench_compress.run(rounds=1, layers=3)
    json.dumps(result)
    self.assertGreater(result["seconds_per_billion"], 0)
    self.assertBetween(result["peak_anonymous_bytes"], 50e6, 20e9)
    self.assertCountEqual(result["scales"], ["none", "rms"])
    for share in ("read_share", "write_share"):
      self.assertGreater(result[share], 0)


if __name__ == "__main__":
  absltest.main()
