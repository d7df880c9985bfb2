"""Every kernel against its reference, on fresh random inputs.

A product's reference is computed in float64 on the host, from the dense matrix;
attention's by plain jnp in float32 of the highest precision, from the inputs that
the kernel got, converted. Errors are ||found - expected|| / ||expected||.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import gpu_check_inputs as inputs
from experiments import gpu_poison, gpu_timing
from legolm_jax.array import Storage
from pallas_kernels.codebook_matmul import api as codebook
from pallas_kernels.shared_prefix_attention import api as attention
from pallas_kernels.shared_prefix_attention.shapes import SHAPES, Shape

LIMITS = {"float32": 1e-5, "bfloat16": 1e-2}
_DTYPES = tuple(map(jnp.dtype, LIMITS))
_NO_NUMBER = 1e30  # Which JSON can hold.
# Those that a later version may have besides "pallas".
_CODEBOOK = ("pallas", "triton")
# One of each tuning of any implementation.
_ROWS = (1, 2, 5, 13, 100)
_TINY_ROWS = (2,)
_TINY = Shape(prompts=1, samples=2, suffix=5, prefix=21, heads=4, kv_heads=2,
              head_dim=16)
_GRADS = ("grad q", "grad prefix_k", "grad prefix_v", "grad suffix_k",
          "grad suffix_v")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
  """A program and what it must give.

  Attributes:
    kernel, implementation, dtype, case: what is checked, in words.
    names: of the results.
    function, args: what to run.
    expected: makes the results' float64 arrays.
  """

  kernel: str
  implementation: str
  dtype: str
  case: str
  names: tuple[str, ...]
  function: Callable
  args: tuple
  expected: Callable[[], Sequence[np.ndarray]]


def implementations() -> tuple[list[str], dict[str, str]]:
  """Implementations of the codebook functions, and why others are missing."""
  rng = np.random.default_rng(0)
  w = inputs.matrix(rng, 32, 128, 16, Storage.OUT_IN)
  x = inputs.normal(rng, (1, 128), jnp.float32)
  found, missing = [], {}
  for name in _CODEBOOK:
    try:
      jax.eval_shape(functools.partial(
          codebook.codebook_matmul, implementation=name), x, w)
    except (ImportError, ValueError) as error:
      missing[name] = " ".join(str(error).split())
      continue
    except Exception:  # It is there; the checks will tell what is wrong.
      pass
    found.append(name)
  return found, missing


def run(seed: int, *, interpret: bool, deadline: float) -> dict[str, Any]:
  """Runs all checks, or those that fit.

  Args:
    seed: of the inputs.
    interpret: run Pallas kernels as plain jax, on small inputs.
    deadline: of `time.monotonic`, after which no check begins.

  Returns:
    "checks" with a row for each result, "failed" with lines, "skipped" with
    reasons, "left_out" with names; "poison" with what was seen of the gaps.
  """
  gaps = gpu_poison.sees_gaps(interpret=interpret)
  result = {
      "failed": [f"unwritten elements would not be seen: {g}" for g in gaps],
      "poison": {"gaps_seen": not gaps, "temp_bytes": 0},
      "checks": [], "skipped": [], "left_out": []}
  found, missing = implementations()
  if interpret:
    missing |= dict.fromkeys(set(found) - {"pallas"}, "can't be interpreted")
    found = [name for name in found if name == "pallas"]
  result["skipped"] = [f"codebook by {name}: {why}"
                       for name, why in missing.items()]
  rng = np.random.default_rng(seed)
  checks = [*_attention_checks(rng, interpret),
            *_codebook_checks(rng, found, interpret)]
  options = gpu_timing.HURRY if interpret else None
  step = 1 if interpret else 16
  for at in range(0, len(checks), step):
    part = checks[at:at + step]
    if time.monotonic() > deadline:
      result["left_out"] += [_title(check) for check in part]
      continue
    # Together they are compiled in a few seconds.
    programs = gpu_timing.compile_all([
        functools.partial(gpu_poison.Poisoned, check.function, *check.args,
                          options=options) for check in part])
    for check, program in zip(part, programs):
      _run_one(check, program, result)
  return result


def _run_one(check: Check, program, result: dict[str, Any]) -> None:
  """Adds rows and failures to the result."""
  try:
    if isinstance(program, Exception):
      raise program
    outcome = program(*check.args)
    expected = check.expected()
  except Exception as error:  # What a kernel raises is its failure.
    result["failed"].append(f"{_title(check)}: {_line(error)}")
    return
  result["poison"]["temp_bytes"] += program.temp_bytes
  if not outcome.in_poison:
    result["failed"].append(f"{_title(check)}: results are not written to the "
                            "buffers that were donated for them")
  limit = LIMITS[check.dtype]
  for name, got, wanted in zip(check.names, jax.tree.leaves(outcome.results),
                               expected, strict=True):
    got = np.asarray(got, np.float64)
    unwritten = int(np.sum(~np.isfinite(got) & np.isfinite(wanted)))
    error = relative_error(got, wanted)
    is_right = not unwritten and error <= limit
    result["checks"].append({
        "kernel": check.kernel, "implementation": check.implementation,
        "dtype": check.dtype, "case": check.case, "result": name,
        "error": error, "limit": limit, "unwritten": unwritten,
        "passed": is_right})
    if not is_right:
      what = (f"{unwritten} of {got.size} elements unwritten or not finite"
              if unwritten else f"error {error:.1e}, limit {limit:.0e}")
      result["failed"].append(f"{_title(check)}, {name}: {what}")


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
  """||found - expected|| / ||expected||; 1e30 if that is no number."""
  distance = np.linalg.norm(found - expected) / np.linalg.norm(expected)
  return float(distance) if np.isfinite(distance) else _NO_NUMBER


def _title(check: Check) -> str:
  return (f"{check.kernel} by {check.implementation}, {check.dtype}, "
          f"{check.case}")


def _line(error: Exception) -> str:
  return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _codebook_checks(rng, names, interpret) -> Iterator[Check]:
  """Products, their gradients and lookups of matrices of odd sizes."""
  for storage in Storage:
    for rows in _TINY_ROWS if interpret else _ROWS:
      sizes = (rng.integers(40, 90, 2) if interpret
               else rng.integers(300, 1500, 2))
      out, inner = map(int, sizes)
      codes = int(rng.integers(3, 257))
      w = inputs.matrix(
          rng, out, inner, codes, storage, has_outliers=rng.random() < 0.8,
          is_scaled=rng.random() < 0.8)
      case = (f"{storage.value} [{out} out, {inner} in], K={codes}"
              f"{'' if w.outliers is None else ', outliers'}"
              f"{'' if w.scale is None else ', scaled'}")
      dense = functools.cache(functools.partial(_dense, w))
      for dtype in _DTYPES:
        # Interpreting takes long: one dtype for each storage.
        if interpret and (storage is Storage.IN_OUT) != (
            dtype == jnp.bfloat16):
          continue
        x, y = (inputs.normal(rng, (rows, n), dtype) for n in (inner, out))
        for name in names:
          how = {"implementation": name}
          if interpret:
            how["interpret"] = True
          yield from _of_matrix(w, x, y, dense, case, how)


def _of_matrix(w, x, y, dense, case, how) -> Iterator[Check]:
  """`dense` makes float64 [out, in]; y is also the gradient of the product."""

  def product(x, y, w):
    found, pull = jax.vjp(
        lambda x: codebook.codebook_matmul(x, w, **how), x)
    return found, *pull(y)

  def transposed(y, w):
    return codebook.codebook_matmul_transposed(y, w, **how)

  to_float64 = lambda a: np.asarray(a, np.float64)
  backward = lambda: to_float64(y) @ dense()
  common = dict(implementation=how["implementation"], dtype=x.dtype.name)
  case_rows = f"{x.shape[0]} rows, {case}"
  yield Check(kernel="codebook_matmul", case=case_rows,
              names=("product", "grad x"), function=product, args=(x, y, w),
              expected=lambda: (to_float64(x) @ dense().T, backward()),
              **common)
  yield Check(kernel="codebook_matmul_transposed", case=case_rows,
              names=("product",), function=transposed, args=(y, w),
              expected=lambda: (backward(),), **common)
  as_stored = lambda a: a if w.storage is Storage.OUT_IN else a.T
  yield Check(
      kernel="codebook_lookup", case=case, names=("matrix",), args=(w,),
      function=functools.partial(
          codebook.codebook_lookup, dtype=x.dtype, **how),
      expected=lambda: (as_stored(dense()),), **common)


def _dense(w) -> np.ndarray:
  """Float64 [out, in]."""
  found = np.asarray(jax.jit(functools.partial(
      codebook.codebook_lookup, dtype=jnp.float32,
      implementation="reference"))(w), np.float64)
  return found if w.storage is Storage.OUT_IN else found.T


def _attention_checks(rng, interpret) -> Iterator[Check]:
  """Forward with backward, and decode, at the heads of the real shapes."""
  how = {"implementation": "pallas", "interpret": interpret}
  for name, shape in {"tiny": _TINY}.items() if interpret else SHAPES.items():
    if not interpret:
      shape = dataclasses.replace(
          shape, prompts=2, samples=min(3, shape.samples),
          suffix=int(rng.integers(3, 90)), prefix=int(rng.integers(40, 700)))
    case = (f"{name}, heads {shape.heads}/{shape.kv_heads} of "
            f"{shape.head_dim}, {shape.samples} samples of {shape.suffix} "
            f"after {shape.prefix}, ragged")
    for dtype in _DTYPES:
      common = dict(implementation="pallas", dtype=dtype.name, case=case)
      call = inputs.attention(rng, shape, dtype, is_decode=False)
      yield Check(
          kernel="shared_prefix_attention", names=("output", *_GRADS),
          function=functools.partial(_pass, how),
          args=(call.floats, call.lengths, call.grad),
          expected=functools.partial(
              _reference, _pass, call.floats, call.lengths, call.grad),
          **common)
      call = inputs.attention(rng, shape, dtype, is_decode=True)
      yield Check(
          kernel="shared_prefix_decode", names=("output", "log-sum-exp"),
          function=functools.partial(_decode, how),
          args=(call.floats, call.lengths),
          expected=functools.partial(
              _reference, _decode, call.floats, call.lengths), **common)


def _pass(how, floats, lengths, grad):
  out, pull = jax.vjp(
      lambda *floats: attention.shared_prefix_attention(
          *floats, *lengths, **how), *floats)
  return out, *pull(grad)


def _decode(how, floats, lengths):
  return attention.shared_prefix_decode(*floats, *lengths, **how)


def _reference(function, floats, lengths, *grad) -> list[np.ndarray]:
  """What a function of the attention gives by plain jnp, in float32."""
  floats, *grad = jax.tree.map(
      lambda a: a.astype(jnp.float32), (floats, *grad))
  with jax.default_matmul_precision("highest"):
    found = jax.jit(functools.partial(
        function, {"implementation": "reference"}))(floats, lengths, *grad)
  return [np.asarray(a, np.float64) for a in jax.tree.leaves(found)]
