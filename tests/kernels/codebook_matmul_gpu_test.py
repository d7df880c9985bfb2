"""The codebook kernels compiled for an H100: registers, spills, what is stored,
and how many instructions a weight takes."""

import dataclasses
import functools
import math

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import pytest

from legolm_jax.array import Storage
from pallas_kernels.codebook_matmul import api, shapes, tuning
from tests.helpers import devices, gpu_program
from tests.kernels import matrices, ptxas

devices.use_virtual_devices()

_SHAPE = next(s for s in shapes.QWEN2_5_7B if s.name == "gate")
# Instructions per weight for 6, 7 and 8 bits by rows; those of rare ways through
# a loop aside.
_MOST = {
    "codebook_matmul": {
        1: (9.4, 10.4, 9.8), 16: (15.1, 17.3, 15.8), 256: (19.2, 21.0, 21.0)},
    "codebook_matmul_transposed": {
        1: (14.9, 15.6, 15.9), 16: (15.3, 17.5, 16.0),
        256: (20.4, 22.4, 22.4)},
}
# 6 bits in one kind of storage and 8 in the other, for each number of rows.
_OTHER_BITS = [
    (rows, storage, bits) for rows in (1, 16, 256)
    for storage, bits in zip(Storage, (6, 8), strict=True)]


@functools.cache
def _on_gpu() -> NamedSharding:
  return NamedSharding(gpu_program.h100_mesh((1,), ("x",)), PartitionSpec())


def _x(*shape, dtype=jnp.bfloat16):
  return jax.ShapeDtypeStruct(shape, dtype, sharding=_on_gpu())


def _matrix(storage, bits, **options):
  return ptxas.shapes_on(
      matrices.abstract(_SHAPE.out, _SHAPE.inputs, 1 << bits, storage=storage,
                        **options), _on_gpu())


