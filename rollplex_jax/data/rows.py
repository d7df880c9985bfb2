"""Sets of rows: read lazily from JSONL files, checked, and selected.

A set is a sequence of rows (see `row_schema`) that can also say `where` each
of them stands, for errors.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
import dataclasses
import json
import os
from typing import Any

import numpy as np

from rollplex_jax.data.row_schema import RowError, first_line, validate_row
from rollplex_jax.errors import InputError


class RowFile(Sequence):
  """The rows of a JSONL file, parsed and validated one at a time, on access.

  Opening scans for line starts only, so that a large file costs eight bytes a
  row. Blank lines are passed over. Reading is safe from several threads.
  """

  def __init__(self, path: str | os.PathLike):
    """Raises InputError if the file is missing, unreadable or has no rows."""
    self.path = os.fspath(path)
    spans, lines, start = [], [], 0
    try:
      with open(self.path, "rb") as file:
        for number, line in enumerate(file, start=1):
          if line.strip():
            spans.append((start, len(line)))
            lines.append(number)
          start += len(line)
    except OSError as error:
      raise InputError(
          f"{self.path}: can't read rows: {error.strerror}") from error
    if not spans:
      raise InputError(f"{self.path}: expected JSON rows, found none")
    self._spans = np.array(spans, np.int64)
    self._lines = np.array(lines, np.int64)
    self._folder = os.path.dirname(os.path.abspath(self.path))

  def __len__(self) -> int:
    return len(self._spans)

  def where(self, index: int) -> str:
    """The place of a row as errors name it: file and 1-based line."""
    return f"{self.path}:{self._lines[index]}"

  def __getitem__(self, index: int) -> dict[str, Any]:
    """Returns a row, media paths resolved against the file's folder.

    Raises:
      RowError: if the line is no JSON object or the row is malformed.
    """
    start, size = (int(n) for n in self._spans[index])
    where = self.where(index)
    try:
      with open(self.path, "rb") as file:
        file.seek(start)
        line = file.read(size)
    except OSError as error:
      raise InputError(f"{where}: can't read: {error.strerror}") from error
    try:
      row = json.loads(line)
    except (ValueError, RecursionError) as error:
      raise RowError(
          where, "invalid JSON",
          f"not valid JSON ({first_line(error)}); expected one JSON object per "
          "line") from error
    return validate_row(row, where, self._folder)


class RowList(Sequence):
  """Rows held in memory; `name` stands for the file in errors."""

  def __init__(self, rows: Sequence[dict[str, Any]], name: str = "rows"):
    self._rows = rows
    self._name = name

  def __len__(self) -> int:
    return len(self._rows)

  def where(self, index: int) -> str:
    return f"{self._name}:{index + 1}"

  def __getitem__(self, index: int) -> dict[str, Any]:
    """Raises RowError if the row is malformed."""
    return validate_row(self._rows[index], self.where(index))


@dataclasses.dataclass(frozen=True)
class SelectedRows(Sequence):
  """The good rows of a set, and why the others were left out.

  Attributes:
    rows: the whole set.
    indices: int64 [n], the good rows' indices in it.
    skipped: number of rows left out, by reason.
    examples: the message of the first row left out, by reason.
  """

  rows: Sequence
  indices: np.ndarray
  skipped: collections.Counter[str]
  examples: dict[str, str]

  def __len__(self) -> int:
    return len(self.indices)

  def where(self, index: int) -> str:
    return self.rows.where(int(self.indices[index]))

  def __getitem__(self, index: int) -> dict[str, Any]:
    return self.rows[int(self.indices[index])]

  def report(self) -> list[str]:
    """Lines to print: the count by reason, each with its first row."""
    if not self.skipped:
      return []
    return [f"skipped {self.skipped.total()} of {len(self.rows)} rows"] + [
        f"  {count} {reason}; first: {self.examples[reason]}"
        for reason, count in self.skipped.most_common()
    ]


def select_rows(
    rows: Sequence,
    check: Callable[[dict[str, Any], str], Any] = lambda row, where: None,
    skip_bad_rows: bool = False,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> SelectedRows:
  """Reads every row once and keeps those that pass `check`.

  Args:
    rows: RowFile or RowList (anything with `where`).
    check: called with (row, where); raises RowError for a bad row, for example
      `Processor.check`.
    skip_bad_rows: leave bad rows out and count them; without it the first bad
      row's error is raised.
    progress: wraps the iteration, for a progress display.

  Raises:
    RowError: for the first bad row, unless they are to be skipped.
    InputError: if no good row is left.
  """
  good, skipped, examples = [], collections.Counter(), {}
  for index in progress(range(len(rows))):
    try:
      check(rows[index], rows.where(index))
    except RowError as error:
      if not skip_bad_rows:
        raise
      skipped[error.reason] += 1
      examples.setdefault(error.reason, str(error))
    else:
      good.append(index)
  selected = SelectedRows(rows, np.array(good, np.int64), skipped, examples)
  if not good:
    raise InputError(f"no good row left: {'; '.join(selected.report())}")
  return selected
