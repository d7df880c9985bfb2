"""Checkpoints by themselves: what comes back, and what is refused."""

import collections
import os
import pathlib
import shutil
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from rollplex_jax.checkpoint import CheckpointError, Checkpoints
from rollplex_jax.errors import InputError
from rollplex_jax.run_record import RunRecord
from rollplex_jax.stages import update
from tests.helpers import devices

devices.use_virtual_devices()

_OPTIMIZER = update.make_optimizer(update.OptimizerConfig(
    learning_rate=1e-2, weight_decay=0.1))
_SIZE = 1 << 16


def _sharding(axis):
  mesh = jax.make_mesh((8,), ("x",))
  return NamedSharding(mesh, PartitionSpec(*axis))


def _state(sharding=None, seed=0):
  """Two matrices and a vector, after an update."""
  rng = np.random.default_rng(seed)
  array = lambda *shape: jax.device_put(
      jnp.asarray(rng.normal(size=shape), jnp.float32),
      sharding if len(shape) == 2 else None)
  params = {"text": {"layers": [{"q": array(8, _SIZE)}, {"q": array(8, 16)}],
                     "norm": array(8)}}
  state = update.create_state(params, _OPTIMIZER)
  return _updated(state)


def _updated(state):
  grads = jax.tree.map(jnp.ones_like, state.params)
  return update.apply_gradients(state, grads, _OPTIMIZER, jnp.float32)[0]


def _like(state, sharding=None):
  single = jax.sharding.SingleDeviceSharding(jax.devices()[3])
  return jax.tree.map(lambda a: jax.ShapeDtypeStruct(
      a.shape, a.dtype, sharding=sharding if sharding and a.ndim == 2
      else single), state)


class CheckpointTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(
        self.enterContext(tempfile.TemporaryDirectory())) / "checkpoints"
    self.checkpoints = Checkpoints(self.folder)

  def assert_equal(self, one, other):
    self.assertEqual(jax.tree.structure(one), jax.tree.structure(other))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other)):
      self.assertEqual(a.dtype, b.dtype)
      np.testing.assert_array_equal(a, b)

  @parameterized.named_parameters(
      ("one_to_one", None, None), ("one_to_eight", None, ("x",)),
      ("eight_to_one", ("x",), None), ("other_axis", ("x",), (None, "x")))
  def test_state_comes_back_in_other_places(self, before, after):
    before, after = (a and _sharding(a) for a in (before, after))
    state = _state(before)
    self.checkpoints.save(7, state, {"a": [1, None]}, wait=True)
    found = self.checkpoints.read()
    self.assertEqual((found.step, found.facts), (7, {"a": [1, None]}))
    restored = self.checkpoints.restore(found, _like(state, after))
    self.assert_equal(state, restored)
    if after:
      self.assertEqual(
          restored.params["text"]["layers"][0]["q"].sharding, after)

  @parameterized.parameters(None, (("x",),))
  def test_updates_go_on_while_it_is_written(self, axis):
    """The update takes the state's own memory, as without a save."""
    state = _state(axis and _sharding(*axis))
    expected = jax.tree.map(np.array, state)
    self.checkpoints.save(1, state, {})
    old = state
    for _ in range(3):
      state = _updated(state)
    self.assertTrue(all(a.is_deleted() for a in jax.tree.leaves(old)))
    self.checkpoints.finish()
    restored = self.checkpoints.restore(
        self.checkpoints.read(), _like(state))
    self.assert_equal(expected, restored)

  def test_state_in_host_memory(self):
    state = _state(_sharding(("x",)))
    expected = jax.tree.map(np.array, state)
    there = jax.tree.map(lambda a: jax.device_put(
        a, a.sharding.with_memory_kind("pinned_host")), state)
    self.checkpoints.save(1, there, {})
    for a in jax.tree.leaves(there):  # As what comes in for an update does.
      a.delete()
    self.checkpoints.finish()
    self.assert_equal(expected, self.checkpoints.restore(
        self.checkpoints.read(), _like(state)))

  def test_pruning(self):
    state = _state()
    for step in range(1, 6):
      self.checkpoints.save(step, state, {}, wait=True)
    self.checkpoints.prune(2, best=[1, 99])
    self.assertEqual(self.checkpoints.steps(), [1, 4, 5])
    with self.assertRaisesRegex(InputError, "no checkpoint of step 2; there a"):
      self.checkpoints.read(2)

  def test_what_was_left_half_done_is_no_checkpoint(self):
    self.assertIsNone(self.checkpoints.read())
    state = _state()
    self.checkpoints.save(3, state, {}, wait=True)
    for name in ("000004.orbax-checkpoint-tmp", "2.removed"):
      shutil.copytree(self.folder / "000003", self.folder / name)
    self.assertEqual(self.checkpoints.read().step, 3)
    self.checkpoints.clean()
    self.assertEqual(os.listdir(self.folder), ["000003"])

  def test_a_copy_that_is_not_whole(self):
    self.checkpoints.save(3, _state(), {}, wait=True)
    path = next((self.folder / "000003/params/d").iterdir())
    os.truncate(path, 20)
    with self.assertRaisesRegex(
        InputError, r"000003: is not a whole checkpoint \(params/d/\w+ has 20 "
        r"bytes, expected \d+\); there is no other"):
      self.checkpoints.read()

  def test_another_optimizer_is_named(self):
    state = _state()
    self.checkpoints.save(3, state, {}, wait=True)
    plain = update.make_optimizer(update.OptimizerConfig(max_grad_norm=None))
    other = update.create_state(state.params, plain)
    with self.assertRaisesRegex(
        InputError, "is of another model or optimizer: optimizer tensor "
        r"opt_state/0/count is missing, expected int32\[\]"):
      self.checkpoints.restore(self.checkpoints.read(), _like(other))

  def test_another_shape_is_named(self):
    state = _state()
    self.checkpoints.save(3, state, {}, wait=True)
    like = _like(state)
    like.params["text"]["norm"] = jax.ShapeDtypeStruct((9,), jnp.float32)
    with self.assertRaisesRegex(
        InputError, r"text/norm is float32\[8\], expected float32\[9\]"):
      self.checkpoints.restore(self.checkpoints.read(), like)

  def test_no_room(self):
    state = _state()
    self.checkpoints.save(1, state, {}, wait=True)
    usage = collections.namedtuple("usage", "free")(1_000_000)
    with mock.patch.object(shutil, "disk_usage", return_value=usage):
      with self.assertRaisesRegex(
          CheckpointError, "000002: can't be written: No space left on device "
          r"\(it takes 0.00629 GB, 0.001 are free\)"):
        self.checkpoints.save(2, state, {})
    self.assertEqual(os.listdir(self.folder), ["000001"])
    self.checkpoints.save(2, state, {}, wait=True)
    self.assertEqual(self.checkpoints.steps(), [1, 2])


class RunRecordTest(absltest.TestCase):

  def test_plain_data_and_back(self):
    record = RunRecord(step=3, evaluations=[{"step": 3, "val/reward": 0.5}],
                       pipeline=[{"next_index": 12}])
    copy = RunRecord.of(record.to_dict())
    self.assertEqual(copy, record)
    self.assertTrue(copy.is_evaluated)
    copy.evaluations.append({})
    self.assertLen(record.evaluations, 1)

  def test_best_steps(self):
    record = RunRecord(evaluations=[
        {"step": 0, "val/reward": 9.0, "val/success": 1.0},
        {"step": 1, "val/reward": 5.0, "val/success": 0.5},
        {"step": 2, "val/reward": 1.0, "val/success": 0.7},
        {"step": 3, "val/reward": 0.0, "val/success": 0.7}])
    self.assertEqual(record.best_steps(2), [3, 2])
    self.assertEqual(record.best_steps(0), [])

  def test_position_in_other_numbers_of_processes(self):
    record = RunRecord(step=5, pipeline=[{"next_index": 40}])
    self.assertEqual(record.position(0, 1, 8), {"next_index": 40})
    self.assertEqual(record.position(1, 2, 4), {"next_index": 20})
    record.skipped_rows = 2
    self.assertEqual(record.position(0, 1, 8), {"next_index": 40})
    with self.assertRaisesRegex(InputError, "left out 2 rows in 1 processes"):
      record.position(1, 2, 4)


if __name__ == "__main__":
  absltest.main()
