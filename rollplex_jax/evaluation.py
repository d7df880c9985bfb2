"""Scores of completions of held-out rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import time

from rollplex_jax import inference
from rollplex_jax import metrics as metrics_lib
from rollplex_jax.data.episodes import EpisodePlayer
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
    """Mean of one of the scores, over the rows that have it."""
    return metrics_lib.mean_scores(self.scores)[name]

  @property
  def success(self) -> tuple[float, float, float] | None:
    """Success rate with its 95 % interval, where scores tell of success."""
    outcomes = self._outcomes
    if not outcomes or not set(outcomes) <= {0.0, 1.0}:
      return None
    wins, trials = int(sum(outcomes)), len(outcomes)
    return wins / trials, *metrics_lib.wilson_interval(wins, trials)

  @property
  def _outcomes(self) -> list[float]:
    return [s["success"] for s in self.scores if "success" in s]

  def metrics(self) -> dict[str, float]:
    """Flat metrics under val/; success_rows where only some tell of success."""
    means = metrics_lib.mean_scores(self.scores)
    out = {"val/reward": means.pop("overall")}
    out |= {f"val/{name}": value for name, value in means.items()}
    if self.success is not None:
      _, out["val/success_low"], out["val/success_high"] = self.success
      if len(self._outcomes) < len(self.scores):
        out["val/success_rows"] = len(self._outcomes)
    return out | {"val/rows": len(self.scores), "timing_s/val": self.seconds}


def evaluate(params: Params, config: ModelConfig, processor: Processor,
             rows: Sequence, score: Callable, sampling: SamplingConfig,
             player: EpisodePlayer | None = None, **kwargs) -> Evaluation:
  """Completes every row once and scores it, or plays its episode.

  Args:
    params: {"text": ..., "visual": ...}.
    config: the model's configuration.
    processor: tokenizer and preprocessors.
    rows: random-access rows with `where`.
    score: (texts, rows, indices) -> scores, as a task's.
    sampling: how to draw; temperature 0 for greedy.
    player: of episodes of several turns, which need no other score.
    **kwargs: batch_size, seed and progress of `inference.complete`, or further
      ones of `inference.play`.
  """
  start = time.perf_counter()
  if player is not None:
    texts, scores = [], []
    for *_, episodes in inference.play(
        params, config, processor, rows, sampling, player, **kwargs):
      texts += episodes.texts
      scores += episodes.scores
    return Evaluation(texts, scores, time.perf_counter() - start)
  texts, seen, indices = [], [], []
  for example, (completion,) in inference.complete(
      params, config, processor, rows, sampling, **kwargs):
    texts.append(completion.text)
    seen.append(example.row)
    indices.append(example.index)
  scores = score(texts, seen, indices)
  return Evaluation(texts, scores, time.perf_counter() - start)
