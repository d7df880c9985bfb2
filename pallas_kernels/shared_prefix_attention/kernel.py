"""Shared-prefix attention as Pallas kernels for Triton: forward and decode.

The queries of all samples of a group, and all query heads of a head of keys and
values, are rows of one product with the prefix, whose keys are thus read once
for many rows and never repeated. The softmax runs online, first through the
prefix and then through the rows' own suffixes (FlashAttention-2,
arXiv:2307.08691); decode splits the keys of a prompt over programs and joins
the parts by their log-sum-exp.
"""

from __future__ import annotations

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
import jax.numpy as jnp

from pallas_kernels.shared_prefix_attention import blocks
from pallas_kernels.shared_prefix_attention.blocks import Sizes
from pallas_kernels.shared_prefix_attention.tuning import DecodeTile, Tile


def forward(sizes: Sizes, tile: Tile, q, prefix_k, prefix_v, suffix_k,
            suffix_v, prefix_lengths, suffix_lengths, *,
            interpret: bool = False):
  """As `reference.attention`; lengths must lie within the arrays."""
  flat = (sizes.tokens * sizes.heads, sizes.head_dim)
  tokens = (sizes.prompts, sizes.tokens, sizes.kv_heads, sizes.head_dim)
  operands = (q.reshape(sizes.prompts, *flat), prefix_k, prefix_v,
              suffix_k.reshape(tokens), suffix_v.reshape(tokens),
              prefix_lengths, suffix_lengths)
  out, logsumexp = blocks.call(
      _forward_kernel, sizes, tile,
      (pl.cdiv(sizes.rows, sizes.row_block(tile.rows)), sizes.kv_heads),
      "shared_prefix_forward", interpret,
      in_specs=[
          blocks.of_prompt(*flat),
          blocks.of_kv_head(sizes.head_dim, sizes.prefix),
          blocks.of_kv_head(sizes.prefix, sizes.head_dim),
          blocks.of_tokens(sizes), blocks.of_tokens(sizes),
          blocks.of_prompt(), blocks.of_prompt(sizes.samples)],
      out_specs=[blocks.of_prompt(*flat), blocks.of_prompt(flat[0])],
      out_shape=[
          blocks.output((sizes.prompts, *flat), q.dtype, *operands),
          blocks.output((sizes.prompts, flat[0]), jnp.float32, *operands)],
  )(*operands)
  return out.reshape(q.shape), logsumexp.reshape(q.shape[:-1])


def _forward_kernel(q_ref, prefix_k_ref, prefix_v_ref, suffix_k_ref,
                    suffix_v_ref, prefix_length_ref, suffix_lengths_ref,
                    out_ref, logsumexp_ref, *, sizes: Sizes, tile: Tile):
  count = sizes.row_block(tile.rows)
  rows = blocks.rows_at(sizes, pl.program_id(0) * count, count,
                        pl.program_id(1), suffix_lengths_ref)
  dims, real = blocks.dims(sizes)
  q = blocks.load(q_ref, rows.place, dims, rows.valid, real)
  steps = jnp.arange(tile.keys, dtype=jnp.int32)

  def through_prefix(i, carry):
    keys = i * tile.keys + steps
    seen = keys < prefix_length_ref[...]
    inside = blocks.inside(keys, sizes.prefix)
    k = blocks.load(prefix_k_ref, dims, keys, real, inside)
    v = blocks.load(prefix_v_ref, keys, dims, inside, real)
    scores = blocks.dot(q, k) * sizes.scale
    return blocks.absorb(
        carry, jnp.where(seen[None, :], scores, blocks.MASKED), v)

  def through_suffix(i, carry):
    keys = first + i * tile.keys + steps
    k = blocks.load(suffix_k_ref, keys, dims, keys < sizes.tokens, real)
    v = blocks.load(suffix_v_ref, keys, dims, keys < sizes.tokens, real)
    scores = blocks.dot(q, k, trans_b=True) * sizes.scale
    return blocks.absorb(
        carry, jnp.where(rows.sees(keys), scores, blocks.MASKED), v)

  # Blocks of padding read nothing.
  first, last = span(rows)
  carry = blocks.nothing(count, dims.size)
  carry = jax.lax.fori_loop(
      0, jnp.where(last > 0, pl.cdiv(prefix_length_ref[...], tile.keys), 0),
      through_prefix, carry)
  out, top, total = jax.lax.fori_loop(
      0, pl.cdiv(jnp.maximum(last - first, 0), tile.keys), through_suffix,
      carry)
  # A valid row sees at least itself.
  total = jnp.where(rows.valid, total, 1)
  out = jnp.where(rows.valid[:, None], out / total[:, None], 0)
  blocks.store(out_ref, rows.place, dims, out, rows.exists, real)
  plgpu.store(logsumexp_ref.at[rows.place],
              jnp.where(rows.valid, top + jnp.log(total), 0),
              mask=rows.exists)


