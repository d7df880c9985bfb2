"""The input pipeline: order, restarts, bad rows."""

import collections
import json
import threading

from absl.testing import absltest, parameterized

from rollplex_jax.data.pipeline import input_pipeline
from rollplex_jax.data.row_schema import RowError
from rollplex_jax.data.rows import RowList
from rollplex_jax.errors import InputError

_ROWS = RowList([{"prompt": f"row {i}"} for i in range(10)])


def _process(row, where):
  return row["prompt"].upper(), where


def _indices(batches):
  return [[example.index for example in batch] for batch in batches]


def _take(iterator, count):
  return [next(iterator) for _ in range(count)]


class PipelineTest(parameterized.TestCase):

  def test_examples(self):
    batch = next(iter(input_pipeline(_ROWS, _process, batch_size=3)))
    self.assertEqual([example.index for example in batch], [0, 1, 2])
    self.assertEqual(batch[1].row, {"prompt": "row 1"})
    self.assertEqual(batch[1].prompt, ("ROW 1", "rows:2"))

  def test_one_epoch_in_order(self):
    dataset = input_pipeline(
        _ROWS, _process, batch_size=4, num_epochs=1, drop_remainder=False)
    expected = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    self.assertEqual(_indices(dataset), expected)
    self.assertEqual(_indices(dataset), expected)
    dataset = input_pipeline(_ROWS, _process, batch_size=4, num_epochs=1)
    self.assertEqual(_indices(dataset), expected[:2])

  def test_each_epoch_holds_every_row_in_another_order(self):
    dataset = input_pipeline(_ROWS, _process, batch_size=5, seed=1)
    flat = [index for batch in _indices(_take(iter(dataset), 6))
            for index in batch]
    epochs = [flat[:10], flat[10:20], flat[20:]]
    for epoch in epochs:
      self.assertCountEqual(epoch, range(10))
    self.assertLen(set(map(tuple, epochs)), 3)

  def test_seed_decides_the_order(self):
    def order(seed):
      dataset = input_pipeline(_ROWS, _process, batch_size=10, seed=seed)
      return _indices(_take(iter(dataset), 2))
    self.assertEqual(order(1), order(1))
    self.assertNotEqual(order(1), order(2))

  @parameterized.product(num_threads=[0, 3], steps=[0, 1, 5])
  def test_restored_state_goes_on_exactly(self, num_threads, steps):
    bad = {2, 7}
    def process(row, where):
      if int(row["prompt"].split()[1]) in bad:
        raise RowError(where, "bad", "bad")
      return row["prompt"]
    dataset = input_pipeline(
        _ROWS, process, batch_size=3, seed=4, num_threads=num_threads,
        on_bad_row=lambda error: None)
    iterator = iter(dataset)
    _take(iterator, steps)
    state = json.loads(json.dumps(iterator.get_state()))
    expected = _indices(_take(iterator, 6))
    restored = iter(dataset)
    _take(restored, 2)  # Wherever it stood before.
    restored.set_state(state)
    self.assertEqual(_indices(_take(restored, 6)), expected)

  @parameterized.parameters(0, 2)
  def test_bad_row_is_an_error(self, num_threads):
    rows = RowList([{"prompt": "a"}, {}])
    iterator = iter(input_pipeline(
        rows, _process, batch_size=2, num_threads=num_threads))
    with self.assertRaisesRegex(RowError, '^rows:2: the row has no "prompt"$'):
      next(iterator)

  def test_bad_rows_are_replaced_and_counted(self):
    rows = RowList([{"prompt": "a"}, {}, {"prompt": "b"}, {"prompt": "c"}])
    skipped = collections.Counter()
    dataset = input_pipeline(
        rows, _process, batch_size=3, num_epochs=1,
        on_bad_row=lambda error: skipped.update([error.reason]))
    self.assertEqual(_indices(dataset), [[0, 2, 3]])
    self.assertEqual(skipped, {"invalid row": 1})

  def test_processing_runs_ahead_in_other_threads(self):
    names = set()
    def process(row, where):
      names.add(threading.current_thread().name)
    next(iter(input_pipeline(_ROWS, process, batch_size=2, num_threads=2)))
    self.assertNotIn(threading.current_thread().name, names)

  def test_batches_that_never_fill(self):
    with self.assertRaisesRegex(ValueError, "batch_size 11 rows, found 10"):
      input_pipeline(_ROWS, _process, batch_size=11, num_epochs=1)
    with self.assertRaisesRegex(ValueError, "batch_size: expected > 0"):
      input_pipeline(_ROWS, _process, batch_size=0)
    dataset = input_pipeline(_ROWS, _process, batch_size=12)
    self.assertEqual(_indices(_take(iter(dataset), 1)),
                     [[*range(10), 0, 1]])

  @parameterized.parameters(0, 2)
  def test_rows_that_are_all_bad_end(self, num_threads):
    def process(row, where):
      if row["prompt"] != "row 3":
        raise RowError(where, "bad", "found something")
      return row

    def batches(rows):
      return iter(input_pipeline(
          rows, process, batch_size=2, max_bad_rows=20, num_threads=num_threads,
          on_bad_row=lambda error: None))

    good = batches(_ROWS)
    self.assertEqual(_indices(_take(good, 5)), [[3, 3]] * 5)
    with self.assertRaisesRegex(
        InputError, "20 rows in a row can't be used; .*found something"):
      next(batches(RowList([{"prompt": "no"}] * 3)))


if __name__ == "__main__":
  absltest.main()
