"""Scoring and gradients over whole sequences: the serial baseline.

Every sample's prompt and response run through the model together, as verl, TRL
and tunix do. The suffix-only programs are measured against this one, and it is
the slow, obviously right path that their numbers must equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from rollplex_jax.models import decoder, vlm
from rollplex_jax.models.config import ModelConfig
from rollplex_jax.models.inputs import PromptInputs, Suffixes, VisionInputs
from rollplex_jax.models.weights import Params


@struct.dataclass
class Responses:
  """Responses of N samples, each continuing one of the prompts at hand.

  Attributes:
    prompt_index: int32 [N], row of each sample's prompt.
    token_ids: int32 [N, R], right padded.
    lengths: int32 [N].
    suffix: of episodes of several turns, where those tokens stand: see
      `Suffixes`, here with the samples in one dimension.
  """

  prompt_index: jax.Array
  token_ids: jax.Array
  lengths: jax.Array
  suffix: Suffixes | None = None

  @property
  def mask(self) -> jax.Array:
    """float32 [N, R], 1 where a response token stands."""
    r = self.token_ids.shape[1]
    return (jnp.arange(r) < self.lengths[:, None]).astype(jnp.float32)


def join(prompts: PromptInputs, responses: Responses):
  """Whole sequences, contiguous and right padded.

  Args:
    prompts: B prompts of P tokens.
    responses: N responses of R tokens.

  Returns:
    token_ids int32 [N, P+R], positions int32 [3, N, P+R] and feature_index
    int32 [N, P+R]; of episodes with S - 1 in place of R.
  """
  suffix = responses.suffix
  after_ids = (responses.token_ids if suffix is None
               else suffix.token_ids[:, 1:])
  p, r = prompts.token_ids.shape[1], after_ids.shape[1]
  row = responses.prompt_index
  length = prompts.lengths[row][:, None]
  t = jnp.arange(p + r)[None, :]
  in_prompt = t < length
  back = jnp.clip(t - length, 0, r - 1)
  at = jnp.broadcast_to(jnp.minimum(t, p - 1), (row.shape[0], p + r))
  take = lambda a, i: jnp.take_along_axis(a, i, axis=-1)
  token_ids = jnp.where(in_prompt, take(prompts.token_ids[row], at),
                        take(after_ids, back))
  after = prompts.next_position[row][:, None] + t - length
  if suffix is not None:
    after = take(jnp.moveaxis(suffix.positions[:, 1:], -1, 0),
                 back[None].repeat(3, 0))
  positions = jnp.where(
      in_prompt, take(prompts.positions[:, row], at[None].repeat(3, 0)), after)
  feature_index = jnp.where(
      in_prompt, take(prompts.feature_index[row], at), -1)
  return token_ids, positions, feature_index


def observed_index(prompts: PromptInputs,
                   responses: Responses) -> jax.Array | None:
  """int32 [N, P+S-1], rows of the features of observations in what `join`
  gives, -1 for other tokens; None without turns."""
  if responses.suffix is None:
    return None
  index = responses.suffix.feature_index[:, 1:]
  p, s = prompts.token_ids.shape[1], index.shape[1]
  length = prompts.lengths[responses.prompt_index][:, None]
  t = jnp.arange(p + s)[None, :]
  index = jnp.take_along_axis(index, jnp.clip(t - length, 0, s - 1), axis=-1)
  return jnp.where(t < length, -1, index)


def response_hidden(
    params: Params, config: ModelConfig, prompts: PromptInputs,
    features: jax.Array | None, responses: Responses,
    observed: VisionInputs | None = None, *,
    remat: bool = False) -> jax.Array:
  """Final hidden states [N, R, D] from which response tokens are predicted.

  Arguments are those of `response_logprobs`.
  """
  token_ids, positions, feature_index = join(prompts, responses)
  hidden = vlm.forward(
      params, config, token_ids, positions, features, feature_index,
      vlm.vision_features(params, config, observed),
      observed_index(prompts, responses), remat=remat)
  # The logits for response token j come from the position before it.
  at = jnp.arange(responses.token_ids.shape[1])
  if responses.suffix is not None:
    at = responses.suffix.predicts
  first = prompts.lengths[responses.prompt_index][:, None] - 1
  return jnp.take_along_axis(hidden, (first + at)[..., None], axis=1)


def response_logprobs(
    params: Params, config: ModelConfig, prompts: PromptInputs,
    features: jax.Array | None, responses: Responses,
    observed: VisionInputs | None = None, *, temperature: float = 1.0,
    remat: bool = False, with_entropy: bool = False):
  """Log-probs of every response token given what stands before it.

  Args:
    params: {"text": ..., "visual": ...}.
    config: the model's configuration.
    prompts: B prompts.
    features: merged vision features [f, D] of those prompts, or None.
    responses: N responses.
    observed: patches of their later observations, if there are any.
    temperature: of the softmax.
    remat: recompute layers in the backward pass.
    with_entropy: also return entropies.

  Returns:
    float32 [N, R] log-probs (without meaning past a response's length) and
    float32 [N, R] entropies or None.
  """
  hidden = response_hidden(
      params, config, prompts, features, responses, observed, remat=remat)
  return decoder.token_logprobs(
      params["text"], hidden, responses.token_ids, temperature,
      with_entropy=with_entropy)


LossFn = Callable[[jax.Array, Any], tuple[jax.Array, Any]]


def loss_and_grad(
    trained: Params, frozen: Params, config: ModelConfig,
    prompts: PromptInputs, features: jax.Array | None,
    vision: VisionInputs | None, responses: Responses, loss_fn,
    observed: VisionInputs | None = None, *, temperature: float = 1.0,
    remat: bool = False, with_entropy: bool = False):
  """Loss and gradient of one micro-batch.

  Args:
    trained: the parts of the parameters that learn; the gradient is theirs.
    frozen: the other parts.
    config: the model's configuration.
    prompts: B prompts.
    features: their merged features; used where the tower is frozen.
    vision: their patches; used where the tower is trained.
    responses: N responses.
    loss_fn: (logprobs [N, R], entropies or None) -> (loss, metrics).
    observed: patches of later observations, if there are any.
    temperature: of the softmax.
    remat: recompute layers in the backward pass.
    with_entropy: hand entropies to `loss_fn`.

  Returns:
    ((loss, metrics), float32 gradients like `trained`).
  """

  def compute(trained):
    params = {**frozen, **trained}
    seen = features
    if "visual" in trained:
      seen = vlm.vision_features(params, config, vision)
    logprobs, entropy = response_logprobs(
        params, config, prompts, seen, responses, observed,
        temperature=temperature, remat=remat, with_entropy=with_entropy)
    return loss_fn(logprobs, entropy)

  out, grads = jax.value_and_grad(compute, has_aux=True)(trained)
  return out, jax.tree.map(lambda g: g.astype(jnp.float32), grads)
