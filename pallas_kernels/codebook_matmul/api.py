"""Products with compressed matrices, whose dense weights are never stored.

    y = x @ W              codebook_matmul
    z = y @ W^T            codebook_matmul_transposed
    W                      codebook_lookup

where W is [in, out] whatever the storage. Each of the products is the other's
gradient with respect to its first operand; the matrix is a constant. Inside
`shard_map` (with `check_vma=False`: Pallas doesn't say what varies) a shard of a
matrix is a matrix. On a GPU, Pallas kernels run, and elsewhere plain jnp does;
Triton kernels, which jax_triton calls, run where they are asked for.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.codebook_matmul import (
    blockwise,
    kernel,
    reference,
    triton_call,
    triton_tuning,
    tuning,
)
from pallas_kernels.codebook_matmul.packed import CompressedMatrix, Packed

_DTYPES = ("float32", "bfloat16", "float16")
_IMPLEMENTATIONS = (None, "pallas", "triton", "blockwise", "reference")
_Config = tuning.Tuning | triton_tuning.TritonTuning | None


def codebook_matmul(
    x: jax.Array, w: CompressedMatrix, *, dtype=None,
    implementation: str | None = None, interpret: bool = False,
    config: _Config = None) -> jax.Array:
  """Multiplies rows by a compressed matrix: over its inputs.

  Args:
    x: [..., in] of float32, bfloat16 or float16.
    w: a matrix of `in` inputs and `out` outputs, in either storage.
    dtype: of the product, by default that of `x`. Sums are float32, and a weight
      is rounded to the dtype of `x` before it is multiplied, if at all.
    implementation: "pallas" or "triton"; "blockwise", plain jnp that decodes a
      block at a time, or for many rows a matrix; "reference"; or None for Pallas
      where the program is compiled for an NVIDIA GPU, and by blocks elsewhere.
    interpret: whether Pallas interprets its kernel, which runs anywhere; for
      tests.
    config: of the kernel, by default by the number of rows; a `TritonTuning` for
      Triton, else a `Tuning`. Without one, Pallas looks up all of the matrix for
      more than 256 rows, and an ordinary product follows.

  Returns:
    [..., out].

  Raises:
    ValueError: if shapes, dtypes or the pieces of `w` don't fit together.
    ImportError: if Triton is asked for and isn't installed.
  """
  return _product(x, w, dtype, implementation, interpret, config, False)


def codebook_matmul_transposed(
    y: jax.Array, w: CompressedMatrix, *, dtype=None,
    implementation: str | None = None, interpret: bool = False,
    config: _Config = None) -> jax.Array:
  """Multiplies rows by a compressed matrix's transpose: over its outputs.

  Args:
    y: [..., out].
    w, dtype, implementation, interpret, config: as of `codebook_matmul`.

  Returns:
    [..., in].

  Raises:
    ValueError, ImportError: as `codebook_matmul`.
  """
  return _product(y, w, dtype, implementation, interpret, config, True)


def codebook_lookup(
    w: CompressedMatrix, *, dtype=None, implementation: str | None = None,
    interpret: bool = False, config: _Config = None) -> jax.Array:
  """The dense matrix.

  Args:
    w: a compressed matrix.
    dtype: of the result, by default `w.dtype`. Centroid times scale is computed
      in float32 and rounded once.
    implementation, interpret, config: as of `codebook_matmul`.

  Returns:
    [out, in] or [in, out], as `w` is stored.

  Raises:
    ValueError, ImportError: as `codebook_matmul`.
  """
  _check_implementation(implementation, interpret, config)
  dtype = jnp.dtype(dtype or w.dtype)
  _check_dtype("the result", dtype)
  packed = jax.lax.stop_gradient(Packed.of(w))
  if implementation == "triton":
    # A program is a tile of a band: there is nothing to tune.
    return triton_call.lookup(packed, dtype=dtype)
  config = config or tuning.LOOKUP
  config.check(is_transposed=True)
  return _pick(
      implementation, interpret,
      functools.partial(kernel.lookup, dtype=dtype, config=config),
      dict.fromkeys(("blockwise", "reference"), reference.lookup), packed,
      dtype=dtype)


def _product(x, w, dtype, implementation, interpret, config, is_transposed):
  _check_implementation(implementation, interpret, config)
  name = "y" if is_transposed else "x"
  _check_dtype(name, x.dtype)
  dtype = jnp.dtype(dtype or x.dtype)
  _check_dtype("the product", dtype)
  packed = Packed.of(w)
  size, dimension = ((packed.out, "out") if is_transposed
                     else (packed.inputs, "in"))
  if x.ndim < 1 or x.shape[-1] != size:
    raise ValueError(
        f"{name}: expected [..., {dimension}] with {dimension} {size} for "
        f"a matrix of {packed.inputs} inputs and {packed.out} outputs, found "
        f"{list(x.shape)}")
  rows = x.reshape(-1, size)
  config = config or _default(
      implementation, rows.shape[0], x.dtype.itemsize, is_transposed)
  if implementation == "triton":
    config.check()
  elif config is not None:
    config.check(is_transposed)
  other = packed.inputs if is_transposed else packed.out
  if not rows.shape[0]:
    return jnp.zeros((*x.shape[:-1], other), dtype)
  found = _matmul(rows, packed, dtype, is_transposed, implementation,
                  interpret, config)
  return found.reshape(*x.shape[:-1], other)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5, 6))
def _matmul(x, w, dtype, is_transposed, implementation, interpret, config):
  """[m, in] to [m, out] or, transposed, back."""
  name = "matmul_transposed" if is_transposed else "matmul"
  if implementation == "triton":
    return getattr(triton_call, name)(x, w, config=config).astype(dtype)
  plain = {"blockwise": getattr(blockwise, name),
           "reference": getattr(reference, name)}
  if config is None:
    pallas = functools.partial(
        _look_up_first, dtype=dtype, is_transposed=is_transposed)
  else:
    pallas = functools.partial(getattr(kernel, name), config=config)
  return _pick(implementation, interpret, pallas, plain, x, w, dtype=dtype)


def _look_up_first(x, w, *, dtype, is_transposed, interpret):
  """The product with the dense matrix, which is not made before x is there."""
  x, w = jax.lax.optimization_barrier((x, w))
  dense = kernel.lookup(
      w, dtype=x.dtype, config=tuning.LOOKUP, interpret=interpret)
  over = int(w.is_words_first == is_transposed)
  precision = (jax.lax.Precision.HIGHEST if x.dtype == jnp.float32
               else jax.lax.Precision.DEFAULT)
  return jax.lax.dot_general(
      x, dense, (((1,), (over,)), ((), ())), precision=precision,
      preferred_element_type=dtype)


def _matmul_forward(x, w, *static):
  # The dtype travels as that of an array.
  return _matmul(x, w, *static), (w, jnp.zeros((), x.dtype))


def _matmul_backward(dtype, is_transposed, implementation, interpret, config,
                     saved, gradient):
  del dtype, config
  w, like = saved
  config = _default(implementation, gradient.shape[0],
                    gradient.dtype.itemsize, not is_transposed)
  back = _matmul(gradient, w, like.dtype, not is_transposed, implementation,
                 interpret, config)
  return back, None


_matmul.defvjp(_matmul_forward, _matmul_backward)


def _pick(implementation, interpret, pallas, plain, *operands, dtype):
  of_dtype = lambda f: lambda *operands: f(*operands).astype(dtype)
  pallas = of_dtype(functools.partial(pallas, interpret=interpret))
  if implementation in plain:
    return of_dtype(plain[implementation])(*operands)
  if implementation == "pallas" or interpret:
    return pallas(*operands)
  return jax.lax.platform_dependent(
      *operands, cuda=pallas, default=of_dtype(plain["blockwise"]))


def _default(implementation, rows, itemsize, is_transposed):
  if implementation == "triton":
    return triton_tuning.default(rows)
  if rows > tuning.MOST_ROWS:
    return None
  return tuning.default(rows, itemsize, is_transposed)


def _check_implementation(implementation, interpret, config) -> None:
  if implementation not in _IMPLEMENTATIONS:
    raise ValueError(f"implementation: expected one of {_IMPLEMENTATIONS}, "
                     f"found {implementation!r}")
  is_triton = implementation == "triton"
  if is_triton:
    triton_call.check_installed()
  if is_triton and interpret:
    raise ValueError("interpret: expected False with Triton, found True")
  wanted = triton_tuning.TritonTuning if is_triton else tuning.Tuning
  if config is not None and not isinstance(config, wanted):
    raise ValueError(f"config: expected a {wanted.__name__} with "
                     f"implementation {implementation!r}, found {config}")


def _check_dtype(name: str, dtype) -> None:
  if dtype not in _DTYPES:
    raise ValueError(
        f"dtype of {name}: expected one of {_DTYPES}, found {dtype}")
