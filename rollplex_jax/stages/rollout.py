"""The rollout stage: batched decoding against a prefix shared by each group.

Each prompt's prefix keys and values are held once; its G completions attend to
them together and to their own suffix cache. One compiled loop draws tokens
until every completion has ended or the length limit is reached.
"""

from __future__ import annotations

import functools

from flax import struct
import jax
import jax.numpy as jnp

from rollplex_jax.models import decoder, layers
from rollplex_jax.models.config import ModelConfig, TextConfig
from rollplex_jax.models.inputs import PromptInputs
from rollplex_jax.models.weights import Params
from rollplex_jax.stages import sampling as sampling_lib


@struct.dataclass
class Completions:
  """What a rollout produced.

  Attributes:
    token_ids: int32 [B, G, R], zero after a completion's end.
    logprobs: float32 [B, G, R] recorded log-probs, zero after the end.
    lengths: int32 [B, G] tokens of each completion, its EOS included.
    finished: bool [B, G], True where an EOS was drawn, False where the length
      limit cut the completion.
  """

  token_ids: jax.Array
  logprobs: jax.Array
  lengths: jax.Array
  finished: jax.Array


@struct.dataclass
class DecodeState:
  """Carry of the decode loop.

  Attributes:
    index: int32 scalar, tokens drawn so far.
    last: int32 [B, G], the next input token.
    done: bool [B, G].
    token_ids: int32 [B, G, R].
    logprobs: float32 [B, G, R].
    lengths: int32 [B, G].
    cache: per layer, suffix keys [N, K, h, R] and values [N, K, R, h], where
      N = B * G.
  """

  index: jax.Array
  last: jax.Array
  done: jax.Array
  token_ids: jax.Array
  logprobs: jax.Array
  lengths: jax.Array
  cache: list[tuple[jax.Array, jax.Array]]


def start(config: ModelConfig, sampling: sampling_lib.SamplingConfig,
          prompts: PromptInputs, num_generations: int,
          dtype) -> DecodeState:
  """The state before the first token: every sample holds its last prompt
  token as next input."""
  b, r = prompts.token_ids.shape[0], sampling.max_completion_length
  g, t = num_generations, config.text
  last = jnp.take_along_axis(
      prompts.token_ids, prompts.lengths[:, None] - 1, axis=1)
  k, h = t.num_key_value_heads, t.head_dim
  return DecodeState(
      index=jnp.zeros((), jnp.int32),
      last=jnp.broadcast_to(last, (b, g)),
      # Rows that pad the batch have length 0 and nothing to say.
      done=jnp.broadcast_to(prompts.lengths[:, None] == 0, (b, g)),
      token_ids=jnp.zeros((b, g, r), jnp.int32),
      logprobs=jnp.zeros((b, g, r), jnp.float32),
      lengths=jnp.zeros((b, g), jnp.int32),
      cache=[(jnp.zeros((b * g, k, h, r), dtype),
              jnp.zeros((b * g, k, r, h), dtype))
             for _ in range(t.num_hidden_layers)],
  )


def decode(params: Params, config: ModelConfig,
           sampling: sampling_lib.SamplingConfig, prompts: PromptInputs,
           prefix_kv, keys: jax.Array) -> Completions:
  """Draws G completions for each of B prompts.

  Args:
    params: {"text": ..., ...}.
    config: the model's configuration.
    sampling: how to draw; its maximum length R fixes the cache.
    prompts: B right-padded prompts; rows of length 0 pad the batch.
    prefix_kv: per layer, the prompts' keys [B, K, h, P] and values
      [B, K, P, h].
    keys: typed PRNG keys [B, G].

  Returns:
    `Completions` with arrays of [B, G, R].
  """
  text = params["text"]
  state = start(config, sampling, prompts, keys.shape[1],
                text["embed"].dtype)
  p = prompts.token_ids.shape[1]
  prefix_mask = jnp.arange(p) < prompts.lengths[:, None] - 1  # [B, P]
  last_position = jnp.take_along_axis(
      prompts.positions, prompts.lengths[None, :, None] - 1, axis=2)

  def more(state):
    return (state.index < sampling.max_completion_length) & ~jnp.all(
        state.done)

  def step(state):
    position = jnp.where(
        state.index == 0, last_position[..., 0],
        prompts.next_position + state.index - 1)  # [3, B]
    scores, cache = decode_step(
        text, config.text, state, position, prefix_kv, prefix_mask)
    b, g, v = scores.shape
    tokens, logprobs = sampling_lib.sample(
        scores.reshape(b * g, v), keys.reshape(-1), state.index, sampling)
    return advance(state, sampling, tokens.reshape(b, g),
                   logprobs.reshape(b, g), cache)

  state = jax.lax.while_loop(more, step, state)
  eos = jnp.array(sampling.eos_token_ids or (-1,), jnp.int32)
  return Completions(
      token_ids=state.token_ids, logprobs=state.logprobs,
      lengths=state.lengths,
      finished=state.done & jnp.isin(state.last, eos))


