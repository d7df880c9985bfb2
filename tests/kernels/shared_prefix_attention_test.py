"""Shared-prefix attention against float64, its kernels in interpret mode."""

import dataclasses
import functools

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from pallas_kernels.shared_prefix_attention import api, tuning
from pallas_kernels.shared_prefix_attention.shapes import Shape
from tests.helpers import devices
from tests.kernels import shared_prefix_cases as cases

devices.use_virtual_devices()

_TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 1e-2}
# Shapes of one batch, and how many batches are not marked slow.
_FEW, _FAST = 6, 1
# How many there are, 204 shapes in all; a backward pass takes longest.
_BATCHES = {"pass": 6, "forward": 14, "decode": 14}
_SPECIAL = {
    "one_row": Shape(prompts=1, samples=1, suffix=1, prefix=1, heads=1,
                     kv_heads=1, head_dim=8),
    "one_sample": Shape(prompts=2, samples=1, suffix=19, prefix=33, heads=4,
                        kv_heads=2, head_dim=16),
    "prefix_of_one": Shape(prompts=2, samples=3, suffix=5, prefix=1, heads=6,
                           kv_heads=2, head_dim=16),
    "mha_head_80": Shape(prompts=1, samples=2, suffix=7, prefix=21, heads=3,
                         kv_heads=3, head_dim=80),
    "gqa_group_7": Shape(prompts=1, samples=8, suffix=3, prefix=50, heads=14,
                         kv_heads=2, head_dim=64),
    "tiles_full": Shape(prompts=1, samples=2, suffix=16, prefix=64, heads=2,
                        kv_heads=1, head_dim=16),
}


def _run(function, *args):
  """Compiled in a hurry: most of the time goes into compiling."""
  return jax.jit(function).lower(*args).compile(
      {"xla_backend_optimization_level": 0})(*args)


def _pass(floats, lengths, grad, **how):
  """The output and the gradients of the floats."""
  out, pull = jax.vjp(
      lambda *floats: api.shared_prefix_attention(*floats, *lengths, **how),
      *floats)
  return out, pull(grad)


