"""Products with compressed matrices against numpy's in float64.

The kernels run interpreted, where reads beyond an array give NaN and an output
is NaN until it is written.
"""

import dataclasses
import functools

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
import numpy as np
import pytest

from legolm_jax import packing, sharding
from legolm_jax.array import Storage
from pallas_kernels.codebook_matmul import api, kernel, packed, tuning
from tests.helpers import devices
from tests.kernels import matrices

devices.use_virtual_devices()

_TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}
# Programs that run once: compile them fast.
_FAST_COMPILER = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}
_PALLAS = dict(implementation="pallas", interpret=True)
_REFERENCE = dict(implementation="reference")
_FUNCTIONS = {
    "matmul": api.codebook_matmul,
    "transposed": api.codebook_matmul_transposed,
}


def run(name, x, array, **options):
  """One of the three functions, jitted."""
  jit = functools.partial(jax.jit, compiler_options=_FAST_COMPILER)
  if name == "lookup":
    return jit(functools.partial(api.codebook_lookup, **options))(array)
  return jit(functools.partial(_FUNCTIONS[name], **options))(x, array)


def expected_of(name, x, array, dense):
  """The same in float64."""
  if name == "lookup":
    return dense
  by_input = dense if array.storage is Storage.IN_OUT else dense.T
  return np.asarray(x, np.float64) @ (
      by_input if name == "matmul" else by_input.T)


def random_x(seed, name, array, rows, dtype=jnp.float32):
  columns = (array.layout.out if name == "transposed"
             else array.layout.inputs)
  return jax.random.normal(jax.random.key(seed), (rows, columns)).astype(dtype)


def random_case(seed):
  """(name, array, dense, x, options): everything drawn from a seed."""
  rng = np.random.default_rng(seed)
  pick = lambda *values: values[rng.integers(len(values))]
  out = pick(1, 8, 32, int(rng.integers(1, 100)), 8 * int(rng.integers(1, 12)))
  inputs = pick(1, 64, 128, int(rng.integers(1, 350)),
                8 * int(rng.integers(1, 45)))
  array, dense = matrices.random(
      seed, out, inputs, pick(3, 4, 9, 17, 40, 64, 100, 128, 200, 256),
      storage=pick(*Storage), escapes=pick(None, 0.0, 0.01, 0.1, 0.6, 1.0),
      scaled=pick(False, True), dtype=np.dtype(pick(matrices.BF16, "float32")))
  # Half of the cases are products over the inputs.
  name = pick("matmul", "matmul", "transposed", "lookup")
  rows = pick(1, 1, 2, 5, 16, 19)
  dtype = pick("float32", "float32", "bfloat16")
  config = tuning.Tuning(
      rows=1 if rows == 1 else pick(2, 16), bands=pick(1, 2),
      words=pick(16, 32) if name == "matmul" else 16, programs=pick(1, 5, 999),
      num_warps=4, num_stages=1)
  x = random_x(seed, name, array, rows, dtype)
  options = dict(config=config, dtype=jnp.float32)
  return name, array, dense, x, options


class RandomTest(parameterized.TestCase):
  """200 random shapes."""

  @parameterized.parameters(range(20))
  def test_some(self, seed):
    self.check(seed)

  @parameterized.parameters(range(20, 200))
  @pytest.mark.slow
  def test_more(self, seed):
    self.check(seed)

  def check(self, seed):
    name, array, dense, x, options = random_case(seed)
    expected = expected_of(name, x, array, dense)
    tolerance = 1e-5 if name == "lookup" else _TOLERANCE[str(x.dtype)]
    for which in (_PALLAS, _REFERENCE):
      found = run(name, x, array, **options | which)
      self.assertEqual(found.dtype, jnp.float32)
      self.assertEqual(found.shape, expected.shape)
      self.assertLess(matrices.error(found, expected), tolerance, which)


