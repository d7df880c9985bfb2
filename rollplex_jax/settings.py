"""What the steps of a run have in common."""

from __future__ import annotations

import dataclasses

from rollplex_jax.models.config import ModelConfig
from rollplex_jax.placement.sharding import Placement
from rollplex_jax.samples import PromptBatch
from rollplex_jax.schedule import Facts, ScheduleConfig
from rollplex_jax.stages.objectives import ObjectiveConfig
from rollplex_jax.stages.sampling import SamplingConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """What does not change during a run.

  Attributes:
    config: the model's configuration.
    schedule: the order of stages.
    sampling: of the rollout.
    objective: the loss.
    micro_batch_size: samples per pass; 0 for all.
    remat: recompute layers in the backward pass.
    with_entropy: measure entropy.
    max_turns: responses of an episode.
    trained: names of the parts of the parameters that learn.
    training, rollout: how these stages lie on the run's mesh, or None on one
      device.
  """

  config: ModelConfig
  schedule: ScheduleConfig
  sampling: SamplingConfig
  objective: ObjectiveConfig
  micro_batch_size: int = 0
  remat: bool = False
  with_entropy: bool = True
  max_turns: int = 1
  trained: tuple[str, ...] = ("text",)
  training: Placement | None = None
  rollout: Placement | None = None


def facts_of(settings: Settings, batch: PromptBatch, *, has_reference: bool,
             several_updates: bool) -> Facts:
  """What the plans of a step depend on."""
  training, rollout = settings.training, settings.rollout
  return Facts(
      has_media=batch.vision is not None, has_reference=has_reference,
      trains_tower="visual" in settings.trained,
      scores_policy=several_updates, has_turns=settings.max_turns > 1,
      moves_weights=training is not None and training.weights_move(rollout))