def span(rows: blocks.Rows):
  """First suffix key that any valid row sees, and one past the last.

  The last is 0 where no row is valid.
  """
  first = jnp.min(jnp.where(rows.valid, rows.start, jnp.int32(2**30)))
  last = jnp.max(jnp.where(rows.valid, rows.token + 1, 0))
  return first, last


def decode(sizes: Sizes, tile: DecodeTile, q, prefix_k, prefix_v, suffix_k,
           suffix_v, prefix_lengths, suffix_lengths, *,
           interpret: bool = False):
  """As `reference.decode`; lengths must lie within the arrays."""
  g, d = sizes.samples, sizes.head_dim
  flat = (g * sizes.heads, d)
  by_sample = (sizes.prompts, g, sizes.kv_heads)
  cut = _Cut(sizes, tile)
  parts = cut.prefix_parts + cut.suffix_parts
  operands = (
      q.reshape(sizes.prompts, *flat), prefix_k, prefix_v,
      suffix_k.reshape(*by_sample, d, sizes.suffix),
      suffix_v.reshape(*by_sample, sizes.suffix, d),
      prefix_lengths, suffix_lengths)
  numbers = blocks.output((sizes.prompts, parts, flat[0]), jnp.float32,
                          *operands)
  by_part = [blocks.of_prompt(parts, *flat), blocks.of_prompt(parts, flat[0]),
             blocks.of_prompt(parts, flat[0])]
  split = blocks.call(
      _decode_kernel, sizes, tile, (cut.programs, sizes.kv_heads),
      "shared_prefix_decode", interpret,
      in_specs=[
          blocks.of_prompt(*flat),
          blocks.of_kv_head(d, sizes.prefix),
          blocks.of_kv_head(sizes.prefix, d),
          pl.BlockSpec((None, g, None, d, sizes.suffix),
                       lambda i, k, b: (b, 0, k, 0, 0)),
          pl.BlockSpec((None, g, None, sizes.suffix, d),
                       lambda i, k, b: (b, 0, k, 0, 0)),
          blocks.of_prompt(), blocks.of_prompt(g)],
      out_specs=by_part,
      out_shape=[blocks.output((sizes.prompts, parts, *flat), jnp.float32,
                               *operands), numbers, numbers],
  )(*operands)
  out, logsumexp = blocks.call(
      _join_kernel, sizes, tile, (pl.cdiv(flat[0], tile.join_rows), 1),
      "shared_prefix_join", interpret, in_specs=by_part,
      out_specs=[blocks.of_prompt(*flat), blocks.of_prompt(flat[0])],
      out_shape=[
          blocks.output((sizes.prompts, *flat), q.dtype, *operands),
          blocks.output((sizes.prompts, flat[0]), jnp.float32, *operands)],
  )(*split)
  return out.reshape(q.shape), logsumexp.reshape(q.shape[:-1])


class _Cut:
  """How a step's keys are cut: programs of a prompt and a head, in order.

  First those of the prefix, part by part, each with blocks of rows; then those
  of the suffixes, sample by sample.
  """

  def __init__(self, sizes: Sizes, tile: DecodeTile):
    self.rows = sizes.samples * sizes.group
    self.row_block = min(tile.rows, blocks.power_of_two(self.rows))
    self.row_blocks = pl.cdiv(self.rows, self.row_block)
    keys = self.row_blocks * sizes.prefix + sizes.tokens
    wanted = pl.cdiv(sizes.prompts * sizes.kv_heads * keys, tile.programs)
    self.split = _rounded_up(max(wanted, tile.split), tile.keys)
    self.prefix_parts = pl.cdiv(sizes.prefix, self.split)
    self.suffix_parts = pl.cdiv(sizes.suffix, self.split)
    self.prefix_programs = self.prefix_parts * self.row_blocks
    self.programs = (
        self.prefix_programs + self.suffix_parts * sizes.samples)


def decode_bytes(sizes: Sizes, tile: DecodeTile, itemsize: int = 2) -> int:
  """What a decode step moves at full lengths, as it is cut.

  To be compared with `shapes.Shape.decode_bytes`, the least that must move.
  """
  cut = _Cut(sizes, tile)
  keys = cut.row_blocks * sizes.prefix + sizes.tokens
  rows = sizes.samples * sizes.heads
  parts = cut.prefix_parts + cut.suffix_parts
  once = (2 * sizes.kv_heads * keys + (parts + 1) * rows) * itemsize
  # Parts are written and read in float32, with two numbers for each row.
  between = 2 * 4 * parts * rows
  return sizes.prompts * (
      once * sizes.head_dim + between * (sizes.head_dim + 2))


