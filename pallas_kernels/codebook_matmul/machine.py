"""What NVIDIA GPUs do in one instruction and Triton in several.

Each function has a twin in plain jnp, which runs where Pallas interprets the
kernel: inline assembly has no interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses

import jax
from jax.experimental.pallas import triton as plgpu
import jax.numpy as jnp

# A launch gets so much shared memory without asking for more, and what a kernel
# declares itself counts: tables leave the rest to Triton.
LAUNCH_BYTES = 48 << 10
# Bytes between a table's rows. Of the first, a byte of an address is an index; the
# last has a column for two lanes.
_STRIDES = (256, 128, 64)

_RESERVE = """{{
.shared .align 128 .b8 codebook_table[{size}];
mov.b32 $0, codebook_table;
add.s32 $0, $0, $1;
}}"""
_FILL = "st.shared.b32 [$1], $2; and.b32 $0, $1, 0;"
# All lanes agree: an instruction can add it to an address at no cost. The barrier
# waits for a table's other threads, and keeps compilers from making two loops of
# one by what they branch on, which took 8 % more instructions. It can't hang: all
# of a program goes the same way through branches and loops. `redux` wants an A100
# or newer.
_UNIFORM = "bar.sync 0; redux.sync.max.s32 $0, $1, 0xffffffff;"
_COLUMN = ("mov.u32 $0, %laneid; and.b32 $0, $0, {mask}; "
           "mad.lo.s32 $0, $0, 4, $1;")


def fma(a: jax.Array, b: jax.Array, c: jax.Array, interpret: bool
        ) -> jax.Array:
  """Float32 a * b + c, broadcast against each other."""
  if interpret:
    return a * b + c
  return _assembly("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f",
                   jnp.broadcast_arrays(a, b, c), jnp.float32)


def count_bits(a: jax.Array, interpret: bool) -> jax.Array:
  """int32: the bits that are set in uint32 `a`."""
  if interpret:
    return jax.lax.population_count(a).astype(jnp.int32)
  return _assembly("popc.b32 $0, $1;", "=r,r", [a], jnp.int32)


def spread_bytes(a: jax.Array, interpret: bool) -> jax.Array:
  """uint32: byte 1 of `a`, which has two, as byte 2."""
  if interpret:
    return (a | a << jnp.uint32(8)) & jnp.uint32(0x00FF00FF)
  return _assembly("prmt.b32 $0, $1, 0, 0x4140;", "=r,r", [a], jnp.int32
                   ).astype(jnp.uint32)


def highest_bit(a: jax.Array, interpret: bool) -> jax.Array:
  """int32: the number of the highest bit that is set in uint32 `a`, or -1."""
  if interpret:
    return 31 - jax.lax.clz(a).astype(jnp.int32)
  return _assembly("bfind.u32 $0, $1;", "=r,r", [a], jnp.int32)


@dataclasses.dataclass(frozen=True)
class Table:
  """A codebook in shared memory, 32 or 16 times: lanes read their own banks.

  Attributes:
    ref: float32 [n], the codebook in memory.
    start: int32 [], address in shared memory; None to read `ref` instead.
    stride: bytes from row to row.
  """

  ref: jax.Ref
  start: jax.Array | None
  stride: int

  @property
  def is_plain(self) -> bool:
    """Whether to do without assembly."""
    return self.start is None

  @classmethod
  def of(cls, ref, threads: int, most_bytes: int, interpret: bool) -> Table:
    """Copies a codebook; all threads of a program have to come by."""
    # Triton's blocks are powers of two; what is beyond the last isn't looked up.
    last = ref.shape[0] - 1
    size = 1 << last.bit_length()
    stride = next(n for n in _STRIDES if n * size <= most_bytes)
    if interpret:
      return cls(ref, None, stride)
    # One element per thread makes one variable.
    start = _assembly(_RESERVE.format(size=size * stride), "=r,r",
                      [jnp.arange(threads) * 0], jnp.int32).max()
    columns = min(stride // 4, 32)
    row, column = jnp.arange(size)[:, None], jnp.arange(columns)[None]
    values = jnp.broadcast_to(plgpu.load(ref.at[jnp.minimum(row, last)]), (size, columns))
    filled = _assembly(_FILL, "=r,r,f", [
        start + row * stride + column * 4, values], jnp.int32)
    # A sum of zeros, which is there when every thread has stored its part.
    return cls(ref, start + filled.sum(), stride)

  def at(self, codes: jax.Array, byte: int) -> jax.Array:
    """Float32: the entries of the codes in a byte of uint32."""
    if self.is_plain:
      code = codes >> jnp.uint32(8 * byte) & jnp.uint32(255)
      return plgpu.load(self.ref.at[code.astype(jnp.int32)])
    start = _assembly(_UNIFORM, "=r,r", [
        jnp.broadcast_to(self.start, codes.shape)], jnp.int32)
    column = _assembly(_COLUMN.format(mask=self.stride // 4 - 1), "=&r,r", [
        jnp.zeros(codes.shape, jnp.int32)], jnp.int32)
    if self.stride == _STRIDES[0]:
      at = f"prmt.b32 at, $1, $2, 0x76{byte}4;"
    else:
      at = (f"bfe.u32 at, $1, {8 * byte}, 8; "
            f"mad.lo.s32 at, at, {self.stride}, $2;")
    return _assembly(
        f"{{ .reg .b32 at; {at} add.s32 at, at, $3; ld.shared.f32 $0, [at]; }}",
        "=f,r,r,r", [codes, column, start], jnp.float32)


def _assembly(text: str, constraints: str, args: Sequence[jax.Array], dtype
              ) -> jax.Array:
  shape = jax.ShapeDtypeStruct(args[0].shape, dtype)
  return plgpu.elementwise_inline_asm(
      text, args=args, constraints=constraints, pack=1,
      result_shape_dtypes=[shape])[0]
