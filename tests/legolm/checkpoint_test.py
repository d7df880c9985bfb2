"""Compressed checkpoints: round trip, size, damage, memory.

Ways in which weight compression went wrong for users of other systems, and the
tests here and beside that hold them off:

- a tied model saved without its head: test_tied_head_stays_tied, and
  transformers_test; one side of a tie compressed: rules_test.TieTest
- a required tensor or a shard missing, unnoticed: test_tensor_is_missing,
  rules_test.FolderTest, which also has a consolidated file beside the shards
- GPT-2's names, mask buffers and [in, out] matrices: test_gpt2, and
  transformers_test
- tiles that don't divide the columns: test_odd_shapes, packing_test
- a tensor that silently gets another scheme: test_dry_run_lists_every_tensor and
  the entries that test_decompress reads
- NaN and Inf: test_not_finite; values beyond float16:
  test_bfloat16_beyond_float16
- damage found only in use: LoadTest; output that is wrong without an error:
  test_self_test
- percentiles and tensors of more than 2^24 or 2^31 elements: histogram_test,
  packing_test
- memory that grows with the model: MemoryTest
"""

import json
import pathlib
import tempfile
import tracemalloc

from absl.testing import absltest, parameterized
import jax
from jax.sharding import Mesh, PartitionSpec
import numpy as np
from safetensors.numpy import load_file

from legolm_jax import accounting, checkpoint, checkpoint_writer, compress
from legolm_jax.array import LegoArray
from legolm_jax.compress import CompressionConfig, Compressor, RowScale, Scope
from legolm_jax.errors import InputError
from legolm_jax.rules import Rules
from legolm_jax.safetensors_files import CheckpointFolder
from tests.helpers import devices
from tests.legolm import checkpoints
from tests.legolm.checkpoints import BF16, F16, F32

devices.use_virtual_devices()


