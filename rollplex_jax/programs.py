"""The compiled programs of a step: stages under jit, with donated buffers.

Each takes `place`, the stage's sharding rules on the run's mesh, or None on one
device. Arguments come in with their shardings; the rules say how activations
and results lie.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from rollplex_jax.models import decoder, vlm
from rollplex_jax.placement import sharding
from rollplex_jax.placement.sharding import Placement
from rollplex_jax.stages import extend as extend_lib
from rollplex_jax.stages import (
  full_sequence,
  objectives,
  prefix,
  prefix_units,
  response,
)
from rollplex_jax.stages import rollout as rollout_lib
from rollplex_jax.stages import window as window_lib
from rollplex_jax.stages.full_sequence import Responses
from rollplex_jax.stages.prefix import SavePolicy
from rollplex_jax.stages.response import GroupResponses


def _placed(f):
  """f, traced under the rules of its argument `place`."""

  @functools.wraps(f)
  def run(*args, place: Placement | None = None, **kwargs):
    mesh, rules = (None, None) if place is None else (place.mesh, place.text)
    with sharding.use(mesh, rules):
      return f(*args, place=place, **kwargs)

  return run


@functools.partial(jax.jit, static_argnames=("config", "place"))
@_placed
def vision(params, config, inputs, *, place=None) -> jax.Array:
  """Merged features of a batch's media."""
  del place
  return vlm.vision_features(params, config, inputs)


@functools.partial(jax.jit, static_argnames=("config", "place"),
                   donate_argnames="grads")
@_placed
def vision_backward(visual, grads, config, inputs, feature_grads, index, *,
                    place=None):
  """Adds the tower's gradient, from that of a batch's features.

  `index` picks the rows of `feature_grads` that are those of `inputs`; -1 for
  rows of padding.
  """
  taken = sharding.take_local(feature_grads, index)
  taken = jnp.where(index[:, None] >= 0, taken, 0.0)
  _, pull = jax.vjp(
      lambda v: vlm.vision_features({"visual": v}, config, inputs), visual)
  new = _float32(pull(taken.astype(visual["patch_embed"].dtype))[0])
  return _add({"visual": grads}, {"visual": new}, config, place)["visual"]


@functools.partial(jax.jit, static_argnames=("config", "save", "place"))
@_placed
def prefix_forward(text, config, prompts, features, save=SavePolicy.NOTHING, *,
                   place=None):
  """`prefix.prefix_forward`, compiled."""
  del place
  return prefix.prefix_forward(text, config, prompts, features, save)


@functools.partial(jax.jit, static_argnames=("config", "save", "place"),
                   donate_argnames=("grads", "feature_grads"))
@_placed
def prefix_backward(text, grads, feature_grads, config, prompts, features,
                    save, saved, kv_grads, rows, *, place=None):
  """Adds the gradients of a block's prefixes.

  `rows` picks the block's rows of what was saved for a whole batch; None where
  it was saved for the block alone. `feature_grads` is None for a frozen tower.
  """
  saved = _rows(saved, rows)
  new, new_features = prefix.prefix_backward(
      text, config, prompts, features, save, saved, kv_grads)
  grads = _add({"text": grads}, {"text": new}, config, place)["text"]
  if feature_grads is not None:
    feature_grads = sharding.constrain(
        feature_grads + new_features, "batch", None)
  return grads, feature_grads


@functools.partial(jax.jit, static_argnames=("config", "sampling", "place"))
@_placed
def decode(params, config, sampling, prompts, kv, keys, turn=None, *,
           place=None):
  """`rollout.decode`, compiled."""
  del place
  return rollout_lib.decode(params, config, sampling, prompts, kv, keys, turn)


@functools.partial(
    jax.jit, static_argnames=("config", "num_samples", "length", "dtype",
                              "place"))
@_placed
def empty_history(config, num_samples, length, dtype, *, place=None):
  """`extend.empty_history`, where the rollout has it."""
  del place
  history, exists = extend_lib.empty_history(
      config, num_samples, length, dtype)
  return _constrain_kv(history), exists


@functools.partial(jax.jit, static_argnames=("length", "place"))
@_placed
def grow_history(history, exists, length, *, place=None):
  """A history of episodes with room for more turns."""
  del place
  more = length - exists.shape[-1]
  pad = lambda a, axis: jnp.pad(
      a, [(0, more if i == axis else 0) for i in range(a.ndim)])
  return (_constrain_kv([(pad(k, 3), pad(v, 2)) for k, v in history]),
          pad(exists, 1))


@functools.partial(jax.jit, static_argnames=("config", "place"),
                   donate_argnames=("history", "exists"))