def _rounded_up(size: int, to: int) -> int:
  return pl.cdiv(size, to) * to


def _decode_kernel(q_ref, prefix_k_ref, prefix_v_ref, suffix_k_ref,
                   suffix_v_ref, prefix_length_ref, suffix_lengths_ref,
                   out_ref, top_ref, total_ref, *, sizes: Sizes,
                   tile: DecodeTile):
  cut = _Cut(sizes, tile)
  program, kv_head = pl.program_id(0), pl.program_id(1)
  dims, real = blocks.dims(sizes)
  steps = jnp.arange(tile.keys, dtype=jnp.int32)

  def attend(part, row, exists, start, length, size, load):
    """Rows [rows] against keys from `start` on, as a part of the output."""
    sample = jax.lax.div(row, jnp.int32(sizes.group))
    place = (sample * sizes.heads + kv_head * sizes.group
             + row - sample * sizes.group)
    q = blocks.load(q_ref, place, dims, exists, real)

    def body(i, carry):
      keys = start + i * tile.keys + steps
      seen = keys < length
      k, v = load(keys, blocks.inside(keys, size))
      scores = blocks.dot(q, k) * sizes.scale
      return blocks.absorb(
          carry, jnp.where(seen[None, :], scores, blocks.MASKED), v)

    there = jnp.clip(length - start, 0, cut.split)
    out, top, total = jax.lax.fori_loop(
        0, pl.cdiv(there, tile.keys), body,
        blocks.nothing(row.size, dims.size))
    blocks.store(out_ref, place, dims, out, exists, real, at=(part,))
    plgpu.store(top_ref.at[part, place], top, mask=exists)
    plgpu.store(total_ref.at[part, place], total, mask=exists)

  @pl.when(program < cut.prefix_programs)
  def _():
    part = jax.lax.div(program, jnp.int32(cut.row_blocks))
    row = (program - part * cut.row_blocks) * cut.row_block + jnp.arange(
        cut.row_block, dtype=jnp.int32)
    attend(part, row, row < cut.rows, part * cut.split,
           prefix_length_ref[...], sizes.prefix, lambda keys, inside: (
               blocks.load(prefix_k_ref, dims, keys, real, inside),
               blocks.load(prefix_v_ref, keys, dims, inside, real)))

  @pl.when(program >= cut.prefix_programs)
  def _():
    part = jax.lax.div(program - cut.prefix_programs, jnp.int32(sizes.samples))
    sample = program - cut.prefix_programs - part * sizes.samples
    head = jnp.arange(blocks.power_of_two(sizes.group), dtype=jnp.int32)
    at = (sample,)
    attend(cut.prefix_parts + part, sample * sizes.group + head,
           head < sizes.group, part * cut.split, suffix_lengths_ref[sample],
           sizes.suffix, lambda keys, inside: (
               blocks.load(suffix_k_ref, dims, keys, real, inside, at),
               blocks.load(suffix_v_ref, keys, dims, inside, real, at)))


def _join_kernel(part_ref, top_ref, total_ref, out_ref, logsumexp_ref, *,
                 sizes: Sizes, tile: DecodeTile):
  parts = top_ref.shape[0]
  place = pl.program_id(0) * tile.join_rows + jnp.arange(
      tile.join_rows, dtype=jnp.int32)
  exists = place < sizes.samples * sizes.heads
  dims, real = blocks.dims(sizes)
  part = jnp.arange(pl.next_power_of_2(parts), dtype=jnp.int32)
  numbers = lambda ref, other: plgpu.load(
      ref.at[part[:, None], place[None, :]],
      mask=(part < parts)[:, None] & exists[None, :], other=other)
  top = numbers(top_ref, blocks.MASKED)
  highest = jnp.max(top, axis=0)
  # Parts without keys have a sum of 0, and so no weight.
  total = jnp.sum(numbers(total_ref, 0) * jnp.exp(top - highest[None, :]),
                  axis=0)
  sees = total > 0
  total = jnp.where(sees, total, 1)

  def add(i, out):
    top = plgpu.load(top_ref.at[i, place], mask=exists, other=blocks.MASKED)
    values = blocks.load(part_ref, place, dims, exists, real, at=(i,))
    return out + values * (jnp.exp(top - highest) / total)[:, None]

  out = jax.lax.fori_loop(
      0, parts, add, jnp.zeros((tile.join_rows, dims.size), jnp.float32))
  blocks.store(out_ref, place, dims, out, exists, real)
  plgpu.store(logsumexp_ref.at[place],
              jnp.where(sees, highest + jnp.log(total), -jnp.inf), mask=exists)
