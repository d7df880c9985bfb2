"""The rollout stage: batched decoding against a prefix shared by each group.

Each prompt's prefix keys and values are held once; its G completions attend to
them together and to their own suffix cache. One compiled loop draws tokens
until every completion has ended or the length limit is reached. In later turns
of an episode they attend to their own earlier turns, too.
"""

from __future__ import annotations

from collections.abc import Sequence
import functools

from flax import struct
import jax
import jax.numpy as jnp

from rollplex_jax.models import decoder, layers, shared_prefix
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


@struct.dataclass
class Turn:
  """Where the samples of a batch stand in a later turn of their episodes.

  Attributes:
    last: int32 [B, G], the last token of what they have seen.
    last_position: int32 [B, G, 3], its M-RoPE position.
    next_position: int32 [B, G], position of the next response token.
    over: bool [B, G], True where there is no next turn.
    first_draw: int32 scalar, number of the turn's first draw in its episode.
    history: per layer, keys [N, K, h, S] and values [N, K, S, h] of all inputs
      after the prefix and before `last`, where N = B * G.
    exists: bool [N, S], which entries of the history do.
  """

  last: jax.Array
  last_position: jax.Array
  next_position: jax.Array
  over: jax.Array
  first_draw: jax.Array
  history: Sequence[tuple[jax.Array, jax.Array]] = ()
  exists: jax.Array | None = None


@struct.dataclass
class DecodeInputs:
  """What every decode step reads.

  Attributes:
    prefix_kv: per layer, keys [B, K, h, P] and values [B, K, P, h].
    prefix_lengths: int32 [B], prefix entries that exist; -1 where a row pads
      the batch.
    last_position: int32 [3, B, g], of the last token seen; g is 1 where it is
      the same for a whole group.
    next_position: int32 [B, g], of the first response token.
    keys: typed PRNG keys [N].
    first_draw: int32 scalar, number of the first draw.
    history: per layer, what `shared_prefix` takes; empty in a first turn.
  """

  prefix_kv: list[tuple[jax.Array, jax.Array]]
  prefix_lengths: jax.Array
  last_position: jax.Array
  next_position: jax.Array
  keys: jax.Array
  first_draw: jax.Array
  history: list[tuple[jax.Array, ...]]


def decode_inputs(prompts: PromptInputs, prefix_kv, keys: jax.Array,
                  turn: Turn | None = None) -> DecodeInputs:
  """Collects what the steps read, for keys [B, G]."""
  shared = dict(prefix_kv=prefix_kv, prefix_lengths=prompts.lengths - 1,
                keys=keys.reshape(-1))
  if turn is not None:
    return DecodeInputs(
        last_position=jnp.moveaxis(turn.last_position, -1, 0),
        next_position=turn.next_position, first_draw=turn.first_draw,
        history=[(*kv, turn.exists) for kv in turn.history], **shared)
  last_position = jnp.take_along_axis(
      prompts.positions, prompts.lengths[None, :, None] - 1, axis=2)
  return DecodeInputs(
      last_position=last_position, next_position=prompts.next_position[:, None],
      first_draw=jnp.zeros((), jnp.int32), history=[], **shared)


def start(sampling: sampling_lib.SamplingConfig, prompts: PromptInputs,
          prefix_kv, num_generations: int,
          turn: Turn | None = None) -> DecodeState:
  """The state before the first token: every sample holds the last token that
  it has seen as next input. Suffix caches are like `prefix_kv` but for size."""
  b, r = prompts.token_ids.shape[0], sampling.max_completion_length
  g = num_generations
  # Rows that pad the batch have length 0 and nothing to say.
  done = jnp.broadcast_to(prompts.lengths[:, None] == 0, (b, g))
  if turn is None:
    last = jnp.take_along_axis(
        prompts.token_ids, prompts.lengths[:, None] - 1, axis=1)
  else:
    last, done = turn.last, done | turn.over

  def cache(keys, values):
    k, h = keys.shape[1:3]
    return (jnp.zeros((b * g, k, h, r), keys.dtype),
            jnp.zeros((b * g, k, r, h), values.dtype))

  return DecodeState(
      index=jnp.zeros((), jnp.int32),
      last=jnp.broadcast_to(last, (b, g)),
      done=done,
      token_ids=jnp.zeros((b, g, r), jnp.int32),
      logprobs=jnp.zeros((b, g, r), jnp.float32),
      lengths=jnp.zeros((b, g), jnp.int32),
      cache=[cache(*kv) for kv in prefix_kv],
  )


def decode(params: Params, config: ModelConfig,
           sampling: sampling_lib.SamplingConfig, prompts: PromptInputs,
           prefix_kv, keys: jax.Array,
           turn: Turn | None = None) -> Completions:
  """Draws G completions for each of B prompts, or their next turn.

  Args:
    params: {"text": ..., ...}.
    config: the model's configuration.
    sampling: how to draw; its maximum length R fixes the cache.
    prompts: B right-padded prompts; rows of length 0 pad the batch.
    prefix_kv: per layer, the prompts' keys [B, K, h, P] and values
      [B, K, P, h].
    keys: typed PRNG keys [B, G].
    turn: where the samples stand, in a later turn of their episodes.

  Returns:
    `Completions` with arrays of [B, G, R].
  """
  inputs = decode_inputs(prompts, prefix_kv, keys, turn)
  state = jax.lax.while_loop(
      lambda state: unfinished(state, sampling),
      lambda state: decode_step(
          params["text"], config.text, sampling, inputs, state),
      start(sampling, prompts, prefix_kv, keys.shape[1], turn))
  return completions(state, sampling)


