"""Operations and bytes of each stage, counted from shapes.

Counted are products of matrices; a forward pass over n tokens is 2 n times the
weights that they meet, and attention on top. Elementwise work is left out: it
is a few percent of the operations. All numbers are of the whole step and of all
devices together, unless a name says otherwise.
"""

from __future__ import annotations

import dataclasses

from rollplex_jax.capacity.case import Case
from rollplex_jax.models import vlm
from rollplex_jax.models.config import ModelConfig
from rollplex_jax.models.weights import num_parameters
from rollplex_jax.stages.prefix import SavePolicy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
  """Weights that a token meets.

  Attributes:
    layer: of a decoder layer's matrices.
    kv: of its key and value projections alone.
    head: of the vocabulary's matrix.
    layers: number of layers.
    query_dim: of all query heads together.
  """

  layer: int
  kv: int
  head: int
  layers: int
  query_dim: int

  @classmethod
  def of(cls, config: ModelConfig) -> Sizes:
    """Of a model's decoder."""
    t = config.text
    d, q = t.hidden_size, t.num_attention_heads * t.head_dim
    kv = 2 * d * t.num_key_value_heads * t.head_dim
    return cls(layer=2 * d * q + kv + 3 * d * t.intermediate_size, kv=kv,
               head=d * t.vocab_size, layers=t.num_hidden_layers, query_dim=q)


def causal_pairs(length: int) -> int:
  """Pairs of query and key of a causal sequence, in blocks as they run."""
  block = 256
  if length <= block:
    return length * length
  whole, rest = divmod(length, block)
  return block * block * whole * (whole + 1) // 2 + rest * length


def attention(pairs: float, sizes: Sizes) -> float:
  """Operations of scores and weighted values of one layer."""
  return 4 * pairs * sizes.query_dim


def prefix_forward(sizes: Sizes, tokens: int, pairs: float) -> float:
  """Operations; of the last layer only keys and values are made."""
  full = sizes.layers - 1
  return (2 * tokens * (full * sizes.layer + sizes.kv)
          + full * attention(pairs, sizes))


def suffix_forward(sizes: Sizes, tokens: int, pairs: float) -> float:
  """Operations of layers and head."""
  return (2 * tokens * (sizes.layers * sizes.layer + sizes.head)
          + sizes.layers * attention(pairs, sizes))


def sequence_forward(sizes: Sizes, tokens: int, targets: int,
                     pairs: float) -> float:
  """Operations of whole sequences, of which `targets` tokens have logits."""
  return (2 * tokens * sizes.layers * sizes.layer + 2 * targets * sizes.head
          + sizes.layers * attention(pairs, sizes))


def vision_forward(config: ModelConfig, case: Case) -> float:
  """Operations of the tower and the merger over all videos."""
  w = case.workload
  if w.video is None:
    return 0.0
  v, (t, h, wide) = config.vision, w.video
  patches = w.num_prompts * t * h * wide
  block = 4 * v.hidden_size**2 + 3 * v.hidden_size * v.intermediate_size
  merged = v.hidden_size * v.spatial_merge_size**2
  per_patch = v.depth * block + v.hidden_size * v.patch_dim
  per_patch += (merged**2 + merged * v.out_hidden_size) // (
      v.spatial_merge_size**2)
  window = (v.window_units * v.spatial_merge_size) ** 2
  full = sum(i < v.depth for i in v.fullatt_block_indexes)
  pairs = patches * (full * h * wide
                     + (v.depth - full) * min(window, h * wide))
  return 2 * patches * per_patch + 4 * pairs * v.hidden_size


def step_flops(case: Case) -> dict[str, float]:
  """Operations of each stage of a step, by stage.

  "remat" stages run their forward pass again before the backward pass, which
  is twice a forward pass.
  """
  config, w = case.model, case.workload
  sizes = Sizes.of(config)
  b, g, p, r = w.num_prompts, w.num_generations, case.length, w.response_length
  prefix = prefix_forward(sizes, b * p, b * causal_pairs(p))
  suffix = suffix_forward(sizes, b * g * r, b * g * (r * p + r * r))
  n = b * g
  full = sequence_forward(
      sizes, n * (p + r), n * r, n * causal_pairs(p + r))
  again = 0 if case.save == SavePolicy.ACTIVATIONS else 1
  more = 1 if case.save == SavePolicy.NOTHING else 0
  return {
      "vision": vision_forward(config, case),
      "prefix": prefix,
      "decode": suffix_forward(sizes, n * r, n * (r * p + r * r / 2)),
      "score": suffix,
      "gradient": 4 * suffix,
      "prefix_backward": (2 + again + more) * prefix,
      "score_full": full,
      "gradient_full": 4 * full,
  }


def parameter_count(config: ModelConfig) -> int:
  """Scalars of the decoder and the tower."""
  return num_parameters(vlm.weights(config))
