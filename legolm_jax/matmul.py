"""Products with weights that are arrays or LegoArrays."""

from __future__ import annotations

import jax

from legolm_jax.array import LegoArray, Storage
from pallas_kernels.codebook_matmul import api as codebook


def take_rows(table: jax.Array | LegoArray, index: jax.Array) -> jax.Array:
  """Rows of a table [n, d], of its dtype: [..., d] for an index [...]."""
  if isinstance(table, LegoArray):
    return table.take_rows(index)
  return table[index]


def matmul(x: jax.Array, w: jax.Array | LegoArray, dtype=None, *,
           implementation: str | None = None) -> jax.Array:
  """x times a weight stored as [in, out].

  A LegoArray is decoded where it is used, in the dtype of `x`, each time anew: on
  an NVIDIA GPU within the product of up to 256 rows, else so that of all the
  weights one is dense at a time.

  Args:
    x: [..., in].
    w: [in, out].
    dtype: of the product; None keeps the operands', or that of `x` for a
      LegoArray.
    implementation: of products with a LegoArray, as in
      `pallas_kernels.codebook_matmul.api`.

  Returns:
    [..., out]. The gradient with respect to `x` is that of the dense product;
    a LegoArray is a constant.

  Raises:
    ValueError: if the shapes don't fit.
  """
  _check(x, w, 0)
  if isinstance(w, LegoArray):
    product = (codebook.codebook_matmul if w.storage is Storage.IN_OUT
               else codebook.codebook_matmul_transposed)
    return product(x, w, dtype=dtype, implementation=implementation)
  return jax.lax.dot_general(
      x, w, (((x.ndim - 1,), (0,)), ((), ())), preferred_element_type=dtype)


def matmul_transposed(x: jax.Array, w: jax.Array | LegoArray, dtype=None, *,
                      implementation: str | None = None) -> jax.Array:
  """x times the transpose of a weight stored as [out, in]; as `matmul`."""
  _check(x, w, 1)
  if isinstance(w, LegoArray):
    product = (codebook.codebook_matmul if w.storage is Storage.OUT_IN
               else codebook.codebook_matmul_transposed)
    return product(x, w, dtype=dtype, implementation=implementation)
  return jax.lax.dot_general(
      x, w, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=dtype)


def _check(x, w, axis: int) -> None:
  if w.ndim != 2 or x.shape[-1] != w.shape[axis]:
    raise ValueError(f"x {x.shape} times a weight {w.shape}: expected "
                     f"{x.shape[-1]} at dimension {axis}")