class SharedPrefixAttentionTest(parameterized.TestCase):

  def assert_near(self, found, expected, dtype, what, scale=0.0):
    error = cases.relative_error(found, expected, scale)
    self.assertLess(error, _TOLERANCE[dtype], what)

  def check_pass(self, case, dtype, **how):
    """Forward and backward; what is past a length is zero, not just small."""
    out, grads = _run(functools.partial(_pass, **how), case.floats,
                      case.arrays[5:], case.grad)
    expected, expected_grads = cases.attention_float64(case)
    self.assertEqual(out.dtype, dtype)
    self.assert_near(out, expected, dtype, "output")
    names = ("q", "prefix_k", "prefix_v", "suffix_k", "suffix_v")
    masks = (case.row_mask, case.prefix_mask, case.prefix_mask.swapaxes(2, 3),
             case.row_mask, case.row_mask)
    self.assertFalse(np.any(np.where(case.row_mask, 0, out)), "padding")
    for name, found, wanted, mask in zip(names, grads, expected_grads, masks,
                                         strict=True):
      self.assertEqual(found.dtype, dtype)
      self.assert_near(found, wanted, dtype, f"gradient of {name}",
                       np.linalg.norm(np.asarray(case.grad, np.float64)))
      self.assertFalse(np.any(np.where(mask, 0, found)), f"padding of {name}")

  def check_forward(self, case, dtype, **how):
    out = _run(functools.partial(api.shared_prefix_attention, **how),
               *case.arrays)
    self.assert_near(out, cases.attention_float64(case)[0], dtype, "output")
    self.assertFalse(np.any(np.where(case.row_mask, 0, out)), "padding")

  def check_decode(self, case, dtype, **how):
    out, logsumexp = _run(functools.partial(api.shared_prefix_decode, **how),
                          *case.arrays)
    expected, expected_sum = cases.decode_float64(case)
    sees = np.isfinite(expected_sum)
    self.assertEqual((out.dtype, logsumexp.dtype), (dtype, jnp.float32))
    self.assert_near(out, expected, dtype, "output")
    self.assertFalse(np.any(np.where(sees[..., None], 0, out)), "no keys")
    np.testing.assert_array_equal(np.isneginf(logsumexp), ~sees)
    self.assert_near(np.where(sees, logsumexp, 0),
                     np.where(sees, expected_sum, 0), dtype, "log-sum-exp")

  def check_random(self, kind, seed):
    rng = np.random.default_rng([seed, len(kind)])
    check = getattr(self, f"check_{kind}")
    for i in range(_FEW):
      dtype = jnp.bfloat16 if i % 3 == 2 else jnp.float32
      shape, tiles = cases.random_shape(rng), cases.random_tuning(rng)
      case = cases.random_case(rng, shape, dtype, decode=kind == "decode")
      with self.subTest(f"{shape}, {tiles}, {dtype.__name__}"):
        check(case, dtype, implementation="pallas", interpret=True,
              tuning=tiles)

  @parameterized.product(kind=tuple(_BATCHES), seed=tuple(range(_FAST)))
  def test_random_shapes(self, kind, seed):
    self.check_random(kind, seed)

  @parameterized.parameters(*(
      (kind, seed) for kind, batches in _BATCHES.items()
      for seed in range(_FAST, batches)))
  @pytest.mark.slow
  def test_more_random_shapes(self, kind, seed):
    self.check_random(kind, seed)

  @parameterized.product(name=tuple(_SPECIAL), kind=("pass", "decode"))
  def test_special_shapes(self, name, kind):
    shape, lengths = _SPECIAL[name], {}
    if name in ("one_row", "tiles_full"):
      lengths = {"prefix_length": shape.prefix, "suffix_length": shape.suffix}
    case = cases.random_case(np.random.default_rng(len(name)), shape,
                             decode=kind == "decode", **lengths)
    getattr(self, f"check_{kind}")(
        case, jnp.float32, implementation="pallas", interpret=True)

  @parameterized.product(kind=("pass", "decode"), empty=("prefix", "suffix"))
  def test_empty(self, kind, empty):
    shape = Shape(prompts=2, samples=3, suffix=5, prefix=20, heads=4,
                  kv_heads=2, head_dim=8)
    lengths = {"prefix": {"prefix_length": 0, "suffix_length": 3},
               "suffix": {"suffix_length": 0}}[empty]
    case = cases.random_case(np.random.default_rng(1), shape,
                             decode=kind == "decode", **lengths)
    for how in ({"implementation": "pallas", "interpret": True},
                {"implementation": "reference"}):
      getattr(self, f"check_{kind}")(case, jnp.float32, **how)

  def test_padding_before_rows(self):
    """Blocks without any row come before and between those with some."""
    tile = tuning.Tile(rows=16, keys=16, num_warps=4, num_stages=2)
    tiles = dataclasses.replace(
        tuning.default(8, jnp.float32), forward=tile, grad_q=tile,
        grad_prefix=tile, grad_suffix=tile)
    shape = Shape(prompts=1, samples=5, suffix=20, prefix=18, heads=2,
                  kv_heads=1, head_dim=8)
    case = cases.random_case(np.random.default_rng(9), shape,
                             suffix_length=np.array([[0, 20, 1, 0, 13]]))
    self.check_pass(case, jnp.float32, implementation="pallas",
                    interpret=True, tuning=tiles)

  @parameterized.product(kind=("pass", "decode"),
                         implementation=("reference", None),
                         dtype=tuple(_TOLERANCE))
  def test_plain(self, kind, implementation, dtype):
    """The reference itself, also as what is chosen on this platform."""
    rng = np.random.default_rng(7)
    for _ in range(3):
      case = cases.random_case(rng, cases.random_shape(rng), dtype,
                               decode=kind == "decode")
      getattr(self, f"check_{kind}")(case, dtype,
                                     implementation=implementation)

  def test_lengths_are_clipped(self):
    shape = _SPECIAL["one_sample"]
    case = cases.random_case(
        np.random.default_rng(3), shape, prefix_length=shape.prefix,
        suffix_length=shape.suffix)
    case.prefix_lengths[:] = -1, 1000
    case.suffix_lengths[:] = [[1000], [-1]]
    found = _run(functools.partial(
        api.shared_prefix_attention, implementation="pallas", interpret=True),
                 *case.arrays)
    case.prefix_lengths[:] = 0, shape.prefix
    case.suffix_lengths[:] = [[shape.suffix], [0]]
    self.assert_near(found, cases.attention_float64(case)[0], jnp.float32, "")

  def test_decode_at_a_step(self):
    """A scalar length holds for all samples."""
    case = cases.random_case(np.random.default_rng(5),
                             _SPECIAL["gqa_group_7"], decode=True,
                             suffix_length=2)
    out, _ = _run(
        functools.partial(api.shared_prefix_decode, implementation="pallas",
                          interpret=True), *case.arrays[:6], jnp.int32(2))
    self.assert_near(out, cases.decode_float64(case)[0], jnp.float32, "")

  @parameterized.parameters("pallas", "reference", None)
  def test_heads_over_devices(self, implementation):
    """Inside shard_map, each device with some heads of keys and values."""
    how = {"implementation": implementation,
           "interpret": implementation == "pallas"}
    shape = Shape(prompts=2, samples=3, suffix=4, prefix=20, heads=8,
                  kv_heads=4, head_dim=8)
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:4]), ("tp",))
    put = lambda arrays, specs: tuple(
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(arrays, specs, strict=True))
    kv, heads = P(None, "tp"), P(None, None, None, "tp")
    floats = (heads, kv, kv, heads, heads)
    case = cases.random_case(np.random.default_rng(11), shape)
    # A kernel's indices vary with no axis, which interpret mode refuses.
    shard_map = functools.partial(
        jax.shard_map, mesh=mesh, check_vma=implementation != "pallas")
    run = shard_map(
        functools.partial(_pass, **how),
        in_specs=(floats, (P(), P()), heads), out_specs=(heads, floats))
    out, grads = jax.jit(run)(
        put(case.floats, floats), put(case.arrays[5:], (P(), P())),
        *put((case.grad,), (heads,)))
    expected = cases.attention_float64(case)
    for found, wanted in zip((out, *grads), (expected[0], *expected[1]),
                             strict=True):
      self.assert_near(found, wanted, jnp.float32, "pass")

    case = cases.random_case(np.random.default_rng(12), shape, decode=True)
    one = P(None, None, "tp")
    specs = (one, kv, kv, kv, kv, P(), P())
    run = shard_map(
        functools.partial(api.shared_prefix_decode, **how), in_specs=specs,
        out_specs=(one, one))
    out, _ = jax.jit(run)(*put(case.arrays, specs))
    self.assert_near(out, cases.decode_float64(case)[0], jnp.float32, "decode")


class BadInputTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    f = jnp.float32
    shapes = {"q": (2, 3, 4, 6, 8), "prefix_k": (2, 2, 8, 5),
              "prefix_v": (2, 2, 5, 8), "suffix_k": (2, 3, 4, 2, 8),
              "suffix_v": (2, 3, 4, 2, 8)}
    self.whole = {name: jnp.zeros(shape, f) for name, shape in shapes.items()}
    self.step = self.whole | {
        "q": jnp.zeros((2, 3, 6, 8), f), "suffix_k": jnp.zeros((6, 2, 8, 4), f),
        "suffix_v": jnp.zeros((6, 2, 4, 8), f)}
    lengths = {"prefix_lengths": jnp.ones((2,), jnp.int32),
               "suffix_lengths": jnp.ones((2, 3), jnp.int32)}
    self.whole |= lengths
    self.step |= lengths

  def refused(self, function, arguments, message, **changed):
    with self.assertRaisesWithLiteralMatch(ValueError, message):
      jax.eval_shape(functools.partial(function, **changed), **arguments)

  @parameterized.parameters(
      ("q", (2, 3, 4, 48), "q: expected [B, G, R, H, D], none of them 0, "
       "found (2, 3, 4, 48)"),
      ("q", (2, 0, 4, 6, 8), "q: expected [B, G, R, H, D], none of them 0, "
       "found (2, 0, 4, 6, 8)"),
      ("q", (2, 3, 4, 5, 8), "query heads must be a multiple of the heads of "
       "keys and values, found q (2, 3, 4, 5, 8) and prefix_k (2, 2, 8, 5): "
       "5 and 2"),
      ("prefix_k", (2, 2, 5, 8), "prefix_k: expected [B, K, D, P] = "
       "(2, 2, 8, 8), found (2, 2, 5, 8)"),
      ("prefix_v", (2, 2, 8, 5), "prefix_v: expected [B, K, P, D] = "
       "(2, 2, 5, 8), found (2, 2, 8, 5)"),
      ("suffix_k", (2, 3, 4, 1, 8), "suffix_k: expected [B, G, R, K, D] = "
       "(2, 3, 4, 2, 8), found (2, 3, 4, 1, 8)"),
      ("suffix_v", (2, 3, 2, 4, 8), "suffix_v: expected [B, G, R, K, D] = "
       "(2, 3, 4, 2, 8), found (2, 3, 2, 4, 8)"),
      ("prefix_lengths", (3,), "prefix_lengths: expected [B] = (2,), found "
       "(3,)"),
      ("suffix_lengths", (2,), "suffix_lengths: expected [B, G] = (2, 3), "
       "found (2,)"))
  def test_shapes(self, name, shape, message):
    self.whole[name] = jnp.zeros(shape, self.whole[name].dtype)
    self.refused(api.shared_prefix_attention, self.whole, message)

  @parameterized.parameters(
      ("q", (2, 3, 1, 6, 8), "q: expected [B, G, H, D], none of them 0, found "
       "(2, 3, 1, 6, 8)"),
      ("suffix_k", (6, 2, 4, 8), "suffix_k: expected [B * G, K, D, R] = "
       "(6, 2, 8, 8), found (6, 2, 4, 8)"),
      ("suffix_v", (2, 2, 4, 8), "suffix_v: expected [B * G, K, R, D] = "
       "(6, 2, 4, 8), found (2, 2, 4, 8)"))
  def test_decode_shapes(self, name, shape, message):
    self.step[name] = jnp.zeros(shape, self.step[name].dtype)
    self.refused(api.shared_prefix_decode, self.step, message)

  @parameterized.parameters(
      ("q", jnp.int32, "q: expected dtype float32 or bfloat16, found int32"),
      ("prefix_k", jnp.bfloat16, "prefix_k: expected q's dtype float32, found "
       "bfloat16"),
      ("suffix_v", jnp.float16, "suffix_v: expected q's dtype float32, found "
       "float16"),
      ("prefix_lengths", jnp.float32, "prefix_lengths: expected integers, "
       "found float32"))
  def test_dtypes(self, name, dtype, message):
    for arguments, function in ((self.whole, api.shared_prefix_attention),
                                (self.step, api.shared_prefix_decode)):
      arguments[name] = arguments[name].astype(dtype)
      self.refused(function, arguments, message)

  def test_settings(self):
    self.refused(api.shared_prefix_attention, self.whole,
                 "implementation must be None, 'pallas' or 'reference', found "
                 "'triton'", implementation="triton")
    self.refused(api.shared_prefix_decode, self.step,
                 "interpret needs implementation 'pallas', found None",
                 interpret=True)
    with self.assertRaisesWithLiteralMatch(
        ValueError, "rows must be a power of two from 16, found 24"):
      tuning.Tile(rows=24, keys=32, num_warps=4, num_stages=2)
    with self.assertRaisesWithLiteralMatch(
        ValueError, "num_warps must be 1 or more, found 0"):
      tuning.Tile(rows=32, keys=32, num_warps=0, num_stages=2)


if __name__ == "__main__":
  absltest.main()
