"""Runs programs on memory full of NaN, so that what they leave unwritten shows.

XLA takes memory for results and for what passes between kernels from its pool,
and clears none of it: an element that no kernel writes holds what was there
before, by chance often the right number of an earlier run. Two things are done
about that:

- Every result is given its buffer: a NaN-filled array of its shape is donated to
  the program, and the pointers are compared. This proves, on every platform, that
  what is a number in a result was written by the program.
- What passes between kernels is one block of memory, whose size the compiled
  program tells. NaN-filled arrays of that size, and a little larger, are made and
  deleted right before the run. A GPU's pool takes the smallest free piece that
  fits: with the same pieces free and the same size asked for it is the same
  piece. No pointer tells so, but `canary` does: a kernel with gaps, whose NaN
  must come out of both places (`sees_gaps`). Interpreted kernels begin on NaN
  anyhow, wherever their results lie.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
import math
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
import jax.numpy as jnp
import numpy as np

# Beside that block a program takes little, such as tables of pointers.
_SLACK = 1 << 16
_BLOCK = 64


@dataclasses.dataclass(frozen=True)
class Outcome:
  """A run's results and what they were written to.

  Attributes:
    results: a tree of arrays.
    in_poison: whether every result lies where NaN was.
  """

  results: Any
  in_poison: bool


class Poisoned:
  """A compiled function that is run on NaN.

  Attributes:
    temp_bytes: of memory for what passes between its kernels.
  """

  def __init__(self, function: Callable, *args, options=None):
    """Compiles; args are as of later calls, options are the compiler's."""
    self._shapes = jax.eval_shape(function, *args)

    def given(buffers, *args):
      del buffers
      return function(*args)

    self._compiled = jax.jit(
        given, donate_argnums=0, keep_unused=True).lower(
            self._shapes, *args).compile(options)
    memory = self._compiled.memory_analysis()
    self.temp_bytes = memory.temp_size_in_bytes if memory else 0

  def __call__(self, *args) -> Outcome:
    jax.block_until_ready(args)
    buffers = jax.block_until_ready(jax.tree.map(
        lambda a: jnp.full(a.shape, jnp.nan, a.dtype), self._shapes))
    given = [b.unsafe_buffer_pointer() for b in jax.tree.leaves(buffers)]
    if self.temp_bytes:
      held = [jax.block_until_ready(_nan(-(-size // 4))) for size in (
          self.temp_bytes, _SLACK, self.temp_bytes + _SLACK)]
      for array in held:
        array.delete()
    results = jax.block_until_ready(self._compiled(buffers, *args))
    taken = [r.unsafe_buffer_pointer() for r in jax.tree.leaves(results)]
    # Results of one shape may change places.
    return Outcome(results, sorted(given) == sorted(taken))


@functools.partial(jax.jit, static_argnums=0)
def _nan(size: int):
  return jnp.full((size,), jnp.nan, jnp.float32)


def canary(x: jax.Array, *, interpret: bool) -> tuple[jax.Array, jax.Array]:
  """Copies float32 [n] but leaves every other block of 64 unwritten.

  Returns:
    The copy, and twice another such copy: a result that was not left in the
    kernel's own buffer.
  """

  def kernel(x_ref, y_ref):
    @pl.when(pl.program_id(0) % 2 == 0)
    def _():
      y_ref[...] = x_ref[...]

  block = pl.BlockSpec((_BLOCK,), lambda i: (i,))
  copy = lambda x, name: pl.pallas_call(
      kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
      grid=(x.size // _BLOCK,), in_specs=[block], out_specs=block,
      compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
      interpret=interpret, name=name)(x)
  return copy(x, "canary"), 2 * copy(x + 1, "canary_between")


def sees_gaps(*, interpret: bool) -> list[str]:
  """Runs the canary. Returns a line for each gap that would not be seen."""
  x = jax.random.normal(jax.random.key(0), (64 * _BLOCK,))
  run = Poisoned(functools.partial(canary, interpret=interpret), x)
  outcome = run(x)
  gap = np.arange(x.size) // _BLOCK % 2 == 1
  lines = [] if outcome.in_poison else [
      "results are not written to the buffers that were donated for them"]
  names = ("a kernel's result", "what passes between kernels")
  for name, found in zip(names, outcome.results, strict=True):
    seen = np.isnan(np.asarray(found))
    if not np.array_equal(seen, gap):
      lines.append(f"{name}: {math.floor(100 * seen[gap].mean())} % of the gap "
                   f"seen, {seen[~gap].sum()} elements beside it")
  return lines
