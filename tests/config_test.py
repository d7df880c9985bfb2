"""Configurations: the tree of flags, and every check."""

import dataclasses
import math

from absl.testing import absltest, parameterized
import ml_collections

from rollplex_jax.config import (
    Algorithm,
    PolicyConfig,
    RolloutConfig,
    TrainConfig,
    from_config_dict,
    to_config_dict,
)
from rollplex_jax.data.settings import DataConfig, EnvironmentConfig
from rollplex_jax.errors import InputError
from rollplex_jax.stages.objectives import (
    AdvantageEstimator,
    LossType,
    ObjectiveConfig,
)
from rollplex_jax.stages.update import OptimizerConfig, SchedulerType


class RoundTripTest(parameterized.TestCase):

  def test_defaults(self):
    config = TrainConfig()
    self.assertEqual(
        from_config_dict(TrainConfig, to_config_dict(config)), config)

  def test_every_kind_of_value(self):
    config = TrainConfig(
        algorithm="supervised", max_seconds=2.5, with_entropy=False,
        policy=PolicyConfig(path="a", compute_dtype="bfloat16", remat=True),
        data=DataConfig(environment=EnvironmentConfig(level="x", noise=0.25)),
        objective=ObjectiveConfig(
            loss_type="dapo", epsilon_high=0.28, scale_rewards="batch"),
        optimizer=OptimizerConfig(max_grad_norm=None, total_steps=7,
                                  lr_scheduler_type="cosine"))
    built = from_config_dict(TrainConfig, to_config_dict(config))
    self.assertEqual(built, config)
    self.assertIs(built.algorithm, Algorithm.SUPERVISED)
    self.assertIs(built.objective.loss_type, LossType.DAPO)
    self.assertIs(built.optimizer.lr_scheduler_type, SchedulerType.COSINE)

  def test_tree_is_plain_and_complete(self):
    def check(config, tree):
      self.assertCountEqual(
          [f.name for f in dataclasses.fields(config)], list(tree))
      for name, value in tree.items():
        if isinstance(value, dict):
          check(getattr(config, name), value)
        else:
          self.assertIn(type(value), (int, float, str, bool, type(None)), name)

    check(TrainConfig(), to_config_dict(TrainConfig()).to_dict())

  def test_none_can_be_overridden_with_the_right_type_only(self):
    tree = to_config_dict(TrainConfig())
    tree.objective.epsilon_high = 0.3
    tree.objective.scale_rewards = "none"
    tree.optimizer.max_grad_norm = None
    config = from_config_dict(TrainConfig, tree)
    self.assertEqual(config.objective.epsilon_high, 0.3)
    self.assertEqual(config.objective.reward_scale, "none")
    self.assertIsNone(config.optimizer.max_grad_norm)
    tree = to_config_dict(TrainConfig())
    with self.assertRaises(TypeError):
      tree.objective.epsilon_high = "wide"
    with self.assertRaises(TypeError):
      tree.total_steps = 1.5
    with self.assertRaises(AttributeError):
      tree.lock()
      tree.total_step = 1


class FromConfigDictTest(parameterized.TestCase):

  @parameterized.parameters(
      ({"stps": 1}, "config.stps: no such key; did you mean total_steps"),
      ({"rollout": {"num_generation": 1}}, "config.rollout.num_generation: no "
       "such key; did you mean num_generations"),
      ({"optimizer": {"lr": 1.0}}, "config.optimizer.lr: no such key; did you "
       "mean learning_rate"),
      ({"data": {"environment": {"levl": "x"}}},
       "config.data.environment.levl: no such key; did you mean level"),
      # In another group, or below a group that is misspelled.
      ({"learning_rate": 1.0}, "config.learning_rate: no such key; did you mean "
       "config.optimizer.learning_rate"),
      ({"rolout": {"top_p": 1.0}}, "config.rolout: no such key; did you mean "
       "rollout"),
      ({"total_steps": {"max": 1}}, "config.total_steps.max: no such key; did "
       "you mean config.total_steps"),
      ({"optimizer": 3}, "config.optimizer: expected a group of keys, found 3"),
      ({"total_steps": "3"}, "config.total_steps='3': expected int"),
      ({"total_steps": 3.0}, "config.total_steps=3.0: expected int"),
      ({"total_steps": True}, "config.total_steps=True: expected int"),
      ({"with_entropy": 1}, "config.with_entropy=1: expected bool"),
      ({"total_steps": None}, "config.total_steps=None: expected int"),
      ({"optimizer": {"learning_rate": "1"}},
       "config.optimizer.learning_rate='1': expected float"),
      ({"data": {"rows": ["a"]}}, r"config.data.rows=\['a'\]: expected str"),
      ({"data": {"environment": {"noise": 2.0}}},
       "config.data.environment.noise=2.0: expected between 0 and 1"),
      ({"objective": {"loss_type": "ppo"}},
       "config.objective.loss_type='ppo': expected one of grpo"),
      ({"schedule": {"name": "rollplex", "share_prefix": False}},
       "config.schedule.name=rollplex with share_prefix=False: "),
      ({"rollout": {"num_generations": 1}},
       "config.rollout.num_generations=1 with "
       "objective.advantage_estimator=grpo: expected at least 2"),
      ({"train_batch_size": 0}, "config.train_batch_size=0: expected at least"))
  def test_errors_name_the_flag(self, raw, message):
    tree = ml_collections.ConfigDict(raw)
    with self.assertRaisesRegex(InputError, f"^{message}") as caught:
      from_config_dict(TrainConfig, tree)
    self.assertNotIn("\n", str(caught.exception))

  def test_whole_numbers_serve_as_floats(self):
    tree = ml_collections.ConfigDict({"optimizer": {"learning_rate": 1}})
    self.assertEqual(
        from_config_dict(TrainConfig, tree).optimizer.learning_rate, 1)


