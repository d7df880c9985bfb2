"""The compiled programs of a step: stages under jit, with donated buffers."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from rollplex_jax.models import vlm
from rollplex_jax.stages import full_sequence, objectives, prefix, response
from rollplex_jax.stages import rollout as rollout_lib
from rollplex_jax.stages import window as window_lib
from rollplex_jax.stages.full_sequence import Responses
from rollplex_jax.stages.prefix import SavePolicy
from rollplex_jax.stages.response import GroupResponses


@functools.partial(jax.jit, static_argnames="config")
def vision(params, config, inputs) -> jax.Array:
  """Merged features of a batch's media."""
  return vlm.vision_features(params, config, inputs)


@functools.partial(jax.jit, static_argnames="config")
def vision_backward(visual, config, inputs, feature_grads):
  """float32 gradient of the tower from that of its features."""
  _, pull = jax.vjp(
      lambda v: vlm.vision_features({"visual": v}, config, inputs), visual)
  return _float32(pull(feature_grads.astype(visual["patch_embed"].dtype))[0])


@functools.partial(jax.jit, static_argnames=("config", "save"))
def prefix_forward(text, config, prompts, features, save=SavePolicy.NOTHING):
  """`prefix.prefix_forward`, compiled."""
  return prefix.prefix_forward(text, config, prompts, features, save)


@functools.partial(jax.jit, static_argnames=("config", "save"),
                   donate_argnames=("grads", "feature_grads"))
def prefix_backward(text, grads, feature_grads, config, prompts, features,
                    save, saved, kv_grads, rows):
  """Adds the gradients of a block's prefixes.

  `rows` picks the block's rows of what was saved for a whole batch; None where
  it was saved for the block alone. `feature_grads` is None for a frozen tower.
  """
  if rows is not None:
    saved = jax.tree.map(lambda a: a[rows], saved)
  new, new_features = prefix.prefix_backward(
      text, config, prompts, features, save, saved, kv_grads)
  grads = jax.tree.map(jnp.add, grads, new)
  if feature_grads is not None:
    feature_grads = feature_grads + new_features
  return grads, feature_grads


@functools.partial(jax.jit, static_argnames=("config", "sampling"))
def decode(params, config, sampling, prompts, kv, keys):
  """`rollout.decode`, compiled."""
  return rollout_lib.decode(params, config, sampling, prompts, kv, keys)


@functools.partial(
    jax.jit, static_argnames=("config", "sampling", "window"),
    donate_argnames="artifacts")
def decode_window(policy, reference, config, sampling, window, prompts, kv,
                  features, reference_features, keys, artifacts):
  """`window.run_window`, compiled, into donated buffers."""
  return window_lib.run_window(
      policy, reference, config, sampling, window, prompts, kv, features,
      reference_features, keys, artifacts)


@functools.partial(jax.jit, static_argnames=("config", "temperature"))
def score_full(params, config, prompts, features, responses: GroupResponses,
               temperature):
  """float32 [b, g, W] log-probs over whole sequences, zero past the ends."""
  logprobs, _ = full_sequence.response_logprobs(
      params, config, prompts, features, _flat(responses),
      temperature=temperature)
  return logprobs.reshape(responses.token_ids.shape) * responses.mask


@functools.partial(jax.jit, static_argnames=("config", "temperature"))
def score_suffix(params, config, prompts, kv, rows,
                 responses: GroupResponses, temperature):
  """float32 [b, g, W] log-probs from prefixes, zero past the ends."""
  logprobs, _ = response.response_logprobs(
      params, config, prompts, _rows(kv, rows), responses,
      temperature=temperature)
  return logprobs * responses.mask


@jax.jit
def zeros(tree):
  """float32 zeros like a tree of arrays."""
  return jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), tree)


@functools.partial(jax.jit, static_argnames="count")
def zeros_of_rows(kv, count):
  """float32 zeros for the gradients of `count` rows of keys and values."""
  return jax.tree.map(
      lambda a: jnp.zeros((count, *a.shape[1:]), jnp.float32), kv)


@functools.partial(
    jax.jit, donate_argnames="grads",
    static_argnames=("config", "objective", "temperature", "remat",
                     "with_entropy"))
