"""The codebook kernels in Triton: numerics interpreted, and compiled for an H100."""

import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import pytest

from legolm_jax.array import Storage
from pallas_kernels.codebook_matmul import (
    api,
    packed,
    shapes,
    triton_call,
    triton_tuning,
    tuning,
)
from tests.helpers import devices, gpu_program
from tests.kernels import cubin, matrices

devices.use_virtual_devices()

_SHAPE = next(s for s in shapes.QWEN2_5_7B if s.name == "gate")
_CODES = 32 * 16 * 8  # In a block.
# A multiprocessor's shared memory that one block can have.
_SHARED_BYTES = 227 << 10
_ROOT = pathlib.Path(__file__).parents[2]


def has_triton() -> bool:
  try:
    triton_call.check_installed()
  except ImportError:
    return False
  return True


def interpret(first: int, last: int) -> list[dict]:
  """Runs random cases in a process in which Triton interprets."""
  run = subprocess.run(
      [sys.executable, "-m", "tests.kernels.triton_cases", str(first),
       str(last)], cwd=_ROOT, capture_output=True, text=True,
      env=os.environ | dict(
          TRITON_INTERPRET="1", JAX_PLATFORMS="cpu",
          PYTHONPATH=os.pathsep.join(map(str, [_ROOT, *sys.path]))))
  if run.returncode:
    raise AssertionError(run.stderr)
  return [json.loads(line) for line in run.stdout.splitlines()]


def abstract(bits, storage, **options) -> packed.Packed:
  """A matrix's shapes and dtypes."""
  return jax.eval_shape(packed.Packed.of, matrices.abstract(
      _SHAPE.out, _SHAPE.inputs, 1 << bits, storage=storage, **options))


def x_of(rows, dtype="bfloat16", size=_SHAPE.inputs):
  return jax.ShapeDtypeStruct((rows, size), dtype)


@pytest.mark.triton
@absltest.skipUnless(has_triton(), "needs triton and jax_triton")
class InterpretedTest(parameterized.TestCase):

  def check(self, first, last, at_least):
    cases = interpret(first, last)
    self.assertGreaterEqual(len(cases), at_least)
    for case in cases:
      is_exact = case["name"] == "lookup" or case["dtype"] == "float32"
      self.assertLess(case["error"], 1e-5 if is_exact else 1e-2, case)

  @pytest.mark.slow
  def test_some(self):
    self.check(0, 12, 20)

  @parameterized.parameters(*range(12, 192, 45))
  @pytest.mark.slow
  def test_more(self, first):
    self.check(first, first + 45, 45)