class CheckpointTestCase(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(
        self.enter_context(tempfile.TemporaryDirectory()))

  def compress(self, tensors, name="out", shards=1, config=None, **kwargs):
    """Writes and compresses; returns the new folder and the accounting."""
    source = checkpoints.write(
        self.root / f"{name}_source", tensors, shards, config or {})
    compressor = Compressor(
        CheckpointFolder(source),
        CompressionConfig(**({"num_centroids": 16, "percentile": 95} | kwargs)))
    compressor.fit()
    out = self.root / name
    return out, checkpoint_writer.save(out, compressor)

  def tensors_of(self, path):
    found = {}
    for file in path.glob("*.safetensors"):
      found |= load_file(file)
    return found


class RoundTripTest(CheckpointTestCase):

  @parameterized.product(
      dtype=(BF16, F16, F32), row_scale=tuple(RowScale), scope=tuple(Scope))
  def test_decompress(self, dtype, row_scale, scope):
    tensors = checkpoints.decoder(dtype=dtype)
    out, result = self.compress(
        tensors, shards=3, row_scale=row_scale, codebook_scope=scope)
    plain = self.root / "plain"
    checkpoint_writer.decompress(out, plain)
    found = self.tensors_of(plain)
    self.assertCountEqual(found, tensors)
    source = self.root / "out_source"
    for name in ("config.json", "tokenizer.json"):
      self.assertEqual(json.loads((plain / name).read_text()),
                       json.loads((source / name).read_text()))
    index = "model.safetensors.index.json"
    self.assertEqual(
        json.loads((plain / index).read_text())["weight_map"],
        json.loads((source / index).read_text())["weight_map"])
    entries = {e["name"]: e for e in result["tensors"]}
    for name, before in tensors.items():
      after = found[name]
      self.assertEqual((after.dtype, after.shape), (before.dtype, before.shape))
      if entries[name]["decision"] == "kept":
        np.testing.assert_array_equal(
            after.view(np.uint8), before.view(np.uint8))
      else:
        # An outlier stays what it is; a centroid seldom equals a weight.
        same = np.mean(after == before)
        share = entries[name]["num_outliers"] / before.size
        self.assertBetween(same, share, share + 0.08)
        error = (after - before).astype(np.float64)
        self.assertLess(np.square(error).sum()
                        / np.square(before.astype(np.float64)).sum(), 0.05)
    self.assertEqual(sum(e["decision"] == "compressed"
                         for e in result["tensors"]), 10)

  def test_transformers_loads_the_config(self):
    import transformers
    out, _ = self.compress(checkpoints.decoder())
    config = transformers.AutoConfig.from_pretrained(out)
    self.assertEqual(config.quantization_config["quant_method"], "legolm")

  def test_stream_equals_files(self):
    tensors = checkpoints.decoder()
    out, _ = self.compress(tensors, row_scale=RowScale.RMS)
    checkpoint_writer.decompress(out, self.root / "plain")
    found = self.tensors_of(self.root / "plain")
    compressor = Compressor(
        CheckpointFolder(self.root / "out_source"), CompressionConfig(
            num_centroids=16, percentile=95, row_scale=RowScale.RMS),
        threads=1)
    compressor.fit()
    for name, tensor in compressor.tensors():
      np.testing.assert_array_equal(tensor, found[name])

  @parameterized.parameters("", "transformer.")
  def test_gpt2(self, prefix):
    tensors = checkpoints.gpt2(prefix)
    out, result = self.compress(
        tensors, config={"model_type": "gpt2"}, row_scale=RowScale.RMS)
    checkpoint_writer.decompress(out, self.root / "plain")
    found = self.tensors_of(self.root / "plain")
    kinds = {e["name"]: e for e in result["tensors"]}
    for name, before in tensors.items():
      if kinds[name]["decision"] == "kept":
        np.testing.assert_array_equal(found[name], before)
    name = f"{prefix}h.1.attn.c_attn.weight"
    self.assertEqual(kinds[name]["storage"], "in_out")
    array = checkpoint.Checkpoint(out).read(name)
    self.assertEqual(array.scale.shape, (192,))  # Of the outputs.
    self.assertEqual(array.shape, (64, 192))
    np.testing.assert_array_equal(np.asarray(array.dequantize()), found[name])

  def test_tied_head_stays_tied(self):
    tensors = checkpoints.decoder()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    out, result = self.compress(
        tensors, config={"tie_word_embeddings": True},
        rules=Rules(compress=("embed_tokens",)))
    kinds = {e["name"]: e["decision"] for e in result["tensors"]}
    self.assertEqual(kinds["lm_head.weight"], "tied")
    tree = checkpoint.load(out)
    self.assertNotIn("lm_head", tree)
    self.assertIsInstance(tree["model"]["embed_tokens"]["weight"], LegoArray)
    checkpoint_writer.decompress(out, self.root / "plain")
    self.assertNotIn("lm_head.weight", self.tensors_of(self.root / "plain"))
    config = json.loads((self.root / "plain" / "config.json").read_text())
    self.assertTrue(config["tie_word_embeddings"])

  def test_bfloat16_beyond_float16(self):
    tensors = checkpoints.decoder()
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][0, 0] = 1e30
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = -1e38
    out, _ = self.compress(tensors)
    array = checkpoint.load(out)["model"]["layers"]["1"]["mlp"]["up_proj"]
    self.assertEqual(array["weight"].dtype, BF16)
    self.assertEqual(array["weight"].dequantize()[0, 0], BF16.type(1e30))

  def test_largest_of_every_tensor(self):
    tensors = checkpoints.decoder()
    quiet = "model.layers.1.mlp.up_proj.weight"
    tensors[quiet] = (tensors[quiet] * BF16.type(1e-2)).astype(BF16)
    out, result = self.compress(
        tensors, percentile=99.9, largest_per_tensor=5,
        row_scale=RowScale.NONE)
    found = {e["name"]: e for e in result["tensors"]}
    self.assertGreaterEqual(found[quiet]["num_outliers"], 5)
    array = checkpoint.Checkpoint(out).read(quiet).dequantize()
    before = tensors[quiet].astype(np.float32)
    largest = np.argsort(np.abs(before), axis=None)[-5:]
    np.testing.assert_array_equal(
        np.asarray(array).ravel()[largest], tensors[quiet].ravel()[largest])


