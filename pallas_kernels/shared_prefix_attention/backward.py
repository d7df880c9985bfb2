"""The gradients of shared-prefix attention as Pallas kernels for Triton.

With scores S, probabilities P = exp(S - logsumexp) and the output's gradient
dO: dV = P^T dO, dS = P * (dO V^T - sum(dO * O)), dQ = dS K and dK = dS^T Q
(FlashAttention-2, arXiv:2307.08691). P is made anew from the saved log-sum-exp.
Gradients of the prefix are summed over the group, and over the query heads of
a head of keys and values, in float32 within one program: there is nothing to
add up in memory, and the order of sums is fixed.
"""

from __future__ import annotations

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
import jax.numpy as jnp

from pallas_kernels.shared_prefix_attention import blocks, kernel
from pallas_kernels.shared_prefix_attention.blocks import Sizes
from pallas_kernels.shared_prefix_attention.tuning import Tile, Tuning


def backward(sizes: Sizes, tuning: Tuning, operands, out, logsumexp, grad, *,
             interpret: bool = False):
  """Gradients of q, of the prefix's keys and values and of the suffixes'.

  Args:
    sizes: of the call.
    tuning: tiles.
    operands: those of `kernel.forward`.
    out: its output [B, G, R, H, D].
    logsumexp: its log-sum-exp, float32 [B, G, R, H].
    grad: [B, G, R, H, D], the gradient of `out`.
    interpret: run as plain jax.

  Returns:
    Five arrays like the first five operands.
  """
  q, prefix_k, prefix_v, suffix_k, suffix_v, _, suffix_lengths = operands
  flat = (sizes.tokens * sizes.heads, sizes.head_dim)
  tokens = (sizes.prompts, sizes.tokens, sizes.kv_heads, sizes.head_dim)
  grad = grad.astype(q.dtype)
  delta = jnp.sum(grad.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
  by_row = (sizes.prompts, flat[0])
  operands = (
      q.reshape(sizes.prompts, *flat), prefix_k, prefix_v,
      suffix_k.reshape(tokens), suffix_v.reshape(tokens), *operands[5:],
      grad.reshape(sizes.prompts, *flat), logsumexp.reshape(by_row),
      delta.reshape(by_row))
  specs = [
      blocks.of_prompt(*flat),
      blocks.of_kv_head(sizes.head_dim, sizes.prefix),
      blocks.of_kv_head(sizes.prefix, sizes.head_dim),
      blocks.of_tokens(sizes), blocks.of_tokens(sizes),
      blocks.of_prompt(), blocks.of_prompt(sizes.samples),
      blocks.of_prompt(*flat), blocks.of_prompt(flat[0]),
      blocks.of_prompt(flat[0])]
  like = lambda i: blocks.output(operands[i].shape, q.dtype, *operands)

  tile = tuning.grad_q
  grad_q = blocks.call(
      _grad_q_kernel, sizes, tile,
      (pl.cdiv(sizes.rows, sizes.row_block(tile.rows)), sizes.kv_heads),
      "shared_prefix_grad_q", interpret,
      in_specs=specs, out_specs=specs[0], out_shape=like(0),
  )(*operands)

  tile = tuning.grad_prefix
  order, count = _blocks_with_rows(sizes, tile, suffix_lengths)
  grad_prefix = blocks.call(
      _grad_prefix_kernel, sizes, tile,
      (pl.cdiv(sizes.prefix, tile.keys), sizes.kv_heads),
      "shared_prefix_grad_prefix", interpret,
      in_specs=[*specs, blocks.of_prompt(order.shape[1]), blocks.of_prompt()],
      out_specs=specs[1:3], out_shape=[like(1), like(2)],
  )(*operands, order, count)

  tile = tuning.grad_suffix
  grad_suffix = blocks.call(
      _grad_suffix_kernel, sizes, tile,
      (pl.cdiv(sizes.tokens, tile.keys), sizes.kv_heads),
      "shared_prefix_grad_suffix", interpret,
      in_specs=specs, out_specs=specs[3:5], out_shape=[like(3), like(4)],
  )(*operands)
  return (grad_q.reshape(q.shape), *grad_prefix,
          *(x.reshape(suffix_k.shape) for x in grad_suffix))


def _blocks_with_rows(sizes: Sizes, tile: Tile, suffix_lengths):
  """Blocks of rows that hold a valid one come first: int32 [B, blocks], [B].

  Blocks of padding are thus left out of a loop, not skipped within it.
  """
  size = sizes.row_block(tile.rows)
  number = pl.cdiv(sizes.rows, size)
  valid = jnp.arange(sizes.suffix) < suffix_lengths[..., None]  # [B, G, R]
  valid = jnp.repeat(valid.reshape(sizes.prompts, -1), sizes.group, axis=1)
  valid = jnp.pad(valid, ((0, 0), (0, number * size - sizes.rows)))
  valid = valid.reshape(sizes.prompts, number, size).any(axis=-1)
  order = jnp.argsort(~valid, axis=1, stable=True).astype(jnp.int32)
  return order, jnp.sum(valid, axis=1, dtype=jnp.int32)


def _grad_scores(scores, mask, logsumexp, grad_probs, delta):
  """Probabilities and the gradient of the scores, both like the scores."""
  probs = jnp.where(mask, jnp.exp(scores - logsumexp), 0)
  return probs, jnp.where(mask, probs * (grad_probs - delta), 0)


def _row_numbers(ref, rows: blocks.Rows):
  return plgpu.load(ref.at[rows.place], mask=rows.valid, other=0)


def _add_rows(carry, sizes: Sizes, rows, mask, scores, q, v, grad_ref,
              logsumexp_ref, delta_ref, dims, real):
  """Gradients of keys and values [keys, D] with what some rows add to them.

  Scores, before scaling, and mask are [keys, rows]: transposed, they are the
  left sides of the products that follow, and need not move.
  """
  grad_k, grad_v = carry
  grad = blocks.load(grad_ref, rows.place, dims, rows.valid, real)
  probs, grad_scores = _grad_scores(
      scores * sizes.scale, mask, _row_numbers(logsumexp_ref, rows)[None, :],
      blocks.dot(v, grad, trans_b=True),
      _row_numbers(delta_ref, rows)[None, :])
  return (grad_k + blocks.dot(grad_scores.astype(q.dtype), q),
          grad_v + blocks.dot(probs.astype(v.dtype), grad))


def _grad_q_kernel(q_ref, prefix_k_ref, prefix_v_ref, suffix_k_ref,
                   suffix_v_ref, prefix_length_ref, suffix_lengths_ref,
                   grad_ref, logsumexp_ref, delta_ref, grad_q_ref, *,
                   sizes: Sizes, tile: Tile):
  count = sizes.row_block(tile.rows)
  rows = blocks.rows_at(sizes, pl.program_id(0) * count, count,
                        pl.program_id(1), suffix_lengths_ref)
  dims, real = blocks.dims(sizes)
  q = blocks.load(q_ref, rows.place, dims, rows.valid, real)
  grad = blocks.load(grad_ref, rows.place, dims, rows.valid, real)
  logsumexp = _row_numbers(logsumexp_ref, rows)[:, None]
  delta = _row_numbers(delta_ref, rows)[:, None]
  steps = jnp.arange(tile.keys, dtype=jnp.int32)

  def through_prefix(i, total):
    keys = i * tile.keys + steps
    seen = keys < prefix_length_ref[...]
    inside = blocks.inside(keys, sizes.prefix)
    k = blocks.load(prefix_k_ref, dims, keys, real, inside)
    v = blocks.load(prefix_v_ref, keys, dims, inside, real)
    _, grad_scores = _grad_scores(
        blocks.dot(q, k) * sizes.scale, seen[None, :] & rows.valid[:, None],
        logsumexp, blocks.dot(grad, v, trans_b=True), delta)
    return total + blocks.dot(grad_scores.astype(k.dtype), k, trans_b=True)

  def through_suffix(i, total):
    keys = first + i * tile.keys + steps
    k = blocks.load(suffix_k_ref, keys, dims, keys < sizes.tokens, real)
    v = blocks.load(suffix_v_ref, keys, dims, keys < sizes.tokens, real)
    _, grad_scores = _grad_scores(
        blocks.dot(q, k, trans_b=True) * sizes.scale, rows.sees(keys),
        logsumexp, blocks.dot(grad, v, trans_b=True), delta)
    return total + blocks.dot(grad_scores.astype(k.dtype), k)

  first, last = kernel.span(rows)
  total = jnp.zeros((count, dims.size), jnp.float32)
  total = jax.lax.fori_loop(
      0, jnp.where(last > 0, pl.cdiv(prefix_length_ref[...], tile.keys), 0),
      through_prefix, total)
  total = jax.lax.fori_loop(
      0, pl.cdiv(jnp.maximum(last - first, 0), tile.keys), through_suffix,
      total)
  blocks.store(grad_q_ref, rows.place, dims, total * sizes.scale, rows.exists,
               real)


def _grad_prefix_kernel(q_ref, prefix_k_ref, prefix_v_ref, suffix_k_ref,
                        suffix_v_ref, prefix_length_ref, suffix_lengths_ref,
                        grad_ref, logsumexp_ref, delta_ref, order_ref,
                        count_ref, grad_k_ref, grad_v_ref, *, sizes: Sizes,
                        tile: Tile):
  del suffix_k_ref, suffix_v_ref
  keys = pl.program_id(0) * tile.keys + jnp.arange(tile.keys, dtype=jnp.int32)
  kv_head = pl.program_id(1)
  seen = keys < prefix_length_ref[...]
  inside = blocks.inside(keys, sizes.prefix)
  dims, real = blocks.dims(sizes)
  k = blocks.load(prefix_k_ref, dims, keys, real, inside)
  v = blocks.load(prefix_v_ref, keys, dims, inside, real)
  count = sizes.row_block(tile.rows)

  def through_rows(i, carry):
    rows = blocks.rows_at(sizes, order_ref[i] * count, count, kv_head,
                          suffix_lengths_ref)
    q = blocks.load(q_ref, rows.place, dims, rows.valid, real)
    scores = blocks.dot(k, q, trans_a=True, trans_b=True)
    return _add_rows(
        carry, sizes, rows, seen[:, None] & rows.valid[None, :], scores, q, v,
        grad_ref, logsumexp_ref, delta_ref, dims, real)

  # Keys past the prefix get zeros.
  anything = pl.program_id(0) * tile.keys < prefix_length_ref[...]
  zeros = jnp.zeros((tile.keys, dims.size), jnp.float32)
  grad_k, grad_v = jax.lax.fori_loop(
      0, jnp.where(anything, count_ref[...], 0), through_rows, (zeros, zeros))
  blocks.store(grad_k_ref, dims, keys, grad_k.T * sizes.scale, real, inside)
  blocks.store(grad_v_ref, keys, dims, grad_v, inside, real)


def _grad_suffix_kernel(q_ref, prefix_k_ref, prefix_v_ref, suffix_k_ref,
                        suffix_v_ref, prefix_length_ref, suffix_lengths_ref,
                        grad_ref, logsumexp_ref, delta_ref, grad_k_ref,
                        grad_v_ref, *, sizes: Sizes, tile: Tile):
  del prefix_k_ref, prefix_v_ref, prefix_length_ref
  first = pl.program_id(0) * tile.keys
  keys = first + jnp.arange(tile.keys, dtype=jnp.int32)
  kv_head = pl.program_id(1)
  exists = keys < sizes.tokens
  dims, real = blocks.dims(sizes)
  k = blocks.load(suffix_k_ref, keys, dims, exists, real)
  v = blocks.load(suffix_v_ref, keys, dims, exists, real)
  count = sizes.row_block(tile.rows)
  # Rows from the first key's own to the last of the last key's sample.
  last = jnp.minimum(first + tile.keys, sizes.tokens) - 1
  sample = jax.lax.div(last, jnp.int32(sizes.suffix))
  end = sample * sizes.suffix + suffix_lengths_ref[sample]
  begin = first * sizes.group

  def through_rows(i, carry):
    rows = blocks.rows_at(sizes, begin + i * count, count, kv_head,
                          suffix_lengths_ref)
    q = blocks.load(q_ref, rows.place, dims, rows.valid, real)
    scores = blocks.dot(k, q, trans_b=True)
    return _add_rows(
        carry, sizes, rows, rows.seen_by(keys), scores, q, v, grad_ref,
        logsumexp_ref, delta_ref, dims, real)

  zeros = jnp.zeros((tile.keys, dims.size), jnp.float32)
  grad_k, grad_v = jax.lax.fori_loop(
      0, pl.cdiv(jnp.maximum(end * sizes.group - begin, 0), count),
      through_rows, (zeros, zeros))
  blocks.store(grad_k_ref, keys, dims, grad_k * sizes.scale, exists, real)
  blocks.store(grad_v_ref, keys, dims, grad_v, exists, real)
