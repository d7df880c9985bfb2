"""Attention of a group's samples to one shared prefix and to themselves.

Letters: B prompts, G samples of each, R suffix tokens of each sample, P prefix
tokens, H query heads, K heads of keys and values (H a multiple of K), D the
size of a head. A query sees its prompt's prefix up to its length and, of its
own sample, itself and what came before; scores are scaled by 1 / sqrt(D).

What a product sums over comes first in keys of prefixes and caches ([D, P] and
[D, R]); keys and values of a suffix that is run as a whole lie as projections
make them. Products accumulate in float32. Entries past a length must be finite
and have no influence. Where P and R are multiples of 8, bfloat16 keys load
fastest.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.shared_prefix_attention import (
    backward,
    kernel,
    reference,
)
from pallas_kernels.shared_prefix_attention import tuning as tuning_lib
from pallas_kernels.shared_prefix_attention.blocks import Sizes

Implementation = Literal["pallas", "reference"]


def supports(head_dim: int, dtype: jax.typing.DTypeLike) -> bool:
  """Whether the kernels, as tuned, take heads of a size and such numbers.

  Smaller heads would fill less than half of a tile's rows, larger ones don't
  fit a block's shared memory, and those in between are loaded in pieces of 16
  numbers. Elsewhere than in an explicit "pallas", what they don't take is left
  to plain jnp.
  """
  return (jnp.dtype(dtype) in (jnp.float32, jnp.bfloat16)
          and 16 <= head_dim <= 128 and head_dim % 16 == 0)


def shared_prefix_attention(
    q: jax.Array, prefix_k: jax.Array, prefix_v: jax.Array,
    suffix_k: jax.Array, suffix_v: jax.Array, prefix_lengths: jax.Array,
    suffix_lengths: jax.Array, *, implementation: Implementation | None = None,
    interpret: bool = False,
    tuning: tuning_lib.Tuning | None = None) -> jax.Array:
  """Attention of whole suffixes; differentiable in the first five arguments.

  The backward pass keeps the arguments, the output and a float32 [B, G, R, H];
  gradients of the prefix are summed over the group in float32.

  Args:
    q: [B, G, R, H, D] queries, float32 or bfloat16.
    prefix_k: [B, K, D, P] keys of the prompts; all arrays have q's dtype.
    prefix_v: [B, K, P, D] values of the prompts.
    suffix_k: [B, G, R, K, D] keys of the samples.
    suffix_v: [B, G, R, K, D] values of the samples.
    prefix_lengths: integers [B]; what is below 0 counts as 0, what is above P
      as P.
    suffix_lengths: integers [B, G], alike.
    implementation: None takes the kernels where the program is compiled for
      CUDA and they `supports` the heads, and plain jnp elsewhere.
    interpret: run the kernels as plain jax, for tests; needs "pallas".
    tuning: tiles of the kernels; None takes `tuning.default`.

  Returns:
    [B, G, R, H, D] in q's dtype. Rows past a suffix's length are zeros, and
    have no gradient.

  Raises:
    ValueError: if shapes or dtypes don't fit together.
  """
  sizes = _suffix_sizes(q, prefix_k, prefix_v, suffix_k, suffix_v,
                        prefix_lengths, suffix_lengths)
  how = _how(sizes, q, implementation, interpret, tuning)
  arrays = (q, prefix_k, prefix_v, suffix_k, suffix_v,
            *_clip(sizes, prefix_lengths, suffix_lengths))
  if implementation == "reference":
    return reference.attention(*arrays)[0]
  return _attention(how, *arrays)


def shared_prefix_decode(
    q: jax.Array, prefix_k: jax.Array, prefix_v: jax.Array,
    suffix_k: jax.Array, suffix_v: jax.Array, prefix_lengths: jax.Array,
    suffix_lengths: jax.Array, *, implementation: Implementation | None = None,
    interpret: bool = False,
    tuning: tuning_lib.Tuning | None = None) -> tuple[jax.Array, jax.Array]:
  """Attention of one query per sample; not differentiable with the kernels.

  Args:
    q: [B, G, H, D] queries, float32 or bfloat16.
    prefix_k: [B, K, D, P] keys of the prompts; all arrays have q's dtype.
    prefix_v: [B, K, P, D] values of the prompts.
    suffix_k: [B * G, K, D, R] keys of the samples, those of a prompt in a row.
    suffix_v: [B * G, K, R, D] values of the samples.
    prefix_lengths: integers [B]; what is below 0 counts as 0, what is above P
      as P.
    suffix_lengths: integers [B, G], how many entries of its suffix a query
      sees, or a scalar for all: the step of a loop, plus 1 where the step's own
      entry has been written.
    implementation: as of `shared_prefix_attention`.
    interpret: run the kernels as plain jax, for tests; needs "pallas".
    tuning: tiles of the kernels; None takes `tuning.default`.

  Returns:
    [B, G, H, D] in q's dtype, and the log-sum-exp of the scores, float32
    [B, G, H], with which attention to other keys can be joined. A query that
    sees no key gets zeros, and -inf.

  Raises:
    ValueError: if shapes or dtypes don't fit together.
  """
  if jnp.ndim(suffix_lengths) == 0:
    suffix_lengths = jnp.broadcast_to(suffix_lengths, q.shape[:2])
  sizes = _decode_sizes(q, prefix_k, prefix_v, suffix_k, suffix_v,
                        prefix_lengths, suffix_lengths)
  how = _how(sizes, q, implementation, interpret, tuning)
  arrays = (q, prefix_k, prefix_v, suffix_k, suffix_v,
            *_clip(sizes, prefix_lengths, suffix_lengths))
  run = functools.partial(kernel.decode, sizes, how.tuning.decode,
                          interpret=interpret)
  return how.choose(run, reference.decode, *arrays)


@dataclasses.dataclass(frozen=True)
class _How:
  """How to run a call: what its arrays don't tell."""

  sizes: Sizes
  tuning: tuning_lib.Tuning
  implementation: Implementation | None
  interpret: bool

  def choose(self, pallas, plain, *arrays):
    """One of the two functions, or either as the platform wants it."""
    if self.implementation is None and supports(
        self.sizes.head_dim, arrays[0].dtype):
      return jax.lax.platform_dependent(*arrays, cuda=pallas, default=plain)
    return (pallas if self.implementation == "pallas" else plain)(*arrays)