def gradient_full(
    trained, frozen, grads, config, objective, prompts, features, vision,
    responses, advantages, old_logprobs, ref_logprobs, normalizers,
    temperature, remat, with_entropy):
  """Adds one micro-batch's gradient over whole sequences.

  Returns:
    (gradients, LossMetrics, float32 [b, g, W] log-probs).
  """
  loss_fn = _policy_loss(responses, advantages, old_logprobs, ref_logprobs,
                         objective, normalizers)
  (_, (metrics, logprobs)), new = full_sequence.loss_and_grad(
      trained, frozen, config, prompts, features, vision, _flat(responses),
      loss_fn, temperature=temperature, remat=remat, with_entropy=with_entropy)
  return jax.tree.map(jnp.add, grads, new), metrics, logprobs


@functools.partial(
    jax.jit, donate_argnames=("grads", "kv_grads"),
    static_argnames=("config", "objective", "temperature", "remat",
                     "with_entropy"))
def gradient_suffix(
    trained, frozen, grads, kv_grads, grad_rows, config, objective, prompts, kv,
    rows, responses, advantages, old_logprobs, ref_logprobs, normalizers,
    temperature, remat, with_entropy):
  """Adds one micro-batch's gradient of suffix and of prefix keys and values.

  `rows` picks the micro-batch's prompts in `kv`, `grad_rows` in `kv_grads`;
  None where it holds just those.

  Returns:
    (gradients of the text decoder, gradients of keys and values, LossMetrics,
    float32 [b, g, W] log-probs).
  """
  loss_fn = _policy_loss(responses, advantages, old_logprobs, ref_logprobs,
                         objective, normalizers)
  (_, (metrics, logprobs)), new, new_kv = response.loss_and_grad(
      trained, frozen, config, prompts, _rows(kv, rows), responses, loss_fn,
      temperature=temperature, remat=remat, with_entropy=with_entropy)
  grads = jax.tree.map(jnp.add, grads, new)
  if grad_rows is None:
    kv_grads = jax.tree.map(jnp.add, kv_grads, new_kv)
  else:
    kv_grads = jax.tree.map(
        lambda a, g: a.at[grad_rows].add(g), kv_grads, new_kv)
  return grads, kv_grads, metrics, logprobs


@functools.partial(
    jax.jit, donate_argnames="grads", static_argnames=("config", "remat"))
def gradient_supervised(trained, frozen, grads, config, prompts, features,
                        vision, responses, num_tokens, remat):
  """Adds one micro-batch of -log p(response) / num_tokens to the gradient."""
  flat = _flat(responses)

  def loss_fn(logprobs, _):
    return -jnp.sum(logprobs * flat.mask) / num_tokens, None

  (loss, _), new = full_sequence.loss_and_grad(
      trained, frozen, config, prompts, features, vision, flat, loss_fn,
      remat=remat)
  return jax.tree.map(jnp.add, grads, new), loss


def _policy_loss(responses, advantages, old_logprobs, ref_logprobs, objective,
                 normalizers):
  """A loss function of log-probs of any shape with the samples in order."""
  r = responses.token_ids.shape[-1]
  by_sample = lambda a: None if a is None else a.reshape(-1, r)

  def loss_fn(logprobs, entropy):
    loss, metrics = objectives.policy_loss(
        by_sample(logprobs), by_sample(responses.mask), advantages.reshape(-1),
        objective, normalizers, old_logp=by_sample(old_logprobs),
        ref_logp=by_sample(ref_logprobs), entropy=by_sample(entropy))
    return loss, (metrics,
                  logprobs.reshape(responses.mask.shape) * responses.mask)

  return loss_fn


def _flat(responses: GroupResponses) -> Responses:
  """The same samples, each with the number of its prompt."""
  b, g, r = responses.token_ids.shape
  return Responses(
      prompt_index=jnp.repeat(jnp.arange(b), g),
      token_ids=responses.token_ids.reshape(b * g, r),
      lengths=responses.lengths.reshape(b * g))


def _rows(kv, rows):
  return kv if rows is None else jax.tree.map(lambda a: a[rows], kv)


def _float32(tree):
  return jax.tree.map(lambda a: a.astype(jnp.float32), tree)
