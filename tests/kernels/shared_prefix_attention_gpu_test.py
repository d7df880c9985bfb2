"""The kernels of shared-prefix attention compiled for an H100."""

import dataclasses
import functools
import math
import pathlib
import re
import tempfile

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import pytest

from pallas_kernels.shared_prefix_attention import (
    api,
    blocks,
    kernel,
    shapes,
    tuning,
)
from tests.helpers import devices, gpu_program
from tests.kernels import ptxas

devices.use_virtual_devices()

_PASS = {f"shared_prefix_{name}"
         for name in ("forward", "grad_q", "grad_prefix", "grad_suffix")}
_DECODE = {f"shared_prefix_{name}" for name in ("decode", "join")}
# Of a multiprocessor: 32-bit registers, and what a block may have of the shared
# memory.
_REGISTERS, _SHARED_BYTES = 1 << 16, 227 << 10


@functools.cache
def _mesh(count=1):
  return gpu_program.h100_mesh((count,), ("tp",))


def _arrays(shape, dtype, decode, specs=None, mesh=None):
  """Abstract arguments of a call."""
  s, rows = shape, shape.prompts * shape.samples
  samples = (s.prompts, s.samples)
  prefix = [(s.prompts, s.kv_heads, s.head_dim, s.prefix),
            (s.prompts, s.kv_heads, s.prefix, s.head_dim)]
  if decode:
    floats = [(*samples, s.heads, s.head_dim), *prefix,
              (rows, s.kv_heads, s.head_dim, s.suffix),
              (rows, s.kv_heads, s.suffix, s.head_dim)]
  else:
    tokens = (*samples, s.suffix)
    keys = (*tokens, s.kv_heads, s.head_dim)
    floats = [(*tokens, s.heads, s.head_dim), *prefix, keys, keys]
  kinds = [(size, dtype) for size in floats] + [
      ((s.prompts,), jnp.int32), (samples, jnp.int32)]
  return tuple(
      jax.ShapeDtypeStruct(size, kind, sharding=NamedSharding(
          mesh or _mesh(), spec))
      for (size, kind), spec in zip(kinds, specs or [P()] * 7, strict=True))


def _pass(*arrays):
  """The output and the gradients, of the output itself for brevity."""
  out, pull = jax.vjp(
      lambda *floats: api.shared_prefix_attention(*floats, *arrays[5:]),
      *arrays[:5])
  return out, pull(out)


@pytest.mark.cuda_plugin
@absltest.skipUnless(ptxas.can_compile(), "needs jax's CUDA plugin and ptxas")
class SharedPrefixAttentionOnGpuTest(parameterized.TestCase):

  def check(self, function, arrays, names):
    """The default way on a GPU is the kernels, and they fit."""
    kernels, program = ptxas.compile_for_gpu(jax.jit(function), *arrays)
    self.assertContainsSubset(names, kernels)
    for name in names:
      needs = kernels[name]
      self.assertEqual(needs.spilled_bytes, 0, name)
      self.assertLessEqual(needs.registers * needs.threads, _REGISTERS, name)
      self.assertBetween(needs.shared_bytes, 0, _SHARED_BYTES, name)
    return program

  @parameterized.product(name=tuple(shapes.SHAPES))
  def test_pass(self, name):
    shape = shapes.SHAPES[name]
    arrays = _arrays(shape, jnp.bfloat16, False)
    program = self.check(_pass, arrays, _PASS)
    # No scores, no mask, no repeated keys: nothing larger than an argument, but
    # the products that give a row its sum of gradient times output.
    largest = max(math.prod(a.shape) for a in arrays)
    for lines in program.computations.values():
      for line in lines:
        for _, dims in line.shapes:
          self.assertLessEqual(math.prod(dims), largest, line)

  @parameterized.product(name=tuple(shapes.SHAPES))
  def test_decode(self, name):
    shape = shapes.SHAPES[name]
    arrays = _arrays(shape, jnp.bfloat16, True)
    program = self.check(api.shared_prefix_decode, arrays, _DECODE)
    largest = max(math.prod(a.shape) for a in arrays)
    for lines in program.computations.values():
      for line in lines:
        for _, dims in line.shapes:
          self.assertLessEqual(math.prod(dims), largest, line)

  @parameterized.product(
      name=("qwen2.5-vl-7b_image", "qwen2.5-0.5b_text"), decode=(False, True))
  @pytest.mark.slow
  def test_float32(self, name, decode):
    self.check(
        api.shared_prefix_decode if decode else _pass,
        _arrays(shapes.SHAPES[name], jnp.float32, decode),
        _DECODE if decode else _PASS)

  @pytest.mark.slow
  def test_heads_over_devices(self):
    """Inside shard_map, checked: what varies with the heads is known."""
    shape = shapes.SHAPES["qwen2.5-vl-7b_image"]
    kv, heads = P(None, "tp"), P(None, None, None, "tp")
    one = P(None, None, "tp")
    for decode, specs in ((False, (heads, kv, kv, heads, heads, P(), P())),
                          (True, (one, kv, kv, kv, kv, P(), P()))):
      function = jax.shard_map(
          api.shared_prefix_decode if decode else _pass, mesh=_mesh(2),
          in_specs=specs,
          out_specs=(one, one) if decode else (heads, specs[:5]))
      program = self.check(
          function, _arrays(shape, jnp.bfloat16, decode, specs, _mesh(2)),
          _DECODE if decode else _PASS)
      for line in program.entry:
        self.assertNotIn("all-", line.op)

  @parameterized.parameters(False, True)
  def test_loads_are_wide(self, decode):
    """Keys and values come in pieces of 16 bytes, however they lie."""
    with tempfile.TemporaryDirectory() as folder:
      gpu_program.compile_for_gpu(
          jax.jit(api.shared_prefix_decode if decode else _pass),
          *_arrays(shapes.SHAPES["qwen2.5-vl-7b_video"], jnp.bfloat16, decode),
          options={"xla_dump_to": folder})
      texts = [path.read_text() for path in pathlib.Path(folder).glob("*.ptx")]
    texts = [text for text in texts if ".entry shared_prefix" in text]
    self.assertNotEmpty(texts)
    for text in texts:
      self.assertEmpty(re.findall(r"ld\.global\S*\.[bu](?:8|16)\b", text))

  @parameterized.parameters(
      name for name in shapes.SHAPES if name.endswith("_video"))
  def test_decode_moves_little_more_than_it_must(self, name):
    shape = shapes.SHAPES[name]
    moved = kernel.decode_bytes(
        blocks.Sizes(**dataclasses.asdict(shape)),
        tuning.default(shape.head_dim, jnp.bfloat16).decode)
    self.assertBetween(moved / shape.decode_bytes(), 1, 1.2)


if __name__ == "__main__":
  absltest.main()
