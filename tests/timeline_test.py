"""Tests of timelines: recording, bytes, windows, traces and plots."""

import gc
import itertools
import json
import pathlib
import tempfile
import time

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from rollplex_jax import timeline_plot
from rollplex_jax.placement.live import live_bytes
from rollplex_jax.timeline import (
  Event,
  Timeline,
  rows,
  summary,
  write_trace,
)
from tests.helpers import devices

DEVICES = devices.use_virtual_devices()
DECODE, SCORE, SHADE = (0, 114, 178), (102, 201, 174), (217, 231, 243)


def event(start, end, stage="prefix", lane="rollout", **kwargs):
  return Event(stage=stage, lane=lane, start=start, end=end, **kwargs)


def folder_of(test):
  return pathlib.Path(test.enterContext(tempfile.TemporaryDirectory()))


def serial():
  return Timeline("serial", events=[
      event(0.0, 1.0, bytes_live=100),
      event(1.0, 5.0, "decode", bytes_live=700),
      event(5.0, 5.5, "reward", "host", bytes_live=300),
      event(6.0, 8.0, "score", "reference", index=0, bytes_live=300),
      event(8.0, 10.0, "score", "reference", index=1, bytes_live=400),
      event(10.0, 20.0, "gradient", "training", bytes_live=500),
  ])


def rollplex():
  """A step whose clock starts late, with units inside the window's program."""
  t = Timeline("rollplex", events=[
      event(3.0, 4.0),
      event(4.0, 8.0, "window"),
      event(8.0, 10.0, "prefix_backward", "training"),
  ])
  t.add("decode", "rollout", None, 4.0, 6.0, estimated=True)
  t.add("prefix", "reference", 0, 4.0, 6.0, estimated=True)
  t.add("prefix", "reference", 1, 5.0, 7.5, estimated=True)
  t.add("prefix", "training", 0, 6.0, 8.0, estimated=True)
  return t


class RecordingTest(parameterized.TestCase):
  def test_events_nest_and_come_sorted(self):
    t = Timeline("serial")
    with t.event("window", "rollout"):
      with t.event("prefix", "reference", index=0):
        pass
      with t.event("prefix", "reference", index=1):
        time.sleep(0.01)
    with t.event("update", "training"):
      pass

    window, first, second, update = t.events
    self.assertEqual(
        [("window", None), ("prefix", 0), ("prefix", 1), ("update", None)],
        [(e.stage, e.index) for e in t.events])
    self.assertEqual(0.0, window.start)
    self.assertLessEqual(first.end, second.start)
    self.assertLessEqual(second.end, window.end)
    self.assertLessEqual(window.end, update.start)
    self.assertGreaterEqual(second.seconds, 0.01)
    self.assertEqual(update.end, t.seconds)
    self.assertEqual({None}, {e.bytes_live for e in t.events})

  def test_longer_of_two_that_start_together_comes_first(self):
    t = Timeline("rollplex", events=[
        event(0, 1, "decode"), event(0, 2, "window")])
    self.assertEqual(["window", "decode"], [e.stage for e in t.events])

  def test_exception_ends_the_event(self):
    t = Timeline("serial")
    with self.assertRaisesRegex(KeyError, "lost"):
      with t.event("window", "rollout"), t.event("prefix", "reference"):
        raise KeyError("lost")
    self.assertEqual(["window", "prefix"], [e.stage for e in t.events])
    self.assertGreater(t.seconds, 0)

  def test_waits_for_results(self):
    def slow(x):
      time.sleep(0.2)
      return x

    program = jax.jit(lambda x: jax.pure_callback(slow, x, x))
    x = np.float32(2.0)
    jax.block_until_ready(program(x))
    t = Timeline("serial")
    with t.event("decode", "rollout") as wait:
      out = wait({"logits": program(x)})
    self.assertEqual(2.0, float(out["logits"]))
    self.assertGreaterEqual(t.seconds, 0.2)

  def test_disabled_records_nothing(self):
    t = Timeline("serial", enabled=False, measure_bytes=True)
    tree = {"a": 1}
    with t.event("decode", "rollout") as wait:
      self.assertIs(tree, wait(tree))
    t.add("prefix", "training", 0, 0.0, 1.0)
    self.assertEmpty(t.events)

  def test_timelines_of_one_origin_join(self):
    origin = time.perf_counter()
    one = Timeline("rollout pool", origin=origin)
    other = Timeline("training pool", origin=origin)
    with one.event("decode", "rollout"):
      pass
    with other.event("gradient", "training"):
      pass
    joined = Timeline("disaggregated", events=other.events + one.events)
    self.assertEqual(["decode", "gradient"], [e.stage for e in joined.events])
    self.assertLessEqual(joined.events[0].end, joined.events[1].start)

  @parameterized.parameters(
      (dict(lane="prefill"), "expected a lane of rollout, .*, found prefill"),
      (dict(end=-1.0), "expected an end after its start, 0.0, found -1.0"),
      (dict(end=float("nan")), "found nan"),
  )
  def test_refuses(self, change, message):
    kwargs = dict(stage="prefix", lane="rollout", index=0, start=0.0, end=1.0)
    with self.assertRaisesRegex(ValueError, message):
      Timeline("serial").add(**kwargs | change)


class BytesTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    gc.collect()
    self.before = live_bytes()

  def added(self):
    gc.collect()
    return live_bytes() - self.before

  def test_aliases_count_once(self):
    x = jnp.zeros((256, 4))
    self.assertEqual(4096, self.added())
    alias = jax.device_put(x, x.sharding, may_alias=True)
    view = jax.dlpack.from_dlpack(x)
    self.assertEqual(x.unsafe_buffer_pointer(), view.unsafe_buffer_pointer())
    self.assertEqual(4096, self.added())
    del x, alias, view
    self.assertEqual(0, self.added())

  def test_a_view_of_a_part_adds_nothing(self):
    memory = np.zeros(4096 + 64, np.uint8)
    at = -memory.ctypes.data % 64  # Elsewhere jax would make copies.
    memory = memory[at:at + 4096]
    whole = jax.dlpack.from_dlpack(memory)
    part = jax.dlpack.from_dlpack(memory[1024:2048])
    self.assertEqual(
        whole.unsafe_buffer_pointer() + 1024, part.unsafe_buffer_pointer())
    self.assertEqual(4096, self.added())
    del whole
    self.assertEqual(1024, self.added())
    del part

  def test_copies_and_shards_count_each(self):
    mesh = jax.sharding.Mesh(np.array(DEVICES), ("x",))
    place = lambda *axes: jax.sharding.NamedSharding(
        mesh, jax.sharding.PartitionSpec(*axes))
    shards = jnp.zeros((256, 4), device=place("x"))
    self.assertEqual(4096, self.added())
    copies = jnp.zeros((256, 4), device=place())
    self.assertEqual(4096 * (1 + len(DEVICES)), self.added())
    part = shards.addressable_shards[0].data
    self.assertEqual(4096 * (1 + len(DEVICES)), self.added())
    self.assertEqual((32, 4), part.shape)
    del shards, copies, part

  def test_host_memory_does_not_count(self):
    host = jax.sharding.SingleDeviceSharding(
        DEVICES[0], memory_kind="pinned_host")
    x = jax.device_put(np.zeros(1024, np.float32), host)
    self.assertEqual(0, self.added())
    del x

  def test_measuring_leaves_donation_alone(self):
    program = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.zeros(1024) + 1
    at = x.unsafe_buffer_pointer()
    live_bytes()
    out = program(x)
    self.assertTrue(x.is_deleted())
    self.assertEqual(at, out.unsafe_buffer_pointer())

  def test_events_hold_bytes_at_their_ends(self):
    t = Timeline("serial", measure_bytes=True)
    with t.event("prefix", "rollout") as wait:
      kv = wait(jnp.zeros(1024))
    with t.event("decode", "rollout"):
      del kv
    first, second = (e.bytes_live - self.before for e in t.events)
    self.assertEqual((4096, 0), (first, second))


