"""What the kernels share: sizes, the rows of a block, loads and the softmax.

A *row* is one query head of one token. For a head of keys and values, rows are
numbered through its query heads, then tokens, then samples; so the rows of a
group of samples are one run, whatever the sizes are, and a block of rows may
hold several samples or a part of one. Suffix keys of a prompt are numbered
through tokens, then samples.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
import jax.numpy as jnp

# Finite, so that blocks whose keys are all masked give numbers, which the next
# block with a key wipes out.
MASKED = -1e30


def power_of_two(size: int) -> int:
  """The smallest power of two that holds `size` and a product takes."""
  return max(16, pl.next_power_of_2(size))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
  """Sizes of a call: B, G, R, P, H, K and D of `reference`."""

  prompts: int
  samples: int
  suffix: int
  prefix: int
  heads: int
  kv_heads: int
  head_dim: int

  @property
  def group(self) -> int:
    """Query heads of a head of keys and values."""
    return self.heads // self.kv_heads

  @property
  def tokens(self) -> int:
    """Suffix tokens of a prompt's samples."""
    return self.samples * self.suffix

  @property
  def rows(self) -> int:
    """Rows of a prompt and a head of keys and values."""
    return self.tokens * self.group

  @property
  def scale(self) -> float:
    """Of the scores."""
    return self.head_dim ** -0.5

  def row_block(self, most: int) -> int:
    """Rows of a block."""
    return min(most, power_of_two(self.rows))


@dataclasses.dataclass(frozen=True)
class Rows:
  """A block of rows.

  Attributes:
    place: int32 [rows], each row's place among [G, R, H].
    token: int32 [rows], its token among [G, R].
    start: int32 [rows], the first token of its sample.
    exists: bool [rows], False past the last row.
    valid: bool [rows], whether the token lies within its suffix.
  """

  place: jax.Array
  token: jax.Array
  start: jax.Array
  exists: jax.Array
  valid: jax.Array

  def sees(self, keys: jax.Array) -> jax.Array:
    """bool [rows, keys]: which of the suffix keys each row sees."""
    keys, valid = keys[None, :], self.valid[:, None]
    return valid & (keys >= self.start[:, None]) & (
        keys <= self.token[:, None])

  def seen_by(self, keys: jax.Array) -> jax.Array:
    """bool [keys, rows]: the same, transposed."""
    keys, valid = keys[:, None], self.valid[None, :]
    return valid & (keys >= self.start[None, :]) & (
        keys <= self.token[None, :])


def rows_at(sizes: Sizes, first, count: int, kv_head, lengths_ref) -> Rows:
  """`count` rows from `first` on; lengths_ref int32 [G]."""
  row = first + jnp.arange(count, dtype=jnp.int32)
  token = jax.lax.div(row, jnp.int32(sizes.group))
  sample = jax.lax.div(token, jnp.int32(sizes.suffix))
  exists = row < sizes.rows
  start = sample * sizes.suffix
  length = plgpu.load(lengths_ref.at[sample], mask=exists, other=0)
  return Rows(
      place=(token * sizes.heads + kv_head * sizes.group
             + row - token * sizes.group),
      token=token, start=start, exists=exists,
      valid=exists & (token - start < length))


def load(ref, down: jax.Array, across: jax.Array, rows=None, columns=None,
         at=()):
  """ref[*at, down[:, None], across[None, :]], zeros where a mask is False.

  Masks are bool vectors along `down` and `across`; None stands for all True.
  """
  mask = None
  if rows is not None and columns is not None:
    mask = rows[:, None] & columns[None, :]
  elif rows is not None:
    mask = jnp.broadcast_to(rows[:, None], (down.size, across.size))
  elif columns is not None:
    mask = jnp.broadcast_to(columns[None, :], (down.size, across.size))
  return plgpu.load(
      ref.at[*at, down[:, None], across[None, :]], mask=mask,
      other=None if mask is None else 0)


