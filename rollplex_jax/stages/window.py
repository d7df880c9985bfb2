"""The decode window: prefix work while the rollout decodes, in one program.

Decoding reads weights and is bound by memory; prefix work is bound by
arithmetic. While completions are drawn, each turn of a loop runs one decode
step and one unit of prefix work (see `prefix_units`):

1. while completions are unfinished and units are left: a step and a unit;
2. while units are left: a unit (decoding ended first);
3. while completions are unfinished: a step (the units ran out first).

Units of the *policy* have the weights of the decode step. Rows of both are put
in one batch, so that each weight is read once for both and only attention is
separate. Units of the *reference* have other weights. On a GPU they run on a
second stream: in each half of each layer the decode rows and the chunk are two
annotated calls without collectives, joined by a barrier, after which one sum
over the tensor-parallel axis serves both. Elsewhere the annotation says nothing
and the same numbers come out in sequence.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses

from flax import struct
import jax
from jax.experimental.xla_metadata import set_xla_metadata
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from legolm_jax.array import LegoArray
from rollplex_jax.models import decoder
from rollplex_jax.models.config import ModelConfig, TextConfig
from rollplex_jax.models.inputs import PromptInputs
from rollplex_jax.models.weights import Params, is_weight
from rollplex_jax.placement import sharding
from rollplex_jax.placement.sharding import Placement
from rollplex_jax.stages import prefix_units, rollout
from rollplex_jax.stages.prefix_units import Buffers, Place, UnitShape
from rollplex_jax.stages.rollout import Completions, DecodeInputs, DecodeState
from rollplex_jax.stages.sampling import SamplingConfig

# Which stream of a GPU runs what; 0 is the one that joins them.
_UNIT_STREAM, _DECODE_STREAM = 1, 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowConfig:
  """How prefix work rides along.

  Attributes:
    unit: the size of a unit.
    streams: let reference units run on a GPU's second stream.
  """

  unit: UnitShape
  streams: bool = False


@struct.dataclass
class Artifacts:
  """Prefix work of a window. What has buffers is what the window computes.

  Attributes:
    policy: the policy's prefixes, or None; their layer inputs are what
      `prefix.prefix_backward` reads under `SavePolicy.LAYER_INPUTS`.
    reference: the reference's prefixes, or None.
  """

  policy: Buffers | None = None
  reference: Buffers | None = None


@struct.dataclass
class Turns:
  """How often each loop turned, int32 scalars.

  Attributes:
    with_policy: a decode step and a policy unit.
    with_reference: a decode step and a reference unit.
    policy: a policy unit alone.
    reference: a reference unit alone.
    decode: a decode step alone.
  """

  with_policy: jax.Array
  with_reference: jax.Array
  policy: jax.Array
  reference: jax.Array
  decode: jax.Array


def allocate(config: TextConfig, num_prompts: int, length: int, dtype, *,
             policy: bool, layer_inputs: bool, reference: bool) -> Artifacts:
  """Zeroed buffers for the prefix work that is wanted.

  Args:
    config: of the policy's decoder, and the reference's.
    num_prompts: B.
    length: P.
    dtype: of the parameters.
    policy: compute the policy's prefixes.
    layer_inputs: and keep the inputs of their layers.
    reference: compute the reference's prefixes.
  """
  make = lambda inputs: prefix_units.allocate(
      config, num_prompts, length, dtype, layer_inputs=inputs)
  return Artifacts(policy=make(layer_inputs) if policy else None,
                   reference=make(False) if reference else None)


def run_window(
    policy: Params, reference: Params | None, config: ModelConfig,
    sampling: SamplingConfig, window: WindowConfig, prompts: PromptInputs,
    prefix_kv, features: jax.Array | None,
    reference_features: jax.Array | None, keys: jax.Array,
    artifacts: Artifacts, *, axis: decoder.Axis = None,
) -> tuple[Completions, Artifacts, Turns]:
  """Draws completions and computes prefixes meanwhile.

  Args:
    policy: the decoder's parameters that draw, and make policy units.
    reference: the reference decoder's parameters, or None.
    config: of both models.
    sampling: how to draw.
    window: how prefix work rides along.
    prompts: B right-padded prompts of P tokens; rows of length 0 pad.
    prefix_kv: what decoding reads: per layer, keys [B, K, h, P] and values
      [B, K, P, h].
    features: merged vision features [f, D] under the policy, or None.
    reference_features: the same under the reference; with a frozen tower the
      very same.
    keys: typed PRNG keys [B, G].
    artifacts: buffers to write (donate them); those that are None leave the
      work out. Positions that no suffix may read, from each prompt's length - 1
      on, may keep what they held.
    axis: mesh axis that splits heads, MLP and vocabulary, under `shard_map`.

  Returns:
    The completions, equal to `rollout.decode`'s; the artifacts, equal to those
    of `prefix.prefix_kv`; and what each loop did.

  Raises:
    ValueError: if reference units are wanted and there is no reference.
  """
  if artifacts.reference is not None and reference is None:
    raise ValueError("reference units need the reference's parameters")
  text, shape = config.text, window.unit.within(prompts)
  length = prompts.token_ids.shape[1]
  units = prefix_units.plan_units(prompts, shape)
  inputs = rollout.decode_inputs(prompts, prefix_kv, keys)
  state = rollout.start(sampling, prompts, prefix_kv, keys.shape[1])
  decoding = lambda state: rollout.unfinished(state, sampling)

  def decode_with_unit(kind, index, state, buffers):
    place = prefix_units.locate(units, index, shape, length)
    if kind == "policy":
      chunk = prefix_units.chunk_rows(
          policy, text, prompts, features, place, shape, axis)
      x, cache, buffers = _run_joined(
          policy, text, inputs, state, chunk, buffers, place, shape, axis)
    else:
      chunk = prefix_units.chunk_rows(
          reference, text, prompts, reference_features, place, shape, axis)
      x, cache, buffers = _run_apart(
          policy, reference, text, inputs, state, chunk, buffers, place, shape,
          axis, window.streams)
    return rollout.draw(
        policy, text, sampling, inputs, state, x, cache, axis), buffers

  def unit_alone(kind, index, buffers):
    place = prefix_units.locate(units, index, shape, length)
    weights, seen = ((policy, features) if kind == "policy" else
                     (reference, reference_features))
    return prefix_units.run_unit(
        weights, text, prompts, seen, buffers, place, shape, axis)

  done = {"policy": artifacts.policy, "reference": artifacts.reference}
  kinds = [kind for kind, buffers in done.items() if buffers is not None]
  none = jnp.zeros((), jnp.int32)
  together, alone = dict.fromkeys(done, none), dict.fromkeys(done, none)
  for kind in kinds:  # Loop 1.

    def step(carry, kind=kind):
      index, state, buffers = carry
      state, buffers = decode_with_unit(kind, index, state, buffers)
      return index + 1, state, buffers

    together[kind], state, done[kind] = jax.lax.while_loop(
        lambda carry: (carry[0] < units.total) & decoding(carry[1]), step,
        (none, state, done[kind]))
  for kind in kinds:  # Loop 2.
    index, done[kind] = jax.lax.while_loop(
        lambda carry: carry[0] < units.total,
        lambda carry, kind=kind: (carry[0] + 1, unit_alone(kind, *carry)),
        (together[kind], done[kind]))
    alone[kind] = index - together[kind]
  before = state.index
  state = jax.lax.while_loop(  # Loop 3.
      decoding,
      lambda state: rollout.decode_step(
          policy, text, sampling, inputs, state, axis=axis), state)
  turns = Turns(
      with_policy=together["policy"], with_reference=together["reference"],
      policy=alone["policy"], reference=alone["reference"],
      decode=state.index - before)
  return rollout.completions(state, sampling), Artifacts(**done), turns


def _run_joined(w_all: Params, config: TextConfig, inputs: DecodeInputs,
                state: DecodeState, chunk, buffers: Buffers, place: Place,
                shape: UnitShape, axis: decoder.Axis):
  """A decode step and a policy unit as rows of one batch.

  Returns:
    Decode rows [B, G, D] after the last layer, the suffix cache, the buffers.
  """
  x_decode, angles_decode = rollout.token_rows(
      w_all, config, inputs, state, axis)
  x_chunk, angles_chunk = chunk
  b, g, d = x_decode.shape
  n = b * g
  # Decode rows first, all as tokens of one sequence: [1, N + M, D].
  rows = lambda a: a.reshape(1, -1, *a.shape[2:])
  x = jnp.concatenate([rows(x_decode), rows(x_chunk)], axis=1)
  angles = tuple(
      jnp.concatenate([rows(jnp.broadcast_to(a, (b, g, a.shape[-1]))),
                       rows(c)], axis=1)
      for a, c in zip(angles_decode, angles_chunk))
  of_decode = lambda a: a[:, :n].reshape(b, g, *a.shape[2:])
  of_chunk = lambda a: a[:, n:].reshape(*x_chunk.shape[:2], *a.shape[2:])
  last = len(w_all["layers"]) - 1
  cache, kv, saved = [], [], []
  for i, w in enumerate(w_all["layers"]):
    attend_decode = rollout.attend(inputs, state, i)

    def attend(q, k, v, i=i, attend_decode=attend_decode):
      out, suffix = attend_decode(of_decode(q), of_decode(k), of_decode(v))
      if i == last:
        new = prefix_units.chunk_kv(of_chunk(k), of_chunk(v))
        return rows(out), (suffix, prefix_units.write_chunk(
            buffers.kv[i], new, place))
      far, written = prefix_units.attend(buffers, place, shape, i)(
          of_chunk(q), of_chunk(k), of_chunk(v))
      return (jnp.concatenate([rows(out), rows(far)], axis=1),
              (suffix, written))

    saved.append(
        prefix_units.save_inputs(buffers, i, of_chunk(x), place, axis))
    queries = n if i == last else None
    half, (suffix, written) = decoder.attention_half(
        w, config, x, angles, attend, queries)
    x = x[:, :queries] + decoder.total(half, axis)
    x = x + decoder.total(decoder.mlp_half(w, config, x), axis)
    cache.append(suffix)
    kv.append(written)
  return x.reshape(b, g, d), cache, prefix_units.collect(kv, saved)


def _run_apart(w_decode: Params, w_unit: Params, config: TextConfig,
               inputs: DecodeInputs, state: DecodeState, chunk,
               buffers: Buffers, place: Place, shape: UnitShape,
               axis: decoder.Axis, streams: bool):
  """A decode step and a reference unit, in pairs of calls per half layer.

  Returns:
    Decode rows [B, G, D] after the last layer, the suffix cache, the buffers.
  """
  x, angles = rollout.token_rows(w_decode, config, inputs, state, axis)
  y, angles_unit = chunk
  last = len(w_decode["layers"]) - 1
  cache, kv = [], []
  for i, (w, w_ref) in enumerate(zip(w_decode["layers"], w_unit["layers"])):

    def decode_attention(w, x, angles, inputs, state, i=i):
      return decoder.attention_half(
          w, config, x, angles, rollout.attend(inputs, state, i, write=False))

    def unit_attention(w, y, angles, buffers, place, i=i):
      if i == last:
        _, k, v = decoder.project_qkv(w, config, y, angles)
        return None, prefix_units.chunk_kv(k, v)
      return decoder.attention_half(
          w, config, y, angles,
          prefix_units.attend(buffers, place, shape, i, write=False))

    def mlp(w, x):
      return decoder.mlp_half(w, config, x)

    (half, entry), (unit_half, new) = _pair(
        streams, (decode_attention, w, x, angles, inputs, state),
        (unit_attention, w_ref, y, angles_unit, buffers, place))
    # A call does not write what it was given, for then XLA copies it first.
    cache.append(rollout.write_entry(state.cache[i], entry, state.index))
    kv.append(prefix_units.write_chunk(buffers.kv[i], new, place))
    if i == last:
      x = x + decoder.total(half, axis)
      x = x + decoder.total(mlp(w, x), axis)
      break
    half, unit_half = _sum_together(half, unit_half, axis)
    x, y = x + half, y + unit_half
    half, unit_half = _sum_together(
        *_pair(streams, (mlp, w, x), (mlp, w_ref, y)), axis)
    x, y = x + half, y + unit_half
  return x, cache, Buffers(kv)


def _pair(streams: bool, decode_call, unit_call):
  """Calls (function, *arguments) twice, on two streams where asked for."""
  if not streams:
    return decode_call[0](*decode_call[1:]), unit_call[0](*unit_call[1:])
  return jax.lax.optimization_barrier((
      on_stream(_DECODE_STREAM, decode_call[0])(*decode_call[1:]),
      on_stream(_UNIT_STREAM, unit_call[0])(*unit_call[1:])))


def on_stream(number: int, f: Callable) -> Callable:
  """f, as one call that a GPU runs on stream `number`.

  `f` must compute its first output and hold no collective. The annotation is
  of the call only: what is inside runs on the stream of the call.
  """
  call = jax.jit(f)

  def annotated(*args):
    leaves, tree = jax.tree.flatten(call(*args))
    leaves[0] = set_xla_metadata(
        leaves[0], _xla_stream_annotation=str(number), inlineable="false")
    return tree.unflatten(leaves)

  return annotated


def _sum_together(x: jax.Array, y: jax.Array, axis: decoder.Axis):
  """`decoder.total` of x [B, G, D] and y [rows, chunk, D] by one collective."""
  if axis is None:
    return x, y
  d = x.shape[-1]
  joined = decoder.total(
      jnp.concatenate([x.reshape(-1, d), y.reshape(-1, d)]), axis)
  n = x.shape[0] * x.shape[1]
  return joined[:n].reshape(x.shape), joined[n:].reshape(y.shape)


def can_shard(place: Placement) -> bool:
  """Whether `shard_window` can run there: all that is split divides alike.

  Otherwise the compiler splits `run_window`, to the same numbers.
  """
  rules = place.text
  return (rules.vocab == rules.heads == rules.kv_heads == rules.mlp
          == rules.saved and not rules.embed)


def shard_window(place: Placement, config: ModelConfig,
                 sampling: SamplingConfig, window: WindowConfig) -> Callable:
  """`run_window` with prompts, heads, MLP and vocabulary split over a mesh.

  Every part of the batch has loops of its own, and waits for no other. The
  result takes the other arguments of `run_window`, from `policy` to
  `artifacts`, in their order. Keys, values and the artifacts' are split by
  heads, saved layer inputs by D, features by the prompts that they belong to.
  The counts of turns have one entry for each part of the batch.
  """
  rules, spec = place.text, PartitionSpec
  axis = rules.heads or None
  batch = rules.batch or None
  declared = decoder.weights(config.text)
  rows, heads = spec(batch), spec(batch, axis)
  prompt_specs = PromptInputs(
      token_ids=rows, lengths=rows, positions=spec(None, batch),
      feature_index=rows, next_position=rows, row_ids=rows)

  def weight_specs(params):
    def of(weight, leaf):
      spec = rules.spec(*weight.axes)
      return (leaf.partition_specs(spec) if isinstance(leaf, LegoArray)
              else spec)

    return params and jax.tree.map(of, declared, params, is_leaf=is_weight)

  def artifact_specs(artifacts):
    split = lambda buffers: buffers and Buffers(
        jax.tree.map(lambda _: heads, buffers.kv),
        jax.tree.map(lambda _: spec(batch, None, axis), buffers.layer_inputs))
    return Artifacts(split(artifacts.policy), split(artifacts.reference))

  def run(policy, reference, prompts, prefix_kv, features,
          reference_features, keys, artifacts):
    specs = artifact_specs(artifacts)

    def local(policy, reference, prompts, prefix_kv, features, *rest):
      if features is not None and batch is not None:
        first = jax.lax.axis_index(batch) * features.shape[0]
        index = prompts.feature_index
        prompts = prompts.replace(
            feature_index=jnp.where(index >= 0, index - first, -1))
      with sharding.use(None):
        done, artifacts, turns = run_window(
            policy, reference, config, sampling, window, prompts, prefix_kv,
            features, *rest, axis=axis)
      return done, artifacts, jax.tree.map(lambda n: n[None], turns)

    return jax.shard_map(
        local, mesh=place.mesh,
        in_specs=(weight_specs(policy), weight_specs(reference), prompt_specs,
                  heads, rows, rows, rows, specs),
        out_specs=(rows, specs, rows), check_vma=False,
    )(policy, reference, prompts, prefix_kv, features, reference_features,
      keys, artifacts)

  return run
