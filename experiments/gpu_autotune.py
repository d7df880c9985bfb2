"""Tries tunings of the kernels and tells the fastest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import importlib
import itertools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import gpu_check_inputs as inputs
from experiments.gpu_check_numerics import relative_error
from experiments.gpu_check_speed import TINY_MATRIX, TINY_SHAPE, how
from experiments.gpu_timing import Program, Timer, compile_all, num_sets
from legolm_jax.array import Storage
from pallas_kernels.codebook_matmul import api as codebook
from pallas_kernels.codebook_matmul import shapes as matrices
from pallas_kernels.codebook_matmul.packed import Packed
from pallas_kernels.shared_prefix_attention import api as attention
from pallas_kernels.shared_prefix_attention import tuning as attention_tuning
from pallas_kernels.shared_prefix_attention.shapes import SHAPES, Shape

_AT_ONCE = 8
# Between two tunings in bfloat16: each may be off by half of it.
_DIFFERENCE = 1e-2
_DTYPE = jnp.bfloat16
# Each with `default` and `candidates`.
_TUNINGS = {
    "pallas": "pallas_kernels.codebook_matmul.tuning",
    "triton": "pallas_kernels.codebook_matmul.triton_tuning",
}


@dataclasses.dataclass(frozen=True)
class Case:
  """What to tune.

  Attributes:
    kernel, name: in words.
    start: the default tuning.
    candidates: others, the likeliest first.
    prepare: makes a function that takes a tuning and compiles a program.
  """

  kernel: str
  name: str
  start: Any
  candidates: Iterator[Any]
  prepare: Callable[[], Callable[[Any], Program]]


def run(rng: np.random.Generator, timer: Timer,
        implementations: Sequence[str], *, interpret: bool, deadline: float
        ) -> dict[str, Any]:
  """Tunes case by case; each gets an equal share of the time that is left.

  Args:
    rng: draws the inputs.
    timer: measures.
    implementations: of the codebook functions.
    interpret: run Pallas kernels as plain jax, on tiny inputs.
    deadline: of `time.monotonic`.

  Returns:
    "rows", one for each case: "default_seconds", "best_seconds", "gain" (their
    ratio), "best" and "default" (the tunings), how many were "tried" and
    "refused" by the compiler and "left_out"; "wrong", a line for each tuning
    that gives something else; "failed", those and what raised; "left_out" and
    "skipped".
  """
  cases, skipped = _cases(rng, implementations, interpret)
  result = {"rows": [], "wrong": [], "failed": [], "skipped": skipped, "left_out": []}
  for i, case in enumerate(cases):
    now = time.monotonic()
    if now > deadline:
      result["left_out"].append(f"{case.kernel}, {case.name}")
      continue
    try:
      row = _tune(case, timer, now + (deadline - now) / (len(cases) - i),
                  most=1 if interpret else None)
    except Exception as error:  # Of one case: the others can be tuned still.
      result["failed"].append(f"{case.kernel}, {case.name}: "
                              f"{type(error).__name__}: {str(error)[:300]}")
      continue
    found = row.pop("wrong")
    result["wrong"] += found
    result["failed"] += found
    result["rows"].append(row)
  return result


def _tune(case: Case, timer: Timer, deadline: float, most: int | None
          ) -> dict[str, Any]:
  make = case.prepare()
  first = make(case.start)
  expected = _numbers(first.run(1))
  default, = timer.measure([first])
  best, best_tuning, wrong = default, case.start, []
  tried = refused = 0
  rest = itertools.islice(
      (t for t in case.candidates if t != case.start), most)
  while time.monotonic() < deadline and (
      batch := list(itertools.islice(rest, _AT_ONCE))):
    programs = compile_all([functools.partial(make, t) for t in batch])
    good = []
    for tuning, program in zip(batch, programs):
      try:
        if isinstance(program, Exception):
          raise program
        error = relative_error(_numbers(program.run(1)), expected)
      except Exception:  # Too many registers or too much shared memory.
        refused += 1
        continue
      if error > _DIFFERENCE:
        wrong.append(f"{case.kernel}, {case.name}: {error:.1e} from the "
                     f"default's result with {tuning}")
      else:
        good.append((tuning, program))
    tried += len(batch)
    timings = timer.measure([program for _, program in good])
    for (tuning, _), timing in zip(good, timings):
      if timing.seconds < best.seconds:
        best, best_tuning = timing, tuning
  return {
      "kernel": case.kernel, "case": case.name,
      "default_seconds": default.seconds, "best_seconds": best.seconds,
      "gain": default.seconds / best.seconds,
      "default": dataclasses.asdict(case.start),
      "best": dataclasses.asdict(best_tuning), "tried": tried,
      "refused": refused, "left_out": sum(1 for _ in rest), "wrong": wrong}


def _numbers(results) -> np.ndarray:
  """All results in one vector."""
  return np.concatenate([np.asarray(a, np.float64).ravel()
                         for a in jax.tree.leaves(results)])


def _cases(rng, implementations, interpret: bool
           ) -> tuple[list[Case], list[str]]:
  """What to tune, in order of importance, and what can't be."""
  if interpret:
    products = [(TINY_MATRIX, Storage.OUT_IN, 1, False)]
    calls = [("decode", "tiny", TINY_SHAPE)]
  else:
    gate = next(m for m in matrices.QWEN2_5_7B if m.name == "gate")
    products = [
        (gate, storage, rows, is_transposed)
        for is_transposed, storage, rows in (
            (False, Storage.OUT_IN, 1), (False, Storage.OUT_IN, 16),
            (False, Storage.IN_OUT, 1), (False, Storage.IN_OUT, 16),
            (False, Storage.OUT_IN, 256), (True, Storage.OUT_IN, 256),
            (True, Storage.OUT_IN, 16), (False, Storage.OUT_IN, 64))]
    video = "qwen2.5-vl-7b_video"
    calls = [(kernel, name, SHAPES[name]) for kernel, name in (
        ("decode", video), ("decode", "qwen2.5-vl-7b_group1"),
        ("forward", video), ("grad_prefix", video), ("grad_q", video),
        ("grad_suffix", video))]
  one, skipped = [], []
  for args in products:
    for name in implementations:
      try:
        one.append(_product_case(rng, interpret, name, *args))
      except (AttributeError, ImportError) as error:
        skipped.append(f"codebook_matmul by {name}: {error}")
  two = [_attention_case(rng, interpret, *args) for args in calls]
  # In turn: what is left out at the end is of both.
  order = itertools.chain(*itertools.zip_longest(one, two))
  return [case for case in order if case is not None], sorted(set(skipped))


