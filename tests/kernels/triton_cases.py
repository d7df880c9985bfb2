"""Random products by Triton's interpreter: run in a process of its own.

Writes a line of JSON for each case: its name, what was compared and the error.

    TRITON_INTERPRET=1 python -m tests.kernels.triton_cases 0 20
"""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

from legolm_jax import sharding
from legolm_jax.array import Storage
from pallas_kernels.codebook_matmul import packed, triton_call, triton_tuning
from tests.kernels import matrices, triton_interpreter


def random_case(seed: int):
  """(matrix, dense, options): everything drawn from a seed."""
  rng = np.random.default_rng(seed)
  pick = lambda *values: values[rng.integers(len(values))]
  # Every number of bits, whatever the seeds that run.
  num_codes = (3, 256, 64, 8, 100, 17, 200, 4, 40, 128, 6)[seed % 11]
  storage = tuple(Storage)[seed // 11 % 2]
  if pick(False, True):  # One or two sections of outputs.
    out = pick(1, 3, 33, 41)
    inputs = pick(1, 7, 130, int(rng.integers(1, 300)))
  else:
    out = pick(8, 24, 40)
    inputs = pick(8, 64, 136, 8 * int(rng.integers(1, 40)))
  array, dense = matrices.random(
      seed, out, inputs, num_codes, storage=storage,
      escapes=pick(None, 0.0, 0.01, 0.1, 0.6, 1.0), scaled=pick(False, True),
      dtype=np.dtype(pick(matrices.BF16, "float32")),
      crowded=out >= 32 and inputs >= 256)
  rows = pick(1, 1, 2, 9)
  tuning = dataclasses.replace(
      triton_tuning.default(rows), programs=pick(1, 5, 999),
      slots=pick(1, 2, 8))
  return array, dense, dict(
      name=pick("matmul", "matmul", "transposed", "lookup"), rows=rows,
      dtype=pick("float32", "float32", "bfloat16"), tuning=tuning)


def special_cases():
  """What random ones would seldom be: (matrix, dense, options)."""
  tuning = dataclasses.replace(triton_tuning.default(1), programs=1)
  options = dict(rows=1, dtype="float32", tuning=tuning)
  for storage in Storage:
    # Tiles of outliers only, and none; lists that run over.
    array, dense = matrices.random(
        0, 3, 640, 64, storage=storage, escapes=0.5, scaled=True, crowded=True)
    yield array, dense, options | dict(name="matmul")
    # Four lists of outliers along the outputs and two along the inputs.
    array, dense = matrices.random(0, 32, 256, 64, storage=storage, escapes=0.2)
    array = sharding.with_shards(array, 4, 2)
    for name in ("matmul", "transposed", "lookup"):
      yield array, dense, options | dict(name=name)


def error(array, dense, *, name, rows, dtype, tuning) -> float:
  """Of one case, as the tests' tolerances mean it."""
  w = packed.Packed.of(array)
  if name == "lookup":
    launch = triton_call.lookup_launch(w, jnp.float32, use_ptx=False)
    return matrices.error(triton_interpreter.run(launch), dense)
  size, make = ((w.out, triton_call.transposed_launch) if name == "transposed"
                else (w.inputs, triton_call.matmul_launch))
  x = jax.random.normal(jax.random.key(0), (rows, size)).astype(dtype)
  by_input = dense if w.is_words_first else dense.T
  expected = np.asarray(x, np.float64) @ (
      by_input.T if name == "transposed" else by_input)
  found = triton_interpreter.run(make(x, w, tuning, use_ptx=False))
  if found.shape != expected.shape:
    raise AssertionError(f"found {found.shape}, expected {expected.shape}")
  return matrices.error(found, expected)


def main(first: int, last: int) -> None:
  triton_interpreter.hurry()
  cases = [random_case(seed) for seed in range(first, last)]
  if not first:
    cases += special_cases()
  for array, dense, options in cases:
    label = (f"{options['name']} {array.layout.out}x{array.layout.inputs} "
             f"K={array.num_codes} {array.storage.value} rows={options['rows']}"
             f" {options['tuning']}")
    print(json.dumps(dict(
        case=label, name=options["name"], dtype=options["dtype"],
        error=error(array, dense, **options))), flush=True)


if __name__ == "__main__":
  main(int(sys.argv[1]), int(sys.argv[2]))
