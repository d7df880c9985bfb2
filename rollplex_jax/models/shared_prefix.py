"""Attention of a group's samples to their prompt's prefix and to themselves.

On a GPU the kernels of `pallas_kernels.shared_prefix_attention` run, elsewhere
products of parts (`layers.attend_part`), which on a CPU are faster than that
package's plain form. Which of them is settled here, when a program is lowered;
no caller knows.

The choice wraps what each way differentiates by itself: on a CPU that is then
no other program than without a choice. What only the other way's backward pass
would keep is never read, and no compiled program holds it.

Letters: B prompts, G samples of each, R suffix tokens of each sample, P prefix
tokens, H query heads, K heads of keys and values, h the size of a head;
N = B * G.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from pallas_kernels.shared_prefix_attention import api
from rollplex_jax.models import layers
from rollplex_jax.placement import sharding

# Beyond so many attention scores to a history at once, 1 GiB of float32, they
# are made for some prompts at a time.
MANY_SCORES = 1 << 28
# How the compiler splits arrays over a mesh, dimension by dimension: the
# leading ones that matter here.
_PROMPTS, _CACHE = ("batch",), ("batch", "kv_heads")
_QUERIES, _KEYS = ("batch", None, "heads"), ("batch", None, "kv_heads")
_TOKENS_QUERIES = ("batch", None, None, "heads")
_TOKENS_KEYS = ("batch", None, None, "kv_heads")


def attend_suffixes(q: jax.Array, k: jax.Array, v: jax.Array, prefix,
                    prefix_lengths: jax.Array, suffix_lengths: jax.Array,
                    history=()) -> jax.Array:
  """Attention of whole suffixes to their prefix and, causally, to themselves.

  With a history there is no kernel: parts of it are joined on any platform.

  Args:
    q: [B, G, R, H, h], not scaled.
    k: [B, G, R, K, h], and v alike.
    v: the values.
    prefix: keys [B, K, h, P] and values [B, K, P, h] of the prompts.
    prefix_lengths: int32 [B]; below 0 counts as 0.
    suffix_lengths: int32 [B, G].
    history: keys [N, K, h, S] and values [N, K, S, h] of each sample's earlier
      turns and bool [N, S], which of them exist; or nothing.

  Returns:
    [B, G, R, H, h] in q's dtype; rows past a suffix's length hold numbers
    without meaning.
  """
  if history:
    return _by_prompts(
        _suffixes_by_parts,
        (q, *prefix, k, v, prefix_lengths, suffix_lengths, *history))
  return _choose(
      _suffixes_by_kernel, _suffixes_by_parts,
      (q, *prefix, k, v, prefix_lengths, suffix_lengths),
      (_TOKENS_QUERIES, _CACHE, _CACHE, _TOKENS_KEYS, _TOKENS_KEYS, _PROMPTS,
       _PROMPTS))


def attend_one(q: jax.Array, prefix, suffix, prefix_lengths: jax.Array,
               count: jax.Array, own=(), history=()) -> jax.Array:
  """Attention of one query per sample to shared prefix and own suffix.

  Args:
    q: [B, G, H, h], not scaled.
    prefix: keys [B, K, h, P] and values [B, K, P, h] of the prompts.
    suffix: keys [N, K, h, R] and values [N, K, R, h] of the samples.
    prefix_lengths: int32 [B]; below 0 counts as 0.
    count: int32 scalar, how many entries of its suffix a query sees.
    own: key and value [B, G, K, h] of one more entry that it sees, or nothing.
    history: as of `attend_suffixes`.

  Returns:
    [B, G, H, h] in q's dtype.
  """
  if history:
    return _one_by_parts(q, *prefix, *suffix, prefix_lengths, count, *own,
                         history=history)
  return _choose(
      _one_by_kernel, _one_by_parts,
      (q, *prefix, *suffix, prefix_lengths, count, *own),
      (_QUERIES, *[_CACHE] * 4, _PROMPTS, (), *[_KEYS] * len(own)))


def _choose(kernel: Callable, plain: Callable, arrays: Sequence[jax.Array],
            axes: Sequence[tuple[str | None, ...]]) -> jax.Array:
  """The kernel where it can run and the program is for CUDA, or else `plain`.

  Args:
    kernel: of arrays; what it returns is like the first of them, the queries.
    plain: the same.
    arrays: queries [B, ...], keys [B, K, h, P] and others.
    axes: logical axes of the arrays' leading dimensions.
  """
  q, keys, *_ = arrays
  floats = [a for a in arrays if jnp.issubdtype(a.dtype, jnp.floating)]
  if not api.supports(q.shape[-1], q.dtype) or any(
      a.dtype != q.dtype for a in floats):
    return plain(*arrays)
  kernel = _on_each_device(kernel, q, keys.shape[1], axes)
  if kernel is None:
    return plain(*arrays)
  return _by_platform(kernel, plain, *arrays)


def _by_platform(kernel, plain, *arrays):
  return jax.lax.platform_dependent(*arrays, cuda=kernel, default=plain)


def _on_each_device(kernel: Callable, q: jax.Array, num_kv: int,
                    axes) -> Callable | None:
  """The kernel of each device's own part, by the sharding rules in use.

  The compiler can't split a kernel, so `shard_map` does. A dimension that the
  rules don't divide is left whole, as by `sharding.constrain`. Arguments are
  those of `_choose`; None means that the kernel can't be split: where no rules
  are in use on a mesh, or where a device's query heads would read some, but
  neither one nor all, of its heads of keys and values.
  """
  mesh = sharding.mesh()
  if sharding.is_free():
    return None
  if mesh is None or mesh.size == 1:
    return kernel
  fits = lambda name, size: sharding.axes_of((size,), name)[0]
  heads = fits("heads", q.shape[axes[0].index("heads")])
  split = {"batch": fits("batch", q.shape[0]), "heads": heads,
           "kv_heads": fits("kv_heads", num_kv) if heads else ()}
  specs = tuple(PartitionSpec(*(split.get(name) or None for name in of))
                for of in axes)
  # Devices that hold the same heads of keys and values share their queries.
  among = heads[len(split["kv_heads"]):]
  held = num_kv // sharding.ways(split["kv_heads"])
  sharers = sharding.ways(among)
  if sharers > 1 and sharers % held:
    return None

  def local(*arrays):
    if sharers > 1 and held > 1:
      at = jax.lax.axis_index(among) * held // sharers
      arrays = [
          a if "kv_heads" not in of else jax.lax.dynamic_slice_in_dim(
              a, at, 1, axis=of.index("kv_heads"))
          for a, of in zip(arrays, axes, strict=True)]
    return kernel(*arrays)

  # Pallas doesn't say what varies over a mesh.
  return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs[0],
                       check_vma=False)


def _suffixes_by_kernel(q, prefix_k, prefix_v, k, v, prefix_lengths,
                        suffix_lengths):
  return api.shared_prefix_attention(
      q, prefix_k, prefix_v, k, v, prefix_lengths, suffix_lengths,
      implementation="pallas")


def _suffixes_by_parts(q, prefix_k, prefix_v, k, v, prefix_lengths,
                       suffix_lengths, *history):
  del suffix_lengths  # A row past the end sees only what comes before it.
  b, g, r, num_heads, h = q.shape
  num_kv = k.shape[3]
  groups = num_heads // num_kv
  q = (q * h ** -0.5).reshape(b, g, r, num_kv, groups, h)
  q = q.transpose(0, 1, 3, 4, 2, 5)  # [B, G, K, q, R, h]
  own = q.reshape(b * g, num_kv, groups * r, h)
  near = [layers.attend_part(
      own, k.transpose(0, 1, 3, 4, 2).reshape(b * g, num_kv, h, r),
      v.transpose(0, 1, 3, 2, 4).reshape(b * g, num_kv, r, h),
      jnp.tile(layers.causal_mask(r), (groups, 1)))]
  if history:
    near.append(_attend_history(own, *history))
  # All of a group's queries are rows of one product with its prefix.
  far = layers.attend_part(
      q.transpose(0, 2, 1, 3, 4, 5).reshape(b, num_kv, g * groups * r, h),
      prefix_k, prefix_v, _prefix_mask(prefix_k, prefix_lengths))
  near = [[a.reshape(b, g, num_kv, groups * r, -1) for a in part]
          for part in near]
  far = [a.reshape(b, num_kv, g, groups * r, -1).swapaxes(1, 2) for a in far]
  out = layers.join_parts(far, *near).astype(v.dtype)
  out = out.reshape(b, g, num_kv, groups, r, h).transpose(0, 1, 4, 2, 3, 5)
  return out.reshape(b, g, r, num_heads, h)


def _one_by_kernel(q, prefix_k, prefix_v, suffix_k, suffix_v, prefix_lengths,
                   count, *own):
  out, logsumexp = api.shared_prefix_decode(
      q, prefix_k, prefix_v, suffix_k, suffix_v, prefix_lengths, count,
      implementation="pallas")
  if not own:
    return out
  b, g, num_heads, h = q.shape
  num_kv = own[0].shape[2]
  by_kv = lambda a: a.reshape(b, g, num_kv, num_heads // num_kv, -1)
  score, _, values = _attend_own(by_kv(q) * h ** -0.5, *own)
  # What the kernel gives is a part of weight 1 at its log-sum-exp: -inf, of no
  # weight, where it saw no key.
  far = by_kv(logsumexp), jnp.ones_like(score), by_kv(out).astype(jnp.float32)
  out = layers.join_parts(far, (score, jnp.ones_like(score), values))
  return out.astype(q.dtype).reshape(q.shape)


def _one_by_parts(q, prefix_k, prefix_v, suffix_k, suffix_v, prefix_lengths,
                  count, *own, history=()):
  b, g, num_heads, h = q.shape
  num_kv = prefix_k.shape[1]
  q = (q * h ** -0.5).reshape(b, g, num_kv, num_heads // num_kv, h)
  # A group's queries are rows of one product with their prompt's prefix.
  far = layers.attend_part(
      q.swapaxes(1, 2).reshape(b, num_kv, -1, h), prefix_k, prefix_v,
      _prefix_mask(prefix_k, prefix_lengths))
  alone = q.reshape(b * g, num_kv, -1, h)
  near = [layers.attend_part(
      alone, suffix_k, suffix_v, jnp.arange(suffix_k.shape[-1]) < count)]
  if history:
    near.append(_attend_history(alone, *history))
  far = [a.reshape(b, num_kv, g, -1, a.shape[-1]).swapaxes(1, 2) for a in far]
  near = [[a.reshape(b, g, num_kv, -1, a.shape[-1]) for a in part]
          for part in near]
  last = [_attend_own(q, *own)] if own else []
  out = layers.join_parts(far, *near, *last).astype(q.dtype)
  return out.reshape(b, g, num_heads, h)


def _by_prompts(attend: Callable, arrays: Sequence[jax.Array]) -> jax.Array:
  """`attend` of arrays [B, ...] and [N, ...], a few prompts at a time.

  All at once where their scores are few. Of a batch that is split over devices,
  each device has a prompt of its own at a time.
  """
  q, keys = arrays[:2]
  b, g, r, heads, _ = q.shape
  seen = keys.shape[-1] + r + arrays[7].shape[-1]
  ways = sharding.batch_ways()
  if b * g * r * heads * seen <= MANY_SCORES or b <= ways:
    return attend(*arrays)
  # [B, ...] as [B / ways, ways, ...]: the second dimension is the devices'.
  apart = lambda a: a.reshape(
      ways, b // ways, a.shape[0] // b, *a.shape[1:]).swapaxes(0, 1)
  together = lambda a: a.reshape(-1, *a.shape[2:])
  out = jax.lax.map(
      lambda parts: attend(*map(together, parts)),
      tuple(map(apart, arrays)))
  return out.swapaxes(0, 1).reshape(q.shape)


def _attend_history(q, keys, values, exists):
  """`layers.attend_part` of each sample to its earlier turns: q [N, K, q, h]."""
  return layers.attend_part(q, keys, values, exists[:, None, None])


def _attend_own(q, k, v):
  """`layers.attend_part` for one key: q [..., q, h], k and v [..., h]."""
  score = jnp.einsum("...qh,...h->...q", q, k,
                     preferred_element_type=jnp.float32)[..., None]
  values = v[..., None, :].astype(jnp.float32)
  return score, jnp.ones_like(score), values


def _prefix_mask(prefix_k, lengths):
  """bool [B, 1, 1, P]: which entries of the prefixes exist."""
  mask = jnp.arange(prefix_k.shape[-1]) < lengths[:, None]
  return mask[:, None, None, :]
