"""The rollout's weights are the stored ones, or go when the rollout ends."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from rollplex_jax.placement import buffer_view
from rollplex_jax.placement.layout import How
from rollplex_jax.placement.sharding import TENSOR_AXES
from rollplex_jax.timeline import live_bytes
from tests.helpers import devices
from tests.placement import layouts
from tests.placement.layouts import BY_2, BY_4, DATA, FSDP, MAJOR, SPLIT

devices.use_virtual_devices()


class WeightsTest(parameterized.TestCase):

  @parameterized.product(
      shape=[BY_2, BY_4, DATA, FSDP], dtype=["float32", "bfloat16"])
  def test_aliases_and_views_add_nothing(self, shape, dtype):
    config = layouts.text_config(head_dim=32)
    got = layouts.plan(shape, MAJOR, TENSOR_AXES, config=config, dtype=dtype)
    weights = layouts.stored(got)
    want = jax.tree.map(np.array, weights)
    jax.block_until_ready(weights)
    before = live_bytes()
    rollout = got.rollout_weights(weights)
    self.assertEqual(live_bytes(), before)
    layouts.assert_equal(rollout, want)
    for tensor, array, source in zip(
        got.tensors, jax.tree.leaves(rollout), jax.tree.leaves(weights)):
      if tensor.how is How.ALIAS:
        self.assertIs(array, source)
        continue
      self.assertEqual(array.sharding, tensor.rollout)
      for inner, outer in zip(layouts.pointers(array), layouts.pointers(source)):
        self.assertBetween(
            inner - outer, 0, tensor.storage_bytes - tensor.rollout_bytes)
    self.assertEqual(set(buffer_view.viewed(weights)), layouts.names(got, How.VIEW))

    got.release(rollout)
    self.assertEqual(buffer_view.viewed(weights), [])
    held = jax.tree.map(layouts.pointers, weights)
    updated = jax.jit(lambda tree: jax.tree.map(lambda x: x * 2, tree),
                      donate_argnums=0)(weights)
    self.assertEqual(jax.tree.map(layouts.pointers, updated), held)
    self.assertEqual(live_bytes(), before)
    self.assertTrue(all(x.is_deleted() for x in jax.tree.leaves(weights)))

  def test_aliases_of_the_finer_storage(self):
    got = layouts.plan(BY_2, TENSOR_AXES, TENSOR_AXES,
               training=layouts.place(BY_2, MAJOR, layouts.text_config()))
    weights = layouts.stored(got)
    rollout = got.rollout_weights(weights)
    jax.tree.map(self.assertIs, rollout, weights)
    got.release(rollout)
    layouts.assert_equal(rollout, weights)

  @parameterized.parameters(*[
      (shape, *pair) for shape in (BY_2, FSDP)
      for pair in ((TENSOR_AXES, MAJOR), (MAJOR, TENSOR_AXES),
                   (MAJOR, ()), ((), TENSOR_AXES))])
  def test_any_pair_without_views(self, shape, storage, rollout):
    got = layouts.plan(shape, storage, rollout, gathered=shape is FSDP, views=False)
    self.assertEqual(layouts.names(got, How.VIEW), set())
    weights = layouts.stored(got)
    jax.block_until_ready(weights)
    before = live_bytes()
    read = got.rollout_weights(weights)
    jax.block_until_ready(read)
    self.assertEqual(
        live_bytes() - before, 8 * got.to_dict()["added_bytes"])
    for tensor, array in zip(got.tensors, jax.tree.leaves(read)):
      self.assertTrue(
          array.sharding.is_equivalent_to(tensor.rollout, array.ndim))
    layouts.assert_equal(read, weights)
    # Views give the rollout the same numbers.
    other = layouts.plan(shape, storage, rollout, gathered=shape is FSDP)
    layouts.assert_equal(other.rollout_weights(weights), read)
    got.release(read)
    self.assertEqual(live_bytes(), before)

  def test_source_that_is_not_kept(self):
    got = layouts.plan(BY_2, TENSOR_AXES, MAJOR)
    others = live_bytes()
    weights = layouts.stored(got)
    want = jax.tree.map(np.array, weights)
    before = live_bytes()
    read = got.rollout_weights(weights, keep_source=False)
    jax.block_until_ready(read)
    total = got.to_dict()
    self.assertEqual(
        live_bytes() - others, 8 * (total["bytes"]["alias"] + total["added_bytes"]))
    layouts.assert_equal(read, want)
    self.assertEqual(
        {t.name for t, x in zip(got.tensors, jax.tree.leaves(weights))
         if x.is_deleted()}, SPLIT)
    back = got.restore(weights, read)
    jax.block_until_ready(back)
    self.assertEqual(live_bytes(), before)
    layouts.assert_equal(back, want)
    for tensor, array in zip(got.tensors, jax.tree.leaves(back)):
      self.assertTrue(
          array.sharding.is_equivalent_to(tensor.storage, array.ndim))

  def test_restoring_drops_views(self):
    # The q bias is rebuilt, all else viewed.
    got = layouts.plan(BY_2, MAJOR, TENSOR_AXES, dtype=jnp.bfloat16)
    weights = layouts.stored(got)
    want = jax.tree.map(np.array, weights)
    back = got.restore(
        weights, got.rollout_weights(weights, keep_source=False))
    layouts.assert_equal(back, want)
    self.assertEqual(buffer_view.viewed(back), [])
    self.assertIs(back["embed"], weights["embed"])

  def test_other_weights_are_refused(self):
    got = layouts.plan(BY_2, MAJOR, TENSOR_AXES)
    weights = layouts.stored(got)
    for change, found in (
        (lambda x: x.astype(jnp.bfloat16), r"found bfloat16\[128,.*128\]"),
        (lambda x: x[:64], r"found float32\[64, 128\]"),
        (lambda x: jax.device_put(x, got.tensors[0].rollout),
         r"found float32\[128, 128\] over .*tp_minor.*")):
      weights["layers"][1]["q"], kept = (
          change(weights["layers"][1]["q"]), weights["layers"][1]["q"])
      with self.assertRaisesRegex(
          ValueError, r"^layers/1/q: expected float32\[128, 128\].*" + found):
        got.rollout_weights(weights)
      weights["layers"][1]["q"] = kept
    with self.assertRaises(ValueError):
      got.rollout_weights({"embed": weights["embed"]})


if __name__ == "__main__":
  absltest.main()