def decode_step(text: Params, config: TextConfig, state: DecodeState,
                position: jax.Array, prefix_kv, prefix_mask):
  """One token for every sample.

  Args:
    text: the decoder's parameters.
    config: its configuration.
    state: the loop's carry.
    position: int32 [3, B], of the input token.
    prefix_kv: per layer, keys [B, K, h, P] and values [B, K, P, h].
    prefix_mask: bool [B, P], prefix entries that exist.

  Returns:
    float32 [B, G, V] logits and the cache with this token's entries.
  """
  x = decoder.embed(text, state.last)  # [B, G, D]
  cos, sin = decoder.rope(config, position[..., None])  # [B, 1, h]
  r = state.token_ids.shape[-1]
  suffix_mask = jnp.arange(r) <= state.index
  cache = []
  for w, prefix, suffix in zip(text["layers"], prefix_kv, state.cache):
    attend = functools.partial(
        _attend_step, prefix=prefix, suffix=suffix, index=state.index,
        prefix_mask=prefix_mask, suffix_mask=suffix_mask)
    x, extra = decoder.layer(w, config, x, (cos, sin), attend)
    cache.append(extra)
  x = layers.rms_norm(x, text["norm"], config.rms_norm_eps)
  return decoder.logits(text, x), cache


def _attend_step(q, k, v, *, prefix, suffix, index, prefix_mask, suffix_mask):
  """Attention of one query per sample to shared prefix and own suffix.

  q [B, G, H, h] and k, v [B, G, K, h]; returns [B, G, H*h] and the suffix
  cache with k and v written at `index`.
  """
  b, g, num_heads, h = q.shape
  num_kv = k.shape[2]
  suffix = (
      jax.lax.dynamic_update_slice(
          suffix[0], k.reshape(b * g, num_kv, h, 1), (0, 0, 0, index)),
      jax.lax.dynamic_update_slice(
          suffix[1], v.reshape(b * g, num_kv, 1, h), (0, 0, index, 0)))
  q = (q * h ** -0.5).reshape(b, g, num_kv, num_heads // num_kv, h)
  # A group's queries are rows of one product with their prompt's prefix.
  far = _attend_part(q.swapaxes(1, 2).reshape(b, num_kv, -1, h), *prefix,
                     prefix_mask[:, None, None, :])
  near = _attend_part(q.reshape(b * g, num_kv, -1, h), *suffix, suffix_mask)
  far = [a.reshape(b, num_kv, g, -1, a.shape[-1]).swapaxes(1, 2) for a in far]
  near = [a.reshape(b, g, num_kv, -1, a.shape[-1]) for a in near]
  # One softmax over both parts. The suffix always holds the token itself, so
  # the maximum is a real score even when the prefix is empty.
  top = jnp.maximum(far[0], near[0])
  far_share, near_share = jnp.exp(far[0] - top), jnp.exp(near[0] - top)
  total = far[1] * far_share + near[1] * near_share
  out = (far[2] * far_share + near[2] * near_share) / total
  return out.astype(q.dtype).reshape(b, g, num_heads * h), suffix


def _attend_part(q, k, v, mask):
  """Attention to some of the keys, to be joined with the others.

  q [N, K, q, h], k [N, K, h, S], v [N, K, S, h] and a mask that broadcasts to
  [N, K, q, S]; returns, in float32, the largest score [N, K, q, 1], the sum of
  exp(score - largest) [N, K, q, 1] and the values weighted so [N, K, q, h].
  """
  scores = jnp.matmul(q, k, preferred_element_type=jnp.float32)
  scores = jnp.where(mask, scores, layers.MASKED)
  top = scores.max(axis=-1, keepdims=True)
  weights = jnp.exp(scores - top)
  values = jnp.matmul(weights.astype(v.dtype), v,
                      preferred_element_type=jnp.float32)
  return top, weights.sum(axis=-1, keepdims=True), values


def advance(state: DecodeState, sampling: sampling_lib.SamplingConfig,
            tokens: jax.Array, logprobs: jax.Array, cache) -> DecodeState:
  """Records drawn tokens [B, G] and marks completions that ended."""
  alive = ~state.done
  place = lambda array, new: jax.lax.dynamic_update_slice(
      array, jnp.where(alive, new, 0)[..., None].astype(array.dtype),
      (0, 0, state.index))
  eos = jnp.array(sampling.eos_token_ids or (-1,), jnp.int32)
  return DecodeState(
      index=state.index + 1,
      last=jnp.where(alive, tokens, state.last),
      done=state.done | jnp.isin(tokens, eos),
      token_ids=place(state.token_ids, tokens),
      logprobs=place(state.logprobs, logprobs),
      lengths=state.lengths + alive.astype(jnp.int32),
      cache=cache,
  )