@_placed
def extend(text, config, chunk, features, kv, prefix_lengths, history, exists,
           start, *, place=None):
  """`extend.extend`, compiled, into the donated history."""
  del place
  history, exists = extend_lib.extend(
      text, config, chunk, features, kv, prefix_lengths, history, exists, start)
  return _constrain_kv(history), exists


@functools.partial(
    jax.jit, static_argnames=("config", "sampling", "window", "place"),
    donate_argnames="artifacts")
@_placed
def decode_window(policy, reference, config, sampling, window, prompts, kv,
                  features, reference_features, keys, artifacts, *, place=None):
  """`window.run_window`, compiled, into donated buffers."""
  run = functools.partial(window_lib.run_window, policy, reference, config,
                          sampling, window)
  if place is not None and window_lib.can_shard(place):
    run = functools.partial(window_lib.shard_window(
        place, config, sampling, window), policy, reference)
  # A unit takes rows of one part of the batch: no rule of a batch holds in it.
  with sharding.use(place and place.mesh):
    return run(prompts, kv, features, reference_features, keys, artifacts)


@functools.partial(jax.jit, static_argnames=(
    "config", "num_prompts", "length", "dtype", "policy", "layer_inputs",
    "reference", "place"))
@_placed
def allocate_window(config, num_prompts, length, dtype, *, policy, layer_inputs,
                    reference, place=None):
  """`window.allocate`, each buffer where the window has it."""
  del place
  return _constrain_artifacts(window_lib.allocate(
      config, num_prompts, length, dtype, policy=policy,
      layer_inputs=layer_inputs, reference=reference))


@functools.partial(jax.jit, static_argnames="place",
                   donate_argnames="artifacts")
@_placed
def reshard_artifacts(artifacts, *, place):
  """A window's artefacts as training reads them."""
  del place
  return _constrain_artifacts(artifacts)


def _constrain_artifacts(artifacts):
  inputs = lambda a: sharding.constrain(a, "batch", None, "saved")
  return jax.tree.map(
      lambda b: dataclasses.replace(
          b, kv=_constrain_kv(b.kv),
          layer_inputs=jax.tree.map(inputs, b.layer_inputs)),
      artifacts, is_leaf=lambda b: isinstance(b, prefix_units.Buffers))


@functools.partial(
    jax.jit, static_argnames=("config", "temperature", "place"))
@_placed
def score_full(params, config, prompts, features, responses: GroupResponses,
               temperature, observed=None, *, place=None):
  """float32 [b, g, W] log-probs over whole sequences, zero past the ends."""
  del place
  logprobs, _ = full_sequence.response_logprobs(
      params, config, prompts, features, _flat(responses), observed,
      temperature=temperature)
  return logprobs.reshape(responses.token_ids.shape) * responses.mask


@functools.partial(
    jax.jit, static_argnames=("config", "temperature", "place"))
@_placed
def score_suffix(params, config, prompts, kv, rows,
                 responses: GroupResponses, temperature, observed=None, *,
                 place=None):
  """float32 [b, g, W] log-probs from prefixes, zero past the ends."""
  del place
  logprobs, _ = response.response_logprobs(
      params, config, prompts, _rows(kv, rows), responses, observed,
      temperature=temperature)
  return logprobs * responses.mask


def text_logits(params, config, token_ids) -> jax.Array:
  """float32 [B, T, V] logits after each of right-padded tokens [B, T]."""
  return head_logits(params["text"], text_hidden(params, config, token_ids))


@functools.partial(jax.jit, static_argnames="config")
def text_hidden(params, config, token_ids) -> jax.Array:
  """[B, T, D] final hidden states of right-padded tokens [B, T]."""
  places = jnp.arange(token_ids.shape[1], dtype=jnp.int32)
  positions = jnp.broadcast_to(places, (3, *token_ids.shape))
  return vlm.forward(params, config, token_ids, positions)


@jax.jit
def head_logits(text, hidden) -> jax.Array:
  """`decoder.logits`, compiled."""
  return decoder.logits(text, hidden)


@functools.partial(jax.jit, static_argnames="config")
def response_logits(params, config, prompts, vision,
                    responses: GroupResponses, observed=None) -> jax.Array:
  """float32 [b, g, R, V] logits of response tokens, over whole sequences."""
  hidden = full_sequence.response_hidden(
      params, config, prompts, vlm.vision_features(params, config, vision),
      _flat(responses), observed)
  logits = decoder.logits(params["text"], hidden)
  return logits.reshape(*responses.token_ids.shape, -1)


@functools.partial(jax.jit, static_argnames=("config", "place"))
def zero_gradients(params, config, *, place=None):
  """float32 zeros like parts of the parameters, laid out as `_add` does."""
  zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), params)
  return _add(zeros, zeros, config, place)


@functools.partial(jax.jit, static_argnames="place")
@_placed
def zero_feature_gradients(features, *, place=None):
  """float32 zeros like merged features."""
  del place
  return sharding.constrain(
      jnp.zeros(features.shape, jnp.float32), "batch", None)