class CornersTest(parameterized.TestCase):

  def check(self, array, dense, *, rows=3, names=("matmul", "transposed",
                                                  "lookup"), **options):
    for name in names:
      x = random_x(0, name, array, rows)
      expected = expected_of(name, x, array, dense)
      for which in (_PALLAS, _REFERENCE):
        found = run(name, x, array, dtype=jnp.float32, **options | which)
        self.assertLess(matrices.error(found, expected), 1e-5, (name, which))

  @parameterized.product(storage=tuple(Storage), num_codes=(3, 256))
  def test_crowded_and_empty_tiles(self, storage, num_codes):
    self.check(*matrices.random(0, 40, 300, num_codes, storage=storage,
                                scaled=True, crowded=True))

  @parameterized.parameters(*Storage)
  def test_one_row_and_one_weight(self, storage):
    self.check(*matrices.random(0, 1, 1, 8, storage=storage, escapes=0.0),
               rows=1)
    self.check(*matrices.random(0, 1, 200, 64, storage=storage), rows=1)

  def test_sections_of_odd_size(self):
    # Eight sections of 33 outputs and of 33 inputs, in words of 8.
    array, dense = matrices.random(0, 264, 264, 64)
    self.assertEqual(array.layout.bands_per_section, 2)
    self.check(array, dense, names=("matmul", "transposed"))

  def test_filled_words(self):
    array, dense = matrices.random(0, 16, 8 * 303, 64)
    self.assertTrue(array.layout.is_filled)
    self.check(array, dense, names=("matmul", "lookup"), rows=1)

  @parameterized.parameters(*Storage)
  def test_outliers_in_several_lists(self, storage):
    array, dense = matrices.random(
        0, 128, 256, 64, storage=storage, escapes=0.2)
    self.check(sharding.with_shards(array, 4, 2), dense)

  @parameterized.parameters("float32", "bfloat16", "float16")
  def test_dtypes_and_leading_dimensions(self, dtype):
    array, dense = matrices.random(0, 24, 40, 64)
    x = random_x(0, "matmul", array, 6, dtype).reshape(2, 3, 40)
    found = run("matmul", x, array, **_PALLAS)
    self.assertEqual(found.dtype, x.dtype)
    error = matrices.error(found, expected_of("matmul", x, array, dense))
    self.assertLess(error, _TOLERANCE[dtype])

  @parameterized.parameters(*Storage)
  def test_many_rows(self, storage):
    """All is looked up first."""
    array, dense = matrices.random(0, 24, 40, 64, storage=storage)
    self.check(array, dense, rows=257, names=("matmul", "transposed"))

  def test_no_rows(self):
    array, _ = matrices.random(0, 24, 40, 64)
    found = run("matmul", jnp.zeros((2, 0, 40)), array, **_PALLAS)
    self.assertEqual(found.shape, (2, 0, 24))

  def test_elsewhere_blocks_are_decoded(self):
    array, _ = matrices.random(0, 24, 40, 64)
    x = random_x(0, "matmul", array, 2)
    np.testing.assert_array_equal(
        run("matmul", x, array),
        run("matmul", x, array, implementation="blockwise"))

  def test_layout_is_legolm_s(self):
    self.assertEqual(
        (packed.WORD, packed.BAND, packed.TILE_WORDS * packed.WORD,
         packed.MIN_BITS, packed.MAX_BITS),
        (packing.WORD, packing.BAND, packing.TILE_INPUTS, packing.MIN_BITS,
         packing.MAX_BITS))
    for num_codes in range(2, 257):
      array, _ = matrices.random(0, 1, 8, num_codes)
      found = packed.Packed.of(array)
      self.assertEqual(found.widths, packing.plane_widths(array.bits))
    array, _ = matrices.random(0, 264, 8 * 303, 64)
    found, layout = packed.Packed.of(array), array.layout
    for name in ("out", "inputs", "words", "bands", "tiles",
                 "words_per_section", "bands_per_section",
                 "tiles_per_section"):
      self.assertEqual(getattr(found, name), getattr(layout, name), name)
    self.assertEqual(found.nbytes, array.nbytes)


