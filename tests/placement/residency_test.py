"""Live bytes from lifetimes, by hand; what gives way under a budget; refusals."""

import dataclasses

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from rollplex_jax.errors import InputError
from rollplex_jax.placement.buffers import Buffer, Policy, shard_bytes
from rollplex_jax.placement.residency import BudgetError, ResidencyPlan, plan
from rollplex_jax.placement.sharding import MeshShape
from tests.helpers import devices

DEVICES = devices.use_virtual_devices()
PHASES = ("prefill", "score", "train/gradient", "train/backward", "update")
AWAY = Policy.OFFLOAD


def offloadable(b, setting):
  return dataclasses.replace(b, fallbacks=(
      dataclasses.replace(b, policy=AWAY, setting=setting),))


def step(saved=20, grads=10):
  """Weights, optimizer, reference, saved layer inputs and gradients."""
  inputs = Buffer(name="saved", bytes_per_device=saved, producer="prefill",
                  last_consumer="train/backward",
                  uses=("prefill", "train/backward"))
  return [
      offloadable(Buffer(
          name="optimizer", bytes_per_device=30, policy=Policy.DONATE,
          uses=("update",), rewritten_in=("update",)), "optimizer away"),
      offloadable(Buffer(
          name="reference", bytes_per_device=8, policy=Policy.KEEP,
          uses=("score",)), "reference away"),
      dataclasses.replace(inputs, fallbacks=(
          dataclasses.replace(inputs, policy=AWAY, setting="save=offload"),
          dataclasses.replace(inputs, policy=Policy.RECOMPUTE, bytes_in_use=2,
                              setting="save=nothing"))),
      Buffer(name="weights", bytes_per_device=10, policy=Policy.KEEP),
      Buffer(name="grads", bytes_per_device=grads, policy=Policy.DONATE,
             producer="train/gradient", last_consumer="update",
             rewritten_in=("train/backward",)),
  ]


def bytes_of(found):
  return list(found.live_bytes.values())


class LiveBytesTest(parameterized.TestCase):

  def test_by_hand(self):
    found = plan(step(), PHASES)
    self.assertEqual([68, 68, 78, 78, 58], bytes_of(found))
    self.assertEqual((78, "train/gradient"),
                     (found.peak_bytes, found.peak_phase))
    self.assertEqual(
        dict(optimizer=30, reference=8, weights=10, saved=20),
        found.after("score"))
    self.assertEqual(dict(optimizer=30, reference=8, weights=10, grads=10),
                     found.after("train"))
    self.assertEqual(dict(optimizer=30, reference=8, weights=10),
                     found.after("update"))

  def test_without_donation_a_rewriter_holds_two(self):
    kept = [dataclasses.replace(b, policy=Policy.KEEP)
            if b.name == "optimizer" else b for b in step()]
    self.assertEqual([68, 68, 78, 78, 88], bytes_of(plan(kept, PHASES)))
    dropped = [dataclasses.replace(b, policy=Policy.DROP)
               if b.name == "grads" else b for b in step()]
    self.assertEqual([68, 68, 78, 88, 58], bytes_of(plan(dropped, PHASES)))

  def test_keep_stays_to_the_end_of_the_step(self):
    kept = Buffer(name="kv", bytes_per_device=5, producer="score",
                  last_consumer="score", policy=Policy.KEEP)
    found = plan([kept], PHASES)
    self.assertEqual([0, 5, 5, 5, 5], bytes_of(found))
    self.assertEqual({}, found.after("update"))

  @parameterized.parameters(
      # While it is made, and again where it is used.
      (AWAY, False, [20, 0, 0, 20, 0], [0, 0, 0, 0, 0]),
      # Its moves overlap with the phases beside.
      (AWAY, True, [20, 20, 20, 20, 20], [0, 0, 20, 0, 0]),
      (Policy.RECOMPUTE, False, [0, 0, 0, 2, 0], [0, 0, 0, 0, 0]))
  def test_away_between_its_uses(self, policy, early, during, after):
    saved = dataclasses.replace(
        step()[2], policy=policy, early=early,
        bytes_in_use=2 if policy == Policy.RECOMPUTE else None)
    found = ResidencyPlan(buffers=(saved,), phases=PHASES)
    self.assertEqual(during, bytes_of(found))
    self.assertEqual(
        after, [sum(found.after(p).values()) for p in PHASES])
    # Wherever it waits, it has to be kept.
    self.assertEqual({"saved"}, found.lives_after("score"))
    self.assertEqual(set(), found.lives_after("train"))

  def test_what_outlives_a_step_returns_early_for_the_next(self):
    weights = Buffer(name="reference", bytes_per_device=8, policy=AWAY,
                     uses=("prefill",), early=True)
    found = plan([weights], PHASES)
    self.assertEqual([8, 8, 0, 0, 8], bytes_of(found))
    self.assertEqual({"reference": 8}, found.after("update"))
    self.assertEqual({"reference"}, found.wanted("update"))
    # It is only on its way out while the score runs.
    self.assertEqual(set(), found.wanted("score"))

  def test_buffers_of_one_name_live_in_turn(self):
    block = Buffer(name="kv", bytes_per_device=3, producer="prefill",
                   last_consumer="prefill")
    again = dataclasses.replace(block, producer="update", last_consumer=None)
    found = plan([block, again], PHASES)
    # What outlives the step is still there when the next one begins.
    self.assertEqual([6, 3, 3, 3, 3], bytes_of(found))

  def test_a_phase_that_is_not_there(self):
    b = Buffer(name="kv", bytes_per_device=1, producer="decode")
    with self.assertRaisesRegex(ValueError, "kv: decode is not a phase"):
      plan([b], PHASES)
    with self.assertRaisesRegex(ValueError, "kv: its last consumer prefill"):
      plan([dataclasses.replace(b, producer="score", last_consumer="prefill")],
           PHASES)
    with self.assertRaisesRegex(KeyError, "decode: not a phase of prefill"):
      plan([], PHASES).after("decode")


