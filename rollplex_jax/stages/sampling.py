"""Choosing the next token, and the log-probability that is recorded for it.

Two things are kept apart. What is *recorded* is log-softmax(logits /
temperature) over the whole vocabulary, the same formula that training uses, so
rollout and training log-probs are comparable. What *shapes* the choice (top-k,
top-p, tokens that may not be sampled) never touches the recorded value.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from rollplex_jax.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig:
  """How completions are drawn.

  Attributes:
    max_completion_length: longest completion, in tokens.
    temperature: divides the logits; 0 takes the most likely token (and then
      log-probs are recorded at temperature 1).
    top_k: sample among the k most likely tokens; 0 for all.
    top_p: sample among the most likely tokens whose probabilities first sum
      to at least p; 1 for all. Applied after top_k.
    eos_token_ids: tokens that end a completion; they are part of it.
    banned_token_ids: tokens that may not be sampled (vision placeholders).
  """

  max_completion_length: int
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  eos_token_ids: tuple[int, ...] = ()
  banned_token_ids: tuple[int, ...] = ()

  def __post_init__(self):
    if self.max_completion_length < 1:
      raise InputError("max_completion_length must be at least 1, found "
                       f"{self.max_completion_length}")
    if not 0 <= self.temperature < math.inf:
      raise InputError(
          f"temperature must be 0 or positive, found {self.temperature}")
    if self.top_k < 0:
      raise InputError(f"top_k must not be negative, found {self.top_k}")
    if not 0 < self.top_p <= 1:
      raise InputError(f"top_p must lie in (0, 1], found {self.top_p}")

  @property
  def logprob_temperature(self) -> float:
    """The temperature of recorded log-probs."""
    return self.temperature or 1.0


def sample_keys(seed: int, step: int, row_ids: jax.Array,
                num_generations: int) -> jax.Array:
  """Keys [B, G] that depend on seed, step, row and sample only.

  Folding in the position gives each token its own key, so the same tokens are
  drawn whatever the schedule, batch or micro-batch around them.
  """
  base = jax.random.fold_in(jax.random.key(seed), step)
  rows = jax.vmap(lambda r: jax.random.fold_in(base, r))(row_ids)
  samples = jnp.arange(num_generations)
  fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
  return jax.vmap(fold, in_axes=(0, None))(rows, samples)


def sample(logits: jax.Array, keys: jax.Array, position: jax.Array,
           config: SamplingConfig) -> tuple[jax.Array, jax.Array]:
  """Draws one token per row.

  Args:
    logits: float32 [N, V].
    keys: typed PRNG keys [N].
    position: int32 scalar, index of the token in its completion.
    config: how to draw.

  Returns:
    int32 [N] tokens and float32 [N] recorded log-probabilities.
  """
  scaled = logits / config.logprob_temperature
  shaped = scaled
  if config.banned_token_ids:
    shaped = shaped.at[:, jnp.array(config.banned_token_ids)].set(-jnp.inf)
  if config.temperature == 0:
    tokens = argmax(shaped)
  else:
    shaped = top_p_filter(top_k_filter(shaped, config.top_k), config.top_p)
    keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, position)
    noise = jax.vmap(
        lambda k: jax.random.gumbel(k, logits.shape[-1:], jnp.float32))(keys)
    tokens = argmax(shaped + noise)
  picked = jnp.take_along_axis(scaled, tokens[:, None], axis=-1)[:, 0]
  logprobs = picked - jax.nn.logsumexp(scaled, axis=-1)
  return tokens, logprobs


def argmax(scores: jax.Array) -> jax.Array:
  """int32 [N]: where each row of scores [N, V] is largest, the first if tied."""
  return jax.lax.platform_dependent(
      scores, cpu=_argmax_by_value,
      default=lambda x: jnp.argmax(x, axis=-1).astype(jnp.int32))


def _argmax_by_value(scores):
  """Finds the largest value, then its place.

  `jnp.argmax` reduces pairs of value and place, which a CPU does one by one;
  these are two reductions that it vectorizes. The barrier makes both see the
  same numbers: computed twice, they could differ in the last bit.
  """
  scores = jax.lax.optimization_barrier(scores)
  top = scores.max(axis=-1, keepdims=True)
  last = scores.shape[-1] - 1
  places = jnp.arange(last + 1, dtype=jnp.int32)
  return jnp.where(scores == top, places, last).min(axis=-1)


def top_k_filter(logits: jax.Array, k: int) -> jax.Array:
  """Sets all but the k largest logits [N, V] to -inf; k = 0 keeps all."""
  if k == 0 or k >= logits.shape[-1]:
    return logits
  threshold = jax.lax.top_k(logits, k)[0][:, -1:]
  return jnp.where(logits < threshold, -jnp.inf, logits)


def top_p_filter(logits: jax.Array, p: float) -> jax.Array:
  """Keeps the smallest set of likeliest tokens with probability >= p."""
  if p >= 1:
    return logits
  ordered = jnp.sort(logits, axis=-1, descending=True)
  probs = jax.nn.softmax(ordered, axis=-1)
  # A token stays if the mass before it is short of p; the first always does.
  before = jnp.cumsum(probs, axis=-1) - probs
  kept = jnp.where(before < p, ordered, jnp.inf)
  threshold = jnp.min(kept, axis=-1, keepdims=True)
  return jnp.where(logits < threshold, -jnp.inf, logits)
