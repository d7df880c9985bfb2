"""Where a run's numbers go, and the numbers about them."""

import json
import math
import os
import pathlib
import sys
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
from tensorboardX.proto import event_pb2

from rollplex_jax import metrics
from rollplex_jax.errors import InputError


def _lines(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


class MetricsWriterTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(
        self.enterContext(tempfile.TemporaryDirectory())) / "run"

  def test_lines_are_there_at_once(self):
    writer = metrics.MetricsWriter(self.folder, tensorboard=False)
    self.addCleanup(writer.close)
    writer.write(1, {"a/b": np.float32(0.5), "c": jnp.ones(())})
    writer.write(2, {"a/b": math.nan, "c": -math.inf})
    writer.write_samples([{"completion": "é"}, {"reward": 1.0}])
    # JSON has no such numbers; every parser reads these lines.
    self.assertEqual(_lines(self.folder / "metrics.jsonl"), [
        {"step": 1, "a/b": 0.5, "c": 1.0},
        {"step": 2, "a/b": "nan", "c": "-inf"}])
    self.assertEqual(_lines(self.folder / "samples.jsonl"),
                     [{"completion": "é"}, {"reward": 1.0}])
    self.assertCountEqual(
        os.listdir(self.folder), ["metrics.jsonl", "samples.jsonl"])

  def test_refuses_to_write_over_metrics(self):
    metrics.MetricsWriter(self.folder, tensorboard=False).close()
    with self.assertRaises(FileExistsError):
      metrics.MetricsWriter(self.folder, tensorboard=False)

  def test_tensorboard_events(self):
    writer = metrics.MetricsWriter(self.folder)
    writer.write(3, {"actor/loss": 0.25})
    writer.close()
    (path,) = (self.folder / "tensorboard").iterdir()
    values = {(e.step, v.tag): v.simple_value
              for e in _events(path.read_bytes()) for v in e.summary.value}
    self.assertEqual(values, {(3, "actor/loss"): 0.25})

  def test_wandb(self):
    with mock.patch.dict(sys.modules, {"wandb": None}):
      with self.assertRaisesRegex(InputError, "wandb is not installed"):
        metrics.MetricsWriter(self.folder, wandb_project="p")
    self.assertFalse(self.folder.exists())
    fake = mock.Mock()
    with mock.patch.dict(sys.modules, {"wandb": fake}):
      writer = metrics.MetricsWriter(
          self.folder, tensorboard=False, wandb_project="p", config={"a": 1})
    writer.write(4, {"x": 1})
    writer.close()
    fake.init.assert_called_once_with(project="p", config={"a": 1})
    fake.init().log.assert_called_once_with({"x": 1.0}, step=4)
    fake.init().finish.assert_called_once_with()


def _events(data):
  """TFRecords: length, its checksum, the record, its checksum."""
  start = 0
  while start < len(data):
    size = int.from_bytes(data[start:start + 8], "little")
    yield event_pb2.Event.FromString(data[start + 12:start + 12 + size])
    start += 16 + size


class NumbersTest(parameterized.TestCase):

  @parameterized.parameters((0, 10), (5, 10), (10, 10), (128, 256), (255, 256))
  def test_wilson_interval(self, wins, trials):
    """Its ends are the rates at which what was seen is 1.96 deviations off."""
    low, high = metrics.wilson_interval(wins, trials)
    for end in (low, high):
      deviation = math.sqrt(end * (1 - end) / trials)
      self.assertAlmostEqual(abs(wins / trials - end), 1.96 * deviation)
    self.assertBetween(low, 0.0, wins / trials)
    self.assertBetween(high, wins / trials, 1.0)
    self.assertGreater(high - low, 0.01)

  def test_wilson_interval_needs_trials(self):
    with self.assertRaisesRegex(ValueError, "trials"):
      metrics.wilson_interval(0, 0)

  def test_spread(self):
    self.assertEqual(metrics.spread("x", np.array([1, 2, 6])),
                     {"x/mean": 3.0, "x/max": 6.0, "x/min": 1.0})

  def test_mean_scores(self):
    self.assertEqual(
        metrics.mean_scores([{"a": 1.0}, {"a": 2.0, "b": 4.0}, {"a": 6.0}]),
        {"a": 3.0, "b": 4.0})

  def test_compilations_are_counted_once_each(self):
    counter = metrics.CompileCounter()
    double = jax.jit(lambda x: x * 2)
    double(np.zeros(3, np.float32))
    once = counter.count
    double(np.ones(3, np.float32))
    self.assertEqual(counter.count, once)
    double(np.zeros(5, np.float32))
    self.assertEqual(counter.count, once + 1)
    self.assertEqual(once, 1)
    counter.close()
    double(np.zeros(7, np.float32))
    self.assertEqual(counter.metrics()["compile/count"], once + 1)


class WriteJsonTest(absltest.TestCase):

  def test_whole_or_not_at_all(self):
    folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    path = folder / "new" / "r.json"
    metrics.write_json(path, {"a": [1.5]})
    self.assertEqual(json.loads(path.read_text()), {"a": [1.5]})
    with self.assertRaises(TypeError):
      metrics.write_json(path, {"a": object()})
    self.assertEqual(json.loads(path.read_text()), {"a": [1.5]})
    self.assertEqual(os.listdir(path.parent), ["r.json"])


if __name__ == "__main__":
  absltest.main()