class BudgetTest(parameterized.TestCase):

  @parameterized.parameters(
      (78, (), [68, 68, 78, 78, 58]),
      # One step back: only in the update the optimizer is there.
      (60, ("optimizer away",), [38, 38, 48, 48, 58]),
      (50, ("optimizer away", "reference away"), [38, 38, 48, 40, 50]))
  def test_gives_way_in_order(self, budget, changed, live):
    found = plan(step(), PHASES, budget)
    self.assertEqual(changed, found.changed)
    self.assertEqual(live, bytes_of(found))
    self.assertLessEqual(found.peak_bytes, budget)

  @parameterized.parameters(
      # Layer inputs are on the device where they are made and where they are
      # used.
      (125, ("optimizer away", "reference away", "save=offload"),
       [110, 48, 20, 120, 50]),
      # Making them again takes what one block takes.
      (55, ("optimizer away", "reference away", "save=nothing"),
       [10, 48, 20, 22, 50]),
      # Once they are not saved, nothing else has to go.
      (78, ("save=nothing",), [48, 78, 58, 60, 58]))
  def test_saves_less_of_large_prefixes(self, budget, changed, live):
    kv = Buffer(name="kv", bytes_per_device=30, producer="score",
                last_consumer="score")
    found = plan([*step(saved=100), kv], PHASES, budget)
    self.assertEqual(changed, found.changed)
    still = [dataclasses.replace(b, early=False) for b in found.buffers]
    self.assertEqual(live, bytes_of(
        ResidencyPlan(buffers=tuple(still), phases=PHASES)))
    self.assertLessEqual(found.peak_bytes, budget)

  def test_takes_back_what_did_not_help(self):
    buffers = step(grads=40)
    buffers[-1] = dataclasses.replace(
        buffers[-1], producer="update", rewritten_in=())
    self.assertEqual(88, plan(buffers, PHASES).peak_bytes)
    # The optimizer is there in the update anyway: only the reference goes.
    found = plan(buffers, PHASES, 80)
    self.assertEqual(("reference away",), found.changed)

  def test_moves_overlap_where_there_is_room(self):
    def early(budget, last="train/backward"):
      buffers = [dataclasses.replace(b, last_consumer=last, uses=None,
                                     fallbacks=())
                 if b.name == "saved" else b for b in step()]
      return [b.name for b in plan(buffers, PHASES, budget).buffers if b.early]

    # The reference may be there beside the score, 8 bytes more; the optimizer
    # beside the update would be 30 more where gradients and inputs are.
    self.assertEqual(["reference"], early(50))
    self.assertEqual([], early(77))
    self.assertEqual(["optimizer"], early(77, last="train/gradient"))

  def test_refused_with_what_would_fit(self):
    def smaller(saved):
      return lambda: (step(saved=saved, grads=saved // 4), PHASES)

    alternatives = [
        ("micro_batch_size=4", smaller(40)), ("micro_batch_size=2", smaller(8)),
        ("micro_batch_size=1", smaller(4)), ("mesh.fsdp=2", smaller(16)),
        ("mesh.fsdp=4", smaller(12))]
    with self.assertRaises(BudgetError) as caught:
      plan(step(), PHASES, 43, alternatives=alternatives)
    error = caught.exception
    self.assertIsInstance(error, InputError)
    self.assertNotIn("\n", str(error))
    self.assertRegex(
        str(error), "^update needs .* per device, more than the budget of .* "
        "even with optimizer away, reference away, save=nothing; what would "
        r"fit: micro_batch_size=2 \(.*\), mesh.fsdp=4 \(.*\)$")
    self.assertEqual(
        [("micro_batch_size=2", 42, True), ("mesh.fsdp=4", 43, True),
         ("mesh.fsdp=2", 44, False), ("micro_batch_size=4", 50, False)],
        [(s.setting, s.peak_bytes, s.fits) for s in error.suggestions])
    report = error.report()
    self.assertIn("\nprefill ", report)
    self.assertRegex(report, "\nupdate .*optimizer .* <- peak\n")
    self.assertRegex(report, "\nmesh.fsdp=2: .*, does not fit")

  def test_refused_with_nothing_that_fits(self):
    with self.assertRaisesRegex(
        BudgetError, "no setting that was tried would fit$"):
      plan(step(), PHASES, 10)


class ShardBytesTest(parameterized.TestCase):

  @parameterized.parameters(
      ((16, 6), jnp.float32, PartitionSpec("fsdp", "tp_major")),
      ((16, 6), jnp.bfloat16, PartitionSpec(("fsdp", "tp_major"))),
      ((8, 4), jnp.bfloat16, PartitionSpec(None, ("tp_major", "tp_minor"))),
      ((3, 5, 7), jnp.int32, PartitionSpec()))
  def test_are_those_of_real_shards(self, shape, dtype, spec):
    mesh_shape = MeshShape(fsdp=2, tp_major=2, tp_minor=2)
    mesh = mesh_shape.make(DEVICES)
    array = jax.device_put(
        jnp.zeros(shape, dtype), NamedSharding(mesh, spec))
    sizes = {shard.data.nbytes for shard in array.addressable_shards}
    self.assertEqual(
        sizes, {shard_bytes(shape, dtype, spec, dict(mesh.shape))})

  def test_what_does_not_divide_stays_whole(self):
    self.assertEqual(4 * 15, shard_bytes(
        (5, 6), jnp.float32, PartitionSpec("a", "b"), {"a": 4, "b": 2}))


class TableTest(absltest.TestCase):

  def test_a_line_for_each_group(self):
    big = [dataclasses.replace(
        b, bytes_per_device=b.bytes_per_device << 30, fallbacks=())
        for b in step()]
    table = ResidencyPlan(buffers=tuple(big), phases=PHASES).table()
    lines = table.splitlines()
    self.assertLen(lines, 5)
    self.assertRegex(
        lines[3], "^train +78.00 GiB  optimizer 30.00 GiB, saved 20.00 GiB, "
        "weights 10.00 GiB, grads 10.00 GiB, reference 8.00 GiB <- peak$")


if __name__ == "__main__":
  absltest.main()