def unfinished(state: DecodeState,
               sampling: sampling_lib.SamplingConfig) -> jax.Array:
  """bool scalar: whether any completion wants another token."""
  return (state.index < sampling.max_completion_length) & ~jnp.all(state.done)


def completions(state: DecodeState,
                sampling: sampling_lib.SamplingConfig) -> Completions:
  """What a loop that has ended produced."""
  eos = jnp.array(sampling.eos_token_ids or (-1,), jnp.int32)
  return Completions(
      token_ids=state.token_ids, logprobs=state.logprobs,
      lengths=state.lengths,
      finished=state.done & jnp.isin(state.last, eos))


def decode_step(text: Params, config: TextConfig,
                sampling: sampling_lib.SamplingConfig, inputs: DecodeInputs,
                state: DecodeState, *,
                axis: decoder.Axis = None) -> DecodeState:
  """Draws one token for every sample.

  Args:
    text: the decoder's parameters.
    config: its configuration.
    sampling: how to draw.
    inputs: what all steps read.
    state: the loop's carry.
    axis: mesh axis that splits heads, MLP and vocabulary.

  Returns:
    The carry with the token in it.
  """
  x, angles = token_rows(text, config, inputs, state, axis)
  cache = []
  for i, w in enumerate(text["layers"]):
    x, suffix = decoder.layer(
        w, config, x, angles, attend(inputs, state, i), axis=axis)
    cache.append(suffix)
  return draw(text, config, sampling, inputs, state, x, cache, axis)


def token_rows(text: Params, config: TextConfig, inputs: DecodeInputs,
               state: DecodeState, axis: decoder.Axis = None):
  """Embedded inputs [B, G, D] of a step, with angles [B, g, h]."""
  position = jnp.where(
      state.index == 0, inputs.last_position,
      inputs.next_position + state.index - 1)
  return (decoder.embed(text, state.last, axis=axis),
          decoder.rope(config, position))


def attend(inputs: DecodeInputs, state: DecodeState, layer: int, *,
           write: bool = True) -> decoder.Attend:
  """Attention of a step in one layer.

  Its extra is the layer's new cache or, unless `write`, what `write_entry`
  takes: where a call can't write a buffer that it was given, its caller can.
  """
  return functools.partial(
      attend_step, prefix=inputs.prefix_kv[layer], suffix=state.cache[layer],
      index=state.index, prefix_lengths=inputs.prefix_lengths,
      history=inputs.history[layer] if inputs.history else (), write=write)


def draw(text: Params, config: TextConfig,
         sampling: sampling_lib.SamplingConfig, inputs: DecodeInputs,
         state: DecodeState, x: jax.Array, cache,
         axis: decoder.Axis = None) -> DecodeState:
  """Samples from the last layer's output x [B, G, D] and moves on."""
  b, g, _ = x.shape
  x = layers.rms_norm(x, text["norm"], config.rms_norm_eps)
  scores = decoder.logits(text, x, axis=axis)
  tokens, logprobs = sampling_lib.sample(
      scores.reshape(b * g, -1), inputs.keys, inputs.first_draw + state.index,
      sampling)
  return advance(state, sampling, tokens.reshape(b, g),
                 logprobs.reshape(b, g), cache)


def attend_step(q, k, v, *, prefix, suffix, index, prefix_lengths, history=(),
                write=True):
  """Attention of one query per sample to shared prefix and own suffix.

  Args:
    q: [B, G, H, h].
    k: [B, G, K, h], and v alike.
    v: the values.
    prefix: keys [B, K, h, P] and values [B, K, P, h] of the prompts.
    suffix: keys [N, K, h, R] and values [N, K, R, h].
    index: int32 scalar, how many entries the suffix has.
    prefix_lengths: int32 [B].
    history: of the samples' earlier turns, if there are any.
    write: put k and v into the suffix first.

  Returns:
    [B, G, H*h], and the suffix with k and v at `index`; or unless `write` that
    entry, [N, K, h, 1] and [N, K, 1, h].
  """
  b, g, num_kv, h = k.shape
  entry = k.reshape(b * g, num_kv, h, 1), v.reshape(b * g, num_kv, 1, h)
  if write:
    suffix = extra = write_entry(suffix, entry, index)
    count, own = index + 1, ()
  else:
    extra = entry
    count, own = index, (k, v)
  out = shared_prefix.attend_one(
      q, prefix, suffix, prefix_lengths, count, own, history)
  return out.reshape(b, g, -1), extra


def write_entry(suffix, entry, index: jax.Array):
  """A suffix cache with an entry of every sample at `index`."""
  return (
      jax.lax.dynamic_update_slice(suffix[0], entry[0], (0, 0, 0, index)),
      jax.lax.dynamic_update_slice(suffix[1], entry[1], (0, 0, index, 0)))


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
