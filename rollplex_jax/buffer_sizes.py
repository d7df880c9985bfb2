"""Bytes on each device of what a training step holds, from shapes and rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from rollplex_jax import prefix_budget
from rollplex_jax.data import batching
from rollplex_jax.models import vlm
from rollplex_jax.models.config import ModelConfig
from rollplex_jax.models.weights import Weight, is_weight
from rollplex_jax.placement.buffers import shard_bytes
from rollplex_jax.placement.sharding import (
  AXES,
  MeshShape,
  Rules,
  fully_sharded,
)
from rollplex_jax.samples import SHORT_TURN, Groups, micro_batches
from rollplex_jax.stages.prefix import SavePolicy

_FSDP = Rules(batch=("data", "fsdp"), embed=("fsdp",))
# What AdamW keeps of each parameter.
_MOMENTS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
  """The shapes of a step.

  Attributes:
    num_prompts: B.
    prompt_length: P, to which prompts are padded.
    num_generations: G completions of each.
    response_length: R, the longest; of one turn.
    max_turns: responses of an episode.
    max_episode_length: most tokens of an episode after its prompt; 0 where
      there is no limit: then observations are taken to be as long as prompts.
    num_features: rows of merged vision features, of all prompts.
    micro_batch_size: samples per pass; 0 for all of an update.
    prompts_per_update: 0 for all.
    updates: of a step.
    parts: into how many a batch is split over devices.
  """

  num_prompts: int
  prompt_length: int
  num_generations: int
  response_length: int
  num_features: int = 0
  micro_batch_size: int = 0
  prompts_per_update: int = 0
  updates: int = 1
  parts: int = 1
  max_turns: int = 1
  max_episode_length: int = 0

  @property
  def history_length(self) -> int:
    """What later turns of an episode may have before them, in tokens."""
    if self.max_turns == 1:
      return 0
    # Each turn has a stretch as long as the longest of its samples needs.
    width = self.response_length + self.prompt_length
    if self.max_episode_length:
      width = min(width, self.max_episode_length)
    return (self.max_turns - 1) * batching.bucket(width, SHORT_TURN)

  @functools.cached_property
  def training_passes(self) -> tuple[tuple[tuple[int, int], ...], int]:
    """(block, part) of an update's micro-batches, and prompts of a block."""
    return self._passes(self.prompts_per_update or self.num_prompts)

  @functools.cached_property
  def scoring_passes(self) -> tuple[tuple[tuple[int, int], ...], int]:
    """The same for scoring, which takes all samples."""
    return self._passes(self.num_prompts)

  def _passes(self, k):
    g = self.num_generations
    # A mini-batch has as many prompts of each part as can be.
    rows = np.arange(self.num_prompts).reshape(self.parts, -1)
    micro = micro_batches(Groups(
        rows=rows[:, :-(-k // self.parts)].reshape(-1)[:k].astype(np.int32),
        token_ids=np.zeros((k, g, 1), np.int32),
        lengths=np.ones((k, g), np.int32),
        advantages=np.zeros((k, g), np.float32)), self.micro_batch_size,
                          parts=self.parts, num_rows=self.num_prompts)
    return tuple((m.block, m.part) for m in micro), len(micro[0].rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageRules:
  """Rules of the decoder and of the tower; a `Placement` will do as well."""

  text: Rules = _FSDP
  vision: Rules = _FSDP


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
  """What the bytes of a step depend on beside schedule and workload.

  Attributes:
    config: of the policy.
    dtype: of compute parameters and activations.
    mesh: its shape; by default one device.
    training: how training and the reference lie on it.
    rollout: the same of the rollout.
    storage: how the decoder's weights lie, if not as training has them.
    reference_bits: of a compressed reference: by a tensor's name the bits that
      each of its weights takes; what is not in it is of `dtype`.
    rebuilt_bytes: per device, of weights that the rollout needs in a layout
      that no view of the training's gives.
    temporaries: stage, or "update" -> bytes per device that its program takes
      beside its arguments and results, where they are known.
  """

  config: ModelConfig
  dtype: str = "bfloat16"
  mesh: MeshShape = dataclasses.field(default_factory=MeshShape)
  training: StageRules = dataclasses.field(default_factory=StageRules)
  rollout: StageRules = dataclasses.field(default_factory=StageRules)
  storage: StageRules | None = None
  reference_bits: Mapping[str, float] = dataclasses.field(default_factory=dict)
  rebuilt_bytes: int = 0
  temporaries: Mapping[str, int] = dataclasses.field(default_factory=dict)


class Sizes:
  """Bytes per device of each kind of buffer."""

  def __init__(self, setup: Setup, work: Workload, trained: Sequence[str]):
    """Computes nothing yet.

    Args:
      setup: the model and how it lies on the devices.
      work: the shapes of a step.
      trained: the parts that learn, of "text" and "visual".
    """
    self.setup = setup
    self.work = work
    self._trained = tuple(trained)
    self._dtype = jnp.dtype(setup.dtype)
    self._axes = {name: getattr(setup.mesh, name) for name in AXES}
    self._declared = vlm.weights(setup.config)

  # -- weights ---------------------------------------------------------------

  def weights(self, *parts: str) -> int:
    """Compute parameters of "text" or "visual"; 0 where there are none."""
    return sum(
        shard_bytes(w.shape, self._dtype, rules.spec(*w.axes), self._axes)
        for rules, w in self._leaves(parts, self.setup.storage))

  def reference(self, *parts: str) -> int:
    """The same of a reference model, which may be compressed."""
    total = 0
    for rules, w in self._leaves(parts, self.setup.storage):
      bits = self.setup.reference_bits.get(
          w.name, 8 * self._dtype.itemsize)
      count = shard_bytes(w.shape, jnp.uint8, rules.spec(*w.axes), self._axes)
      total += math.ceil(count * bits / 8)
    return total

  def gradients(self) -> int:
    """Of the trained parts: float32, split over all devices."""
    return sum(self._float32(rules, w)
               for rules, w in self._leaves(self._trained))

  def optimizer(self) -> int:
    """Moments, and master weights that aren't the compute parameters."""
    total = 0
    stored = self._leaves(self._trained, self.setup.storage)
    for (rules, w), (own, _) in zip(self._leaves(self._trained), stored):
      shared = self._dtype == jnp.float32 and (
          self.setup.mesh.size == 1
          or own.spec(*w.axes) == self._full_spec(rules, w))
      total += self._float32(rules, w) * (_MOMENTS + (not shared))
    return total

  def _leaves(self, parts, storage=None) -> Iterator[tuple[Rules, Weight]]:
    for part in parts:
      rules = self.setup.training.vision
      if part == "text":
        rules = (storage or self.setup.training).text
      for w in jax.tree.leaves(
          self._declared.get(part, ()), is_leaf=is_weight):
        yield rules, w

  def _full_spec(self, rules: Rules, w: Weight) -> PartitionSpec:
    return fully_sharded(self.setup.mesh, rules, w.shape, w.axes)

  def _float32(self, rules: Rules, w: Weight) -> int:
    return shard_bytes(
        w.shape, jnp.float32, self._full_spec(rules, w), self._axes)

  # -- artefacts -------------------------------------------------------------

  def kv(self, rows: int, *, rollout: bool = False, dtype=None) -> int:
    """Keys and values of prefixes, [rows, K, h, P] twice per layer."""
    return self._kv(rows, self.work.prompt_length, rollout, dtype)

  def cache(self) -> int:
    """Keys and values of responses while they are decoded."""
    return self._kv(self.work.num_prompts * self.work.num_generations,
                    self.work.response_length, True, None)

  def history(self) -> int:
    """Keys and values of earlier turns, during a rollout."""
    return self._kv(self.work.num_prompts * self.work.num_generations,
                    self.work.history_length, True, None)

  def _kv(self, rows, length, rollout, dtype):
    text = self.setup.config.text
    rules = (self.setup.rollout if rollout else self.setup.training).text
    one = shard_bytes(
        (rows, text.num_key_value_heads, text.head_dim, length),
        dtype or self._dtype, rules.spec("batch", "kv_heads", None, None),
        self._axes)
    return 2 * text.num_hidden_layers * one

  def saved(self, rows: int, save: SavePolicy) -> int:
    """What is saved of prefixes; of layer inputs wherever they are."""
    text, length = self.setup.config.text, self.work.prompt_length
    if save == SavePolicy.ACTIVATIONS:
      ways = math.prod(
          self._axes[a] for a in self.setup.training.text.batch)
      total = prefix_budget.saved_bytes(
          self.setup.config, (rows, length), self.work.num_features,
          self._dtype, save)
      return total if rows % ways else total // ways
    return text.num_hidden_layers * shard_bytes(
        (rows, length, text.hidden_size), self._dtype,
        self.setup.training.text.spec("batch", None, "saved"), self._axes)

  def features(self, *, rollout: bool = False, dtype=None) -> int:
    """Merged vision features, [f, D]."""
    rules = (self.setup.rollout if rollout else self.setup.training).text
    return shard_bytes(
        (self.work.num_features, self.setup.config.text.hidden_size),
        dtype or self._dtype, rules.spec("batch", None), self._axes)

  def patches(self, *, rollout: bool = False) -> int:
    """The float32 patches of all features, which a vision unit is given."""
    vision = self.setup.config.vision
    if vision is None:
      return 0
    rules = self.setup.rollout if rollout else self.setup.training
    return shard_bytes(
        (self.work.num_features * vision.spatial_merge_size ** 2,
         vision.patch_dim), jnp.float32,
        rules.vision.spec("batch", None), self._axes)

  def completions(self) -> int:
    """int32 tokens and float32 log-probs [B, G, R]."""
    w = self.work
    return shard_bytes(
        (w.num_prompts, w.num_generations, w.response_length, 2), jnp.float32,
        self.setup.rollout.text.spec("batch", None, None, None), self._axes)
