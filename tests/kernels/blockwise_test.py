"""Products by blocks of a matrix against its dense product."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from legolm_jax import sharding
from legolm_jax.array import LegoArray, Storage
from pallas_kernels.codebook_matmul import api, blockwise, reference
from pallas_kernels.codebook_matmul.packed import Packed
from tests.helpers import devices
from tests.kernels import matrices

devices.use_virtual_devices()


def product(x, w: LegoArray, implementation, **kwargs):
  """x [m, k], of the inputs or of the outputs."""
  inputs = w.shape[w.storage is Storage.OUT_IN]
  run = (api.codebook_matmul if x.shape[1] == inputs
         else api.codebook_matmul_transposed)
  return run(x, w, implementation=implementation, **kwargs)


class BlockwiseTest(parameterized.TestCase):

  @parameterized.product(
      # Blocks of several bands and of one; a section that is no whole band.
      shape=((2048, 1032), (1024 + 32 * 8, 2000), (1000, 640), (7, 13)),
      storage=tuple(Storage), shards=((1, 1), (4, 2)))
  def test_product(self, shape, storage, shards):
    # Few and many rows, which are multiplied in two ways.
    rows = 70 if shards == (1, 1) else 3
    out, inputs = shape
    if out % 8 or inputs % 8:
      shards = (1, 1)
    w, dense = matrices.random(
        0, *shape, 16, storage=storage, scaled=True, escapes=0.02)
    w = sharding.with_shards(w, *(
        shards if storage is Storage.OUT_IN else shards[::-1]))
    out_in = dense if storage is Storage.OUT_IN else dense.T
    for matrix in (out_in.T, out_in):
      x = np.random.default_rng(1).standard_normal(
          (rows, len(matrix))).astype(np.float32)
      want = x.astype(np.float64) @ matrix
      found = product(jnp.asarray(x), w, "blockwise")
      self.assertLess(matrices.error(found, want), 1e-6)
      rounded = jnp.asarray(x, jnp.bfloat16)
      self.assertLess(matrices.error(
          product(rounded, w, "blockwise", dtype=jnp.float32),
          product(rounded, w, "reference", dtype=jnp.float32)), 1e-6)

  @parameterized.parameters(*Storage)
  def test_no_dense_matrix(self, storage):
    """Not in a product, and not in a loop around many of them."""
    matrix, _ = matrices.random(0, 1024, 1024, 128, storage=storage)
    ws = [jax.tree.map(jnp.asarray, matrix)] * 6
    dense = 4 * 1024 * 1024

    @jax.jit
    def loop(x, ws):
      def body(_, x):
        for w in ws:
          x = jnp.tanh(product(x, w, "blockwise"))
        return x
      return jax.lax.fori_loop(0, 100, body, x)

    # As separate arguments.
    ws = [jax.tree.map(jnp.copy, w) for w in ws]
    x = jnp.ones((2, 1024))
    memory = loop.lower(x, ws).compile().memory_analysis()
    self.assertLess(memory.temp_size_in_bytes, dense)

  def test_blocks(self):
    for shape, size in (
        ((4096, 1024), 512), ((8960, 1536), 224), ((96, 64), 96 // 8),
        ((32 * 37 * 8, 512), 32)):
      w = Packed.of(matrices.random(0, *shape, 4, escapes=None)[0])
      self.assertEqual(blockwise.block_outputs(w), size, shape)
    self.assertEqual(reference.lookup(w).shape, shape)


if __name__ == "__main__":
  absltest.main()
