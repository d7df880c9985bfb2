"""The response stage: suffixes of whole groups against their shared prefixes.

A suffix is the last prompt token and the response but its last token: exactly
the inputs whose logits are needed. Its queries attend to the prompt's prefix,
held once, and causally to the suffix itself. Of an episode of several turns the
suffix holds the later observations too, their vision features included. For
training, the gradient of the
loss is taken with respect to the weights and to the prefix's keys and values,
summed over the group; `prefix_backward` carries the latter on.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from rollplex_jax.models import decoder, layers, shared_prefix, vlm
from rollplex_jax.models.config import ModelConfig, TextConfig
from rollplex_jax.models.inputs import PromptInputs, Suffixes, VisionInputs
from rollplex_jax.models.weights import Params


@struct.dataclass
class GroupResponses:
  """G responses to each of B prompts, some of which may be empty.

  Attributes:
    token_ids: int32 [B, G, R], right padded; of an episode the tokens of all
      its responses, one after the other.
    lengths: int32 [B, G].
    suffix: of episodes of several turns, where those tokens stand.
  """

  token_ids: jax.Array
  lengths: jax.Array
  suffix: Suffixes | None = None

  @property
  def mask(self) -> jax.Array:
    """float32 [B, G, R], 1 where a response token stands."""
    r = self.token_ids.shape[-1]
    return (jnp.arange(r) < self.lengths[..., None]).astype(jnp.float32)


def suffix_inputs(prompts: PromptInputs, responses: GroupResponses):
  """Tokens int32 [B, G, R] and positions int32 [3, B, R] of the suffixes."""
  b, g, r = responses.token_ids.shape
  at_last = jnp.maximum(prompts.lengths - 1, 0)[:, None]
  last = jnp.take_along_axis(prompts.token_ids, at_last, axis=1)
  last = jnp.broadcast_to(last[:, :, None], (b, g, 1))
  token_ids = jnp.concatenate([last, responses.token_ids[..., :-1]], axis=-1)
  first = jnp.take_along_axis(prompts.positions, at_last[None], axis=2)
  after = prompts.next_position[:, None] + jnp.arange(r - 1)
  after = jnp.broadcast_to(after, (3, b, r - 1))
  return token_ids, jnp.concatenate([first, after], axis=-1)


def _embed(params: Params, config: ModelConfig, prompts: PromptInputs,
           responses: GroupResponses, observed: VisionInputs | None):
  """Suffixes embedded [B, G, R, D], their angles and their lengths [B, G]."""
  text, suffix = params["text"], responses.suffix
  if suffix is None:
    token_ids, positions = suffix_inputs(prompts, responses)
    # One group axis, for positions are the same for all samples.
    angles = tuple(a[:, None] for a in decoder.rope(config.text, positions))
    return decoder.embed(text, token_ids), angles, responses.lengths
  features = vlm.vision_features(params, config, observed)
  x = decoder.embed(text, suffix.token_ids, features, suffix.feature_index)
  return x, decoder.sample_rope(
      config.text, suffix.positions), suffix.lengths


def response_logprobs(
    params: Params, config: ModelConfig, prompts: PromptInputs, prefix_kv,
    responses: GroupResponses, observed: VisionInputs | None = None, *,
    temperature: float = 1.0, remat: bool = False, with_entropy: bool = False):
  """Log-probs of every response token given its prompt and what came before.

  Args:
    params: {"text": ..., ...}.
    config: the model's configuration.
    prompts: B prompts of P tokens.
    prefix_kv: per layer, the prompts' keys [B, K, h, P] and values
      [B, K, P, h]; entries from `prompts.lengths - 1` on are not read.
    responses: G responses to each prompt.
    observed: patches of their later observations, if there are any.
    temperature: of the softmax.
    remat: recompute layers in the backward pass.
    with_entropy: also return entropies.

  Returns:
    float32 [B, G, R] log-probs (without meaning past a response's length) and
    float32 [B, G, R] entropies or None.
  """
  text = params["text"]
  x, angles, suffix_lengths = _embed(
      params, config, prompts, responses, observed)
  lengths = prompts.lengths - 1, suffix_lengths
  run = functools.partial(_layer, config.text)
  if remat:
    run = layers.finish_backward(jax.checkpoint(run))
  for w, kv in zip(text["layers"], prefix_kv, strict=True):
    x = run(w, x, angles, kv, lengths)
  if responses.suffix is not None:
    # Only what predicts a response token goes through the vocabulary.
    x = jnp.take_along_axis(x, responses.suffix.predicts[..., None], axis=2)
  hidden = layers.rms_norm(x, text["norm"], config.text.rms_norm_eps)
  return decoder.token_logprobs(
      text, hidden, responses.token_ids, temperature,
      with_entropy=with_entropy)


def _layer(config: TextConfig, w: Params, x, angles, prefix_kv, lengths):
  attend = functools.partial(_attend, prefix_kv=prefix_kv, lengths=lengths)
  return decoder.layer(w, config, x, angles, attend)[0]


def _attend(q, k, v, *, prefix_kv, lengths):
  """Attention of suffixes to their prefix and, causally, to themselves.

  q [B, G, R, H, h], k and v [B, G, R, K, h], lengths of prefixes [B] and
  suffixes [B, G]; returns [B, G, R, H*h] and None.
  """
  out = shared_prefix.attend_suffixes(q, k, v, prefix_kv, *lengths)
  return out.reshape(*q.shape[:3], -1), None


def loss_and_grad(
    trained: Params, frozen: Params, config: ModelConfig,
    prompts: PromptInputs, prefix_kv, responses: GroupResponses,
    loss_fn: Callable[[jax.Array, Any], tuple[jax.Array, Any]],
    observed: VisionInputs | None = None, *, temperature: float = 1.0,
    remat: bool = False, with_entropy: bool = False):
  """Loss and gradient of one micro-batch's suffixes.

  Args:
    trained: the parts of the parameters that learn, "text" among them.
    frozen: the other parts.
    config: the model's configuration.
    prompts: B prompts.
    prefix_kv: their keys and values.
    responses: G responses to each.
    loss_fn: (log-probs [B, G, R], entropies or None) -> (loss, metrics).
    observed: patches of later observations, if there are any.
    temperature: of the softmax.
    remat: recompute layers in the backward pass.
    with_entropy: hand entropies to `loss_fn`.

  Returns:
    ((loss, metrics), float32 gradients of those trained parts that suffixes
    read, float32 gradients like `prefix_kv`, summed over each group). A trained
    tower is read by observations only.
  """
  # Differentiated in float32, so that what is summed over passes is not
  # rounded in between.
  kv = jax.tree.map(lambda a: a.astype(jnp.float32), prefix_kv)

  read = trained if observed is not None else {"text": trained["text"]}

  def compute(read, kv):
    kv = jax.tree.map(lambda a, like: a.astype(like.dtype), kv, prefix_kv)
    logprobs, entropy = response_logprobs(
        {**frozen, **read}, config, prompts, kv, responses, observed,
        temperature=temperature, remat=remat, with_entropy=with_entropy)
    return loss_fn(logprobs, entropy)

  out, (grads, kv_grads) = jax.value_and_grad(
      compute, argnums=(0, 1), has_aux=True)(read, kv)
  return out, jax.tree.map(lambda g: g.astype(jnp.float32), grads), kv_grads
