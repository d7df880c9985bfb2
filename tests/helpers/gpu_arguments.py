"""Abstract arguments of programs, as they lie on a mesh of H100s."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from legolm_jax.array import LegoArray
from rollplex_jax.models import decoder, vlm
from rollplex_jax.models.config import ModelConfig
from rollplex_jax.models.inputs import PromptInputs
from rollplex_jax.models.weights import is_weight
from rollplex_jax.placement import sharding
from rollplex_jax.placement.sharding import MeshShape, Placement
from tests.helpers import gpu_program


class Arguments:
  """Of a model without a tower, for some prompts of equal padded length."""

  def __init__(self, config: ModelConfig, shape: MeshShape, num_prompts: int,
               length: int):
    rules = sharding.make_rules(
        shape, vlm.axis_sizes(config)["text"], sharding.TENSOR_AXES,
        what="test")
    mesh = gpu_program.h100_mesh(
        [getattr(shape, axis) for axis in sharding.AXES], sharding.AXES)
    self._config, self._prompts, self._length = config, num_prompts, length
    self._shape, self._rules = shape, rules
    self._place = Placement(mesh, rules, rules)
    self.place = None if shape.size == 1 else self._place

  def ways(self, axis: str) -> int:
    """Into how many parts a logical axis is split."""
    return self._shape.ways(getattr(self._rules, axis))

  def array(self, *shape, dtype=jnp.float32, axes=("batch",)):
    return jax.ShapeDtypeStruct(
        shape, dtype,
        sharding=self._sharding(*axes) if shape else self._sharding())

  def text(self, dtype=jnp.bfloat16):
    """Weights; float32 ones as master weights lie."""
    place = self._place.master if dtype == jnp.float32 else (
        self._place.storage)
    declared = {"text": decoder.weights(self._config.text)}
    return jax.tree.map(
        lambda w, s: jax.ShapeDtypeStruct(w.shape, dtype, sharding=s),
        declared, place(declared), is_leaf=is_weight)["text"]

  def compressed(self, array: LegoArray, *axes: str) -> LegoArray:
    """An abstract LegoArray where a weight of these axes would lie."""
    return jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype,
            sharding=NamedSharding(self._place.mesh, spec)),
        array, array.partition_specs(self._rules.spec(*axes)))

  def prompts(self):
    b, p = self._prompts, self._length
    ints = functools.partial(self.array, dtype=jnp.int32)
    return PromptInputs(
        token_ids=ints(b, p), lengths=ints(b),
        positions=ints(3, b, p, axes=(None, "batch")),
        feature_index=ints(b, p), next_position=ints(b), row_ids=ints(b))

  def kv(self, dtype=jnp.bfloat16):
    """Keys and values of the prompts, by layer."""
    t, b, p = self._config.text, self._prompts, self._length
    k, h = t.num_key_value_heads, t.head_dim
    of = functools.partial(
        self.array, dtype=dtype, axes=("batch", "kv_heads", None, None))
    return [(of(b, k, h, p), of(b, k, p, h))] * t.num_hidden_layers

  def keys(self, *shape):
    """Typed PRNG keys."""
    return self.array(
        *shape, dtype=jax.eval_shape(lambda: jax.random.key(0)).dtype)

  def _sharding(self, *axes: str | None) -> NamedSharding:
    spec = self._rules.spec(*axes) if axes else PartitionSpec()
    return NamedSharding(self._place.mesh, spec)