class FinerTest(CheckpointTestCase):
  """Small kinds of matrices get a bit more."""

  KEYS = "self_attn.k_proj"

  @parameterized.parameters(*Scope)
  def test_small_kinds(self, scope):
    tensors = checkpoints.decoder()
    error = {}
    for share in (0.0, 0.1):
      out, result = self.compress(
          tensors, f"out{share}", finer_below=share, codebook_scope=scope)
      opened = checkpoint.Checkpoint(out)
      size = accounting.codebook_bytes(sum(
          c["num_codes"] - c["has_escape"]
          for c in opened.report["codebooks"].values()))
      for entry in result["tensors"]:
        if entry["decision"] != "compressed":
          continue
        array, is_small = opened.read(entry["name"]), self.KEYS in entry["name"]
        codes = 32 if share and is_small else 16
        self.assertEqual(array.num_codes, codes, entry["name"])
        size += accounting.matrix_bytes(
            array.layout, codes, entry["num_outliers"], 2, True)
        if is_small:
          source = tensors[entry["name"]].astype(np.float32)
          error.setdefault(share, 0.0)
          error[share] += np.square(
              np.asarray(array.dequantize(np.float32)) - source).sum()
      weights = sum(np.prod(e["shape"]) for e in result["tensors"]
                    if e["decision"] == "compressed")
      self.assertAlmostEqual(
          result["bits_per_compressed_weight"], 8 * size / weights)
    self.assertLess(error[0.1], 0.4 * error[0.0])

  def test_which(self):
    def finer(tensors, **kwargs):
      folder = CheckpointFolder(checkpoints.write(
          tempfile.mkdtemp(dir=self.root) + "/model", tensors))
      compressor = Compressor(folder, CompressionConfig(**kwargs))
      k = compressor.config.num_centroids
      return {d.name for d in compressor.compressed
              if compressor.num_codes_of(d) > k}

    wide = checkpoints.decoder(width=128, inner=1024)
    self.assertEqual(finer(wide), {
        f"model.layers.{i}.self_attn.k_proj.weight" for i in (1, 2)})
    self.assertEmpty(finer(wide, finer_below=0.0))
    self.assertEmpty(finer(wide, num_centroids=129))
    # A layer's experts are one kind, however small each of them is.
    experts = {
        name: w for name, w in wide.items() if ".mlp." not in name} | {
            f"model.layers.{i}.mlp.experts.{e}.up_proj.weight":
            checkpoints.weights((32, 128), seed=e)
            for i in range(4) for e in range(64)}
    self.assertEqual(finer(experts), finer(wide))


class SizeTest(CheckpointTestCase):

  @parameterized.product(
      num_centroids=(5, 64, 128, 200), row_scale=tuple(RowScale),
      percentile=(95, 100))
  def test_to_the_byte(self, num_centroids, row_scale, percentile):
    tensors = checkpoints.decoder(width=72)
    out, result = self.compress(
        tensors, shards=2, num_centroids=num_centroids, row_scale=row_scale,
        percentile=percentile, largest_per_tensor=0)
    compressed = [e for e in result["tensors"] if e["decision"] == "compressed"]
    opened = checkpoint.Checkpoint(out)
    expected = sum(t.nbytes for n, t in tensors.items()
                   if n not in {e["name"] for e in compressed})
    matrices = 0
    for entry in compressed:
      array = opened.read(entry["name"])
      size = accounting.matrix_bytes(
          array.layout, num_centroids, entry["num_outliers"], 2,
          row_scale is not RowScale.NONE)
      self.assertAlmostEqual(8 * size / array.size, entry["bits_per_weight"])
      matrices += size
    matrices += accounting.codebook_bytes(num_centroids - (percentile < 100))
    expected += matrices
    for file in out.glob("*.safetensors"):
      with file.open("rb") as f:
        expected += 8 + int.from_bytes(f.read(8), "little")
    files = sum(f.stat().st_size for f in out.glob("*.safetensors"))
    self.assertEqual(files, expected)
    others = sum((out / name).stat().st_size for name in (
        "config.json", "legolm.json", "model.safetensors.index.json"))
    self.assertEqual(result["bytes_out"], files + others)
    parameters = sum(t.size for t in tensors.values())
    self.assertEqual(result["num_parameters"], parameters)
    self.assertAlmostEqual(
        result["bits_per_parameter"], 8 * result["bytes_out"] / parameters)
    self.assertAlmostEqual(
        result["bits_per_compressed_weight"],
        8 * matrices / sum(np.prod(e["shape"]) for e in compressed))

  @parameterized.parameters((64, 99, 5.11), (128, 99, 4.41), (128, 80, 2.67))
  def test_published_ratios(self, k, percentile, expected):
    # (K = 64 is printed as 5.12 there.)
    self.assertAlmostEqual(
        accounting.nominal_ratio(k, percentile), expected, delta=5e-3)

  def test_odd_shapes(self):
    tensors = checkpoints.decoder(width=70, inner=101)
    out, _ = self.compress(tensors, row_scale=RowScale.RMS)
    checkpoint_writer.decompress(out, self.root / "plain")
    found = self.tensors_of(self.root / "plain")
    for name, before in tensors.items():
      self.assertEqual(found[name].shape, before.shape)


