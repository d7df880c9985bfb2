"""Where inside a decode window decoding and units of prefix work ran."""

from __future__ import annotations

import jax
import numpy as np

from rollplex_jax.placement.host import to_host
from rollplex_jax.schedule import Lane
from rollplex_jax.stages.rollout import Completions
from rollplex_jax.stages.window import Turns
from rollplex_jax.timeline import Timeline

# Reading the weights takes about as long as the arithmetic of so many rows:
# what a decode step of a few samples costs beside a unit of prefix work.
_ROWS_OF_A_READ = 64


def record(timeline: Timeline, start: float, done: Completions, turns: Turns,
           *, unit_tokens: int) -> None:
  """Adds a window's loops to a timeline that is enabled, after it has ended.

  They are one program, whose inside the host can't see: its time is divided by
  the rows that each turn takes through the model.

  Args:
    timeline: of the step.
    start: of the window, by the timeline's clock.
    done: the window's completions, to wait for.
    turns: of its loops, one number each or one for each part of the batch.
    unit_tokens: tokens of a unit of prefix work.
  """
  if not timeline.enabled:
    return
  turns = to_host(jax.block_until_ready((done, turns))[1])
  end = timeline.now()
  # Parts of the batch have loops of their own: the longest counts.
  turns = jax.tree.map(np.max, turns)
  loops = [  # In the order in which they run.
      ("policy", turns.with_policy, True),
      ("reference", turns.with_reference, True),
      ("policy", turns.policy, False), ("reference", turns.reference, False),
      (None, turns.decode, True)]
  samples = done.lengths.size

  def cost(model, count, decodes):
    # Policy units and decode steps read the same weights, once.
    reads = 2 if decodes and model == "reference" else 1
    rows = samples * decodes + unit_tokens * (model is not None)
    return int(count) * (rows + reads * _ROWS_OF_A_READ)

  total = max(sum(cost(*loop) for loop in loops), 1)
  lanes = {"policy": str(Lane.TRAINING), "reference": str(Lane.REFERENCE)}
  at = start
  for model, count, decodes in loops:
    after = at + (end - start) * cost(model, count, decodes) / total
    if count and model:
      timeline.add("prefix", lanes[model], None, at, after, estimated=True)
    if count and decodes:
      timeline.add("decode", str(Lane.ROLLOUT), None, at, after,
                   estimated=True)
    at = after
