"""Scores and gradients over whole sequences, of given responses."""

from __future__ import annotations

import jax
import numpy as np

from rollplex_jax import programs
from rollplex_jax.data import batching
from rollplex_jax.models.config import ModelConfig
from rollplex_jax.models.weights import Params
from rollplex_jax.placement.sharding import Placement
from rollplex_jax.samples import Groups, PromptBatch, own_batch


def features_of(params: Params, config: ModelConfig, batch: PromptBatch,
                place: Placement | None = None) -> jax.Array | None:
  """Merged vision features of a batch, or None where it has no media."""
  if batch.vision is None:
    return None
  return programs.vision(params, config, batch.vision, place=place)


def score_groups(params: Params, config: ModelConfig, batch: PromptBatch,
                 groups: Groups, *, temperature: float,
                 micro_batch_size: int = 0,
                 place: Placement | None = None) -> np.ndarray:
  """float32 [K, G, R] log-probs over whole sequences, zero past the ends."""
  features = features_of(params, config, batch, place)
  out = np.zeros(groups.token_ids.shape, np.float32)
  for item in batch.cut(groups, micro_batch_size):
    responses, observed = item.observed(config, batch.parts)
    item.place(out, programs.score_full(
        params, config, batching.take_rows(batch.inputs, item.rows), features,
        responses, temperature, observed, place=place))
  return out


def supervised_gradient(
    trained: Params, frozen: Params, config: ModelConfig, batch: PromptBatch,
    groups: Groups, *, micro_batch_size: int, remat: bool,
    place: Placement | None = None) -> tuple[Params, jax.Array]:
  """Gradient and value of the mean negative log-prob of response tokens."""
  num_tokens = np.float32(max(groups.lengths.sum(), 1))
  grads, loss = programs.zero_gradients(trained, config, place=place), 0.0
  features = None
  if "visual" not in trained:
    features = features_of({**frozen, **trained}, config, batch, place)
  for item in batch.cut(groups, micro_batch_size):
    prompts, vision = batching.take_rows(batch.inputs, item.rows), None
    responses, observed = item.observed(config, batch.parts)
    if "visual" in trained:
      own = own_batch(config, batch, item.rows)
      prompts, vision = own.inputs, own.vision
    grads, new = programs.gradient_supervised(
        trained, frozen, grads, config, prompts, features, vision,
        responses, num_tokens, remat, observed, place=place)
    loss += new
  return grads, loss
