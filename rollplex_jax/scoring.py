"""Rewards of a step's samples, each from the process whose rows they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import itertools
from typing import Any

from rollplex_jax import reports
from rollplex_jax.data import fallbacks
from rollplex_jax.data.pipeline import Example
from rollplex_jax.data.processor import Processor
from rollplex_jax.placement import processes
from rollplex_jax.placement.processes import Spread
from rollplex_jax.stages.rollout import Completions


def score(
    score_texts: Callable, processor: Processor, examples: Sequence[Example],
    completions: Completions, step: int, spread: Spread | None,
) -> tuple[list[dict[str, float]], list[dict[str, Any]]]:
  """Scores of all samples, and their lines of samples.jsonl, in order.

  Args:
    score_texts: (texts, rows, indices) -> scores, as a task's.
    processor: decodes tokens.
    examples: rows of the batch that are in this process.
    completions: of all rows.
    step: number of the step, from 1.
    spread: which rows those are, where there are several processes. Each
      scores the samples that it answers for.
  """
  b, g = completions.lengths.shape
  rows = dict(enumerate(examples))
  if spread is not None:
    local = dict(zip(spread.rows(b), examples))
    rows = {row: local[row] for row in spread.owned_rows(b)}
  texts = [processor.decode(completions.token_ids[row, i, :length])
           for row in rows for i, length in enumerate(completions.lengths[row])]
  repeat = lambda values: [value for value in values for _ in range(g)]
  scores = []
  if rows:
    scores = score_texts(texts, repeat(e.row for e in rows.values()),
                         repeat(e.index for e in rows.values()))
  lines = [marked(line) for line in reports.sample_lines(
      step, list(rows.values()), texts, scores, g)]
  found: dict[int, tuple[list, list]] = {}
  for theirs in processes.exchange({
      row: (scores[i * g:(i + 1) * g], lines[i * g:(i + 1) * g])
      for i, row in enumerate(rows)}):
    found |= theirs
  join = lambda k: list(itertools.chain.from_iterable(
      found[row][k] for row in range(b)))
  return join(0), join(1)


def marked(line: dict[str, Any]) -> dict[str, Any]:
  """A sample's line whose "error" names what was wrong with its reward, if so.
  """
  scores, error = fallbacks.split(line["scores"])
  return {**line, "scores": scores} | ({"error": error} if error else {})