class LoadTest(CheckpointTestCase):

  def test_tree(self):
    tensors = checkpoints.decoder()
    out, _ = self.compress(tensors)
    tree = checkpoint.load(out)
    leaves = jax.tree.leaves(
        tree, is_leaf=lambda x: isinstance(x, LegoArray))
    self.assertLen(leaves, len(tensors))
    layer = tree["model"]["layers"]["1"]
    self.assertIsInstance(layer["mlp"]["up_proj"]["weight"], LegoArray)
    self.assertIsInstance(
        layer["mlp"]["up_proj"]["weight"].planes[0], jax.Array)
    np.testing.assert_array_equal(
        tree["lm_head"]["weight"], tensors["lm_head.weight"])

  @parameterized.parameters(1, 2, 4, 8)
  def test_sharded(self, degree):
    out, _ = self.compress(checkpoints.decoder(), row_scale=RowScale.RMS)
    mesh = Mesh(np.array(jax.devices()[:degree]), ("x",))
    spec_of = lambda name: (
        PartitionSpec(None, "x") if "down_proj" in name
        else PartitionSpec("x", None) if "_proj" in name else PartitionSpec())
    tree = checkpoint.load(out, mesh=mesh, spec_of=spec_of, verify=False)
    whole = checkpoint.load(out)
    mlp, mlp_whole = (t["model"]["layers"]["2"]["mlp"] for t in (tree, whole))
    for name in ("up_proj", "down_proj"):
      np.testing.assert_array_equal(
          np.asarray(mlp[name]["weight"].dequantize()),
          np.asarray(mlp_whole[name]["weight"].dequantize()))

  def _damage(self, out, name, at=0):
    info = CheckpointFolder(out).tensors[name]
    with (out / info.file).open("r+b") as file:
      file.seek(info.offset + at)
      byte = file.read(1)
      file.seek(info.offset + at)
      file.write(bytes([byte[0] ^ 64]))

  @parameterized.parameters(
      ".plane0", ".plane1", ".offsets", ".outliers", ".scale")
  def test_damage_is_found_by_checksum(self, piece):
    out, _ = self.compress(checkpoints.decoder(), num_centroids=64,
                           row_scale=RowScale.RMS)
    name = "model.layers.1.mlp.up_proj.weight"
    self._damage(out, name + piece, at=1)
    with self.assertRaisesRegex(InputError, f"{name}{piece} is damaged"):
      checkpoint.load(out)
    with self.assertRaisesRegex(InputError, "is damaged"):
      checkpoint_writer.decompress(out, self.root / "plain")
    self.assertFalse((self.root / "plain").exists())

  def test_damage_of_a_kept_tensor(self):
    out, _ = self.compress(checkpoints.decoder())
    self._damage(out, "lm_head.weight", at=7)
    with self.assertRaisesRegex(InputError, "lm_head.weight is damaged"):
      checkpoint.load(out)

  @parameterized.parameters("plane0", "outliers", "scale", "codebook")
  def test_self_test(self, piece):
    out, _ = self.compress(checkpoints.decoder(), num_centroids=64,
                           row_scale=RowScale.RMS, percentile=60)
    name = "model.layers.1.mlp.up_proj.weight"
    stored = ("legolm.codebook.global" if piece == "codebook"
              else f"{name}.{piece}")
    self._damage(out, stored, at=83 if piece == "codebook" else 1)
    # Checksums are off, as for a process that reads a part only.
    with self.assertRaisesRegex(InputError, f"{name} (fails|is damaged)"):
      checkpoint.Checkpoint(out).read(name, verify=False)

  def test_tensor_is_missing(self):
    out, _ = self.compress(checkpoints.decoder(), shards=3)
    report = json.loads((out / "legolm.json").read_text())
    report["tensors"].append(
        report["tensors"][0] | {"name": "model.more.weight"})
    (out / "legolm.json").write_text(json.dumps(report))
    with self.assertRaisesRegex(InputError, "model.more.weight is missing"):
      checkpoint.Checkpoint(out)
    report["tensors"] = report["tensors"][1:-1]
    (out / "legolm.json").write_text(json.dumps(report))
    with self.assertRaisesRegex(InputError, "are not in legolm.json"):
      checkpoint.Checkpoint(out)

  def test_report_is_damaged(self):
    out, _ = self.compress(checkpoints.decoder())
    (out / "legolm.json").write_text("{}")
    with self.assertRaisesRegex(InputError, "legolm.json: is damaged"):
      checkpoint.Checkpoint(out)

  def test_plain_checkpoint(self):
    source = checkpoints.write(self.root / "plain", checkpoints.decoder())
    with self.assertRaisesRegex(InputError, "expected a compressed checkpoint"):
      checkpoint.Checkpoint(source)
    self.assertFalse(checkpoint.is_compressed(source))