@pytest.mark.cuda_plugin
@absltest.skipUnless(ptxas.can_compile(), "needs jax's CUDA plugin and ptxas")
class CodebookMatmulOnGpuTest(parameterized.TestCase):

  def compile(self, function, *args):
    return ptxas.compile_for_gpu(jax.jit(function), *args)

  def check(self, needs):
    """Nothing spills, and a multiprocessor holds 8 warps or more."""
    self.assertEqual(needs.spilled_bytes, 0)
    warps = (1 << 16) // (needs.registers * needs.threads) * needs.threads // 32
    self.assertGreaterEqual(warps, 8)
    # A launch asks for more than 48 KB only if its own part is more.
    total = needs.shared_bytes + needs.static_bytes
    self.assertBetween(
        total, 0, (48 if needs.shared_bytes <= 48 << 10 else 112) << 10)

  def check_loop(self, kernels, name, rows, bits):
    self.check(kernels[name])
    if kernels[name].loop is None:
      return
    config = tuning.default(rows, 2, name != "codebook_matmul")
    weights = 256 * config.bands * config.words / kernels[name].threads
    self.assertLess(
        kernels[name].loop / weights, _MOST[name][rows][bits - 6])

  @parameterized.parameters(*_OTHER_BITS)
  @pytest.mark.slow
  def test_matmul_of_other_bits(self, rows, storage, bits):
    kernels, _ = self.compile(
        api.codebook_matmul, _x(rows, _SHAPE.inputs), _matrix(storage, bits))
    self.check_loop(kernels, "codebook_matmul", rows, bits)

  @parameterized.parameters(*Storage)
  def test_one_row(self, storage):
    kernels, _ = self.compile(
        api.codebook_matmul, _x(1, _SHAPE.inputs), _matrix(storage, 6))
    self.check_loop(kernels, "codebook_matmul", 1, 6)

  @parameterized.product(rows=(1, 16, 256), storage=tuple(Storage), bits=(7,))
  @pytest.mark.slow
  def test_matmul(self, rows, storage, bits):
    kernels, program = self.compile(
        api.codebook_matmul, _x(rows, _SHAPE.inputs), _matrix(storage, bits))
    self.check_loop(kernels, "codebook_matmul", rows, bits)
    # No array in memory has as many elements as the dense weight.
    sizes = [math.prod(dims) for lines in program.computations.values()
             for line in lines for _, dims in line.shapes]
    self.assertLess(max(sizes), _SHAPE.out * _SHAPE.inputs // 7)

  @parameterized.parameters(*_OTHER_BITS)
  @pytest.mark.slow
  def test_transposed_of_other_bits(self, rows, storage, bits):
    self.check_transposed(rows, storage, bits)

  @parameterized.product(rows=(1, 16, 256), storage=tuple(Storage))
  @pytest.mark.slow
  def test_transposed(self, rows, storage):
    self.check_transposed(rows, storage, 7)

  def check_transposed(self, rows, storage, bits):
    kernels, _ = self.compile(
        api.codebook_matmul_transposed, _x(rows, _SHAPE.out),
        _matrix(storage, bits))
    self.check_loop(kernels, "codebook_matmul_transposed", rows, bits)

  @parameterized.parameters(3, 100)
  def test_any_number_of_codes(self, num_codes):
    w = ptxas.shapes_on(matrices.abstract(300, 700, num_codes), _on_gpu())
    for name, x in (("codebook_matmul", 700), ("codebook_lookup", None),
                    ("codebook_matmul_transposed", 300)):
      args = (w,) if x is None else (_x(2, x), w)
      kernels, _ = self.compile(getattr(api, name), *args)
      self.assertEqual(kernels[name].spilled_bytes, 0)

  @parameterized.product(rows=(2, 16, 64), storage=tuple(Storage))
  @pytest.mark.slow
  def test_transposed_float32(self, rows, storage):
    kernels, _ = self.compile(
        api.codebook_matmul_transposed,
        _x(rows, _SHAPE.out, dtype=jnp.float32), _matrix(storage, 7))
    self.check(kernels["codebook_matmul_transposed"])

  @parameterized.parameters(*Storage)
  def test_lookup(self, storage):
    kernels, _ = self.compile(api.codebook_lookup, _matrix(storage, 7))
    self.check(kernels["codebook_lookup"])

  @parameterized.product(
      case=((1, 2, False), (2, 2, False), (16, 2, False), (256, 2, False),
            (16, 4, False), (256, 4, False), (1, 2, True), (16, 2, True),
            (256, 2, True), (16, 4, True)), storage=tuple(Storage))
  @pytest.mark.slow
  def test_candidates(self, case, storage):
    rows, itemsize, is_transposed = case
    name, function, width = (
        ("codebook_matmul_transposed", api.codebook_matmul_transposed,
         _SHAPE.out) if is_transposed else
        ("codebook_matmul", api.codebook_matmul, _SHAPE.inputs))
    dtype = jnp.bfloat16 if itemsize == 2 else jnp.float32
    # How many programs there are changes no instruction.
    configs = {dataclasses.replace(config, programs=528) for config in
               tuning.candidates(rows, itemsize, is_transposed)}
    for config in configs:
      kernels, _ = self.compile(
          functools.partial(function, config=config),
          _x(rows, width, dtype=dtype), _matrix(storage, 7))
      with self.subTest(str(config)):
        self.check(kernels[name])

  @parameterized.product(rows=(1, 16, 256), storage=tuple(Storage))
  def test_float32(self, rows, storage):
    kernels, _ = self.compile(
        api.codebook_matmul, _x(rows, _SHAPE.inputs, dtype=jnp.float32),
        _matrix(storage, 7))
    self.check(kernels["codebook_matmul"])

  def test_without_scale_or_outliers(self):
    for options in (dict(scaled=False), dict(escapes=None)):
      kernels, _ = self.compile(
          api.codebook_matmul, _x(1, _SHAPE.inputs),
          _matrix(Storage.OUT_IN, 6, **options))
      self.check(kernels["codebook_matmul"])

  def test_gradient(self):
    kernels, _ = self.compile(
        jax.grad(lambda x, w: jnp.sum(api.codebook_matmul(x, w)).astype(
            jnp.float32)), _x(16, _SHAPE.inputs), _matrix(Storage.IN_OUT, 6))
    self.assertContainsSubset({"codebook_matmul_transposed"}, kernels)


if __name__ == "__main__":
  absltest.main()
