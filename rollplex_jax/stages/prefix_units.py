"""Prefix work in units: one chunk of one prompt micro-batch, all layers.

A prefix that is to be computed while something else runs has to come in pieces
of about the cost of a decode step. A unit takes `chunk` tokens of `rows`
prompts through every layer, as in chunked prefill: it writes their keys and
values into buffers for the whole batch and attends to what those buffers hold
so far. Units of one prompt must run in order. How many there are depends on
how long the prompts are, not on how far they are padded.
"""

from __future__ import annotations

import dataclasses
import functools

from flax import struct
import jax
from jax.experimental.layout import Layout, with_layout_constraint
import jax.numpy as jnp
import numpy as np

from rollplex_jax.models import decoder, layers
from rollplex_jax.models.config import TextConfig
from rollplex_jax.models.inputs import PromptInputs
from rollplex_jax.models.weights import Params

# Tokens of a chunk are a multiple of this where they can be.
_ALIGNMENT = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnitShape:
  """The size of a unit.

  Attributes:
    chunk: tokens of each prompt.
    rows: prompts.
    key_extents: how many lengths of keys are compiled. A chunk attends to the
      shortest that holds what it may see, where with 1 it always reads, and
      masks, the whole buffer. Each choice is a branch, for which a GPU asks
      the host once per layer: use 1 there.
  """

  chunk: int
  rows: int = 1
  key_extents: int = 8

  def __post_init__(self):
    for field in dataclasses.fields(self):
      if getattr(self, field.name) < 1:
        raise ValueError(f"{field.name} must be at least 1, found "
                         f"{getattr(self, field.name)}")

  @classmethod
  def of_tokens(cls, tokens: int, length: int) -> UnitShape:
    """At most `tokens` in all: of one prompt, or of several short ones.

    Chunks of a long prompt are about alike: the last one is computed whole,
    however few tokens are left for it.

    Args:
      tokens: of a unit.
      length: P, to which prompts are padded.
    """
    count = -(-length // tokens)
    chunk = -(-length // count)
    chunk = min(-(-chunk // _ALIGNMENT) * _ALIGNMENT, tokens, length)
    return cls(chunk=chunk, rows=max(tokens // length, 1))

  def within(self, prompts: PromptInputs) -> UnitShape:
    """The same, no larger than the batch."""
    b, p = prompts.token_ids.shape
    return dataclasses.replace(
        self, chunk=min(self.chunk, p), rows=min(self.rows, b))


@struct.dataclass
class Buffers:
  """What units write, for a whole batch of prompts.

  Attributes:
    kv: per layer, keys [B, K, h, P] and values [B, K, P, h].
    layer_inputs: per layer, [B, P, D], or None where they are not wanted.
  """

  kv: list[tuple[jax.Array, jax.Array]]
  layer_inputs: list[jax.Array] | None = None


@struct.dataclass
class Units:
  """The units of a batch, one micro-batch of prompts after another.

  Attributes:
    first_row: int32 [M], first prompt of each micro-batch.
    counts: int32 [M], units of each.
    ends: int32 [M], units of this and all before it.
  """

  first_row: jax.Array
  counts: jax.Array
  ends: jax.Array

  @property
  def total(self) -> jax.Array:
    """int32 scalar."""
    return self.ends[-1]


@struct.dataclass
class Place:
  """Where a unit stands: int32 scalars, its first prompt and token."""

  row: jax.Array
  offset: jax.Array


def allocate(config: TextConfig, num_prompts: int, length: int, dtype, *,
             layer_inputs: bool) -> Buffers:
  """Zeroed buffers for `num_prompts` prompts padded to `length`."""
  b, p, t = num_prompts, length, config
  k, h = t.num_key_value_heads, t.head_dim
  depth = range(t.num_hidden_layers)
  return Buffers(
      kv=[(jnp.zeros((b, k, h, p), dtype), jnp.zeros((b, k, p, h), dtype))
          for _ in depth],
      layer_inputs=[jnp.zeros((b, p, t.hidden_size), dtype) for _ in depth]
      if layer_inputs else None)


def plan_units(prompts: PromptInputs, shape: UnitShape) -> Units:
  """Counts the units that the longest prefix of each micro-batch needs.

  The last micro-batch, like the last chunk of a full buffer, is moved back to
  end with the batch: what both it and the one before hold is computed twice,
  to the same numbers.
  """
  b = prompts.token_ids.shape[0]
  first_row = np.minimum(np.arange(0, b, shape.rows), b - shape.rows)
  members = first_row[:, None] + np.arange(shape.rows)
  # A prompt's last token belongs to the suffix.
  longest = jnp.max(prompts.lengths[members], axis=1) - 1
  counts = (jnp.maximum(longest, 0) + shape.chunk - 1) // shape.chunk
  return Units(jnp.asarray(first_row, jnp.int32), counts, jnp.cumsum(counts))


def locate(units: Units, index: jax.Array, shape: UnitShape,
           length: int) -> Place:
  """The place of unit `index` of prompts padded to `length`."""
  micro_batch = jnp.sum(units.ends <= index)
  start = units.ends[micro_batch] - units.counts[micro_batch]
  offset = jnp.minimum((index - start) * shape.chunk, length - shape.chunk)
  return Place(units.first_row[micro_batch], offset)


def chunk_rows(text: Params, config: TextConfig, prompts: PromptInputs,
               features: jax.Array | None, place: Place, shape: UnitShape,
               axis: decoder.Axis = None):
  """A unit's embedded tokens [rows, chunk, D] and angles [rows, chunk, h]."""
  size = (shape.rows, shape.chunk)
  cut = lambda a: jax.lax.dynamic_slice(a, (place.row, place.offset), size)
  x = decoder.embed(text, cut(prompts.token_ids), features,
                    cut(prompts.feature_index), axis=axis)
  return x, decoder.rope(config, jax.vmap(cut)(prompts.positions))


def attend(buffers: Buffers, place: Place, shape: UnitShape, layer: int, *,
           write: bool = True) -> decoder.Attend:
  """Attention of a unit in one layer.

  Its extra is the layer's new buffers or, unless `write`, what `write_chunk`
  takes: where a call can't write a buffer that it was given, its caller can.
  """
  return functools.partial(
      attend_chunk, kv=buffers.kv[layer], place=place,
      key_extents=shape.key_extents, write=write)


def attend_chunk(q, k, v, *, kv, place: Place, key_extents: int,
                 write: bool = True):
  """Causal attention of a chunk to itself and the chunks before it.

  Args:
    q: [rows, chunk, H, h].
    k: [rows, chunk, K, h], and v alike.
    v: the values.
    kv: keys [B, K, h, P] and values [B, K, P, h] of all prompts.
    place: of the chunk in those.
    key_extents: how many lengths of keys to compile.
    write: put k and v into `kv` first.

  Returns:
    [rows, chunk, H*h], and `kv` with the chunk's keys and values; or unless
    `write` those as `chunk_kv` gives them.
  """
  rows, chunk, num_heads, h = q.shape
  num_kv, length = k.shape[2], kv[0].shape[-1]
  groups = num_heads // num_kv
  new = chunk_kv(k, v)
  q = (q * h ** -0.5).reshape(rows, chunk, num_kv, groups, h)
  q = q.transpose(0, 2, 3, 1, 4).reshape(rows, num_kv, groups * chunk, h)
  if write:
    kv = extra = write_chunk(kv, new, place)
    own, seen = (), place.offset + 1 + jnp.arange(chunk)
  else:
    extra = new
    causal = jnp.tile(layers.causal_mask(chunk), (groups, 1))
    own, seen = (layers.attend_part(q, *new, causal),), place.offset[None]

  def attend_to(extent, q, kv, row, seen):
    at = (row, 0, 0, 0)
    keys = jax.lax.dynamic_slice(kv[0], at, (rows, num_kv, h, extent))
    values = jax.lax.dynamic_slice(kv[1], at, (rows, num_kv, extent, h))
    mask = jnp.arange(extent) < seen[:, None]  # [chunk or 1, extent]
    mask = jnp.broadcast_to(mask, (chunk, extent))
    return layers.attend_part(q, keys, values, jnp.tile(mask, (groups, 1)))

  extents = _extents(length, chunk, key_extents)
  branches = [functools.partial(attend_to, extent) for extent in extents]
  shorter = jnp.sum(jnp.asarray(extents[:-1], jnp.int32) < seen[-1])
  part = jax.lax.switch(shorter, branches, q, kv, place.row, seen)
  out = layers.join_parts(part, *own).astype(q.dtype)
  out = out.reshape(rows, num_kv, groups, chunk, h).transpose(0, 3, 1, 2, 4)
  return out.reshape(rows, chunk, num_heads * h), extra


def chunk_kv(k: jax.Array, v: jax.Array):
  """k, v [rows, chunk, K, h] as kept: [rows, K, h, chunk], [rows, K, chunk, h].

  Laid out like the buffers that they go into: left to choose, XLA keeps them
  as they were made and turns whole buffers over to fit.
  """
  straight = Layout(major_to_minor=(0, 1, 2, 3))
  return (with_layout_constraint(k.transpose(0, 2, 3, 1), straight),
          with_layout_constraint(v.transpose(0, 2, 1, 3), straight))


def write_chunk(kv, new, place: Place):
  """`kv` with a chunk's keys and values, from `chunk_kv`, at its place."""
  row, offset = place.row, place.offset
  return (
      jax.lax.dynamic_update_slice(kv[0], new[0], (row, 0, 0, offset)),
      jax.lax.dynamic_update_slice(kv[1], new[1], (row, 0, offset, 0)))


def _extents(length: int, chunk: int, count: int) -> list[int]:
  """Up to `count` lengths of keys, multiples of `chunk` but for the last."""
  chunks = -(-length // chunk)
  count = min(count, chunks)
  return [min(-(-chunks * i // count) * chunk, length)
          for i in range(1, count + 1)]


def save_inputs(buffers: Buffers, layer: int, x: jax.Array, place: Place,
                axis: decoder.Axis = None) -> jax.Array | None:
  """One layer's buffer of inputs with x [rows, chunk, D] at its place.

  Under `axis` each device keeps its own part of D.
  """
  if buffers.layer_inputs is None:
    return None
  saved = buffers.layer_inputs[layer]
  if axis is not None:
    part = saved.shape[-1]
    x = jax.lax.dynamic_slice_in_dim(
        x, jax.lax.axis_index(axis) * part, part, axis=-1)
  return jax.lax.dynamic_update_slice(
      saved, x, (place.row, place.offset, 0))


def collect(kv, inputs) -> Buffers:
  """Buffers of per-layer lists; None among the inputs means none are kept."""
  return Buffers(kv, None if inputs[0] is None else inputs)


def run_unit(text: Params, config: TextConfig, prompts: PromptInputs,
             features: jax.Array | None, buffers: Buffers, place: Place,
             shape: UnitShape, axis: decoder.Axis = None) -> Buffers:
  """Takes one chunk through every layer; of the last, only keys and values.

  Args:
    text: the decoder's parameters.
    config: its configuration.
    prompts: B prompts of P tokens.
    features: merged vision features [f, D], or None.
    buffers: what earlier units wrote.
    place: of the unit.
    shape: of the unit.
    axis: mesh axis that splits heads, MLP and vocabulary.

  Returns:
    The buffers with the chunk in them.
  """
  x, angles = chunk_rows(text, config, prompts, features, place, shape, axis)
  kv, inputs = [], []
  for i, w in enumerate(text["layers"]):
    inputs.append(save_inputs(buffers, i, x, place, axis))
    if i + 1 == len(text["layers"]):
      _, k, v = decoder.project_qkv(w, config, x, angles)
      written = write_chunk(buffers.kv[i], chunk_kv(k, v), place)
    else:
      x, written = decoder.layer(
          w, config, x, angles, attend(buffers, place, shape, i), axis=axis)
    kv.append(written)
  return collect(kv, inputs)
