"""Moving to host memory and back: values, freed memory, overlap, keepers."""

import dataclasses
import gc
import time
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
import numpy as np

from rollplex_jax.placement import moves
from rollplex_jax.placement.buffers import Buffer, Policy
from rollplex_jax.placement.ledger import Ledger, LedgerError
from rollplex_jax.placement.live import live_bytes_by_device
from rollplex_jax.placement.moves import Keeper, offload, onload
from rollplex_jax.placement.residency import ResidencyPlan
from rollplex_jax.placement.sharding import MeshShape
from tests.helpers import devices

DEVICES = devices.use_virtual_devices()
PHASES = ("rollout", "score", "train", "update")


def shardings():
  mesh = MeshShape(fsdp=4, tp_major=2).make(DEVICES)
  return [SingleDeviceSharding(DEVICES[0]),
          NamedSharding(mesh, PartitionSpec("fsdp", "tp_major")),
          NamedSharding(mesh, PartitionSpec())]


def kinds(tree):
  return {a.sharding.memory_kind for a in jax.tree.leaves(tree)}


class MoveTest(parameterized.TestCase):

  @parameterized.parameters(*range(3))
  def test_there_and_back(self, i):
    sharding = shardings()[i]
    values = {"w": np.arange(64, dtype=np.float32).reshape(8, 8),
              "count": np.int32(3)}
    tree = {"w": jax.device_put(jnp.asarray(values["w"]), sharding),
            "count": jnp.int32(3)}
    before = live_bytes_by_device([tree["w"]])
    there = offload(tree)
    self.assertTrue(all(a.is_deleted() for a in jax.tree.leaves(tree)))
    self.assertEqual({"pinned_host"}, kinds(there))
    self.assertEqual({}, live_bytes_by_device(jax.tree.leaves(there)))
    back = onload(there)
    self.assertTrue(all(a.is_deleted() for a in jax.tree.leaves(there)))
    self.assertEqual({"device"}, kinds(back))
    self.assertEqual(before, live_bytes_by_device([back["w"]]))
    self.assertTrue(back["w"].sharding.is_equivalent_to(sharding, 2))
    jax.tree.map(np.testing.assert_array_equal, values, back)

  def test_what_is_there_stays(self):
    tree = {"w": jnp.ones(4), "name": "w"}
    self.assertIs(onload(tree), tree)
    there = offload(tree)
    self.assertIs(offload(there), there)
    self.assertEqual("w", there["name"])

  def test_one_array_in_two_places_goes_once(self):
    w = jnp.arange(4.0)
    there = offload({"embed": w, "head": w})
    self.assertIs(there["embed"], there["head"])
    np.testing.assert_array_equal(np.arange(4.0), there["head"])

  def test_what_others_use_stays(self):
    master, moment = jnp.ones(4), jnp.ones(4)
    there = offload({"params": master, "mu": moment}, keep={"text": master})
    self.assertIs(master, there["params"])
    self.assertFalse(master.is_deleted())
    self.assertTrue(moment.is_deleted())

  def test_a_copy_may_remain_on_the_host(self):
    there = offload({"w": jnp.arange(4.0)})
    back = onload(there, delete=False)
    np.testing.assert_array_equal(there["w"], back["w"])


class OverlapTest(absltest.TestCase):
  """What a CPU can show: calls return at once, copies don't wait in a queue."""

  def setUp(self):
    super().setUp()
    # About a second; `is_ready` tells whether it still runs.
    self.slow = jax.jit(lambda x, n: jax.lax.fori_loop(
        0, n, lambda _, x: jnp.sin(x) + 0.5 * x, x))
    self.x = jnp.ones(1 << 18)
    jax.block_until_ready(self.slow(self.x, 1))
    start = time.perf_counter()
    jax.block_until_ready(self.slow(self.x, 20))
    self.turns = max(20, int(20 / (time.perf_counter() - start)))

  def test_moves_return_before_their_source_is_there(self):
    y = self.slow(self.x, self.turns)
    expected = jnp.sum(y)
    there = offload({"y": y})
    self.assertTrue(y.is_deleted())
    self.assertFalse(there["y"].is_ready())
    back = onload(there)
    self.assertFalse(back["y"].is_ready())
    self.assertEqual(float(expected), float(jnp.sum(back["y"])))

  def test_copies_run_while_a_program_runs(self):
    w = jax.block_until_ready(jnp.full(1 << 16, 3.0))
    busy = self.slow(self.x, self.turns)
    back = jax.block_until_ready(onload(offload({"w": w})))
    self.assertFalse(busy.is_ready())
    self.assertEqual(3.0, float(back["w"][0]))
    jax.block_until_ready(busy)


class KeeperTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    gc.collect()
    size = 64 << 10
    self.zeros = lambda: {"w": jnp.zeros(16 << 10)}
    self.buffers = dict(
        optimizer=Buffer(name="optimizer", bytes_per_device=size,
                         policy=Policy.OFFLOAD, uses=("update",),
                         rewritten_in=("update",)),
        reference=Buffer(name="reference", bytes_per_device=size,
                         policy=Policy.OFFLOAD, uses=("score",)),
        kv=Buffer(name="kv", bytes_per_device=size, producer="rollout",
                  last_consumer="train"))
    self.update = jax.jit(lambda t: jax.tree.map(lambda a: a + 1, t),
                          donate_argnums=0)

  def keeper(self, **changes):
    buffers = tuple(dataclasses.replace(b, **changes) if b.name != "kv" else b
                    for b in self.buffers.values())
    found = ResidencyPlan(buffers=buffers, phases=PHASES)
    ledger = Ledger(found, slack_bytes=1024, ignore=jax.live_arrays())
    return Keeper(found, ledger), ledger

  def run_step(self, keeper, where=lambda phase: None):
    with keeper.phase("rollout"):
      keeper.hold("kv", self.zeros())
      where("rollout")
    with keeper.phase("score"):
      keeper.get("reference")
      where("score")
    with keeper.phase("train"):
      keeper.get("kv")
      where("train")
    with keeper.phase("update"):
      where("update")
      keeper.hold("optimizer", self.update(keeper.take("optimizer")))

  @parameterized.parameters(
      (False, {"score": {"reference"}, "update": {"optimizer"}}),
      (True, {"rollout": {"reference"}, "score": {"reference"},
              "train": {"optimizer"}, "update": {"optimizer"}}))
  def test_trees_are_where_the_plan_has_them(self, early, expected):
    keeper, ledger = self.keeper(early=early)
    keeper.hold("optimizer", self.zeros())
    keeper.hold("reference", offload(self.zeros()))
    with keeper.phase("update"):
      pass
    for _ in range(3):
      seen = {}
      on_device = lambda phase, seen=seen: seen.update({phase: {
          name for name in ("optimizer", "reference")
          if kinds(keeper._trees[name]) == {"device"}}})
      self.run_step(keeper, on_device)
      self.assertEqual(expected, {p: names for p, names in seen.items() if names})
      self.assertEqual(["optimizer", "reference"], keeper.names())
    self.assertEqual(3.0, float(keeper.take("optimizer")["w"][0]))
    self.assertEmpty(ledger.violations)

  def test_twenty_steps_on_eight_devices(self):
    mesh = MeshShape(fsdp=8).make(DEVICES)
    split = NamedSharding(mesh, PartitionSpec("fsdp"))
    self.zeros = lambda: {"w": jnp.zeros((8, 16 << 10), device=split)}
    keeper, ledger = self.keeper(early=True)
    keeper.hold("optimizer", self.zeros())
    keeper.hold("reference", offload(self.zeros()))
    with keeper.phase("update"):
      pass
    for _ in range(20):
      self.run_step(keeper)
    size = 64 << 10
    self.assertEqual(
        dict(rollout=2 * size, score=size, train=size, update=0),
        {phase: found - found % size for phase, found in ledger.found.items()})
    np.testing.assert_array_equal(
        np.full((8, 16 << 10), 20.0), keeper.take("optimizer")["w"])

  def test_what_was_only_read_needs_no_copy_back(self):
    keeper, _ = self.keeper()
    keeper.hold("optimizer", offload(self.zeros()))
    on_host = offload(self.zeros())
    keeper.hold("reference", on_host)
    self.run_step(keeper)
    self.assertIs(on_host, keeper._trees["reference"])

  def test_without_an_offload_the_ledger_complains(self):
    keeper, _ = self.keeper()
    keeper.hold("optimizer", self.zeros())
    keeper.hold("reference", offload(self.zeros()))
    with mock.patch.object(moves, "offload", lambda tree, keep: tree):
      with self.assertRaisesRegex(
          LedgerError, r"optimizer\['w'\] .* \(not on the device in the plan"):
        with keeper.phase("update"):
          pass

  def test_without_a_donation_the_ledger_complains(self):
    keeper, _ = self.keeper()
    keeper.hold("optimizer", offload(self.zeros()))
    keeper.hold("reference", offload(self.zeros()))
    self.update = jax.jit(lambda t: jax.tree.map(lambda a: a + 1, t))
    with self.assertRaisesRegex(
        LedgerError, r"optimizer\['w'\] .*should have been donated"):
      self.run_step(keeper)


if __name__ == "__main__":
  absltest.main()
