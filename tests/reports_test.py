"""What a step leaves behind: the time of its phases, samples, timelines."""

import json
import pathlib
import tempfile
import time
from unittest import mock

from absl.testing import absltest, parameterized

from rollplex_jax import reports
from rollplex_jax.config import TrainConfig
from rollplex_jax.data.pipeline import Example
from rollplex_jax.schedule import ScheduleConfig
from rollplex_jax.timeline import Event, Timeline


class PhaseTimerTest(absltest.TestCase):

  def test_phases_add_up(self):
    timer = reports.PhaseTimer()
    for _ in range(2):
      with timer.phase("gen"):
        time.sleep(0.01)
    with timer.phase("reward", "host"):
      pass
    values = timer.metrics()
    self.assertEqual(list(values), ["timing_s/gen", "timing_s/reward"])
    self.assertGreaterEqual(values["timing_s/gen"], 0.02)
    self.assertLess(values["timing_s/reward"], 0.01)
    self.assertEmpty(timer.timeline.events)

  def test_phases_on_a_lane_are_events(self):
    timer = reports.PhaseTimer(Timeline("serial"))
    with timer.phase("gen"):
      pass
    with timer.phase("reward", "host"):
      time.sleep(0.01)
    (event,) = timer.timeline.events
    self.assertEqual((event.stage, event.lane), ("reward", "host"))
    self.assertBetween(event.seconds, 0.01, timer.seconds["reward"])


class TimelineTest(parameterized.TestCase):

  @parameterized.parameters(
      (0, 5, 10, False), (0, 1, 1, False), (1, 1, 10, False), (1, 2, 10, True),
      (1, 1, 1, True), (5, 4, 10, False), (5, 5, 10, True), (5, 10, 10, True))
  def test_which_steps_are_recorded(self, every, step, total, recorded):
    config = TrainConfig(timeline_every=every, total_steps=total)
    self.assertEqual(reports.step_timeline(config, step).enabled, recorded)

  @parameterized.parameters(
      (dict(), "rollplex, step 3"),
      (dict(schedule=ScheduleConfig(share_prefix=False)),
       "serial (unshared), step 3"),
      (dict(algorithm="supervised"), "supervised, step 3"))
  def test_names(self, settings, name):
    self.assertEqual(
        reports.step_timeline(TrainConfig(**settings), 3).name, name)

  def test_files(self):
    folder = pathlib.Path(
        self.enterContext(tempfile.TemporaryDirectory())) / "timeline"
    event = Event(stage="decode", lane="rollout", start=0.0, end=1.0)
    off = Timeline("serial", enabled=False)
    reports.write_timeline(folder, off, 1, 0)
    self.assertFalse(folder.exists())
    recorded = Timeline("serial", events=[event])
    reports.write_timeline(folder, recorded, 20, 0)
    self.assertEqual(sorted(p.name for p in folder.iterdir()),
                     ["step_000020.json", "step_000020.png"])
    trace = json.loads((folder / "step_000020.json").read_text())
    self.assertIn("decode", {e["name"] for e in trace["traceEvents"]})
    # A step that compiled is slow for that reason, so its picture says so.
    with mock.patch.object(reports.timeline_plot, "plot") as plot:
      reports.write_timeline(folder, recorded, 20, 3)
    self.assertIn("compiling 3 program(s)", plot.call_args.args[2])


class SamplesTest(absltest.TestCase):

  def test_lines(self):
    rows = [
        {"prompt": "go"},
        {"prompt": [{"role": "user", "content": [
            {"type": "video", "video": []}, {"type": "text", "text": "look"}]},
            {"role": "user", "content": "again"}]}]
    examples = [Example(7, rows[0], None), Example(4, rows[1], None)]
    scores = [{"overall": float(i), "success": 1.0} for i in range(4)]
    lines = list(reports.sample_lines(
        3, examples, ["a", "b", "c", "d"], scores, 2))
    self.assertEqual(
        [(line["row"], line["sample"], line["completion"], line["reward"])
         for line in lines],
        [(7, 0, "a", 0.0), (7, 1, "b", 1.0), (4, 0, "c", 2.0),
         (4, 1, "d", 3.0)])
    self.assertEqual({line["step"] for line in lines}, {3})
    self.assertEqual(
        [line["prompt"] for line in lines[1:3]], ["go", "<video> look again"])


if __name__ == "__main__":
  absltest.main()
