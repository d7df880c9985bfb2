"""Sizes of tiles and of thread blocks: all the numbers of the kernels."""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import itertools

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
  """How one kernel is cut.

  Attributes:
    rows: query rows (a token's query head each) of a product, at most: fewer
      are taken where there are fewer.
    keys: keys of a product.
    num_warps: warps of 32 threads of a program.
    num_stages: of the pipeline that loads ahead.
  """

  rows: int
  keys: int
  num_warps: int
  num_stages: int

  def __post_init__(self):
    for name in ("rows", "keys"):
      size = getattr(self, name)
      if size < 16 or size & (size - 1):
        raise ValueError(
            f"{name} must be a power of two from 16, found {size}")
    for name in ("num_warps", "num_stages"):
      size = getattr(self, name)
      if size < 1:
        raise ValueError(f"{name} must be 1 or more, found {size}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeTile(Tile):
  """A tile of the decode kernel, whose programs share the keys of a prompt.

  Attributes:
    programs: of the kernel in all, about: few prompts are cut into more parts.
    split: keys of a part, at least.
    join_rows: query rows of a program that joins the parts, a power of two.
  """

  programs: int
  split: int
  join_rows: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
  """The tiles of all kernels.

  Attributes:
    forward: of the forward kernel.
    grad_q: of the kernel of the queries' gradient.
    grad_prefix: of that of the prefix's keys and values.
    grad_suffix: of that of the suffixes'.
    decode: of one query per sample.
  """

  forward: Tile
  grad_q: Tile
  grad_prefix: Tile
  grad_suffix: Tile
  decode: DecodeTile


def default(head_dim: int, dtype: jax.typing.DTypeLike) -> Tuning:
  """Tiles that fit an H100's registers, by size of head and of number."""
  small = head_dim <= 64
  if jnp.dtype(dtype).itemsize == 4:
    # Products in full float32 run without tensor cores, operands in registers.
    tile = Tile(rows=32 if small else 16, keys=32, num_warps=8, num_stages=2)
    return Tuning(
        forward=Tile(rows=32, keys=32, num_warps=4, num_stages=2)
        if small else tile,
        grad_q=tile, grad_prefix=tile, grad_suffix=tile,
        decode=DecodeTile(rows=32, keys=32, num_warps=4, num_stages=2,
                          programs=132, split=128, join_rows=4))
  decode = DecodeTile(rows=64, keys=64, num_warps=4, num_stages=3,
                      programs=132, split=128, join_rows=4)
  if small:
    return Tuning(
        forward=Tile(rows=128, keys=64, num_warps=8, num_stages=3),
        grad_q=Tile(rows=128, keys=64, num_warps=8, num_stages=3),
        grad_prefix=Tile(rows=64, keys=128, num_warps=8, num_stages=2),
        grad_suffix=Tile(rows=32, keys=128, num_warps=8, num_stages=2),
        decode=decode)
  return Tuning(
      forward=Tile(rows=128, keys=64, num_warps=8, num_stages=3),
      grad_q=Tile(rows=128, keys=64, num_warps=8, num_stages=2),
      grad_prefix=Tile(rows=32, keys=128, num_warps=8, num_stages=2),
      grad_suffix=Tile(rows=32, keys=128, num_warps=8, num_stages=2),
      decode=decode)


def candidates(kernel: str, head_dim: int, dtype: jax.typing.DTypeLike
               ) -> Iterator[Tuning]:
  """Tunings to try where there is a device, the likeliest first.

  Those that differ from the default in one number of one kernel's tile, twice
  as large or half as large; then in two. Some need more of a device than it has
  and don't compile.

  Args:
    kernel: the field of `Tuning` to change, such as "decode".
    head_dim, dtype: as of `default`.
  """
  start = default(head_dim, dtype)
  tile = getattr(start, kernel)
  steps = []
  for field in dataclasses.fields(tile):
    number = getattr(tile, field.name)
    others = ((number + 1, number - 1) if field.name == "num_stages"
              else (number * 2, number // 2))
    steps.append([(field.name, other) for other in others])
  one = [(change,) for change in itertools.chain(*steps)]
  two = [pair for a, b in itertools.combinations(steps, 2)
         for pair in itertools.product(a, b)]
  for changes in one + two:
    try:
      changed = dataclasses.replace(tile, **dict(changes))
    except ValueError:  # Too small.
      continue
    yield dataclasses.replace(start, **{kernel: changed})