class BadInputTest(CheckpointTestCase):

  @parameterized.parameters(np.nan, np.inf, -np.inf)
  def test_not_finite(self, value):
    for name in ("model.layers.1.mlp.up_proj.weight", "lm_head.weight"):
      for row_scale in RowScale:
        tensors = checkpoints.decoder()
        tensors[name][5, 7] = value
        tensors[name][9, 0] = value
        with self.subTest(name=name, scale=row_scale.value):
          with self.assertRaisesRegex(
              InputError, rf"{name} has 2 values.*first at \[5, 7\]"):
            self.compress(tensors, f"{name}{row_scale.value}",
                          row_scale=row_scale)
          self.assertFalse((self.root / f"{name}{row_scale.value}").exists())

  @parameterized.parameters(
      (dict(num_centroids=2), "num_centroids: expected 3 to 256, found 2"),
      (dict(num_centroids=257), "num_centroids.*257"),
      (dict(percentile=0.0), "percentile.*found 0"),
      (dict(percentile=100.5), "percentile.*100.5"),
      (dict(percentile=float("nan")), "percentile.*nan"),
      (dict(largest_per_tensor=-1), "largest_per_tensor.*-1"),
      (dict(finer_below=1.5), "finer_below: expected 0 to 1, found 1.5"))
  def test_settings(self, kwargs, message):
    with self.assertRaisesRegex(InputError, message):
      CompressionConfig(**kwargs)

  def test_fewer_values_than_centroids(self):
    tensors = checkpoints.decoder()
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = np.sign(tensors[name]).astype(BF16)
    with self.assertRaisesRegex(
        InputError, f"codebook of {name}.*at least 15 distinct.*found"):
      self.compress(tensors, codebook_scope=Scope.TENSOR)

  def test_compressed_already(self):
    out, _ = self.compress(checkpoints.decoder())
    with self.assertRaisesRegex(InputError, r"quantized already \(legolm\)"):
      Compressor(CheckpointFolder(out), CompressionConfig())

  def test_nothing_to_compress(self):
    with self.assertRaisesRegex(
        InputError, "no tensor is to be compressed.*5 protected block"):
      self.compress(checkpoints.decoder(layers=2))

  def test_output_is_not_empty(self):
    out, _ = self.compress(checkpoints.decoder())
    before = sorted(p.name for p in out.iterdir())
    compressor = Compressor(
        CheckpointFolder(self.root / "out_source"), CompressionConfig())
    with self.assertRaisesRegex(InputError, "not empty"):
      checkpoint_writer.save(out, compressor)
    self.assertEqual(sorted(p.name for p in out.iterdir()), before)

  def test_nothing_is_left_of_a_failure(self):
    source = checkpoints.write(self.root / "source", checkpoints.decoder())
    compressor = Compressor(CheckpointFolder(source), CompressionConfig())
    compressor.fit()

    def stop(decisions):
      yield from list(decisions)[:7]
      raise KeyboardInterrupt

    with self.assertRaises(KeyboardInterrupt):
      checkpoint_writer.save(self.root / "out", compressor, stop)
    self.assertEqual([p.name for p in self.root.iterdir()], ["source"])


class MemoryTest(CheckpointTestCase):

  def test_bounded_by_the_largest_tensor(self):
    peaks = []
    for layers in (4, 12):
      tensors = checkpoints.decoder(layers=layers, width=512, inner=2048)
      source = checkpoints.write(self.root / f"source{layers}", tensors)
      largest = max(t.nbytes for t in tensors.values())
      total = sum(t.nbytes for t in tensors.values())
      del tensors
      tracemalloc.start()
      compressor = Compressor(CheckpointFolder(source), CompressionConfig(
          row_scale=RowScale.RMS), threads=2)
      compressor.fit()
      checkpoint_writer.save(self.root / f"out{layers}", compressor)
      peaks.append(tracemalloc.get_traced_memory()[1])
      tracemalloc.stop()
    # Bins, tables and the pieces at hand, whatever the tensors are.
    fixed = 45 << 20
    self.assertLess(peaks[1], 4 * largest + fixed)
    self.assertLess(peaks[1] - peaks[0], 0.1 * total)

  def test_parallel_does_not_run_ahead(self):
    started = []
    results = compress.parallel(
        lambda i: started.append(i) or i, range(100), threads=2)
    self.assertEqual(next(results), 0)
    self.assertLessEqual(len(started), 4)
    self.assertEqual(list(results), list(range(1, 100)))


if __name__ == "__main__":
  absltest.main()
