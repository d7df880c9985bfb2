"""Triton kernels run by Triton's interpreter, on numpy arrays.

TRITON_INTERPRET=1 must be set before triton is imported. Every array lies between
bytes of ones, which are NaN as numbers, and results are full of them before.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import ml_dtypes
import numpy as np
from triton.runtime import interpreter

from pallas_kernels.codebook_matmul import triton_call

_MARGIN = 1 << 16
_TYPES = {
    "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "uint8": "u8",
    "uint16": "u16", "uint32": "u32",
}


class _NoScope:
  """What isn't to be undone."""

  def restore(self) -> None:
    pass


def hurry() -> None:
  """Makes the interpreter three times as fast, in this process.

  It checks for overflow, which our words are meant to, and prepares
  triton.language anew in every call of a function, though once for each of their
  modules is enough.
  """
  builder = interpreter.interpreter_builder
  builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
  patch = interpreter._patch_lang
  done = set()

  def patch_once(function):
    if function.__module__ not in done:
      done.add(function.__module__)
      patch(function)
    return _NoScope()

  interpreter._patch_lang = patch_once


class Guarded:
  """An array with bytes of ones around it, as the interpreter's tensors are."""

  def __init__(self, shape: tuple[int, ...], dtype):
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    self._bytes = np.full(size + 2 * _MARGIN, 255, np.uint8)
    self.array = self._bytes[_MARGIN:_MARGIN + size].view(dtype).reshape(shape)
    self.dtype = _TYPES[str(dtype)]

  def data_ptr(self) -> int:
    return self.array.ctypes.data

  def untyped_storage(self) -> Guarded:
    return self

  def cpu(self) -> Guarded:
    return self

  def new_empty(self, *_, **__) -> Guarded:
    return self

  def set_(self, *_) -> None:
    pass

  def storage_offset(self) -> int:
    return 0

  def size(self) -> tuple[int, ...]:
    return self.array.shape

  def stride(self) -> tuple[int, ...]:
    return self.array.strides

  def copy_(self, _) -> None:
    pass

  def is_intact(self) -> bool:
    """Whether nothing was written around it."""
    return bool((self._bytes[:_MARGIN] == 255).all()
                and (self._bytes[-_MARGIN:] == 255).all())


def run(launch: triton_call.Launch) -> np.ndarray:
  """Returns what the launch's function returns."""
  arrays = []
  for operand in launch.operands:
    value = np.asarray(operand)
    arrays.append(Guarded(value.shape, value.dtype))
    arrays[-1].array[...] = value
  results = [Guarded(r.shape, ml_dtypes.bfloat16 if r.dtype == "bfloat16"
                     else r.dtype) for r in launch.results]
  kernel = triton_call.kernel_of(launch)
  kernel[launch.grid](*arrays, *results, **launch.constants)
  for guarded in arrays + results:
    if not guarded.is_intact():
      raise AssertionError("the kernel wrote beyond an array")
  return np.asarray(launch.finish(jax.numpy.asarray(results[0].array)))
