"""Products with compressed weights against products with dense ones."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from legolm_jax import matmul
from legolm_jax.array import Storage
from tests.legolm.arrays import make


class MatmulTest(parameterized.TestCase):

  @parameterized.product(storage=tuple(Storage), rows=(1, 5),
                         dtype=("float32", "bfloat16"))
  def test_against_dense(self, storage, rows, dtype):
    *_, array = make((72, 200), storage=storage, scaled=True)
    dtype = jnp.dtype(dtype)
    inputs = array.layout.inputs
    x = jax.random.normal(jax.random.key(0), (2, rows, inputs)).astype(dtype)
    product = (matmul.matmul_transposed if storage is Storage.OUT_IN
               else matmul.matmul)
    dense = array.dequantize(jnp.float32)
    expected = np.asarray(x, np.float64) @ np.asarray(
        dense.T if storage is Storage.OUT_IN else dense, np.float64)
    found = product(x, array)
    self.assertEqual(found.dtype, dtype)
    error = np.linalg.norm(np.asarray(found, np.float64) - expected)
    self.assertLess(error / np.linalg.norm(expected),
                    1e-6 if dtype == jnp.float32 else 1e-2)
    # The other way round: over the outputs.
    y = jax.random.normal(jax.random.key(1), (3, 72)).astype(dtype)
    back = (matmul.matmul if storage is Storage.OUT_IN
            else matmul.matmul_transposed)
    self.assertEqual(back(y, array).shape, (3, inputs))

  def test_arrays(self):
    x, w = jnp.ones((2, 3)), jnp.arange(12.0).reshape(3, 4)
    np.testing.assert_array_equal(matmul.matmul(x, w), x @ w)
    np.testing.assert_array_equal(matmul.matmul_transposed(x, w.T), x @ w)

  def test_gradient_of_x(self):
    *_, array = make((72, 200), scaled=True)
    x = jax.random.normal(jax.random.key(0), (4, 200))
    loss = lambda x, w: jnp.sum(jnp.sin(matmul.matmul_transposed(x, w)))
    dense = jax.grad(loss)(x, array.dequantize(jnp.float32))
    # Terms are summed in another order.
    np.testing.assert_allclose(jax.grad(loss)(x, array), dense,
                               atol=1e-6 * np.abs(dense).max())

  def test_shapes_must_fit(self):
    *_, array = make((72, 200))
    with self.assertRaisesRegex(ValueError, r"\(2, 72\).*\(72, 200\)"):
      matmul.matmul_transposed(jnp.ones((2, 72)), array)


if __name__ == "__main__":
  absltest.main()
