"""Schedules side by side: the files and the table."""

import json
import pathlib
import tempfile

from absl.testing import absltest
from PIL import Image

from experiments import schedule_report
from rollplex_jax.timeline import Event, Timeline


def _timeline(name, seconds, num_bytes=None):
  return Timeline(name, events=[
      Event(stage="decode", lane="rollout", start=0.0, end=seconds / 4,
            bytes_live=num_bytes),
      Event(stage="gradient", lane="training", index=0, start=seconds / 4,
            end=seconds, bytes_live=num_bytes)])


class ScheduleReportTest(absltest.TestCase):

  def test_files(self):
    folder = pathlib.Path(
        self.enterContext(tempfile.TemporaryDirectory())) / "new"
    written = schedule_report.write(
        folder / "a.b", [_timeline("serial_unshared", 3.0),
                         _timeline("rollplex", 1.0), _timeline("mine", 2.0)],
        "One step")
    self.assertEqual(written, (folder / "a.b.png", folder / "a.b.json"))
    self.assertCountEqual(folder.iterdir(), written)
    with Image.open(written[0]) as image:
      self.assertEqual(image.width, 1200)
    trace = json.loads(written[1].read_text())["traceEvents"]
    self.assertEqual(
        [e["args"]["name"] for e in trace if e["name"] == "process_name"],
        ["serial (unshared)", "rollplex", "mine"])
    self.assertEqual(
        max(e["dur"] for e in trace if e["ph"] == "X" and e["pid"] == 1),
        2_250_000)

  def test_bytes_of_another_recording(self):
    joined = schedule_report.with_bytes(
        _timeline("rollplex", 1.0), _timeline("rollplex", 2.0, 7))
    self.assertEqual([(e.end, e.bytes_live) for e in joined.events],
                     [(0.25, 7), (1.0, 7)])
    with self.assertRaisesRegex(ValueError, "rollplex: .* found 2 and 0"):
      schedule_report.with_bytes(
          _timeline("rollplex", 1.0), Timeline("rollplex"))

  def test_table(self):
    rows = {"serial_unshared": {"seconds": 3.0, "peak_bytes_live": 2_000_000},
            "rollplex": {"seconds": 1.5, "peak_bytes_live": 9_000_000}}
    lines = schedule_report.table(rows, "rollplex").splitlines()
    self.assertEqual(
        [line.split() for line in lines[1:]],
        [["serial", "(unshared)", "3000", "ms", "2.00x", "2", "MB"],
         ["rollplex", "1500", "ms", "1.00x", "9", "MB"]])
    self.assertLen({len(line) for line in lines}, 1)


if __name__ == "__main__":
  absltest.main()
