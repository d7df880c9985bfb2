"""The products by Triton kernels that jax_triton calls.

A `Launch` says everything about a call of a kernel; jax_triton makes it part of a
program, and a test may run it elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.codebook_matmul.packed import BAND, WORD, Packed
from pallas_kernels.codebook_matmul.triton_tuning import TritonTuning

# What Triton compiles for where no GPU says otherwise: an H100.
_COMPUTE_CAPABILITY = 90
# Of kernels that hold a block's weights in full: fewer would spill registers.
_DENSE_WARPS = 4
# Words that have outliers, in the list of an output: `triton_kernel.LIST`.
_LIST = 32
# A program's words are counted in 15 bits.
_MOST_WORDS = 1 << 14


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
  """A call of a kernel.

  Attributes:
    kernel: name of the kernel.
    operands: arrays, in order; results follow them.
    results: shapes and dtypes; the first is meant.
    grid: programs.
    num_warps: of a program.
    constants: the rest of the kernel's parameters.
    finish: makes the function's result of the first result.
  """

  kernel: str
  operands: tuple[jax.Array, ...]
  results: tuple[jax.ShapeDtypeStruct, ...]
  grid: tuple[int, ...]
  num_warps: int
  constants: dict[str, Any]
  finish: Callable[[jax.Array], jax.Array]


def check_installed() -> None:
  """Raises ImportError, with the remedy, where jax_triton can't be imported."""
  missing = [name for name in ("triton", "jax_triton")
             if importlib.util.find_spec(name) is None]
  if missing:
    raise ImportError(
        f'implementation="triton" needs {" and ".join(missing)}: pip install '
        "-r requirements-gpu.txt")


def matmul(x: jax.Array, w: Packed, *, config: TritonTuning) -> jax.Array:
  """[m, in] to float32 [m, out]."""
  return call(matmul_launch(x, w, config))


def matmul_transposed(y: jax.Array, w: Packed, *, config: TritonTuning
                      ) -> jax.Array:
  """[m, out] to float32 [m, in]."""
  return call(transposed_launch(y, w, config))


def lookup(w: Packed, *, dtype) -> jax.Array:
  """The dense matrix, of `w.shape` and `dtype`."""
  return call(lookup_launch(w, dtype))


def matmul_launch(x: jax.Array, w: Packed, config: TritonTuning, *,
                  use_ptx: bool = True) -> Launch:
  """The call that is `matmul`; without PTX it can be interpreted."""
  rows, parts = x.shape[0], w.shards[1]
  row_blocks = -(-rows // config.rows)
  tiles = w.tiles // parts
  splits = _splits(config, row_blocks * w.bands * parts, tiles)
  if -(-tiles // splits) * 16 > _MOST_WORDS:
    splits = -(-tiles * 16 // _MOST_WORDS)
  grid = (w.bands, parts * splits, row_blocks)
  shape = (parts * splits, rows, w.out)
  lists = grid[0] * grid[1] * grid[2] * _LIST * BAND if not use_ptx else 1
  gather_rows = min(config.rows, 1 << (rows - 1).bit_length())
  return Launch(
      kernel="matmul_kernel",
      operands=(_filled(x, w), *_operands(w)),
      results=(jax.ShapeDtypeStruct(shape, jnp.float32),
               jax.ShapeDtypeStruct((lists, 2), jnp.uint32)),
      grid=grid, num_warps=1,
      constants=_constants(w, use_ptx) | dict(
          rows=rows, splits=splits, block_rows=config.rows,
          gather_rows=gather_rows, slots=config.slots),
      finish=lambda sums: sums.sum(0))


def transposed_launch(y: jax.Array, w: Packed, config: TritonTuning, *,
                      use_ptx: bool = True) -> Launch:
  """The call that is `matmul_transposed`."""
  rows = y.shape[0]
  row_blocks = -(-rows // config.rows)
  splits = _splits(config, row_blocks * w.tiles, w.bands)

  def finish(sums):
    filled = sums.sum(0).reshape(
        rows, w.in_sections, w.words_per_section * WORD)
    return filled[..., :w.section_inputs].reshape(rows, w.inputs)

  return Launch(
      kernel="transposed_kernel",
      operands=(y, *_operands(w)),
      results=(jax.ShapeDtypeStruct(
          (splits, rows, w.words * WORD), jnp.float32),),
      grid=(w.tiles, splits, row_blocks), num_warps=_DENSE_WARPS,
      constants=_constants(w, use_ptx) | dict(
          rows=rows, splits=splits, block_rows=config.rows),
      finish=finish)


def lookup_launch(w: Packed, dtype, *, use_ptx: bool = True) -> Launch:
  """The call that is `lookup`."""
  return Launch(
      kernel="lookup_kernel", operands=_operands(w),
      results=(jax.ShapeDtypeStruct(w.shape, dtype),),
      grid=(w.tiles, w.bands), num_warps=_DENSE_WARPS,
      constants=_constants(w, use_ptx) | dict(section_inputs=w.section_inputs),
      finish=lambda dense: dense)


def kernel_of(launch: Launch):
  """The Triton function; imports triton."""
  from pallas_kernels.codebook_matmul import triton_dense, triton_kernel

  module = (triton_kernel if launch.kernel == "matmul_kernel"
            else triton_dense)
  return getattr(module, launch.kernel)


def call(launch: Launch) -> jax.Array:
  """Makes a launch part of the program that is traced."""
  check_installed()
  import jax_triton

  has_gpu = any(device.platform == "gpu" for device in jax.local_devices())
  found = jax_triton.triton_call(
      *launch.operands, kernel=kernel_of(launch), out_shape=launch.results,
      grid=launch.grid, name=f"triton_{launch.kernel}", num_warps=launch.num_warps,
      num_stages=1,
      compute_capability=None if has_gpu else _COMPUTE_CAPABILITY,
      **launch.constants)
  return launch.finish(found[0])


def _operands(w: Packed) -> tuple[jax.Array, ...]:
  """All leaves; what isn't there is the codebook again."""
  planes = w.planes + (w.codebook,) * (3 - len(w.planes))
  or_any = lambda a: w.codebook if a is None else a
  return (*planes, w.codebook, or_any(w.scale), or_any(w.outliers),
          or_any(w.offsets))


def _constants(w: Packed, use_ptx: bool) -> dict[str, Any]:
  shards_out, shards_in = w.shards
  return dict(
      out=w.out, words=w.words, section_out=w.section_out,
      section_words=w.words_per_section, shards_out=shards_out,
      shards_in=shards_in,
      longest=0 if w.outliers is None else w.outliers.shape[2], bits=w.bits,
      num_codes=w.num_codes, has_scale=w.scale is not None,
      has_outliers=w.outliers is not None, is_words_first=w.is_words_first,
      use_ptx=use_ptx)


def _splits(config: TritonTuning, programs: int, most: int) -> int:
  """Into how many parts to cut a sum of `most` terms."""
  return max(1, min(-(-config.programs // programs), most))


def _filled(x: jax.Array, w: Packed) -> jax.Array:
  """[m, in] with each section filled up to whole words."""
  fill = w.words_per_section * WORD - w.section_inputs
  if not fill:
    return x
  x = x.reshape(x.shape[0], w.in_sections, w.section_inputs)
  return jnp.pad(x, ((0, 0), (0, 0), (0, fill))).reshape(x.shape[0], -1)