@pytest.mark.triton
@absltest.skipUnless(has_triton(), "needs triton and jax_triton")
class CompiledTest(parameterized.TestCase):

  def compile(self, launch) -> cubin.Cubin:
    found = cubin.compile_for_h100(launch)
    self.assertEqual(found.spilled_bytes, 0)
    self.assertLess(found.shared_bytes, _SHARED_BYTES)
    return found

  def check_matmul(self, w, x, config=None):
    launch = triton_call.matmul_launch(
        x, w, config or triton_tuning.default(x.shape[0]))
    found = self.compile(launch)
    # A multiprocessor holds 12 warps or more.
    self.assertGreaterEqual((1 << 16) // (32 * found.registers), 12)
    self.assertGreaterEqual(_SHARED_BYTES // (found.shared_bytes + 1024), 12)
    return found

  @parameterized.product(storage=tuple(Storage))
  def test_one_row_of_six_bits(self, storage):
    found = self.check_matmul(abstract(6, storage), x_of(1))
    # One step of the loop over words, with what is done once in many steps.
    step = found.loops[0]
    self.assertEqual(step["LDS"] - step["LDS"] % 16, 8 * 16)
    self.assertEqual(step["HMMA"], _CODES // (16 * 16))
    # Weights don't move between lanes.
    self.assertLess(step["SHFL"], 32)
    self.assertLess(step.total() * 32 / _CODES, 8.5)

  @parameterized.product(
      bits=(6, 7, 8), storage=tuple(Storage), rows=(1, 4, 16))
  @pytest.mark.slow
  def test_matmul(self, bits, storage, rows):
    found = self.check_matmul(abstract(bits, storage), x_of(rows))
    self.assertLess(found.loops[0]["SHFL"], 32)
    self.assertLess(found.loops[0].total() * 32 / _CODES, 11)

  @parameterized.product(bits=(2, 5), storage=tuple(Storage))
  @pytest.mark.slow
  def test_fewer_bits(self, bits, storage):
    self.check_matmul(abstract(bits, storage), x_of(1))

  @parameterized.product(rows=(1, 16), storage=tuple(Storage))
  @pytest.mark.slow
  def test_other_matrices(self, rows, storage):
    for options in (dict(scaled=False), dict(escapes=None)):
      self.check_matmul(abstract(6, storage, **options), x_of(rows))
    self.check_matmul(abstract(6, storage), x_of(rows, "float16"))

  @parameterized.product(rows=(1, 16), storage=tuple(Storage))
  @pytest.mark.slow
  def test_float32(self, rows, storage):
    self.compile(triton_call.matmul_launch(
        x_of(rows, "float32"), abstract(7, storage),
        triton_tuning.default(rows)))

  @parameterized.product(
      rows=(1, 16), bits=(7,), storage=tuple(Storage))
  @pytest.mark.slow
  def test_candidates(self, rows, bits, storage):
    # How many programs there are changes no instruction.
    for slots in {config.slots for config in triton_tuning.candidates(rows)}:
      config = dataclasses.replace(triton_tuning.default(rows), slots=slots)
      self.compile(triton_call.matmul_launch(
          x_of(rows), abstract(bits, storage), config))

  @parameterized.product(bits=(6, 7, 8), storage=tuple(Storage))
  @pytest.mark.slow
  def test_dense_kernels(self, bits, storage):
    w = abstract(bits, storage)
    self.compile(triton_call.lookup_launch(w, jnp.bfloat16))
    for rows in (1, 16):
      self.compile(triton_call.transposed_launch(
          x_of(rows, size=_SHAPE.out), w, triton_tuning.default(rows)))

  @pytest.mark.cuda_plugin
  @absltest.skipUnless(gpu_program.has_plugin(), "needs jax's CUDA plugin")
  def test_a_jax_program_calls_them(self):
    array = matrices.abstract(_SHAPE.out, _SHAPE.inputs, 64)
    loss = lambda x, w: jnp.sum(api.codebook_matmul(
        x, w, implementation="triton").astype(jnp.float32))
    # The gradient is the other product; its sum needs the product as well.
    lowered = jax.jit(jax.value_and_grad(loss)).trace(x_of(1), array).lower(
        lowering_platforms=("cuda",))
    self.assertEqual(
        lowered.as_text().count("stablehlo.custom_call @triton_kernel_call"), 2)


class BadInputTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.array, _ = matrices.random(0, 24, 40, 64)

  def test_not_installed(self):
    with mock.patch.object(
        triton_call.importlib.util, "find_spec", return_value=None):
      with self.assertRaisesRegex(
          ImportError, "needs triton and jax_triton: pip install"):
        api.codebook_matmul(
            jnp.ones((1, 40)), self.array, implementation="triton")

  @parameterized.parameters(
      (dict(interpret=True), "interpret: .*True"),
      (dict(config=tuning.default(16, 2)), "config: .*TritonTuning.*found Tuning"),
      (dict(config=triton_tuning.TritonTuning(rows=7, programs=1, slots=1)),
       "rows: .*found 7"),
      (dict(config=triton_tuning.TritonTuning(rows=8, programs=1, slots=3)),
       "slots: .*found 3"),
      (dict(config=triton_tuning.TritonTuning(rows=8, programs=0, slots=1)),
       "programs: .*found 0"),
  )
  def test_options(self, options, message):
    with mock.patch.object(triton_call, "check_installed"):
      with self.assertRaisesRegex(ValueError, message):
        jax.eval_shape(
            functools.partial(api.codebook_matmul, implementation="triton",
                              **options), jnp.ones((1, 40)), self.array)

  def test_tuning_of_triton_for_pallas(self):
    with self.assertRaisesRegex(ValueError, "config: .* a Tuning with"):
      api.codebook_matmul(jnp.ones((1, 40)), self.array,
                          config=triton_tuning.default(1))

  @parameterized.parameters(1, 2, 16)
  def test_candidates_are_valid(self, rows):
    found = triton_tuning.candidates(rows)
    self.assertEqual(found[0], triton_tuning.default(rows))
    self.assertLen(set(found), len(found))
    for config in found:
      config.check()


if __name__ == "__main__":
  absltest.main()