# Around the choice, not within it: what the backward pass of each way keeps
# would otherwise be kept by both.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(how: _How, *arrays):
  return _forward(how, *arrays)[0]


def _forward(how: _How, *arrays):
  run = functools.partial(kernel.forward, how.sizes, how.tuning.forward,
                          interpret=how.interpret)
  out, logsumexp = how.choose(run, reference.attention, *arrays)
  return out, (arrays, out, logsumexp)


def _backward(how: _How, saved, grad):
  arrays, out, logsumexp = saved

  def pallas(out, logsumexp, grad, *arrays):
    return backward.backward(how.sizes, how.tuning, arrays, out, logsumexp,
                             grad, interpret=how.interpret)

  def plain(out, logsumexp, grad, *arrays):
    del out, logsumexp
    _, pull = jax.vjp(
        lambda *floats: reference.attention(*floats, *arrays[5:])[0],
        *arrays[:5])
    return pull(grad)

  grads = how.choose(pallas, plain, out, logsumexp, grad, *arrays)
  return *grads, None, None


_attention.defvjp(_forward, _backward)


def _clip(sizes: Sizes, prefix_lengths, suffix_lengths):
  return (jnp.clip(prefix_lengths, 0, sizes.prefix).astype(jnp.int32),
          jnp.clip(suffix_lengths, 0, sizes.suffix).astype(jnp.int32))