def store(ref, down: jax.Array, across: jax.Array, value, rows=None,
          columns=None, at=()) -> None:
  """Writes what `load` reads, in the dtype of `ref`."""
  mask = jnp.ones((down.size, across.size), jnp.bool_)
  if rows is not None:
    mask &= rows[:, None]
  if columns is not None:
    mask &= columns[None, :]
  plgpu.store(ref.at[*at, down[:, None], across[None, :]],
              value.astype(ref.dtype), mask=mask)


def inside(keys: jax.Array, size: int):
  """Which of a tile's keys, from a multiple of its size on, an array holds.

  None where all are. Loads are masked with this, not with a length: keys lie
  side by side in memory, and a bound that the compiler doesn't know would have
  them loaded one by one.
  """
  return None if size % keys.size == 0 else keys < size


def dims(sizes: Sizes):
  """Indices along a head, to a power of two, and a mask of those that exist.

  The mask is None where all exist.
  """
  padded = power_of_two(sizes.head_dim)
  index = jnp.arange(padded, dtype=jnp.int32)
  return index, None if padded == sizes.head_dim else index < sizes.head_dim


def dot(a, b, **transposed):
  """A float32 product; of float32 operands in full precision."""
  full = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
  return plgpu.dot(a, b, precision=full, **transposed)


def absorb(carry, scores, v):
  """One step of an online softmax.

  Args:
    carry: float32 (weighted values [rows, D], largest score [rows], sum of
      weights [rows]).
    scores: float32 [rows, keys], MASKED where a row doesn't see a key.
    v: [keys, D].

  Returns:
    The carry with these keys in it.
  """
  out, top, total = carry
  higher = jnp.maximum(top, jnp.max(scores, axis=1))
  share = jnp.exp(top - higher)
  weights = jnp.exp(scores - higher[:, None])
  out = out * share[:, None] + dot(weights.astype(v.dtype), v)
  return out, higher, total * share + jnp.sum(weights, axis=1)


def nothing(rows: int, columns: int):
  """The carry of `absorb` before any key."""
  return (jnp.zeros((rows, columns), jnp.float32),
          jnp.full((rows,), MASKED, jnp.float32),
          jnp.zeros((rows,), jnp.float32))


def output(shape, dtype, *operands: jax.Array) -> jax.ShapeDtypeStruct:
  """An output that under `shard_map` varies with the operands."""
  varying = frozenset().union(*(jax.typeof(x).manual_axis_type.varying
                                for x in operands))
  return jax.ShapeDtypeStruct(
      shape, dtype,
      manual_axis_type=jax.sharding.ManualAxisType(varying=varying))


def call(kernel, sizes: Sizes, tile, grid, name: str, interpret: bool,
         in_specs, out_specs, out_shape):
  """A pallas_call with a grid of two sizes and B.

  The first counts fastest: programs that read the same keys follow one another
  where the second is K.
  """
  return pl.pallas_call(
      functools.partial(kernel, sizes=sizes, tile=tile),
      grid=(*grid, sizes.prompts),
      in_specs=in_specs, out_specs=out_specs, out_shape=out_shape,
      compiler_params=plgpu.CompilerParams(
          num_warps=tile.num_warps, num_stages=tile.num_stages),
      interpret=interpret, name=name)


def of_prompt(*shape: int) -> pl.BlockSpec:
  """All of an array [B, *shape] that belongs to a program's prompt."""
  zeros = (0,) * len(shape)
  return pl.BlockSpec((None, *shape), lambda i, k, b: (b, *zeros))


def of_kv_head(*shape: int) -> pl.BlockSpec:
  """The same of [B, K, *shape]: of its prompt and head."""
  zeros = (0,) * len(shape)
  return pl.BlockSpec((None, None, *shape), lambda i, k, b: (b, k, *zeros))


def of_tokens(sizes: Sizes) -> pl.BlockSpec:
  """The same of suffix keys or values [B, G * R, K, D]: of prompt and head."""
  return pl.BlockSpec((None, sizes.tokens, None, sizes.head_dim),
                      lambda i, k, b: (b, 0, k, 0))
