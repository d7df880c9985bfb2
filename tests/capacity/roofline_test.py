"""The forecast's arithmetic."""

import dataclasses

from absl.testing import absltest, parameterized

from rollplex_jax.capacity import roofline
from rollplex_jax.capacity.deviceless import Collective
from rollplex_jax.capacity.devices import device_of
from rollplex_jax.capacity.memory import buffers_of
from rollplex_jax.capacity.roofline import Efficiency, StageTime
from tests.capacity.cases import tiny
from tests.helpers import devices

devices.use_virtual_devices()

_FULL = Efficiency(compute=1.0, hbm=1.0, link=1.0, host=1.0,
                   collective_seconds=0.0)


def stage(compute, memory, collective=0.0):
  return StageTime(compute=compute, memory=memory, collective=collective)


class WindowTest(parameterized.TestCase):

  def times(self, **changes):
    # 8 decode steps of 1 s each; 4 units of 3 s arithmetic each.
    return {"decode": stage(0.0, 8.0, 0.5), "prefill": stage(12.0, 0.0, 0.25),
            "reference_units": stage(12.0, 4.0, 0.25), **changes}

  def case(self, **changes):
    # 2 prompts of 64 tokens on each device.
    return tiny(**{"window_chunk": 32, **changes})

  def test_each_turn_takes_the_longer(self):
    case, times = self.case(), self.times()
    self.assertEqual(roofline.num_units(case), 4)
    # 4 turns of max(1 + 1, 3), and 4 of a decode step alone.
    self.assertEqual(roofline.window(case, times)["window"],
                     0.75 + 4 * 3.0 + 4 * 1.0)
    # Of 12.25 s, 8.25 s are added.
    self.assertAlmostEqual(roofline.hidden_share(case, times), 1 - 8.25 / 12.25)

  def test_units_that_are_left(self):
    case = self.case(window_chunk=8)  # 16 units for 8 steps.
    times = self.times(reference_units=stage(12.0, 16.0, 0.25))
    self.assertEqual(roofline.num_units(case), 16)
    self.assertEqual(roofline.window(case, times)["window"],
                     0.75 + 8 * (1.0 + 1.0) + 8 * 1.0)

  def test_nothing_beside(self):
    case = self.case(has_reference=False)
    self.assertEqual(roofline.window(case, self.times())["window"], 8.5)
    self.assertIsNone(roofline.hidden_share(case, self.times()))


class StagesTest(absltest.TestCase):

  def test_collectives(self):
    make = lambda kind, group, far=False: Collective(
        kind=kind, bytes=1000, count=3, group=group, far=far)
    spec = dataclasses.replace(
        device_of("h800"), link_bandwidth=100.0, network_bandwidth=10.0)
    efficiency = dataclasses.replace(_FULL, collective_seconds=1.0)
    for kind, seconds in {"all-gather": 7.5, "all-reduce": 15.0,
                          "reduce-scatter": 30.0}.items():
      self.assertEqual(roofline.collective_seconds(
          [make(kind, 4)], spec, efficiency), seconds + 3)
    self.assertEqual(roofline.collective_seconds(
        [make("all-gather", 4, far=True)], spec, efficiency), 75.0 + 3)

  def test_decode_waits_for_memory(self):
    case, have = tiny(), buffers_of(tiny())
    times = roofline.stage_times(case, {}, _FULL)
    self.assertAlmostEqual(
        times["decode"].memory * case.spec.hbm_bandwidth,
        8 * (have.rollout_text + have.kv + have.suffix_kv / 2))
    loop = Collective(kind="all-gather", bytes=1000, count=1, group=2,
                      far=False, loop=0)
    times = roofline.stage_times(case, {"decode": [loop]}, _FULL)
    self.assertAlmostEqual(times["decode"].collective,
                           8 * 500 / case.spec.link_bandwidth)

  def test_host_memory(self):
    case, have = tiny(), buffers_of(tiny())
    seconds = lambda *away, case=case: roofline.host_seconds(
        case, away, _FULL) * case.spec.host_bandwidth
    self.assertAlmostEqual(seconds(), 0)
    self.assertAlmostEqual(seconds("optimizer"), 2 * have.optimizer)
    self.assertAlmostEqual(seconds("reference/weights"), 2 * have.reference)
    self.assertAlmostEqual(
        seconds(case=tiny(save="offload")), 2 * have.inputs)

  def test_schedules(self):
    case = tiny()
    times = {name: stage(1.0, 0.0) for name in (
        "vision", "prefill", "decode", "score", "gradient", "prefix_backward",
        "score_full", "gradient_full", "update", "compute_copy")}
    total = lambda name: sum(roofline.step_seconds(case, times, name).values())
    self.assertEqual(total("serial"), 7)
    self.assertEqual(total("serial_shared"), 3 + 2 + 3 + 2)
    sent = 2 * buffers_of(case).rollout_text / case.spec.network_bandwidth
    self.assertAlmostEqual(total("disaggregated"), 14 + sent)


if __name__ == "__main__":
  absltest.main()