def _product_case(rng, interpret, name: str, shape, storage, rows,
                  is_transposed) -> Case:
  """Raises AttributeError or ImportError if there are no candidates."""
  kernel = "codebook_matmul" + ("_transposed" if is_transposed else "")
  module = importlib.import_module(_TUNINGS[name])
  sizes = (rows,)
  if name == "pallas":
    sizes += (jnp.dtype(_DTYPE).itemsize, is_transposed)

  def prepare():
    w = inputs.matrix(rng, shape.out, shape.inputs, 64, storage)
    size = shape.out if is_transposed else shape.inputs
    sets = [(inputs.normal(rng, (rows, size), _DTYPE), copy)
            for copy in inputs.copies(w, num_sets(Packed.of(w).nbytes))]
    return lambda tuning: Program(functools.partial(
        getattr(codebook, kernel), config=tuning, **how(name, interpret)), sets)

  return Case(
      kernel=f"{kernel} by {name}", start=module.default(*sizes),
      candidates=iter(module.candidates(*sizes)), prepare=prepare,
      name=f"{rows} rows, {shape.model} {shape.name}, 6 bits, {storage.value}")


def _attention_case(rng, interpret, kernel: str, name: str, shape: Shape
                    ) -> Case:
  is_decode = kernel == "decode"

  def prepare():
    count = num_sets(shape.decode_bytes()) if is_decode else 1
    calls = [inputs.attention(rng, shape, _DTYPE, is_decode=is_decode,
                              is_ragged=False) for _ in range(count)]
    options = how("pallas", interpret)

    def attend(tuning, *args):
      if is_decode:
        return attention.shared_prefix_decode(*args, tuning=tuning, **options)
      out, pull = jax.vjp(
          lambda *floats: attention.shared_prefix_attention(
              *floats, *args[5:7], tuning=tuning, **options), *args[:5])
      return out if kernel == "forward" else (out, pull(args[7]))

    sets = [(*c.floats, *c.lengths, *(() if is_decode else (c.grad,)))
            for c in calls]
    return lambda tuning: Program(functools.partial(attend, tuning), sets)

  return Case(
      kernel=f"shared_prefix {kernel}", prepare=prepare,
      name=name, start=attention_tuning.default(shape.head_dim, _DTYPE),
      candidates=attention_tuning.candidates(kernel, shape.head_dim, _DTYPE))