@functools.partial(jax.jit, static_argnames=("count", "place"))
@_placed
def zero_kv_gradients(kv, count, *, place=None):
  """float32 zeros for the gradients of `count` rows of keys and values."""
  del place
  return _constrain_kv(jax.tree.map(
      lambda a: jnp.zeros((count, *a.shape[1:]), jnp.float32), kv))


@functools.partial(
    jax.jit, donate_argnames="grads",
    static_argnames=("config", "objective", "temperature", "remat",
                     "with_entropy", "place"))
@_placed
def gradient_full(
    trained, frozen, grads, config, objective, prompts, features, vision,
    responses, advantages, old_logprobs, ref_logprobs, normalizers,
    temperature, remat, with_entropy, observed=None, *, place=None):
  """Adds one micro-batch's gradient over whole sequences.

  Returns:
    (gradients, LossMetrics, float32 [b, g, W] log-probs).
  """
  loss_fn = _policy_loss(responses, advantages, old_logprobs, ref_logprobs,
                         objective, normalizers)
  (_, (metrics, logprobs)), new = full_sequence.loss_and_grad(
      trained, frozen, config, prompts, features, vision, _flat(responses),
      loss_fn, observed, temperature=temperature, remat=remat,
      with_entropy=with_entropy)
  return _add(grads, new, config, place), metrics, logprobs


@functools.partial(
    jax.jit, donate_argnames=("grads", "kv_grads"),
    static_argnames=("config", "objective", "temperature", "remat",
                     "with_entropy", "place"))
@_placed
def gradient_suffix(
    trained, frozen, grads, kv_grads, grad_rows, config, objective, prompts, kv,
    rows, responses, advantages, old_logprobs, ref_logprobs, normalizers,
    temperature, remat, with_entropy, observed=None, *, place=None):
  """Adds one micro-batch's gradient of suffix and of prefix keys and values.

  `rows` picks the micro-batch's prompts in `kv`, `grad_rows` in `kv_grads`;
  None where it holds just those. `grads` are of the parts that suffixes read:
  observations read a trained tower too.

  Returns:
    (gradients of those parts, gradients of keys and values, LossMetrics,
    float32 [b, g, W] log-probs).
  """
  loss_fn = _policy_loss(responses, advantages, old_logprobs, ref_logprobs,
                         objective, normalizers)
  (_, (metrics, logprobs)), new, new_kv = response.loss_and_grad(
      trained, frozen, config, prompts, _rows(kv, rows), responses, loss_fn,
      observed, temperature=temperature, remat=remat,
      with_entropy=with_entropy)
  grads = _add(grads, new, config, place)
  if grad_rows is None:
    kv_grads = jax.tree.map(jnp.add, kv_grads, new_kv)
  else:
    kv_grads = jax.tree.map(
        lambda a, g: sharding.add_local(a, grad_rows, g), kv_grads, new_kv)
  return grads, _constrain_kv(kv_grads), metrics, logprobs


@functools.partial(
    jax.jit, donate_argnames="grads",
    static_argnames=("config", "remat", "place"))
@_placed
def gradient_supervised(trained, frozen, grads, config, prompts, features,
                        vision, responses, num_tokens, remat, observed=None, *,
                        place=None):
  """Adds one micro-batch of -log p(response) / num_tokens to the gradient."""
  flat = _flat(responses)

  def loss_fn(logprobs, _):
    return -jnp.sum(logprobs * flat.mask) / num_tokens, None

  (loss, _), new = full_sequence.loss_and_grad(
      trained, frozen, config, prompts, features, vision, flat, loss_fn,
      observed, remat=remat)
  return _add(grads, new, config, place), loss


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
      lengths=responses.lengths.reshape(b * g),
      suffix=jax.tree.map(lambda a: a.reshape(b * g, *a.shape[2:]),
                          responses.suffix))


def _rows(kv, rows):
  if rows is None:
    return kv
  return jax.tree.map(lambda a: sharding.take_local(a, rows), kv)


def _constrain_kv(kv):
  return jax.tree.map(
      lambda a: sharding.constrain(a, "batch", "kv_heads", None, None), kv)


def _add(grads, new, config, place):
  """The sum of gradients by part, laid out like the master weights.

  Sharded over all devices: what is added is reduced and scattered.
  """
  grads = jax.tree.map(jnp.add, grads, new)
  if place is None:
    return grads
  declared = {part: w for part, w in vlm.weights(config).items()
              if part in grads}
  return jax.tree.map(
      jax.lax.with_sharding_constraint, grads, place.master(declared))


def _float32(tree):
  return jax.tree.map(lambda a: a.astype(jnp.float32), tree)
