"""Baselines: what each makes of weights, by its definition."""

import os
import tempfile

from absl.testing import absltest, parameterized
import numpy as np

from legolm_jax import baselines, checkpoint_writer, vectors
from legolm_jax.compress import CompressionConfig, Compressor, RowScale
from legolm_jax.errors import InputError
from legolm_jax.rules import Rules
from legolm_jax.safetensors_files import CheckpointFolder
from tests.legolm import checkpoints

_NAME = "model.layers.1.mlp.up_proj.weight"


class BaselinesTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.root = self.enter_context(tempfile.TemporaryDirectory())
    self.tensors = checkpoints.decoder()
    self.folder = CheckpointFolder(checkpoints.write(
        os.path.join(self.root, "model"), self.tensors))

  def check(self, found, protected=("0", "3")):
    """Kept tensors are untouched; returns the others, and relative errors."""
    replaced, errors = {}, []
    for name, tensor in found.tensors():
      before = self.tensors[name]
      self.assertEqual((tensor.dtype, tensor.shape),
                       (before.dtype, before.shape))
      parts = name.split(".")
      if "_proj" not in name or parts[2] in protected:
        np.testing.assert_array_equal(tensor, before)
        continue
      replaced[name] = tensor
      error = (tensor - before).astype(np.float64)
      errors.append(np.square(error).sum()
                    / np.square(before.astype(np.float64)).sum())
    self.assertLen(replaced, 5 * (4 - len(protected)))
    return replaced, np.mean(errors)

  def test_uncompressed(self):
    found = baselines.uncompressed(self.folder)
    for name, tensor in found.tensors():
      np.testing.assert_array_equal(tensor, self.tensors[name])
    self.assertEqual(found.bits_per_parameter, 16)

  @parameterized.parameters(False, True)
  def test_int8(self, per_row):
    found = baselines.int8(self.folder, per_row=per_row)
    replaced, _ = self.check(found)
    w = self.tensors[_NAME].astype(np.float32)
    peak = np.abs(w).max(axis=1 if per_row else None, keepdims=True)
    step = peak / 127
    expected = (np.round(w / step) * step).astype(checkpoints.BF16)
    np.testing.assert_array_equal(replaced[_NAME], expected)
    again = dict(found.tensors())
    np.testing.assert_array_equal(again[_NAME], expected)
    self.assertBetween(found.bits_per_compressed_weight, 8, 8.6)

  def test_rows_beat_tensors(self):
    _, row = self.check(baselines.int8(self.folder, per_row=True))
    _, tensor = self.check(baselines.int8(self.folder, per_row=False))
    self.assertLess(row, tensor)

  def test_int8_of_in_out_storage(self):
    # Scales belong to the outputs, which come second here.
    folder = CheckpointFolder(checkpoints.write(
        os.path.join(self.root, "gpt2"), checkpoints.gpt2(),
        config={"model_type": "gpt2"}))
    name = "transformer.h.1.mlp.c_fc.weight"
    w = folder.read(name)
    step = np.abs(w).max(axis=0) / np.float32(127)
    found = dict(baselines.int8(folder, per_row=True).tensors())[name]
    np.testing.assert_allclose(found, np.round(w / step) * step, rtol=1e-6)

  def test_legolm_as_on_disk(self):
    config = CompressionConfig(
        num_centroids=32, percentile=97, row_scale=RowScale.RMS)
    found = baselines.legolm(self.folder, config)
    compressor = Compressor(self.folder, config)
    compressor.fit()
    result = checkpoint_writer.save(os.path.join(self.root, "out"), compressor)
    self.assertAlmostEqual(found.bits_per_compressed_weight,
                           result["bits_per_compressed_weight"])
    self.assertLess(found.bits_per_parameter, result["bits_per_parameter"])
    checkpoint_writer.decompress(
        os.path.join(self.root, "out"), os.path.join(self.root, "plain"))
    plain = CheckpointFolder(os.path.join(self.root, "plain"))
    for name, tensor in found.tensors():
      np.testing.assert_array_equal(tensor, plain.read(name))

  def test_full_replacement(self):
    """Of every number, each by the nearest of one codebook's values."""
    full = baselines.full_replacement(self.folder, 16)
    tensors = dict(full.tensors())
    self.assertEqual(list(tensors), list(self.folder.tensors))
    values = np.unique(np.concatenate(
        [t.astype(np.float64).ravel() for t in tensors.values()]))
    self.assertLen(values, 16)
    for name, found in tensors.items():
      source = self.folder.read(name)
      self.assertEqual((found.dtype, found.shape), (source.dtype, source.shape))
      distance = np.abs(source.astype(np.float64)[..., None] - values).min(-1)
      np.testing.assert_allclose(
          np.abs(source.astype(np.float64) - found.astype(np.float64)),
          distance, rtol=0.02, atol=1e-6)
    self.assertAlmostEqual(full.bits_per_parameter, 4, delta=0.02)
    self.assertEqual(full.bits_per_parameter, full.bits_per_compressed_weight)

  def test_selection_rescues_replacement(self):
    full = baselines.all_blocks(self.folder, 16)
    replaced, error = self.check(full, protected=())
    self.assertLen(np.unique(np.concatenate(
        [t.astype(np.float32).ravel() for t in replaced.values()])), 16)
    self.assertLess(full.bits_per_compressed_weight, 4.02)
    selective = baselines.legolm(self.folder, CompressionConfig(
        num_centroids=16, percentile=97, row_scale=RowScale.NONE,
        rules=Rules(protected_blocks=())))
    self.assertLess(self.check(selective, protected=())[1], error)

  @parameterized.parameters(None, 97.0)
  def test_kmeans_per_layer(self, percentile):
    found = baselines.kmeans_per_layer(self.folder, 16, percentile)
    replaced, _ = self.check(found)
    for layer in "12":
      values = np.concatenate([
          t.astype(np.float32).ravel() for n, t in replaced.items()
          if n.startswith(f"model.layers.{layer}.")])
      values, counts = np.unique(values, return_counts=True)
      if percentile is None:
        self.assertLen(values, 16)
      else:  # Outliers are values of their own, and few have the same.
        self.assertGreater(np.sort(counts)[-15:].sum(), 0.95 * counts.sum())

  @parameterized.parameters((2, 64), (4, 64), (2, 1000))
  def test_vector_blocks(self, dim, num_centroids):
    found = baselines.vector_blocks(self.folder, dim, num_centroids, 97)
    replaced, error = self.check(found)
    sizes = np.sort(np.abs(np.concatenate([
        self.tensors[n].astype(np.float32).ravel() for n in replaced])))
    threshold = sizes[int(np.ceil(0.97 * sizes.size)) - 1]
    before = self.tensors[_NAME].astype(np.float32)
    beyond = np.abs(before) > threshold
    np.testing.assert_array_equal(
        replaced[_NAME][beyond], self.tensors[_NAME][beyond])
    blocks = replaced[_NAME].reshape(-1, dim)
    pure = ~beyond.reshape(-1, dim).any(axis=1)
    self.assertLessEqual(len(np.unique(blocks[pure].astype(np.float32), axis=0)),
                         num_centroids)
    self.assertLess(error, 0.5)
    # The mismatch grows with d.
    if dim == 2 and num_centroids == 64:
      quads = baselines.vector_blocks(self.folder, 4, num_centroids, 97)
      self.assertLess(error, self.check(quads)[1])

  def test_too_few_vectors(self):
    with self.assertRaisesRegex(InputError, "at least 65536 distinct vectors"):
      baselines.vector_blocks(self.folder, 2, 65536)


class VectorsTest(absltest.TestCase):

  def test_finds_clusters(self):
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(20, 4))
    x = np.repeat(centers, 100, axis=0) + 1e-3 * rng.normal(size=(2000, 4))
    found = vectors.fit(x.astype(np.float32), 40)
    self.assertLen(found, 40)
    quantized = vectors.Quantizer(found)(x.astype(np.float32))
    distances = np.linalg.norm(x[:, None] - found[None], axis=-1)
    np.testing.assert_array_equal(quantized, found[distances.argmin(1)])

  def test_centroids_are_means(self):
    x = np.random.default_rng(0).normal(size=(4000, 2)).astype(np.float32)
    found = vectors.fit(x, 10)
    of = np.linalg.norm(x[:, None] - found[None], axis=-1).argmin(1)
    means = np.stack([x[of == i].mean(0) for i in range(10)])
    # The iteration ends before the fixed point; it starts 0.5 away.
    np.testing.assert_allclose(found, means, atol=0.1)


if __name__ == "__main__":
  absltest.main()
