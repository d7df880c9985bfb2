"""Products with weights that are arrays or LegoArrays."""

from __future__ import annotations

import jax

from legolm_jax.array import LegoArray


def dense(w: jax.Array | LegoArray, dtype=None) -> jax.Array:
  """A weight as an array: itself, or dequantized to `dtype`."""
  return w.dequantize(dtype) if isinstance(w, LegoArray) else w


def take_rows(table: jax.Array | LegoArray, index: jax.Array) -> jax.Array:
  """Rows of a table [n, d], of its dtype: [..., d] for an index [...]."""
  if isinstance(table, LegoArray):
    return table.take_rows(index)
  return table[index]


def matmul(x: jax.Array, w: jax.Array | LegoArray, dtype=None) -> jax.Array:
  """x times a weight stored as [in, out].

  Args:
    x: [..., in].
    w: [in, out]; a LegoArray is computed in the dtype of `x`.
    dtype: of the product; None keeps the operands'.

  Returns:
    [..., out], by default of the dtype of `x` if `w` is a LegoArray. The
    gradient with respect to `x` is that of the dense product.

  Raises:
    ValueError: if the shapes don't fit.
  """
  _check(x, w, 0)
  return jax.lax.dot_general(
      x, dense(w, x.dtype), (((x.ndim - 1,), (0,)), ((), ())),
      preferred_element_type=dtype)


def matmul_transposed(x: jax.Array, w: jax.Array | LegoArray,
                      dtype=None) -> jax.Array:
  """x times the transpose of a weight stored as [out, in]; as `matmul`."""
  _check(x, w, 1)
  return jax.lax.dot_general(
      x, dense(w, x.dtype), (((x.ndim - 1,), (1,)), ((), ())),
      preferred_element_type=dtype)


def _check(x, w, axis: int) -> None:
  if w.ndim != 2 or x.shape[-1] != w.shape[axis]:
    raise ValueError(f"x {x.shape} times a weight {w.shape}: expected "
                     f"{x.shape[-1]} at dimension {axis}")
