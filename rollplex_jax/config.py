"""The configuration of a training run.

Frozen dataclasses say what exists and check it; a launcher holds the same tree
as an `ml_collections.ConfigDict`, so that every key can be set by a flag
(`--config.optimizer.learning_rate=1e-5`) and a wrong key or type is refused.
Hyper-parameter names are those of TRL and verl.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import types
import typing
from typing import Any

import jax
import ml_collections
from ml_collections import config_dict

from rollplex_jax import config_keys
from rollplex_jax.data.settings import DataConfig, check_least
from rollplex_jax.errors import InputError
from rollplex_jax.health import HealthConfig
from rollplex_jax.placement.mesh import MeshConfig
from rollplex_jax.placement.residency import ResidencyConfig
from rollplex_jax.schedule import PrefixSource, ScheduleConfig, ScheduleName
from rollplex_jax.stages.objectives import ObjectiveConfig
from rollplex_jax.stages.update import OptimizerConfig


class Algorithm(enum.StrEnum):
  RL = "rl"
  SUPERVISED = "supervised"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyConfig:
  """The model that is trained.

  Attributes:
    path: checkpoint folder in Hugging Face's layout.
    compute_dtype: of the parameters that programs read; master weights and
      optimizer state are float32 whatever it is.
    freeze_vision_tower: train the text decoder only.
    remat: recompute layers in the backward pass.
  """

  path: str = ""
  compute_dtype: str = "float32"
  freeze_vision_tower: bool = True
  remat: bool = False

  def __post_init__(self):
    if self.compute_dtype not in ("float32", "bfloat16"):
      raise InputError(
          f"compute_dtype={self.compute_dtype!r}: expected float32 or bfloat16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
  """The model that the KL is taken to, if objective.beta is above 0.

  Attributes:
    path: checkpoint folder of the policy's architecture, ordinary or
      compressed; empty for the policy's own initial weights. A frozen vision
      tower is shared with the policy.
  """

  path: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
  """How completions are drawn.

  Attributes:
    num_generations: completions per prompt.
    max_completion_length, temperature, top_k, top_p: as in `SamplingConfig`.
      In episodes of several turns the length is that of one response.
    max_episode_length: most tokens of an episode after its prompt, later
      observations included. One that leaves no room for an answer is not
      shown, and the episode ends there. 0 for no limit.
  """

  num_generations: int = 8
  max_completion_length: int = 256
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  max_episode_length: int = 0

  def __post_init__(self):
    check_least(self, 1, "num_generations", "max_completion_length")
    check_least(self, 0, "top_k", "max_episode_length")
    if 0 < self.max_episode_length < self.max_completion_length:
      raise InputError(
          f"max_episode_length={self.max_episode_length}: expected at least "
          f"max_completion_length={self.max_completion_length}")
    if not 0 < self.top_p <= 1:
      raise InputError(
          f"top_p={self.top_p}: expected more than 0 and at most 1")
    if not 0 < self.temperature < math.inf:
      raise InputError(
          f"temperature={self.temperature}: expected more than 0; samples of a "
          "greedy rollout are all the same")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
  """When a run's state is saved, so that it can go on from there.

  It is saved after so many steps, after so much time, at a new best evaluation
  and at the end, while training goes on. With both `every` and `every_minutes`
  0 nothing is saved, neither then nor on a signal.

  Attributes:
    every: steps between two saves; 0 leaves it to the clock.
    every_minutes: minutes between two saves; 0 leaves it to the steps.
    keep: newest checkpoints to keep.
    keep_best: checkpoints to keep beside them: those of the best evaluations,
      by success or else by reward. 0 doesn't save at evaluations either.
    exit_seconds: how long a signal's save may take before the process ends
      without it.
  """

  every: int = 0
  every_minutes: float = 10.0
  keep: int = 2
  keep_best: int = 1
  exit_seconds: float = 30.0

  def __post_init__(self):
    check_least(self, 0, "every", "every_minutes", "keep_best")
    check_least(self, 1, "keep", "exit_seconds")

  @property
  def enabled(self) -> bool:
    return self.every > 0 or self.every_minutes > 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
  """A run.

  Attributes:
    algorithm: "rl" or "supervised".
    policy, reference, data, rollout, objective, optimizer, mesh, schedule,
      residency, health, checkpoint: see there.
    train_batch_size: prompts (supervised: rows) per step.
    gen_batch_size: prompts that are rolled out per step; those groups whose
      rewards are not all equal are trained on, up to train_batch_size (DAPO's
      dynamic sampling). 0 rolls out train_batch_size and trains on them all.
    mini_batch_size: prompts per update, each with its whole group; 0 for all
      of train_batch_size.
    micro_batch_size: samples per forward and backward pass; 0 for all of a
      mini-batch. Results do not depend on it.
    num_iterations: passes over a rollout's samples.
    total_steps: steps of the run.
    max_seconds: end earlier after so many seconds of training, evaluations
      not counted; 0 for no limit.
    stop_at_success: end at the first evaluation in whose scores the share of
      "success" reaches this; 0 for never.
    eval_every: steps between evaluations, beside the first and last; 0 for
      those two only.
    eval_batch_size: prompts per batch of an evaluation.
    timeline_every: record every so many steps as timeline/step_000010.json, a
      trace, and .png. A recorded step waits after each of its units and
      measures live bytes, so it takes longer. The first step, which compiles,
      isn't recorded unless it is the only one. 0 for never.
    seed: of sampling and of the order of rows.
    with_entropy: measure the policy's entropy over the whole vocabulary, which
      costs a pass over the logits. Without, actor/entropy is estimated from the
      log-probs of the sampled tokens.
  """

  algorithm: Algorithm = Algorithm.RL
  policy: PolicyConfig = dataclasses.field(
      default_factory=PolicyConfig)
  reference: ReferenceConfig = dataclasses.field(
      default_factory=ReferenceConfig)
  data: DataConfig = dataclasses.field(
      default_factory=DataConfig)
  rollout: RolloutConfig = dataclasses.field(
      default_factory=RolloutConfig)
  objective: ObjectiveConfig = dataclasses.field(
      default_factory=ObjectiveConfig)
  optimizer: OptimizerConfig = dataclasses.field(
      default_factory=OptimizerConfig)
  mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
  schedule: ScheduleConfig = dataclasses.field(
      default_factory=lambda: ScheduleConfig(name=ScheduleName.ROLLPLEX))
  residency: ResidencyConfig = dataclasses.field(
      default_factory=ResidencyConfig)
  health: HealthConfig = dataclasses.field(default_factory=HealthConfig)
  checkpoint: CheckpointConfig = dataclasses.field(
      default_factory=CheckpointConfig)
  train_batch_size: int = 8
  gen_batch_size: int = 0
  mini_batch_size: int = 0
  micro_batch_size: int = 0
  num_iterations: int = 1
  total_steps: int = 100
  max_seconds: float = 0.0
  stop_at_success: float = 0.0
  eval_every: int = 0
  eval_batch_size: int = 64
  timeline_every: int = 0
  seed: int = 0
  with_entropy: bool = True

  def __post_init__(self):
    if self.algorithm not in list(Algorithm):
      raise InputError(
          f"algorithm={self.algorithm!r}: expected {' or '.join(Algorithm)}")
    object.__setattr__(self, "algorithm", Algorithm(self.algorithm))
    check_least(self, 1, "train_batch_size", "num_iterations", "total_steps",
                 "eval_batch_size")
    check_least(self, 0, "gen_batch_size", "mini_batch_size",
                 "micro_batch_size", "eval_every", "timeline_every",
                 "max_seconds")
    if not 0 <= self.stop_at_success <= 1:
      raise InputError(
          f"stop_at_success={self.stop_at_success}: expected 0 to 1")
    if 0 < self.gen_batch_size < self.train_batch_size:
      raise InputError(
          f"gen_batch_size={self.gen_batch_size}: expected at least "
          f"train_batch_size={self.train_batch_size}")
    if self.mini_batch_size and self.train_batch_size % self.mini_batch_size:
      raise InputError(
          f"mini_batch_size={self.mini_batch_size}: expected a divisor of "
          f"train_batch_size={self.train_batch_size}")
    if self.residency != ResidencyConfig():
      unplanned = (
          "algorithm=supervised" if self.algorithm == Algorithm.SUPERVISED else
          "schedule.name=disaggregated"
          if self.schedule.name == ScheduleName.DISAGGREGATED else None)
      if unplanned:
        raise InputError(
            f"residency.budget_gb={self.residency.budget_gb:g}, "
            f"residency.check={self.residency.check} with {unplanned}: expected "
            "neither, for only serial and rollplex steps are planned")
    if self.micro_batch_size > self.samples_per_update:
      raise InputError(
          f"micro_batch_size={self.micro_batch_size}: expected at most the "
          f"{self.samples_per_update} samples of a mini-batch")
    if (self.algorithm == Algorithm.RL
        and self.rollout.num_generations < 2):
      raise InputError(
          f"rollout.num_generations={self.rollout.num_generations} with "
          "objective.advantage_estimator="
          f"{self.objective.advantage_estimator}: expected at least 2; a "
          "completion's advantage is relative to its group")
    # Sharing one length between rollout and loss leaves no room for a mistake.
    if (self.objective.max_completion_length is not None
        and self.objective.max_completion_length
        != self.rollout.max_completion_length):
      raise InputError(
          "objective.max_completion_length="
          f"{self.objective.max_completion_length}: expected "
          "rollout.max_completion_length="
          f"{self.rollout.max_completion_length}")

  @property
  def has_reference(self) -> bool:
    """Whether a reference model is scored."""
    return self.algorithm == Algorithm.RL and self.objective.beta > 0

  @property
  def prompts_per_update(self) -> int:
    return self.mini_batch_size or self.train_batch_size

  @property
  def samples_per_update(self) -> int:
    per_prompt = (self.rollout.num_generations
                  if self.algorithm == Algorithm.RL else 1)
    return self.prompts_per_update * per_prompt

  @property
  def updates_per_step(self) -> int:
    return (self.num_iterations * self.train_batch_size
            // self.prompts_per_update)


def check_mesh(config: TrainConfig, parts: int) -> None:
  """Checks what a mesh asks of a run, before anything runs.

  Args:
    config: of the run.
    parts: into how many the mesh splits a batch.

  Raises:
    InputError: naming both numbers that do not fit.
  """
  mesh, schedule = config.mesh, config.schedule
  for name in ("train_batch_size", "gen_batch_size", "micro_batch_size"):
    if getattr(config, name) % parts:
      raise InputError(f"{name}={getattr(config, name)}: expected a multiple "
                       f"of the {parts} parts into which the mesh splits a "
                       "batch")
  if config.algorithm == Algorithm.SUPERVISED:
    return
  if mesh.shape.size > 1 and schedule.name == ScheduleName.DISAGGREGATED:
    raise InputError(
        f"schedule.name=disaggregated with a mesh of {mesh.shape.size} devices: "
        "each pool is one device; expected no mesh")
  if jax.process_count() > 1 and schedule.name == ScheduleName.DISAGGREGATED:
    raise InputError(
        f"schedule.name=disaggregated in {jax.process_count()} processes: "
        "expected one, whose devices the pools are")
  if (mesh.training_tp != mesh.rollout_tp
      and schedule.name == ScheduleName.ROLLPLEX
      and schedule.prefix_source == PrefixSource.ROLLOUT):
    raise InputError(
        f"schedule.prefix_source=rollout with mesh.training_tp="
        f"{mesh.training_tp} and mesh.rollout_tp={mesh.rollout_tp}: the "
        "rollout's prefixes lie otherwise than training's; expected "
        "schedule.prefix_source=window")


def check_turns(config: TrainConfig, max_turns: int) -> None:
  """Checks what episodes of several turns ask of a run.

  Args:
    config: of the run.
    max_turns: of its task.

  Raises:
    InputError: naming what does not go with them.
  """
  if max_turns == 1:
    return
  if (config.algorithm == Algorithm.RL
      and config.schedule.name == ScheduleName.DISAGGREGATED):
    raise InputError(
        f"schedule.name=disaggregated with episodes of {max_turns} turns: "
        "expected serial or rollplex")
  if jax.process_count() > 1:
    raise InputError(
        f"episodes of {max_turns} turns in {jax.process_count()} processes: "
        "expected one")


def to_config_dict(config: Any) -> ml_collections.ConfigDict:
  """The tree of a config dataclass as a ConfigDict whose keys are fixed."""
  out = ml_collections.ConfigDict()
  hints = typing.get_type_hints(type(config))
  for field in dataclasses.fields(config):
    value = getattr(config, field.name)
    if dataclasses.is_dataclass(value):
      out[field.name] = to_config_dict(value)
    elif value is None:
      out[field.name] = config_dict.placeholder(
          _plain_type(hints[field.name]))
    else:
      out[field.name] = str(value) if isinstance(value, enum.Enum) else value
  return out


def from_config_dict(cls: type, raw: ml_collections.ConfigDict,
                     where: str = "config") -> Any:
  """Builds a config dataclass from a ConfigDict.

  Raises:
    InputError: for a key that does not exist, naming the nearest one, or a value
      out of range.
  """
  known = set(config_keys.key_paths(cls))
  for path in _paths(raw):
    if path not in known:
      raise InputError(config_keys.no_such_key(cls, path, where))
  return _build(cls, raw, where)


def _paths(raw: ml_collections.ConfigDict) -> list[str]:
  """Dotted paths of all keys, in the order of their names."""
  out = []
  for name in sorted(raw.keys()):
    out.append(name)
    if isinstance(raw[name], ml_collections.ConfigDict):
      out += [f"{name}.{path}" for path in _paths(raw[name])]
  return out


def _build(cls: type, raw: ml_collections.ConfigDict, where: str) -> Any:
  hints = typing.get_type_hints(cls)
  values = {}
  for name in raw.keys():
    value = raw[name]
    if dataclasses.is_dataclass(hints[name]):
      if not isinstance(value, ml_collections.ConfigDict):
        raise InputError(
            f"{where}.{name}: expected a group of keys, found {value!r}")
      value = _build(hints[name], value, f"{where}.{name}")
    else:
      _check_type(value, hints[name], f"{where}.{name}")
    values[name] = value
  try:
    return cls(**values)
  except InputError as error:
    raise InputError(f"{where}.{error}") from error


def _plain_type(hint: Any) -> type:
  """The type a key holds when it is not None; enums are given as text."""
  if isinstance(hint, types.UnionType):
    hint = next(t for t in typing.get_args(hint) if t is not type(None))
  hint = typing.get_origin(hint) or hint
  return str if issubclass(hint, enum.Enum) else hint


def _check_type(value: Any, hint: Any, where: str) -> None:
  """A file may hold any value; flags were checked when they were parsed."""
  if value is None and isinstance(hint, types.UnionType):
    return
  expected = _plain_type(hint)
  # True counts as a number to Python, and a whole number is a float here.
  allowed = (int, float) if expected is float else expected
  if (not isinstance(value, allowed)
      or (isinstance(value, bool) and expected is not bool)):
    raise InputError(f"{where}={value!r}: expected {expected.__name__}")