class TrafficTest(absltest.TestCase):

  def test_counted_by_hand(self):
    # Eight sections of 64 outputs and of 128 inputs: 16 bands, 8 tiles each.
    array, _ = matrices.random(0, 512, 1024, 64, escapes=0.01)
    w = packed.Packed.of(array)
    config = dataclasses.replace(tuning.default(16, 2), bands=1, programs=64)
    found = kernel.traffic(w, 2, 2, config)
    num_outliers = array.outliers.size
    codes = 512 * 1024 * 6 // 8 + 4 * 64 + 2 * num_outliers
    x, y = 2 * 1024 * 2, 2 * 512 * 2
    self.assertEqual(found.floor, codes + 4 * 16 * 8 + x + y)
    # 64 programs are 16 bands times four parts, that begin at a tile each.
    self.assertEqual(
        found.moved, codes + 4 * 16 * 4 + 3 * x + 2 * 4 * 2 * 512 * 4 + y)


  def test_one_row_goes_twice_and_in_float32(self):
    array, _ = matrices.random(0, 512, 1024, 64, escapes=0.01)
    w = packed.Packed.of(array)
    config = dataclasses.replace(tuning.default(1, 2), programs=1)
    found = kernel.traffic(w, 1, 2, config)
    # One program per band, each from the first tile; a tile has an offset.
    self.assertEqual(
        found.moved - found.floor,
        4 * 16 - 4 * 16 * 8 + 4 * 4 * 1024 + 2 * 4 * 512)


class TuningTest(parameterized.TestCase):

  @parameterized.product(
      rows=(1, 2, 3, 16, 17, 256), itemsize=(2, 4), is_transposed=(False, True))
  def test_candidates(self, rows, itemsize, is_transposed):
    found = tuning.candidates(rows, itemsize, is_transposed)
    self.assertBetween(len(found), 6, 16)
    self.assertLen(set(found), len(found))
    self.assertEqual(found[0], tuning.default(rows, itemsize, is_transposed))
    for config in found:
      config.check(is_transposed)


class GradientTest(parameterized.TestCase):

  @parameterized.product(name=("matmul", "transposed"),
                         storage=tuple(Storage))
  def test_of_x(self, name, storage):
    array, dense = matrices.random(0, 40, 136, 64, storage=storage, scaled=True)
    dense = jnp.asarray(dense, jnp.float32)
    by_input = dense if storage is Storage.IN_OUT else dense.T
    w = by_input if name == "matmul" else by_input.T
    x = random_x(0, name, array, 2)
    expected = jax.grad(lambda x: jnp.sum(jnp.sin(jnp.matmul(
        x, w, precision=jax.lax.Precision.HIGHEST))))(x)
    for which in (_PALLAS, _REFERENCE):
      loss = lambda x, array, which=which: jnp.sum(jnp.sin(
          _FUNCTIONS[name](x, array, **which)))
      found = jax.jit(jax.grad(loss), compiler_options=_FAST_COMPILER)(x, array)
      self.assertEqual(found.dtype, x.dtype)
      # The sine's argument carries the product's own rounding.
      self.assertLess(matrices.error(found, np.asarray(expected)), 1e-5, which)

  @parameterized.parameters("pallas", "reference")
  def test_matrix_is_a_constant(self, implementation):
    array, _ = matrices.random(0, 8, 16, 64)
    loss = lambda codebook: jnp.sum(api.codebook_matmul(
        jnp.ones((2, 16)), array.replace(codebook=codebook),
        implementation=implementation, interpret=implementation == "pallas"))
    grad = jax.jit(jax.grad(loss))(jnp.asarray(array.codebook))
    np.testing.assert_array_equal(grad, 0)


class ShardMapTest(parameterized.TestCase):

  @parameterized.product(storage=tuple(Storage), which=("pallas", "reference"))
  def test_shards_are_matrices(self, storage, which):
    options = _PALLAS if which == "pallas" else _REFERENCE
    array, dense = matrices.random(
        0, 64, 256, 64, storage=storage, escapes=0.2, scaled=True)
    mesh = Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), ("o", "i"))
    spec = PartitionSpec(*("oi" if storage is Storage.OUT_IN else "io"))
    weights = sharding.device_put(array, mesh, spec)
    x = random_x(0, "matmul", array, 3)

    def both_ways(x, w):
      y = jax.lax.psum(api.codebook_matmul(x, w, **options), "i")
      return y, jax.lax.psum(
          api.codebook_matmul_transposed(y, w, **options), "o")

    parts = lambda axis: PartitionSpec(None, axis)
    y, z = jax.jit(jax.shard_map(
        both_ways, mesh=mesh, check_vma=False,
        in_specs=(parts("i"), weights.partition_specs(spec)),
        out_specs=(parts("o"), parts("i"))))(x, weights)
    expected = expected_of("matmul", x, array, dense)
    self.assertLess(matrices.error(y, expected), 1e-5)
    expected = expected_of("transposed", expected, array, dense)
    self.assertLess(matrices.error(z, expected), 1e-5)


class BadInputTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("x", lambda a: (jnp.ones((2, 39)), a), {}, r"x: .*in 40.*\[2, 39\]"),
      ("scalar", lambda a: (jnp.float32(1), a), {}, r"x: .*found \[\]"),
      ("x_dtype", lambda a: (jnp.ones((2, 40), jnp.int32), a), {},
       "dtype of x: .*int32"),
      ("dtype", lambda a: (jnp.ones((2, 40)), a), dict(dtype=jnp.int8),
       "dtype of the product: .*int8"),
      ("implementation", lambda a: (jnp.ones((2, 40)), a),
       dict(implementation="cuda"), "implementation: .*'cuda'"),
      ("codebook", lambda a: (jnp.ones((2, 40)), a.replace(
          codebook=a.codebook[1:])), {}, r"codebook: .*\[64\].*\[63\]"),
      ("num_codes", lambda a: (jnp.ones((2, 40)), a.replace(
          codebook=np.ones(257, np.float32), num_codes=257)), {},
       "num_codes: .*257"),
      ("missing_plane", lambda a: (jnp.ones((2, 40)), a.replace(
          planes=a.planes[:1])), {}, r"planes: expected 2 of 6 bits"),
      ("plane_dtype", lambda a: (jnp.ones((2, 40)), a.replace(
          planes=(a.planes[0], a.planes[1].astype(np.uint8)))), {},
       r"plane of 2 bits: expected uint16 .*found uint8"),
      ("plane_shape", lambda a: (jnp.ones((2, 40)), a.replace(
          planes=(a.planes[0], a.planes[1][1:]))), {},
       r"plane of 2 bits: expected .*\[24, 5\].*\[23, 5\]"),
      ("section", lambda a: (jnp.ones((2, 40)), a.replace(section_out=7)), {},
       "section_out: .*found 7"),
      ("scale", lambda a: (jnp.ones((2, 40)), a.replace(
          scale=a.scale[1:])), {}, r"scale: .*\[24\].*\[23\]"),
      ("offsets", lambda a: (jnp.ones((2, 40)), a.replace(
          offsets=a.offsets[1:])), {}, r"offsets: .*\[8, .*found.*\[7, "),
      ("no_offsets", lambda a: (jnp.ones((2, 40)), a.replace(offsets=None)),
       {}, "outliers and offsets"),
      ("shards", lambda a: (jnp.ones((2, 40)), a.replace(
          outliers=np.zeros((3, 1, 9), np.float32))), {},
       r"outliers: .*\(3, 1, 9\)"),
      ("config", lambda a: (jnp.ones((2, 40)), a),
       dict(config=dataclasses.replace(tuning.default(16, 2), words=24)),
       "words: .*24"),
  )
  def test_matmul(self, change, options, message):
    array, _ = matrices.random(0, 24, 40, 64, scaled=True)
    x, array = change(array)
    with self.assertRaisesRegex(ValueError, message):
      # Before anything is lowered.
      jax.jit(functools.partial(api.codebook_matmul, **options)).trace(x, array)

  def test_transposed(self):
    array, _ = matrices.random(0, 24, 40, 64)
    with self.assertRaisesRegex(ValueError, r"y: .*out 24.*\[2, 40\]"):
      api.codebook_matmul_transposed(jnp.ones((2, 40)), array)
    with self.assertRaisesRegex(ValueError, "words: expected 16, found 32"):
      api.codebook_matmul_transposed(
          jnp.ones((2, 24)), array,
          config=dataclasses.replace(tuning.default(16, 2), words=32))

  def test_lookup(self):
    array, _ = matrices.random(0, 24, 40, 64)
    with self.assertRaisesRegex(ValueError, "dtype of the result: .*int8"):
      api.codebook_lookup(array, dtype=jnp.int8)


if __name__ == "__main__":
  absltest.main()