class ChecksTest(parameterized.TestCase):

  @parameterized.parameters(
      (PolicyConfig, {"compute_dtype": "float16"}),
      (EnvironmentConfig, {"image_size": 0}),
      (EnvironmentConfig, {"max_actions": 0}),
      (EnvironmentConfig, {"num_episodes": 0}),
      (EnvironmentConfig, {"eval_episodes": -1}),
      (EnvironmentConfig, {"first_episode": -1}),
      (EnvironmentConfig, {"length_penalty": 1.5}),
      (EnvironmentConfig, {"noise": math.nan}),
      (EnvironmentConfig, {"train_split": "eval"}),
      (DataConfig, {"max_prompt_length": -1}),
      (RolloutConfig, {"num_generations": 0}),
      (RolloutConfig, {"max_completion_length": 0}),
      (RolloutConfig, {"temperature": 0.0}),
      (RolloutConfig, {"temperature": math.nan}),
      (RolloutConfig, {"top_k": -1}),
      (RolloutConfig, {"top_p": 0.0}),
      (RolloutConfig, {"top_p": 1.01}),
      (TrainConfig, {"algorithm": "dpo"}),
      (TrainConfig, {"train_batch_size": 0}),
      (TrainConfig, {"num_iterations": 0}),
      (TrainConfig, {"total_steps": 0}),
      (TrainConfig, {"eval_batch_size": 0}),
      (TrainConfig, {"gen_batch_size": -1}),
      (TrainConfig, {"mini_batch_size": -1}),
      (TrainConfig, {"micro_batch_size": -1}),
      (TrainConfig, {"eval_every": -1}),
      (TrainConfig, {"max_seconds": -1.0}),
      (TrainConfig, {"max_seconds": math.nan}))
  def test_ranges(self, cls, values):
    ((name, value),) = values.items()
    shown = repr(value) if isinstance(value, str) else str(value)
    with self.assertRaisesRegex(InputError, f"^{name}={shown}: expected "):
      cls(**values)

  @parameterized.parameters(
      (dict(gen_batch_size=4), "gen_batch_size=4: .*train_batch_size=8$"),
      (dict(mini_batch_size=3), "mini_batch_size=3: .*train_batch_size=8$"),
      (dict(mini_batch_size=16), "mini_batch_size=16: .*train_batch_size=8$"),
      (dict(micro_batch_size=65), "micro_batch_size=65: .* the 64 samples"),
      (dict(mini_batch_size=2, micro_batch_size=17),
       "micro_batch_size=17: .* the 16 samples"),
      (dict(algorithm="supervised", micro_batch_size=9),
       "micro_batch_size=9: .* the 8 samples"),
      (dict(rollout=RolloutConfig(num_generations=1)),
       "rollout.num_generations=1 with objective.advantage_estimator=grpo: "
       "expected at least 2; a completion's advantage is relative to its "
       "group$"),
      (dict(rollout=RolloutConfig(num_generations=1),
            objective=ObjectiveConfig(advantage_estimator="rloo")),
       "rollout.num_generations=1 with objective.advantage_estimator=rloo: "),
      (dict(objective=ObjectiveConfig(max_completion_length=5)),
       "objective.max_completion_length=5: .*max_completion_length=256$"))
  def test_settings_that_contradict(self, values, message):
    with self.assertRaisesRegex(InputError, f"^{message}") as caught:
      TrainConfig(**values)
    self.assertNotIn("\n", str(caught.exception))

  def test_rows_and_environment_exclude_one_another(self):
    with self.assertRaisesRegex(InputError, "^rows=a: .*level=b$"):
      DataConfig(rows="a", environment=EnvironmentConfig(level="b"))

  def test_mini_batches_hold_whole_groups(self):
    """They count prompts: no setting can cut a group in two."""
    for mini in (1, 2, 3, 6):
      config = TrainConfig(
          rollout=RolloutConfig(num_generations=4), train_batch_size=6,
          mini_batch_size=mini)
      self.assertEqual(config.samples_per_update, 4 * mini)

  def test_sizes(self):
    config = TrainConfig(
        rollout=RolloutConfig(num_generations=4), train_batch_size=6,
        mini_batch_size=2, num_iterations=3, micro_batch_size=8)
    self.assertEqual(config.prompts_per_update, 2)
    self.assertEqual(config.samples_per_update, 8)
    self.assertEqual(config.updates_per_step, 9)
    config = TrainConfig(algorithm="supervised", train_batch_size=6)
    self.assertEqual(config.samples_per_update, 6)
    self.assertEqual(config.updates_per_step, 1)

  def test_advantages_need_no_group_where_there_are_none(self):
    TrainConfig(algorithm="supervised",
                rollout=RolloutConfig(num_generations=1))
    TrainConfig(objective=ObjectiveConfig(
        advantage_estimator=AdvantageEstimator.RLOO))

  def test_every_field_is_described(self):
    """An attribute that the docstring forgets is one nobody finds."""
    for cls in (PolicyConfig, EnvironmentConfig, DataConfig, RolloutConfig,
                TrainConfig):
      for field in dataclasses.fields(cls):
        self.assertRegex(cls.__doc__, rf"\b{field.name}\b", cls.__name__)


if __name__ == "__main__":
  absltest.main()
