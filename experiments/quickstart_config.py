"""What the quick start runs: plans, or step by step."""

from __future__ import annotations

import dataclasses

from rollplex_jax.config import (
    Algorithm,
    CheckpointConfig,
    PolicyConfig,
    RolloutConfig,
    TrainConfig,
)
from rollplex_jax.data.settings import EnvironmentConfig
from rollplex_jax.errors import InputError
from rollplex_jax.small_policy import ShapeConfig
from rollplex_jax.stages.objectives import ObjectiveConfig
from rollplex_jax.stages.update import OptimizerConfig

# It begins anew if it is interrupted.
_NO_CHECKPOINTS = CheckpointConfig(every_minutes=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuickstartConfig:
  """The whole run.

  Attributes:
    environment: the world; `num_episodes` and splits are set per phase.
    shape: the policy's size.
    demonstrations: episodes that the expert shows.
    warm_start: supervised learning on them.
    rl: the RL that follows.
    gif_episodes: held-out episodes that are drawn.
    seed: of the weights, of sampling and of the order of episodes.
  """

  environment: EnvironmentConfig = dataclasses.field(
      default_factory=lambda: EnvironmentConfig(
          level="BabyAI-GoToObjS6-v1", image_size=56, max_actions=8,
          must_stop=True, eval_episodes=512))
  shape: ShapeConfig = dataclasses.field(default_factory=ShapeConfig)
  demonstrations: int = 12000
  # Ends where RL has something to work with: a policy that starts to see.
  warm_start: TrainConfig = dataclasses.field(
      default_factory=lambda: TrainConfig(
          algorithm=Algorithm.SUPERVISED,
          policy=PolicyConfig(freeze_vision_tower=False),
          rollout=RolloutConfig(max_completion_length=9),
          optimizer=OptimizerConfig(
              learning_rate=3e-3, warmup_steps=50, adam_beta2=0.98,
              weight_decay=0.01),
          train_batch_size=64, total_steps=800, stop_at_success=0.3,
          eval_every=15, eval_batch_size=256, checkpoint=_NO_CHECKPOINTS))
  rl: TrainConfig = dataclasses.field(
      default_factory=lambda: TrainConfig(
          policy=PolicyConfig(freeze_vision_tower=False),
          rollout=RolloutConfig(num_generations=16, max_completion_length=9),
          objective=ObjectiveConfig(
              loss_type="dapo", epsilon=0.2, epsilon_high=0.28),
          optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=5),
          train_batch_size=32, gen_batch_size=48, total_steps=200,
          eval_every=25, eval_batch_size=256, checkpoint=_NO_CHECKPOINTS))
  gif_episodes: int = 6
  seed: int = 0

  def __post_init__(self):
    for name in ("demonstrations", "gif_episodes"):
      if getattr(self, name) < 1:
        raise InputError(f"{name}={getattr(self, name)}: expected at least 1")


def step_by_step() -> QuickstartConfig:
  """The quick start of a policy that acts in up to eight turns.

  An episode has some twenty times the tokens of a plan, and an action for each
  thing seen. So there are fewer of them in a step, from which the policy learns
  faster.
  """
  plans = QuickstartConfig()
  # Without must_stop a fixed sweep of the room arrives now and then; the warm
  # start goes on until the policy does better than that.
  return dataclasses.replace(
      plans,
      environment=dataclasses.replace(
          plans.environment, max_turns=8, must_stop=False),
      warm_start=dataclasses.replace(
          plans.warm_start, train_batch_size=32, stop_at_success=0.4,
          eval_every=20, rollout=RolloutConfig(max_completion_length=2)),
      rl=dataclasses.replace(
          plans.rl, rollout=RolloutConfig(
              num_generations=8, max_completion_length=2),
          optimizer=dataclasses.replace(
              plans.rl.optimizer, learning_rate=5e-4),
          train_batch_size=8, gen_batch_size=12, total_steps=100,
          eval_every=25))
