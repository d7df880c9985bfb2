"""GRPO on your own checkpoint, rows and reward.

    python -m experiments.train --config=experiments/configs/grpo.py \\
      --config.policy.path=CHECKPOINT --config.data.rows=TRAIN.jsonl \\
      --config.data.eval_rows=HELD_OUT.jsonl \\
      --config.data.reward=my_reward.py:reward --output_dir=runs/mine
"""

from rollplex_jax.config import RolloutConfig, TrainConfig, to_config_dict
from rollplex_jax.stages.objectives import ObjectiveConfig
from rollplex_jax.stages.update import OptimizerConfig


def get_config():
  return to_config_dict(TrainConfig(
      rollout=RolloutConfig(num_generations=8, max_completion_length=512),
      objective=ObjectiveConfig(loss_type="grpo", beta=0.01),
      optimizer=OptimizerConfig(learning_rate=1e-6, warmup_steps=10),
      train_batch_size=16, micro_batch_size=8, total_steps=200,
      eval_every=50))