class DerivedTest(absltest.TestCase):
  def test_window_spans_decoding(self):
    self.assertEqual((1.0, 5.0), serial().window)
    self.assertEqual((4.0, 8.0), rollplex().window)
    self.assertIsNone(Timeline("serial", events=[event(0, 1)]).window)
    self.assertIsNone(Timeline("serial").window)

  def test_summary(self):
    numbers = summary([serial(), rollplex()])
    self.assertEqual({
        "step_seconds": 20.0,
        "window_seconds": 4.0,
        "stage_seconds": {"prefix": 1.0, "decode": 4.0, "reward": 0.5,
                          "score": 4.0, "gradient": 10.0},
        "lane_seconds": {"rollout": 5.0, "reference": 4.0, "training": 10.0,
                         "host": 0.5},
        "peak_bytes_live": 700,
    }, numbers["serial"])
    # What overlaps in a lane counts once; two lanes count twice.
    self.assertEqual({
        "step_seconds": 7.0,
        "window_seconds": 4.0,
        "stage_seconds": {"prefix": 1.0 + 3.5 + 2.0, "window": 4.0,
                          "decode": 2.0, "prefix_backward": 2.0},
        "lane_seconds": {"rollout": 5.0, "reference": 3.5, "training": 4.0},
        "peak_bytes_live": None,
    }, numbers["rollplex"])
    json.dumps(numbers)

  def test_summary_refuses_two_of_one_name(self):
    with self.assertRaisesRegex(ValueError, "found serial twice"):
      summary([serial(), serial()])

  def test_rows_hold_nested_events_only(self):
    a, b, c = event(0, 4), event(1, 2), event(3, 6)
    d, e = event(4, 5), event(4, 5)
    self.assertEqual(
        [[(a, 0), (b, 1), (d, 0), (e, 1)], [(c, 0)]], rows([e, d, c, b, a]))
    self.assertEmpty(rows([]))


class TraceTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.path = folder_of(self) / "new" / "trace.json"
    write_trace(self.path, [serial(), rollplex()])
    self.trace = json.loads(self.path.read_text())
    self.events = self.trace["traceEvents"]

  def spans(self, pid):
    return [e for e in self.events if e["ph"] == "X" and e["pid"] == pid]

  def test_fields_are_those_of_the_format(self):
    self.assertEqual("ms", self.trace["displayTimeUnit"])
    self.assertEqual({"M", "X", "C"}, {e["ph"] for e in self.events})
    for e in self.events:
      self.assertIsInstance(e["ts"], int)
      self.assertGreaterEqual(e["ts"], 0)
      self.assertIsInstance(e["pid"], int)
      self.assertIsInstance(e["tid"], int)
      self.assertIsInstance(e["name"], str)
      if e["ph"] == "X":
        self.assertIsInstance(e["dur"], int)
        self.assertGreaterEqual(e["dur"], 0)
    times = [e["ts"] for e in self.events]
    self.assertEqual(sorted(times), times)

  def test_processes_are_schedules_and_threads_lanes(self):
    def names(kind):
      return {(e["pid"], e["tid"]): e["args"]["name"] for e in self.events
              if e["name"] == kind}

    self.assertEqual({(1, 0): "serial", (2, 0): "rollplex"},
                     names("process_name"))
    threads = names("thread_name")
    # The reference's two units overlap, so they can't share a thread.
    self.assertEqual(
        ["rollout", "reference", "training", "host",
         "rollout", "reference", "reference 2", "training"],
        [threads[key] for key in sorted(threads)])
    for e in self.spans(1) + self.spans(2):
      self.assertStartsWith(threads[e["pid"], e["tid"]], e["cat"])

  def test_events_and_counter(self):
    score = [e for e in self.spans(1) if e["name"] == "score"]
    self.assertEqual(
        [(6_000_000, 2_000_000, 0), (8_000_000, 2_000_000, 1)],
        [(e["ts"], e["dur"], e["args"]["index"]) for e in score])
    # Every process starts at zero.
    self.assertEqual(0, min(e["ts"] for e in self.spans(2)))
    self.assertLen([e for e in self.spans(2) if e["args"].get("estimated")], 4)
    self.assertEqual(
        [(1_000_000, 100), (5_000_000, 700), (5_500_000, 300),
         (8_000_000, 300), (10_000_000, 400), (20_000_000, 500)],
        [(e["ts"], e["args"]["bytes"]) for e in self.events
         if e["ph"] == "C"])

  def test_threads_nest_whatever_the_rounding(self):
    edges = np.sort(np.random.default_rng(0).uniform(0, 1e-4, 65))
    t = Timeline("rollplex", events=[
        event(edges[0], edges[-1], "window"),
        *(event(*pair, "decode") for pair in itertools.pairwise(edges))])
    write_trace(self.path, [t])
    window, *parts = (e for e in json.loads(self.path.read_text())[
        "traceEvents"] if e["ph"] == "X")
    self.assertLen(parts, 64)
    for before, after in itertools.pairwise(parts):
      self.assertEqual(before["ts"] + before["dur"], after["ts"])
    self.assertEqual(window["ts"] + window["dur"],
                     parts[-1]["ts"] + parts[-1]["dur"])

  def test_failure_leaves_the_old_file(self):
    before = self.path.read_bytes()
    with self.assertRaises(TypeError):
      write_trace(self.path, [Timeline("serial", events=[
          event(0, 1, bytes_live=object())])])
    self.assertEqual(before, self.path.read_bytes())
    self.assertEqual([self.path], list(self.path.parent.iterdir()))


class PlotTest(absltest.TestCase):
  def test_writes_a_picture_to_scale(self):
    path = folder_of(self) / "new" / "timeline.png"
    timeline_plot.plot(path, [serial(), rollplex()], "tiny")
    self.assertEqual([path], list(path.parent.iterdir()))
    self.assertGreater(path.stat().st_size, 10_000)
    with Image.open(path) as image:
      pixels = np.asarray(image.convert("RGB"))
    self.assertEqual(1200, pixels.shape[1])
    self.assertBetween(pixels.shape[0], 400, 900)

    def columns(color):
      """Where most of a panel's row has a color: the first, and how many."""
      found = np.flatnonzero((pixels[:half] == color).all(-1).sum(0) > 10)
      return found[0], np.ptp(found) + 1

    half = pixels.shape[0] // 2
    (opens, decode), (_, score) = columns(DECODE), columns(SCORE)
    self.assertAlmostEqual(1.0, decode / score, delta=0.03)  # 4 s each.
    shaded = columns(SHADE)
    self.assertAlmostEqual(opens, shaded[0], delta=2)
    self.assertAlmostEqual(decode, shaded[1], delta=3)
    # The other panel has the same scale: its window takes 4 s too.
    pixels = pixels[::-1]
    self.assertAlmostEqual(decode, columns(SHADE)[1], delta=3)

  def test_one_panel_with_a_stage_of_no_color(self):
    path = folder_of(self) / "timeline.png"
    timeline_plot.plot(path, [Timeline("serial", events=[
        event(0, 1e-4, "other")])])
    with Image.open(path) as image:
      self.assertEqual(1200, image.width)

  def test_refuses_nothing_to_draw(self):
    path = folder_of(self) / "timeline.png"
    with self.assertRaisesRegex(ValueError, "at least one, found none"):
      timeline_plot.plot(path, [])
    with self.assertRaisesRegex(ValueError, "timeline serial: .* 0 events"):
      timeline_plot.plot(path, [serial(), Timeline("serial")])
    self.assertFalse(path.exists())


if __name__ == "__main__":
  absltest.main()
