"""Greedy completions of held-out rows, and what they score."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import time

import jax
import numpy as np

from rollplex_jax import metrics as metrics_lib
from rollplex_jax import schedule
from rollplex_jax.data.pipeline import input_pipeline
from rollplex_jax.data.processor import Processor
from rollplex_jax.models.config import ModelConfig
from rollplex_jax.models.weights import Params
from rollplex_jax.stages.sampling import SamplingConfig


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """Scores of one completion per row.

  Attributes:
    completions: texts.
    scores: a dict per row, each with "overall".
    seconds: wall time.
  """

  completions: list[str]
  scores: list[dict[str, float]]
  seconds: float

  def mean(self, name: str = "overall") -> float:
    return float(np.mean([s[name] for s in self.scores]))

  @property
  def success(self) -> tuple[float, float, float] | None:
    """Success rate with its 95 % interval, where scores tell of success."""
    if "success" not in self.scores[0]:
      return None
    wins = int(sum(s["success"] for s in self.scores))
    low, high = metrics_lib.wilson_interval(wins, len(self.scores))
    return wins / len(self.scores), low, high

  def metrics(self) -> dict[str, float]:
    """Flat metrics under val/."""
    out = {f"val/{name}": self.mean(name) for name in self.scores[0]}
    out["val/reward"] = out.pop("val/overall")
    if self.success is not None:
      _, out["val/success_low"], out["val/success_high"] = self.success
    return out | {"val/rows": len(self.scores),
                  "timing_s/val": self.seconds}


def evaluate(params: Params, config: ModelConfig, processor: Processor,
             rows: Sequence, score: Callable, sampling: SamplingConfig, *,
             batch_size: int, seed: int = 0,
             progress: Callable = iter) -> Evaluation:
  """Completes every row once and scores it.

  Args:
    params: {"text": ..., "visual": ...}.
    config: the model's configuration.
    processor: tokenizer and preprocessors.
    rows: random-access rows with `where`.
    score: (texts, rows, indices) -> scores, as a task's.
    sampling: how to draw; temperature 0 for greedy.
    batch_size: rows at a time; the last batch is filled up with empty rows.
    seed: of sampling.
    progress: wraps the iteration over batches.
  """
  start = time.perf_counter()
  batch_size = min(batch_size, len(rows))
  texts, scores = [], []
  dataset = input_pipeline(
      rows, processor.prompt, batch_size=batch_size, num_epochs=1,
      drop_remainder=False)
  for examples in progress(dataset):
    batch = schedule.make_batch(
        config, [e.prompt for e in examples], [e.index for e in examples],
        num_rows=batch_size)
    features = None
    if batch.vision is not None:
      features = schedule.vision_program(params, config, batch.vision)
    done = jax.device_get(schedule.roll_out(
        params, config, sampling, batch, features, num_generations=1,
        seed=seed, step=0))
    new = [processor.decode(ids[0, :n[0]]) for ids, n in
           zip(done.token_ids[:len(examples)], done.lengths[:len(examples)])]
    texts += new
    scores += score(new, [e.row for e in examples],
                    [e.index for e in examples])
  return Evaluation(texts, scores, time.perf_counter() - start)
