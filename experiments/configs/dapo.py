"""DAPO: token-mean loss, a wider upper clip, groups of mixed outcome only."""

from rollplex_jax.config import RolloutConfig, TrainConfig, to_config_dict
from rollplex_jax.stages.objectives import ObjectiveConfig
from rollplex_jax.stages.update import OptimizerConfig


def get_config():
  return to_config_dict(TrainConfig(
      rollout=RolloutConfig(num_generations=16, max_completion_length=1024),
      objective=ObjectiveConfig(
          loss_type="dapo", epsilon=0.2, epsilon_high=0.28),
      optimizer=OptimizerConfig(learning_rate=1e-6, warmup_steps=10),
      train_batch_size=16, gen_batch_size=48, micro_batch_size=8,
      total_steps=200, eval_every=50))
