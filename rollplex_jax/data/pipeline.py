"""The input pipeline: rows in a seeded order, processed ahead, in batches.

Its position is part of a run's state: an iterator's `get_state()` gives a small
JSON-able dict, and `set_state` on a new iterator goes on with exactly the
batches that would have come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import threading
from typing import Any

import grain

from rollplex_jax.data.row_schema import RowError
from rollplex_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class Example:
  """A row on its way to the model.

  Attributes:
    index: the row's place in its set; stable over epochs and restarts.
    row: the row itself, for reward functions.
    prompt: what `process` made of it.
  """

  index: int
  row: dict[str, Any]
  prompt: Any


def input_pipeline(
    rows: Sequence,
    process: Callable[[dict[str, Any], str], Any],
    *,
    batch_size: int,
    seed: int | None = None,
    num_epochs: int | None = None,
    drop_remainder: bool = True,
    on_bad_row: Callable[[RowError], None] | None = None,
    max_bad_rows: int = 1000,
    num_threads: int = 2,
    prefetch: int | None = None,
    slots: Sequence[int] | None = None,
) -> grain.IterDataset[list[Example]]:
  """Returns a dataset of lists of `batch_size` examples.

  Args:
    rows: a random-access set with `where`, such as `rows.SelectedRows`.
    process: called with (row, where), for example `Processor.prompt`; runs in
      the threads that read ahead, so media are decoded there.
    batch_size: rows of a batch. Batches run on over the end of an epoch.
    seed: the order's seed; each epoch has another order. None keeps the rows'
      own order.
    num_epochs: None repeats for ever.
    drop_remainder: leave out a last batch that isn't full.
    on_bad_row: told of each row that fails while it is read or processed; the
      next one takes its place. It is called from the reading threads. Without
      it the error reaches whoever asks for the batch.
    max_bad_rows: with so many bad rows in a row, all that were read last, no
      good one is expected any more and whoever asks for the batch gets an
      InputError.
    num_threads: threads that read ahead; 0 reads when asked.
    prefetch: rows to keep ready, two batches by default.
    slots: places in each batch to read, by default all; the batches that come
      hold those rows only. Several processes thus share out the same batches.
      Rows must then be repeated for ever.

  Returns:
    A dataset; `iter` gives an iterator with `get_state` and `set_state`.

  Raises:
    ValueError: if batch_size isn't positive, or no full batch will ever come.
  """
  if batch_size <= 0:
    raise ValueError(f"batch_size: expected > 0, found {batch_size}")
  if (drop_remainder and num_epochs is not None
      and len(rows) * num_epochs < batch_size):
    raise ValueError(
        f"expected at least batch_size {batch_size} rows, found {len(rows)} in "
        f"{num_epochs} epochs")

  bad_rows, lock = 0, threading.Lock()

  def load(index: int) -> Example | None:
    nonlocal bad_rows
    try:
      row = rows[index]
      example = Example(index, row, process(row, rows.where(index)))
    except RowError as error:
      if on_bad_row is None:
        raise
      on_bad_row(error)
      with lock:
        bad_rows += 1
        if bad_rows >= max_bad_rows:
          raise InputError(
              f"{bad_rows} rows in a row can't be used; the last: {error}"
          ) from error
      return None  # Left out of the batch by grain.
    with lock:
      bad_rows = 0
    return example

  dataset = grain.MapDataset.source(range(len(rows)))
  if seed is not None:
    dataset = dataset.shuffle(seed=seed)
  dataset = dataset.repeat(num_epochs)
  if slots is not None:
    whole, own = dataset, list(slots)
    dataset = grain.MapDataset.range(0, len(whole)).map(
        lambda i, size=batch_size: whole[
            i // len(own) * size + own[i % len(own)]])
    batch_size = len(own)
  dataset = dataset.map(load)
  if prefetch is None:
    prefetch = 2 * batch_size
  options = grain.ReadOptions(
      num_threads=num_threads,
      prefetch_buffer_size=prefetch if num_threads else 0)
  return dataset.to_iter_dataset(options).batch(
      batch_size, drop_remainder=drop_remainder, batch_fn=list)
