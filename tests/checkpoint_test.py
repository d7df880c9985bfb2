"""Checkpoints by themselves: what comes back, and what is refused."""

import collections
import errno
import os
import pathlib
import shutil
import tempfile
import threading
import time
import types
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from rollplex_jax import checkpoint as checkpoint_lib
from rollplex_jax.checkpoint import CheckpointError, Checkpoints
from rollplex_jax.config import CheckpointConfig, TrainConfig
from rollplex_jax.errors import InputError
from rollplex_jax.placement import processes
from rollplex_jax.run_record import RunRecord
from rollplex_jax.saver import Saver
from rollplex_jax.stages import update
from tests.helpers import devices

devices.use_virtual_devices()

_OPTIMIZER = update.make_optimizer(update.OptimizerConfig(
    learning_rate=1e-2, weight_decay=0.1))
_SIZE = 1 << 16
_FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


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

  def test_no_room_for_the_sizes(self):
    with mock.patch.object(checkpoint_lib, "write_json", side_effect=_FULL):
      with self.assertRaisesRegex(
          CheckpointError, "000001/files.json: can't be written: No space left"):
        self.checkpoints.save(1, _state(), {}, wait=True)
    self.assertEqual(self.checkpoints.read().step, 1)

  def test_one_that_cannot_be_removed_stays(self):
    for step in (1, 2, 3):
      self.checkpoints.save(step, _state(), {}, wait=True)
    rename = pathlib.Path.rename

    def refuse(path, target):
      if path.name == "000001":
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))
      return rename(path, target)

    with mock.patch.object(pathlib.Path, "rename", refuse):
      with self.assertLogs("absl", level="WARNING") as logs:
        self.checkpoints.prune(1)
    self.assertIn("000001: can't be removed: Permission denied",
                  "".join(logs.output))
    self.assertEqual(self.checkpoints.steps(), [1, 3])


class SaverTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = self.enterContext(tempfile.TemporaryDirectory())

  def saver(self, **kwargs):
    saver = Saver(self.folder, types.SimpleNamespace(
        config=TrainConfig(checkpoint=CheckpointConfig(**kwargs)),
        state=_state()), {})
    self.addCleanup(saver.close)
    return saver

  def reach(self, saver, step, rewards):
    """A step, and evaluations so far with these rewards by step."""
    record = RunRecord(step=step, pipeline=[{"next_index": step}], evaluations=[
        {"step": s, "val/reward": r} for s, r in rewards.items()])
    saver.remember(record)
    return record

  def test_the_best_stays_until_a_better_one_is_saved(self):
    saver = self.saver(keep=1, keep_best=1)
    for step in (1, 2):
      self.reach(saver, step, {1: 0.5})
      saver.save(wait=True)
    record = self.reach(saver, 3, {1: 0.5, 3: 0.7})
    self.assertFalse(saver.is_time())
    self.assertTrue(saver.is_due(record))
    self.assertEqual(saver.checkpoints.steps(), [1, 2])
    with mock.patch.object(shutil, "disk_usage", side_effect=_FULL):
      with self.assertLogs("absl", level="WARNING"):
        self.assertFalse(saver.save(wait=True))
    self.reach(saver, 4, {1: 0.5, 3: 0.7})
    saver.save(wait=True)  # That of step 3 is not there, nor will be.
    self.assertEqual(saver.checkpoints.steps(), [1, 4])
    self.reach(saver, 5, {1: 0.5, 3: 0.7, 5: 0.6})
    saver.save()
    saver.checkpoints.finish()
    self.assertFalse(saver.is_time())
    self.assertEqual(saver.checkpoints.steps(), [5])

  def test_makes_room_though_a_save_is_always_under_way(self):
    saver = self.saver(keep=1, keep_best=0)
    for step in (1, 2, 3, 4):
      self.reach(saver, step, {})
      saver.save()
    saver.checkpoints.finish()
    self.assertEqual(saver.checkpoints.steps(), [3, 4])

  def test_a_save_that_failed_hinders_no_other(self):
    for last in ("save", "save_beside"):
      with self.subTest(last):
        saver = self.saver()
        saver._trainer.policy = types.SimpleNamespace(
            lock=threading.Lock(), version=0)
        step = 1 + max(saver.checkpoints.steps(), default=0)
        self.reach(saver, step, {})
        saver.save()
        writer = saver.checkpoints._writer
        wait, errors = writer.wait_until_finished, [_FULL]

        def fail_once(wait=wait, errors=errors):
          wait()
          if errors:
            raise errors.pop()

        self.reach(saver, step + 1, {})
        with mock.patch.object(writer, "wait_until_finished", fail_once):
          with self.assertLogs("absl", level="WARNING") as logs:
            self.assertTrue(saver.save(wait=True) if last == "save"
                            else saver.save_beside(time.monotonic()))
        self.assertIn(f"00000{step}: can't be written: No space left on device;"
                      " the run goes on", "".join(logs.output))
        self.assertEqual(saver.checkpoints.steps()[-1], step + 1)

  def test_rows_left_out_by_any_process_count(self):
    """Another process has left out two rows."""
    saver = self.saver()
    self.reach(saver, 1, {})
    with mock.patch.object(processes, "exchange", side_effect=(
        lambda mine: [mine, ([{"next_index": 3}], 2)])):
      saver.save(wait=True)
    record = RunRecord.of(saver.checkpoints.read().facts["record"])
    self.assertEqual(record.skipped_rows, 2)
    self.assertEqual(record.position(1, 2, 1), {"next_index": 3})
    with self.assertRaisesRegex(InputError, "left out 2 rows in 2 processes"):
      record.position(0, 1, 2)


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
    # As many, but on another mesh.
    self.assertEqual(record.position(0, 1, 4), {"next_index": 20})
    record.skipped_rows = 2
    self.assertEqual(record.position(0, 1, 8), {"next_index": 40})
    with self.assertRaisesRegex(InputError, "left out 2 rows in 1 processes"):
      record.position(1, 2, 4)


if __name__ == "__main__":
  absltest.main()