def _how(sizes: Sizes, q, implementation, interpret, tuning) -> _How:
  if implementation not in (None, "pallas", "reference"):
    raise ValueError("implementation must be None, 'pallas' or 'reference', "
                     f"found {implementation!r}")
  if interpret and implementation != "pallas":
    raise ValueError("interpret needs implementation 'pallas', found "
                     f"{implementation!r}")
  return _How(sizes, tuning or tuning_lib.default(sizes.head_dim, q.dtype),
              implementation, interpret)


def _suffix_sizes(q, prefix_k, prefix_v, suffix_k, suffix_v, prefix_lengths,
                  suffix_lengths) -> Sizes:
  """Sizes of a call of `shared_prefix_attention`. Raises ValueError."""
  b, g, r, h, d = _dims("q", q, "B, G, R, H, D")
  _, k, _, p = _dims("prefix_k", prefix_k, "B, K, D, P")
  _check(q, prefix_k, prefix_v, prefix_lengths, suffix_lengths, h, (b, g),
         (b, k, d, p))
  for name, array in (("suffix_k", suffix_k), ("suffix_v", suffix_v)):
    _expect(name, array, "B, G, R, K, D", (b, g, r, k, d), q.dtype)
  return Sizes(prompts=b, samples=g, suffix=r, prefix=p, heads=h, kv_heads=k,
               head_dim=d)


def _decode_sizes(q, prefix_k, prefix_v, suffix_k, suffix_v, prefix_lengths,
                  suffix_lengths) -> Sizes:
  """Sizes of a call of `shared_prefix_decode`. Raises ValueError."""
  b, g, h, d = _dims("q", q, "B, G, H, D")
  _, k, _, p = _dims("prefix_k", prefix_k, "B, K, D, P")
  _check(q, prefix_k, prefix_v, prefix_lengths, suffix_lengths, h, (b, g),
         (b, k, d, p))
  r = _dims("suffix_k", suffix_k, "B * G, K, D, R")[3]
  _expect("suffix_k", suffix_k, "B * G, K, D, R", (b * g, k, d, r), q.dtype)
  _expect("suffix_v", suffix_v, "B * G, K, R, D", (b * g, k, r, d), q.dtype)
  return Sizes(prompts=b, samples=g, suffix=r, prefix=p, heads=h, kv_heads=k,
               head_dim=d)


def _check(q, prefix_k, prefix_v, prefix_lengths, suffix_lengths, heads,
           samples, prefix) -> None:
  """What both calls have in common; `prefix` is (B, K, D, P)."""
  b, k, d, p = prefix
  if q.dtype not in (jnp.float32, jnp.bfloat16):
    raise ValueError(
        f"q: expected dtype float32 or bfloat16, found {q.dtype}")
  if heads % k:
    raise ValueError("query heads must be a multiple of the heads of keys and "
                     f"values, found q {q.shape} and prefix_k "
                     f"{prefix_k.shape}: {heads} and {k}")
  _expect("prefix_k", prefix_k, "B, K, D, P", prefix, q.dtype)
  _expect("prefix_v", prefix_v, "B, K, P, D", (b, k, p, d), q.dtype)
  _expect("prefix_lengths", prefix_lengths, "B", (b,))
  _expect("suffix_lengths", suffix_lengths, "B, G", samples)


def _dims(name: str, array, letters: str) -> tuple[int, ...]:
  if array.ndim != len(letters.split(",")) or 0 in array.shape:
    raise ValueError(f"{name}: expected [{letters}], none of them 0, found "
                     f"{array.shape}")
  return array.shape


def _expect(name: str, array, letters: str, shape, dtype=None) -> None:
  """Raises ValueError unless shape and dtype (None: an integer) are these."""
  if array.shape != tuple(shape):
    raise ValueError(f"{name}: expected [{letters}] = {tuple(shape)}, found "
                     f"{array.shape}")
  if dtype is None and not jnp.issubdtype(array.dtype, jnp.integer):
    raise ValueError(f"{name}: expected integers, found {array.dtype}")
  if dtype is not None and array.dtype != dtype:
    raise ValueError(f"{name}: expected q's dtype {dtype}, found "
                     f"{array.dtype}")
