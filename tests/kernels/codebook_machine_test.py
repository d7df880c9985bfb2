"""The codebook kernels' inline assembly, executed by a few lines of Python.

Nothing else runs it without a GPU: interpreted kernels take the plain twins.
"""

import re
import types
from unittest import mock

from absl.testing import absltest, parameterized
import jax.numpy as jnp
import numpy as np

from pallas_kernels.codebook_matmul import machine

_START = 0x400  # Where the first variable in shared memory begins.
_MASK = 0xFFFFFFFF


def _prmt(a, b, selector):
  both = (b << 32 | a).to_bytes(8, "little")
  return int.from_bytes(
      bytes(both[selector >> 4 * i & 7] for i in range(4)), "little")


def _float(bits: int) -> np.float32:
  return np.uint32(bits).view(np.float32)


def _bits(value) -> int:
  return int(np.float32(value).view(np.uint32))


_OPERATIONS = {
    "mov.b32": lambda a: a,
    "mov.u32": lambda a: a,
    "add.s32": lambda a, b: a + b,
    "and.b32": lambda a, b: a & b,
    "mad.lo.s32": lambda a, b, c: a * b + c,
    "bfe.u32": lambda a, at, size: a >> at & (1 << size) - 1,
    "prmt.b32": _prmt,
    "popc.b32": lambda a: bin(a).count("1"),
    "bfind.u32": lambda a: a.bit_length() - 1,
    "redux.sync.max.s32": lambda a, _: a,
    "fma.rn.f32": lambda a, b, c: _bits(
        float(_float(a)) * float(_float(b)) + float(_float(c))),
}


class Warp:
  """Executes assembly lane by lane; stands in for `machine._assembly`."""

  def __init__(self):
    self.memory = {}
    self.addresses = []  # Of every load.

  def run(self, text, constraints, args, dtype):
    del constraints
    args = [np.asarray(a) for a in args]
    found = [self._execute(text, [_bits(a) if a.dtype == np.float32 else
                                  int(a) & _MASK for a in each], i % 32)
             for i, each in enumerate(zip(*(a.ravel() for a in args)))]
    found = np.array(found, np.uint32).view(np.dtype(dtype))
    return jnp.asarray(found.reshape(args[0].shape))

  def _execute(self, text, args, lane) -> int:
    values = {"%laneid": lane} | {f"${i + 1}": a for i, a in enumerate(args)}

    def value(name):
      return values[name] if name in values else int(name, 0)

    for line in text.strip().strip("{}").split(";"):
      words = re.findall(r"[\w.$%]+", line)
      if not words or words[0] in (".reg", "bar.sync"):
        continue
      operation, *names = words
      if operation == ".shared":
        values[names[-2]] = _START
      elif operation.startswith("st.shared"):
        self.memory[value(names[0])] = value(names[1])
      elif operation.startswith("ld.shared"):
        self.addresses.append(value(names[1]))
        values[names[0]] = self.memory[value(names[1])]
      else:
        values[names[0]] = _OPERATIONS[operation](
            *map(value, names[1:])) & _MASK
    return values["$0"]


class MachineTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.warp = Warp()
    self.enter_context(mock.patch.object(machine, "_assembly", self.warp.run))
    self.enter_context(mock.patch.object(machine.plgpu, "load", lambda a: a))

  @parameterized.product(size=(3, 64, 65, 128, 200, 256), part=(1, 2))
  def test_table(self, size, part):
    rng = np.random.default_rng(0)
    entries = jnp.asarray(rng.standard_normal(size), jnp.float32)
    ref = types.SimpleNamespace(shape=(size,), at=entries)
    most = machine.LAUNCH_BYTES // 3 * part
    table = machine.Table.of(ref, 32, most, False)
    self.assertLessEqual(size * table.stride, most)
    self.assertLess(max(self.warp.memory), _START + most)
    codes = rng.integers(0, size, (4, 32)).astype(np.uint32)
    word = jnp.asarray(sum(codes[i] << np.uint32(8 * i) for i in range(4)))
    for byte in range(4):
      self.warp.addresses = []
      np.testing.assert_array_equal(
          table.at(word, byte), np.asarray(entries)[codes[byte]])
      banks = {at // 4 % 32 for at in self.warp.addresses}
      if table.stride >= 128:
        self.assertLen(banks, 32)

  def test_twins(self):
    rng = np.random.default_rng(0)
    words = np.concatenate([rng.integers(0, 1 << 32, 50), [0, 1, _MASK]])
    words = jnp.asarray(words.astype(np.uint32))
    for function, a in ((machine.count_bits, words),
                        (machine.highest_bit, words),
                        (machine.spread_bytes, words & jnp.uint32(0xFFFF))):
      found = function(a, False)
      self.assertEqual(found.dtype, function(a, True).dtype)
      np.testing.assert_array_equal(found, function(a, True))
    a, b, c = jnp.asarray(rng.standard_normal((3, 50)), jnp.float32)
    np.testing.assert_allclose(
        machine.fma(a, b, c, False), machine.fma(a, b, c, True), rtol=1e-5)


if __name__ == "__main__":
  absltest.main()
