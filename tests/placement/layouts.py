"""A small decoder's weights under pairs of placements on 8 devices."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from rollplex_jax.models import decoder
from rollplex_jax.models.config import TextConfig
from rollplex_jax.placement.layout import plan_layout
from rollplex_jax.placement.sharding import (
    MeshShape,
    Placement,
    Rules,
    make_rules,
)

MAJOR = ("tp_major",)
# Mesh shapes of 8 devices. Tensor parallelism of 4 or 8; of 2 or 8; with data
# parallelism; with FSDP.
BY_2 = MeshShape(tp_major=4, tp_minor=2)
BY_4 = MeshShape(tp_major=2, tp_minor=4)
DATA = MeshShape(data=2, tp_major=2, tp_minor=2)
FSDP = MeshShape(fsdp=2, tp_major=2, tp_minor=2)
SPLIT = {"embed", "head", *(f"layers/{i}/{name}" for i in range(2) for name in (
    "q", "q_bias", "o", "gate", "up", "down"))}
KEYS = {f"layers/{i}/{name}" for i in range(2) for name in (
    "k", "k_bias", "v", "v_bias")}
NORMS = {"norm", *(f"layers/{i}/{name}" for i in range(2)
                   for name in ("attn_norm", "mlp_norm"))}


@functools.cache
def text_config(kv_heads=2, head_dim=16, vocab=264):
  return TextConfig(
      vocab_size=vocab, hidden_size=8 * head_dim, intermediate_size=192,
      num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=kv_heads)


def place(shape, axes, config, *, gathered=False):
  """The decoder's placement; `gathered` does without FSDP."""
  rules = make_rules(shape, {
      "vocab": config.vocab_size, "heads": config.num_attention_heads,
      "kv_heads": config.num_key_value_heads, "mlp": config.intermediate_size,
      "embed": config.hidden_size}, axes, what="decoder")
  if gathered:
    rules = dataclasses.replace(rules, embed=())
  return Placement(shape.make(), rules, Rules())


def plan(shape, storage, rollout, *, config=None, dtype=jnp.float32,
         gathered=False, **kwargs):
  config = config or text_config()
  return plan_layout(
      decoder.weights(config), place(shape, storage, config),
      place(shape, rollout, config, gathered=gathered), dtype, **kwargs)


def stored(plan):
  """Random weights as a plan has them stored, in memory of a program."""
  rng = np.random.default_rng(0)
  drawn = plan.tree.unflatten([
      jax.device_put(rng.standard_normal(t.shape).astype(plan.dtype), t.storage)
      for t in plan.tensors])
  return jax.jit(lambda tree: jax.tree.map(lambda x: x / 2, tree))(drawn)


def names(plan, how):
  return {t.name for t in plan.tensors if t.how is how}


def pointers(array):
  return [s.data.unsafe_buffer_pointer() for s in array.addressable_shards]


def assert_equal(tree, want):
  jax.tree.map(lambda a, b: np.testing.assert_array_equal(
      np.asarray(a), np.asarray(b)), tree, want)
