"""A step's programs with abstract arguments, as the executor calls them.

Every buffer is a tree of shapes with shardings; a program's arguments are the
same trees of which the planner adds up the bytes of a phase.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from rollplex_jax import programs
from rollplex_jax.capacity.case import Case
from rollplex_jax.data.batching import bucket
from rollplex_jax.models import vlm
from rollplex_jax.models.inputs import PromptInputs, VisionInputs
from rollplex_jax.models.weights import is_weight
from rollplex_jax.placement.sharding import Placement
from rollplex_jax.schedule import PrefixSource
from rollplex_jax.stages import prefix_units, update
from rollplex_jax.stages import window as window_lib
from rollplex_jax.stages.objectives import Normalizers, ObjectiveConfig
from rollplex_jax.stages.prefix import SavePolicy
from rollplex_jax.stages.response import GroupResponses
from rollplex_jax.stages.sampling import SamplingConfig

_COMPUTE = jnp.bfloat16
_TEMPERATURE = 1.0
# Layers are recomputed in backward passes, and entropy is measured.
_REMAT_ENTROPY = (True, True)


@functools.cache
def _optimizer():
  return update.make_optimizer(update.OptimizerConfig())


class Programs:
  """Buffers and programs of a case. Allocates and compiles nothing."""

  def __init__(self, case: Case):
    self.case = case
    self.config = case.config
    self.places = case.places()
    self.training = self.places and self.places.training
    self.rollout = self.places and self.places.rollout
    self.declared = vlm.weights(self.config)
    w = case.workload
    self._b, self._g, self._p = w.num_prompts, w.num_generations, case.length
    self._r = w.response_length
    self._block = case.block
    self.sampling = SamplingConfig(
        max_completion_length=self._r,
        eos_token_ids=self.config.eos_token_ids or (0,),
        banned_token_ids=self.config.vision_token_ids)
    self.objective = ObjectiveConfig(
        loss_type="dapo", beta=0.001 if case.has_reference else 0.0)

  # -- buffers: trees of shapes with shardings -------------------------------

  @functools.cached_property
  def weights(self):
    """What training reads: {"text": ..., "visual": ...}."""
    return self._tree(
        self.declared, _COMPUTE,
        self.places and self.places.compute_weights(self.declared))

  @functools.cached_property
  def rollout_weights(self):
    """What the rollout reads of the decoder."""
    if self.places is None or not self.places.moves_weights:
      return self.weights["text"]
    text = self.declared["text"]
    return self._tree(text, _COMPUTE, self.rollout.weights(text))

  @functools.cached_property
  def master(self):
    """float32 weights of the trained decoder, over all devices."""
    declared = {"text": self.declared["text"]}
    if self.training is None:
      return self._tree(declared, jnp.float32, None)
    return self._tree(declared, jnp.float32, self.training.master(declared))

  @functools.cached_property
  def state(self):
    """Master weights, moments and counts."""
    state = jax.eval_shape(
        lambda p: update.create_state(p, _optimizer()), self.master)
    by_shape = jax.tree.structure(self.master)

    def place(node):
      if jax.tree.structure(node) == by_shape:
        return self.master
      return node

    return jax.tree.map(
        place, state, is_leaf=lambda n: jax.tree.structure(n) == by_shape)

  @property
  def grads(self):
    """float32, laid out like the master weights."""
    return self.master

  def kv(self, rows: int, place: Placement | None, dtype=_COMPUTE,
         length: int | None = None):
    """Prefix keys and values of some prompts."""
    t, p = self.config.text, length or self._p
    k, h = t.num_key_value_heads, t.head_dim
    make = lambda *shape: self._constrained(
        shape, dtype, place, "batch", "kv_heads", None, None)
    return [(make(rows, k, h, p), make(rows, k, p, h))
            for _ in range(t.num_hidden_layers)]

  def saved(self, rows: int, place: Placement | None):
    """Layer inputs of some prompts."""
    t = self.config.text
    return [self._constrained((rows, self._p, t.hidden_size), _COMPUTE, place,
                              "batch", None, "saved")
            for _ in range(t.num_hidden_layers)]

  @property
  def num_features(self) -> int:
    return (0 if self.case.workload.video is None else
            self._vision_size // self.config.vision.spatial_merge_size ** 2
            * self.case.parts)

  def features(self, place: Placement | None):
    """Merged features of all prompts, or None."""
    if not self.num_features:
      return None
    return self._constrained(
        (self.num_features, self.config.text.hidden_size), _COMPUTE, place,
        "batch", None)

  def prompts(self, rows: int) -> PromptInputs:
    """Host arrays, which the program places."""
    i = lambda *shape: self._host(shape, jnp.int32)
    p = self._p
    return PromptInputs(
        token_ids=i(rows, p), lengths=i(rows), positions=i(3, rows, p),
        feature_index=i(rows, p), next_position=i(rows), row_ids=i(rows))

  @functools.cached_property
  def _vision_size(self) -> int:
    """Patches of one part of the batch."""
    _, h, w = self.case.workload.video
    return self._vision_bucket(self._frames * h * w)

  @property
  def _frames(self) -> int:
    """Pairs of frames of one part of the batch."""
    return self._b // self.case.parts * self.case.workload.video[0]

  def _vision_bucket(self, size: int) -> int:
    """As batches of media are padded."""
    unit = self.config.vision.spatial_merge_size ** 2
    return unit * bucket(-(-size // unit))

  def vision_inputs(self) -> VisionInputs:
    """Packed patches of all prompts, in as many parts as the batch has."""
    v, (_, h, w) = self.config.vision, self.case.workload.video
    m, units = v.spatial_merge_size, v.window_units
    n, round_up = self._vision_size, self._vision_bucket
    frames = self._frames
    windows = frames * -(-h // m // units) * -(-w // m // units)
    slots = min((units * m) ** 2, h * w)
    parts = (self.case.parts,) if self.case.parts > 1 else ()
    make = lambda dtype, *shape: self._host((*parts, *shape), dtype)
    return VisionInputs(
        patches=make(jnp.float32, n, v.patch_dim),
        rows_columns=make(jnp.int32, n, 2),
        window_index=make(jnp.int32, round_up(windows), slots),
        window_slot=make(jnp.int32, n),
        frame_index=make(jnp.int32, round_up(frames), round_up(h * w)),
        frame_slot=make(jnp.int32, n))

  def artifacts(self, place: Placement | None):
    """What the decode window writes."""
    c = self.case
    policy = reference = None
    if c.prefix_source == PrefixSource.WINDOW:
      policy = prefix_units.Buffers(
          self.kv(self._b, place), self.saved(self._b, place)
          if c.save != SavePolicy.NOTHING else None)
    if c.has_reference:
      reference = prefix_units.Buffers(self.kv(self._b, place))
    return window_lib.Artifacts(policy=policy, reference=reference)

  def kv_grads(self):
    """float32 gradients of one block's keys and values."""
    return self.kv(self._block[0], self.training, jnp.float32)

  # -- programs: (jitted function, arguments, keyword arguments) -------------

  def program(self, name: str) -> tuple[Any, tuple, dict]:
    """A program by the name of its stage."""
    return getattr(self, f"_{name}")()

  def _compute_copy(self):
    shardings = jax.tree.map(
        lambda a: a.sharding, {"text": self.weights["text"]})

    def cast(params):
      return jax.tree.map(lambda a: a.astype(_COMPUTE), params)

    return jax.jit(cast, out_shardings=shardings), (self.master,), {}

  def _vision(self):
    return programs.vision, (
        {"visual": self.weights["visual"]}, self.config,
        self.vision_inputs()), dict(place=self.rollout)

  def _prefill(self):
    from_rollout = self.case.prefix_source == PrefixSource.ROLLOUT
    save = self.case.save if from_rollout else SavePolicy.NOTHING
    return self._prefix(self._b, self.rollout_weights, save, self.rollout)

  def _plain_prefill(self):
    """A rollout's that no training reads."""
    return self._prefix(
        self._b, self.rollout_weights, SavePolicy.NOTHING, self.rollout)

  def _prefix(self, rows, text, save, place):
    return programs.prefix_forward, (
        text, self.config, self.prompts(rows), self.features(place), save,
    ), dict(place=place)

  def _decode(self):
    return programs.decode, (
        {"text": self.rollout_weights}, self.config, self.sampling,
        self.prompts(self._b), self.kv(self._b, self.rollout), self._keys(),
    ), dict(place=self.rollout)

  def _window(self):
    artifacts, features = self.artifacts(self.rollout), self.features(
        self.rollout)
    unit = window_lib.UnitShape.of_tokens(self.case.window_chunk, self._p)
    on_gpu = self.case.spec.kind == "cuda"
    if on_gpu:  # As the executor has it there.
      unit = dataclasses.replace(unit, key_extents=1)
    return programs.decode_window, (
        self.rollout_weights,
        self.rollout_weights if self.case.has_reference else None,
        self.config, self.sampling,
        window_lib.WindowConfig(unit=unit, streams=on_gpu),
        self.prompts(self._b), self.kv(self._b, self.rollout), features,
        features, self._keys(), artifacts), dict(place=self.rollout)

  def _reshard(self):
    return programs.reshard_artifacts, (self.artifacts(self.rollout),), dict(
        place=self.training)

  def _score(self):
    b, _ = self._block
    return programs.score_suffix, (
        self.weights, self.config, self.prompts(b),
        self.kv(self._b, self.training), self._rows(), self._responses(),
        _TEMPERATURE), dict(place=self.training)

  def _score_full(self):
    b, _ = self._full_block
    return programs.score_full, (
        self.weights, self.config, self.prompts(b),
        self.features(self.training), self._responses(self._full_block),
        _TEMPERATURE), dict(place=self.training)

  def _gradient(self):
    whole = self.kv(self._b, self.training)
    return programs.gradient_suffix, (
        {"text": self.weights["text"]}, {"visual": self.weights.get("visual")},
        {"text": self.grads["text"]}, self.kv_grads(), None, self.config,
        self.objective, self.prompts(self._block[0]), whole, self._rows(),
        self._responses(), *self._targets(self._block), _TEMPERATURE, *_REMAT_ENTROPY,
    ), dict(place=self.training)

  def _gradient_full(self):
    block = self._full_block
    return programs.gradient_full, (
        {"text": self.weights["text"]}, {"visual": self.weights.get("visual")},
        self.grads, self.config, self.objective, self.prompts(block[0]),
        self.features(self.training), None, self._responses(block),
        *self._targets(block), _TEMPERATURE, *_REMAT_ENTROPY,
    ), dict(place=self.training)

  def _prefix_backward(self):
    """One block's, out of what was saved for all prompts."""
    b = self._block[0]
    saved, rows = None, self._rows()
    if self.case.save in (SavePolicy.LAYER_INPUTS, SavePolicy.OFFLOAD):
      saved = self.saved(self._b, self.training)
    elif self.case.save == SavePolicy.NOTHING:
      rows = None
    return programs.prefix_backward, (
        self.weights["text"], self.grads["text"], None, self.config,
        self.prompts(b), self.features(self.training), self.case.save, saved,
        self.kv_grads(), rows), dict(place=self.training)

  def _update(self):
    dtype = _COMPUTE if self.training is None else jnp.float32
    return update.update_program, (
        self.state, self.grads, _optimizer(), np.dtype(dtype)), {}

  # -- the rest ---------------------------------------------------------------

  @property
  def _full_block(self) -> tuple[int, int]:
    """Whole sequences are long: one of each part at a time."""
    return self.case.parts, 1

  def _responses(self, block=None) -> GroupResponses:
    b, g = block or self._block
    return GroupResponses(self._host((b, g, self._r), jnp.int32),
                          self._host((b, g), jnp.int32))

  def _targets(self, block):
    """Advantages, old and reference log-probs, normalizers."""
    b, g = block
    f = lambda *shape: self._host(shape, jnp.float32)
    reference = f(b, g, self._r) if self.case.has_reference else None
    return f(b, g), None, reference, Normalizers(
        num_tokens=f(), num_sequences=f())

  def _rows(self):
    return self._host((self._block[0],), jnp.int32)

  def _keys(self):
    return self._host((self._b, self._g),
                      jax.eval_shape(lambda: jax.random.key(0)).dtype)

  def _host(self, shape, dtype):
    """An array that comes from the host; the program says where it goes."""
    return jax.ShapeDtypeStruct(shape, dtype)

  def _constrained(self, shape, dtype, place: Placement | None, *logical):
    """As `sharding.constrain` leaves an array."""
    if place is None:
      return jax.ShapeDtypeStruct(shape, dtype, sharding=self._single)
    rules, mesh = place.text, place.mesh
    parts = []
    for size, axes in zip(shape, rules.axes(*logical)):
      ways = int(np.prod([mesh.shape[axis] for axis in axes], dtype=np.int64))
      parts.append((axes or None) if size % ways == 0 else None)
    return jax.ShapeDtypeStruct(
        shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*parts)))

  @functools.cached_property
  def _single(self):
    return jax.sharding.SingleDeviceSharding(self.case.devices[0])

  def _tree(self, declared, dtype, shardings):
    if shardings is None:
      return jax.tree.map(lambda w: jax.ShapeDtypeStruct(
          w.shape, dtype, sharding=self._single), declared, is_leaf=is_weight)
    return jax.tree.map(
        lambda w, s: jax.ShapeDtypeStruct(w.shape, dtype, sharding=s),
        declared, shardings, is_leaf=is_weight)


def tree_bytes(tree: Any) -> int:
  """Bytes of a tree of shapes on one device."""
  return sum(_bytes(a, a.shape if a.sharding is None
                    else a.sharding.shard_shape(a.shape))
             for a in jax.tree.leaves(tree))


def whole_bytes(tree: Any) -> int:
  """Bytes of a tree of shapes, wherever they are."""
  return sum(_bytes(a, a.shape) for a in jax.tree.leaves(tree))


def _bytes(leaf: Any, shape: tuple[int, ...]) -> int:
  # A key is two words.
  size = 8 if jax.dtypes.issubdtype(
      leaf.dtype, jax.dtypes.prng_key) else leaf.dtype.itemsize
  return int(np.prod(shape, dtype=np.int64)) * size
