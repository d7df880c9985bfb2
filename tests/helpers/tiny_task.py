"""A task that a tiny policy learns in seconds, and runs of its trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rollplex_jax.config import PolicyConfig, RolloutConfig, TrainConfig
from rollplex_jax.data.rows import RowList
from rollplex_jax.stages.objectives import ObjectiveConfig
from rollplex_jax.stages.update import OptimizerConfig
from rollplex_jax.trainer import Trainer


class VowelTask:
  """Rows with and without pictures; reward is the share of the letter a."""

  max_turns = 1

  def __init__(self, with_media: bool = True, with_video: bool = False,
               count: int = 6):
    rows = []
    for i in range(count):
      content = [{"type": "text", "text": f"row {i} go to the ball"[:8 + i]}]
      if with_media and i % 3:
        content.insert(0, {"type": "image", "image": _image(i)})
      if with_video and i % 2:
        frames = [_image(10 * i + t) for t in range(2 + i)]
        content.insert(0, {"type": "video", "video": frames, "fps": 2.0})
      rows.append({"prompt": [{"role": "user", "content": content}],
                   "response": "aa"})
    self.train_rows = RowList(rows)
    self.eval_rows = RowList(rows[:3])
    self.may_skip = False
    self.report = []
    self.constant = False

  def score(self, completions: Sequence[str], rows, row_indices
            ) -> list[dict[str, float]]:
    del rows, row_indices
    if self.constant:
      return [{"overall": 1.0} for _ in completions]
    return [{"overall": c.count("a") / 4 + c.count("e") / 8}
            for c in completions]


def _image(seed: int) -> np.ndarray:
  rng = np.random.default_rng(seed)
  return rng.integers(0, 256, (56, 56, 3)).astype(np.uint8)


def config(path: str, **kwargs: Any) -> TrainConfig:
  """Four prompts with four completions of up to four tokens per step."""
  defaults = dict(
      policy=PolicyConfig(path=path),
      rollout=RolloutConfig(num_generations=4, max_completion_length=4),
      objective=ObjectiveConfig(loss_type="dapo", beta=0.0),
      optimizer=OptimizerConfig(learning_rate=1e-2),
      train_batch_size=4, total_steps=2, eval_batch_size=3)
  return TrainConfig(**{**defaults, **kwargs})


def run_steps(config: TrainConfig, steps: int, task=None,
              ) -> tuple[Trainer, list[dict[str, float]]]:
  """A new trainer after some steps, and the metrics of each."""
  trainer = Trainer(config, task=task or VowelTask())
  batches = trainer.batches()
  return trainer, [
      trainer.step(next(batches), step)[0] for step in range(steps)]
