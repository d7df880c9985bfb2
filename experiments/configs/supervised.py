"""Supervised fine-tuning on rows with responses."""

from rollplex_jax.config import TrainConfig, to_config_dict
from rollplex_jax.stages.update import OptimizerConfig


def get_config():
  return to_config_dict(TrainConfig(
      algorithm="supervised",
      optimizer=OptimizerConfig(learning_rate=1e-5, warmup_steps=20),
      train_batch_size=32, micro_batch_size=8, total_steps=500))
