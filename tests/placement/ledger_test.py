"""What lives against what was planned, on one device and on eight."""

import ctypes
import gc

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from rollplex_jax.placement.buffers import Buffer, Policy
from rollplex_jax.placement.ledger import Ledger, LedgerError
from rollplex_jax.placement.live import live_bytes_by_device
from rollplex_jax.placement.residency import plan
from rollplex_jax.placement.sharding import MeshShape
from tests.helpers import devices

DEVICES = devices.use_virtual_devices()
PHASES = ("rollout", "train/gradient", "train/backward", "update")
KIB = 1024


def a_plan(weights=64 * KIB, kv=32 * KIB, optimizer=0):
  """Bytes of weights for ever, of keys and values from rollout to gradient."""
  return plan([
      Buffer(name="weights", bytes_per_device=weights, policy=Policy.KEEP),
      Buffer(name="kv", bytes_per_device=kv, producer="rollout",
             last_consumer="train/gradient"),
      Buffer(name="optimizer", bytes_per_device=optimizer,
             policy=Policy.DONATE, rewritten_in=("update",)),
  ], PHASES)


class LedgerTest(parameterized.TestCase):

  def ledger(self, found=None, **kwargs):
    gc.collect()
    # Eight devices or one, what other tests left is not this run's.
    kwargs = dict(slack_bytes=KIB, ignore=jax.live_arrays()) | kwargs
    return Ledger(found or a_plan(), **kwargs)

  def place(self, *axes):
    mesh = MeshShape(fsdp=8).make(DEVICES)
    return NamedSharding(mesh, PartitionSpec(*axes))

  def test_what_is_planned_passes(self):
    ledger = self.ledger()
    weights, kv = jnp.zeros(16 * KIB), jnp.zeros(8 * KIB)
    ledger.register("weights", weights)
    ledger.register("kv", kv)
    self.assertEmpty(ledger.check("rollout"))
    del kv
    self.assertEmpty(ledger.check("train"))
    self.assertEqual({"rollout": 96 * KIB, "train/backward": 64 * KIB},
                     ledger.found)

  def test_what_stays_too_long_is_named(self):
    ledger = self.ledger()
    weights = jnp.zeros(16 * KIB)
    kv = {"layers": [jnp.zeros((4, 2 * KIB), jnp.bfloat16) for _ in range(2)]}
    ledger.register("weights", weights)
    ledger.register("kv", kv)
    self.assertEmpty(ledger.check("rollout"))
    with self.assertRaises(LedgerError) as caught:
      ledger.check("train")
    (violation,) = caught.exception.violations
    self.assertEqual(("train/backward", DEVICES[0], 64 * KIB, 96 * KIB), (
        violation.phase, violation.device, violation.expected, violation.found))
    self.assertEqual(
        ["kv['layers'][0]", "kv['layers'][1]"],
        sorted(u.name for u in violation.unexpected))
    self.assertRegex(
        str(caught.exception), r"^after train/backward, .*: expected 0.06 MiB "
        r"alive, found 0.09 MiB; unexpected: kv\['layers'\]\[.\] "
        r"bfloat16\[4, 2048\] 0.02 MiB \(not on the device in the plan\); kv")

  def test_what_nobody_registered_is_named_by_shape(self):
    ledger = self.ledger(raises=False)
    weights, stray = jnp.zeros(16 * KIB), jnp.ones((9, KIB))
    ledger.register("weights", weights)
    (violation,) = ledger.check("train")
    self.assertEqual([violation], ledger.violations)
    (unexpected,) = violation.unexpected
    self.assertEqual(("", (9, KIB), "not registered"), (
        unexpected.name, unexpected.shape, unexpected.reason))
    del stray
    self.assertEmpty(ledger.check("train"))

  def test_slack(self):
    weights, small = jnp.zeros(16 * KIB), jnp.zeros(2 * KIB)
    check = lambda **slack: self.ledger(
        raises=False, ignore=others, **slack).check("update")
    others = [a for a in jax.live_arrays() if a is not weights
              and a is not small]
    self.assertLen(check(slack_bytes=8 * KIB - 1, slack_ratio=0), 1)
    self.assertEmpty(check(slack_bytes=8 * KIB, slack_ratio=0))
    self.assertEmpty(check(slack_bytes=0, slack_ratio=1 / 8))
    self.assertLen(check(slack_bytes=0, slack_ratio=0.12), 1)

  def test_each_device_for_itself(self):
    ledger = self.ledger(raises=False)
    weights = jnp.zeros((8, 16 * KIB), device=self.place("fsdp"))
    ledger.register("weights", weights)
    self.assertEmpty(ledger.check("train"))
    extra = jax.device_put(jnp.zeros(4 * KIB), DEVICES[5])
    (violation,) = ledger.check("train")
    self.assertEqual(DEVICES[5], violation.device)
    self.assertEqual(80 * KIB, violation.found)
    elsewhere = Ledger(a_plan(), slack_bytes=KIB, devices=DEVICES[:5],
                       ignore=[a for a in jax.live_arrays()
                               if a is not weights and a is not extra])
    self.assertEmpty(elsewhere.check("train"))

  def test_views_count_once(self):
    ledger = self.ledger()
    weights = jnp.zeros((8, 16 * KIB), device=self.place("fsdp"))
    ledger.register("weights", weights)
    # Two arrays of different names share all bytes.
    alias = jax.device_put(weights, weights.sharding, may_alias=True)
    ledger.register("rollout/weights", alias)
    at = lambda a, i: a.addressable_shards[i].data.unsafe_buffer_pointer()
    self.assertEqual([at(weights, i) for i in range(8)],
                     [at(alias, i) for i in range(8)])
    self.assertEmpty(ledger.check("train"))
    # A view of a quarter of a shard, as a finer layout has it.
    quarter = (ctypes.c_float * (4 * KIB)).from_address(at(weights, 0) + 4 * KIB)
    part = jax.dlpack.from_dlpack(np.ctypeslib.as_array(quarter))
    self.assertEqual(at(weights, 0) + 4 * KIB, at(part, 0))
    self.assertEmpty(ledger.check("train"))
    # A copy is not a view.
    copy = jnp.copy(weights)
    with self.assertRaises(LedgerError) as caught:
      ledger.check("train")
    self.assertLen(caught.exception.violations, 8)
    self.assertEqual(
        {(8, 16 * KIB)}, {u.shape for v in caught.exception.violations
                          for u in v.unexpected})
    del copy, part

  def test_live_bytes_by_device(self):
    gc.collect()
    before = live_bytes_by_device()
    split = jnp.zeros((8, KIB), device=self.place("fsdp"))
    whole = jnp.zeros((8, KIB), device=self.place())
    after = live_bytes_by_device()
    self.assertEqual(
        dict.fromkeys(DEVICES, 36 * KIB),
        {d: after[d] - before.get(d, 0) for d in DEVICES})
    self.assertEqual(dict.fromkeys(DEVICES, 4 * KIB),
                     live_bytes_by_device([split]))
    del whole


class DonationTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    gc.collect()
    self.ledger = Ledger(a_plan(0, 0, 64 * KIB), slack_bytes=KIB,
                         ignore=jax.live_arrays())
    self.state = {"m": jnp.zeros(16 * KIB)}
    self.ledger.register("optimizer", self.state)
    self.ledger.check("train")

  def update(self, **kwargs):
    program = jax.jit(lambda t: jax.tree.map(lambda a: a + 1, t), **kwargs)
    self.state = program(self.state)

  def test_in_place(self):
    for _ in range(3):
      self.update(donate_argnums=0)
      self.ledger.register("optimizer", self.state)
      self.assertEmpty(self.ledger.check("update"))

  def test_not_in_place(self):
    self.update()
    self.ledger.register("optimizer", self.state)
    with self.assertRaisesRegex(
        LedgerError, r"expected 0.06 MiB alive, found 0.12 MiB; unexpected: "
        r"optimizer\['m'\] float32\[16384\] 0.06 MiB \(should have been donat"):
      self.ledger.check("update")
    # The ledger keeps nothing alive beyond the check that found it.
    self.ledger.forget("optimizer")
    gc.collect()
    self.assertEmpty(self.ledger.check("update"))

  def test_not_in_place_and_not_registered(self):
    self.update()
    with self.assertRaisesRegex(LedgerError, "should have been donated"):
      self.ledger.check("update")


if __name__ == "__main__":
  absltest.main()
