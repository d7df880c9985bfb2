"""Views lie in their base's memory, and what they stop is found."""

import gc

from absl.testing import absltest, parameterized
import jax
from jax.experimental.layout import Format, Layout
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from rollplex_jax.placement import buffer_view
from rollplex_jax.placement.sharding import TENSOR_AXES, MeshShape
from rollplex_jax.timeline import live_bytes
from tests.helpers import devices

devices.use_virtual_devices()

P = PartitionSpec
MAJOR = ("tp_major",)


def sharding(*spec, mesh=None):
  mesh = mesh or MeshShape(tp_major=4, tp_minor=2)
  return NamedSharding(mesh.make(), P(*spec))


def make(shape, dtype, at):
  """Counts up, in memory that a program allocated."""
  count = jnp.arange(np.prod(shape), dtype=jnp.int32).reshape(shape)
  return jax.jit(lambda x: (x % 251).astype(dtype), out_shardings=at)(count)


def ranges(array):
  return {s.device: (s.data.unsafe_buffer_pointer(),
                     s.data.unsafe_buffer_pointer() + s.data.nbytes)
          for s in array.addressable_shards}


class ViewTest(parameterized.TestCase):

  @parameterized.parameters(
      "float32", "bfloat16", "float16", "float8_e4m3fn", "int8", "uint8",
      "int32", "bool", "complex64")
  def test_same_memory_for_every_dtype(self, dtype):
    base = make((64, 64), jnp.dtype(dtype), sharding(MAJOR))
    got = buffer_view.view(base, sharding(TENSOR_AXES))
    self.assertEqual(got.dtype, base.dtype)
    self.assertEqual(got.sharding, sharding(TENSOR_AXES))
    inner, outer = ranges(got), ranges(base)
    for i, device in enumerate(jax.devices()):
      start, stop = outer[device]
      half = (stop - start) // 2
      self.assertEqual(
          inner[device], (start + half * (i % 2), start + half * (i % 2 + 1)))
    np.testing.assert_array_equal(np.asarray(got), np.asarray(base))
    for shard in got.addressable_shards:
      self.assertEqual(shard.data.devices(), {shard.device})
      np.testing.assert_array_equal(
          np.asarray(shard.data), np.asarray(base)[shard.index])

  @parameterized.named_parameters(
      ("vector", (512,), (MAJOR,), (TENSOR_AXES,)),
      ("columns_stay_split", (64, 64), ("tp_major", "fsdp"),
       (TENSOR_AXES, "fsdp")),
      ("second_of_two", (4, 64, 16), ("tp_major", None),
       ("tp_major", "tp_minor")),
      ("whole", (64, 64), (), (TENSOR_AXES,)),
      ("prompts_too", (64, 64), ("data",), (("data", "tp_minor"),)),
  )
  def test_contiguous_parts(self, shape, source, target):
    mesh = MeshShape(fsdp=2, tp_major=2, tp_minor=2)
    if shape[0] == 4:
      mesh = MeshShape(tp_major=4, tp_minor=2)
    base = make(shape, jnp.float32, sharding(*source, mesh=mesh))
    jax.block_until_ready(base)
    before = live_bytes()
    got = buffer_view.view(base, sharding(*target, mesh=mesh))
    self.assertEqual(live_bytes(), before)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(base))
    for device, (start, stop) in ranges(got).items():
      outer = ranges(base)[device]
      self.assertBetween(start, *outer)
      self.assertBetween(stop, *outer)

  def test_view_of_a_pending_result(self):
    slow = jax.jit(lambda x: jax.lax.fori_loop(
        0, 200, lambda _, x: jnp.sin(x @ x.T) @ x, x))
    x = jax.device_put(jnp.ones((256, 256)), sharding(MAJOR))
    base = slow(x)
    got = buffer_view.view(base, sharding(TENSOR_AXES))
    np.testing.assert_array_equal(np.asarray(got), np.asarray(base))

  def test_base_keeps_its_shape_and_programs_read_views(self):
    base = make((64, 64), jnp.float32, sharding(MAJOR))
    got = buffer_view.view(base, sharding(TENSOR_AXES))
    self.assertEqual({s.data.shape for s in base.addressable_shards},
                     {(16, 64)})
    again = buffer_view.view(base, sharding(TENSOR_AXES))
    self.assertEqual(ranges(again), ranges(got))
    want = np.asarray(base)
    np.testing.assert_array_equal(
        np.asarray(jax.jit(lambda a, b: a + b)(base, base)), 2 * want)
    product = jax.jit(lambda w: w @ jnp.ones((64, 2)))(got)
    np.testing.assert_allclose(np.asarray(product), want @ np.ones((64, 2)))

  @parameterized.named_parameters(
      ("columns", (64, 64), P("tp_major"), P("tp_major", "tp_minor"),
       "a shard is not one piece of memory"),
      ("coarser", (64, 64), P(TENSOR_AXES), P("tp_major"),
       "a device lacks a part of its shard"),
      ("moved", (64, 64), P("tp_major"), P(None, "tp_major"),
       "a device lacks a part of its shard"),
      ("stacked", (3, 64, 64), P(None, "tp_major"), P(None, TENSOR_AXES),
       "a shard is not one piece of memory"),
      ("same", (64, 64), P("tp_major"), P(MAJOR, None), "shards are the same"),
      ("misaligned", (16, 3), P("tp_major"), P(TENSOR_AXES),
       "begin at byte 24, no multiple of 64"),
  )
  def test_refused(self, shape, source, target, message):
    mesh = MeshShape(tp_major=4, tp_minor=2).make()
    base = jax.device_put(jnp.ones(shape), NamedSharding(mesh, source))
    with self.assertRaisesRegex(ValueError, "^no view of float32.*" + message):
      buffer_view.view(base, NamedSharding(mesh, target))

  def test_other_memories_and_devices_are_refused(self):
    at, finer = sharding(MAJOR), sharding(TENSOR_AXES)
    host = at.with_memory_kind("pinned_host")
    base = jax.device_put(jnp.ones((64, 64)), host)
    with self.assertRaisesRegex(ValueError, "pinned_host is not"):
      buffer_view.view(base, finer)
    half = NamedSharding(MeshShape(tp_major=4).make(jax.devices()[:4]),
                         P("tp_major"))
    self.assertEqual(
        buffer_view.refusal((64, 64), jnp.float32, half, finer),
        "the devices differ")
    self.assertEqual(
        buffer_view.refusal((64, 64), jnp.int4, at, finer),
        "int4 does not fill bytes")

  def test_an_address_that_jax_would_copy_is_refused(self):
    base = make((64, 64), jnp.float32, sharding(MAJOR))
    with self.assertRaisesRegex(ValueError, "not aligned to 64 bytes"):
      buffer_view.part(base.addressable_shards[0].data, 1, (8, 64))

  def test_other_orders_of_memory_are_refused(self):
    turned = Format(Layout(major_to_minor=(1, 0)), sharding(MAJOR))
    base = jax.jit(lambda: jnp.ones((64, 64)), out_shardings=turned)()
    with self.assertRaisesRegex(
        ValueError, r"expected memory in row-major order, found .*\[1, 16\]"):
      buffer_view.view(base, sharding(TENSOR_AXES))


class LifetimeTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.base = make((256, 128), jnp.float32, sharding(MAJOR))
    self.update = jax.jit(lambda x: x + 1, donate_argnums=0)

  def test_views_outlive_their_base(self):
    want = np.array(self.base)
    got = buffer_view.view(self.base, sharding(TENSOR_AXES))
    self.base.delete()
    del self.base
    gc.collect()
    junk = [make((64, 128), jnp.float32, sharding()) for _ in range(20)]
    np.testing.assert_array_equal(np.asarray(got), want)
    del junk

  def test_a_view_stops_donation_and_is_found(self):
    tree = {"layers": [{"q": self.base}], "norm": jnp.ones(4)}
    self.assertEqual(buffer_view.viewed(tree), [])
    got = buffer_view.view(self.base, sharding(TENSOR_AXES))
    self.assertEqual(buffer_view.viewed(tree), ["layers/0/q"])
    before = live_bytes()
    updated = self.update(self.base)
    self.assertFalse(self.base.is_deleted())
    # A second copy, which nobody asked for.
    self.assertEqual(live_bytes(), before + self.base.nbytes * 2)
    np.testing.assert_array_equal(np.asarray(got) + 1, np.asarray(updated))

  def test_one_shard_of_a_view_is_enough(self):
    got = buffer_view.view(self.base, sharding(TENSOR_AXES))
    part = got.addressable_shards[5].data
    del got
    gc.collect()
    self.assertEqual(buffer_view.viewed([self.base]), ["0"])
    del part
    self.assertEqual(buffer_view.viewed([self.base]), [])

  def test_donation_works_once_views_are_deleted(self):
    got = buffer_view.view(self.base, sharding(TENSOR_AXES))
    jax.block_until_ready(jax.jit(lambda w: w @ w.T)(got))
    got.delete()
    self.assertEqual(buffer_view.viewed([self.base]), [])
    before, start = live_bytes(), ranges(self.base)
    updated = self.update(self.base)
    self.assertTrue(self.base.is_deleted())
    self.assertEqual(ranges(updated), start)
    self.assertEqual(live_bytes(), before)

  def test_neighbors_and_whole_shards_do_not_count(self):
    others = [make((256, 128), jnp.float32, sharding(MAJOR)) for _ in range(3)]
    whole = [s.data for s in self.base.addressable_shards]
    self.assertEqual(buffer_view.viewed([self.base]), [])
    self.update(self.base)
    self.assertTrue(whole[0].is_deleted())
    del others


if __name__ == "__main__":
  absltest.main()
