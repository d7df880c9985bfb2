"""How fast the kernels are, beside what else computes the same.

A product with a compressed matrix is limited by the matrix's bytes, so is a
decode step of attention by those of keys and values; both are told as a share of
what a large copy reaches. Beside them runs what would be used without them: a dense
bfloat16 matrix and cuBLAS, and `jax.nn.dot_product_attention` over keys
and values that every sample has for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import gpu_check_inputs as inputs
from experiments.gpu_timing import (
    CACHE_BYTES,
    Program,
    Timer,
    compile_all,
    num_sets,
)
from legolm_jax.array import Storage
from pallas_kernels.codebook_matmul import api as codebook
from pallas_kernels.codebook_matmul import shapes as matrices
from pallas_kernels.codebook_matmul.packed import Packed
from pallas_kernels.shared_prefix_attention import api as attention
from pallas_kernels.shared_prefix_attention.shapes import SHAPES, Shape

ROWS = (1, 4, 16, 64, 256)
FEW_ROWS = 16  # Up to which the goals below are meant.
GOAL_OF_COPY = 0.8
GOAL_OVER_DENSE = 2.1  # At 6 bits.
_DTYPE = jnp.bfloat16
TINY_MATRIX = matrices.Shape(model="tiny", name="q", out=64, inputs=128)
TINY_SHAPE = Shape(prompts=1, samples=2, suffix=4, prefix=16, heads=2,
                    kv_heads=1, head_dim=16)
# XLA would otherwise choose between cuBLAS and Triton. One row alone it
# multiplies in a kernel of its own all the same; `peer_kernels` tells.
_CUBLAS = {"xla_gpu_enable_triton_gemm": False}
_TRAINED = ("qwen2.5-vl-7b_video", "qwen2.5-0.5b_text")


@dataclasses.dataclass(frozen=True)
class Job:
  """Some measurements on the same inputs.

  Attributes:
    name: what is measured.
    run: makes rows of numbers with a timer.
  """

  name: str
  run: Callable[[Timer], list[dict[str, Any]]]


def jobs(rng: np.random.Generator, implementations: Sequence[str], *,
         interpret: bool) -> Iterator[Job]:
  """All measurements, the most telling first.

  Args:
    rng: draws the inputs.
    implementations: of the codebook functions.
    interpret: run Pallas kernels as plain jax, on tiny inputs.
  """
  products = functools.partial(
      _products, rng, implementations, {}, interpret)
  attend = functools.partial(_attention_jobs, rng, interpret)
  if interpret:
    yield products(TINY_MATRIX, Storage.OUT_IN, 6, (1,))
    yield from attend("tiny", TINY_SHAPE, is_decode=True)
    return
  small, middle, large = (
      {m.name: m for m in found} for found in (
          matrices.QWEN2_5_1_5B, matrices.QWEN2_5_7B, matrices.QWEN2_5_32B))
  for name in ("gate", "q", "down"):
    for storage in Storage:
      yield products(middle[name], storage, 6, ROWS)
  for name, shape in SHAPES.items():
    yield from attend(name, shape, is_decode=True)
  for bits in (8, 7):
    yield products(middle["gate"], Storage.OUT_IN, bits, ROWS)
  yield _lookup(rng, implementations, interpret, middle["gate"])
  yield products(middle["gate"], Storage.OUT_IN, 6, ROWS, is_transposed=True)
  for name in _TRAINED:
    yield from attend(name, SHAPES[name], is_decode=False)
  for bits in (8, 7):
    yield products(middle["gate"], Storage.IN_OUT, bits, ROWS)
  for sizes in (large, small):
    for name in ("gate", "q", "k", "down"):
      for storage in Storage:
        yield products(sizes[name], storage, 6, ROWS)
  yield products(middle["head"], Storage.OUT_IN, 6, ROWS)


def how(name: str, interpret: bool) -> dict[str, Any]:
  """Keyword arguments that choose an implementation."""
  return {"implementation": name} | ({"interpret": True} if interpret else {})


def _products(rng, implementations, dense: dict, interpret: bool, shape,
              storage: Storage, bits: int, rows: Sequence[int], *,
              is_transposed: bool = False) -> Job:
  """Products of several numbers of rows; `dense` remembers cuBLAS's times."""
  kernel = "codebook_matmul" + ("_transposed" if is_transposed else "")
  case = (f"{shape.model} {shape.name} [{shape.out}, {shape.inputs}], "
          f"{bits} bits, {storage.value}")

  def run(timer: Timer) -> list[dict[str, Any]]:
    w = inputs.matrix(rng, shape.out, shape.inputs, 1 << bits, storage)
    size, other = ((shape.out, shape.inputs) if is_transposed
                   else (shape.inputs, shape.out))
    matrix_bytes = Packed.of(w).nbytes
    ws = inputs.copies(w, num_sets(matrix_bytes))
    xs = {m: [inputs.normal(rng, (m, size), _DTYPE) for _ in ws] for m in rows}
    labels, makers = [], []
    for m in rows:
      for name in implementations:
        labels.append((m, name))
        makers.append(functools.partial(
            Program, functools.partial(
                getattr(codebook, kernel), **how(name, interpret)),
            list(zip(xs[m], ws))))
    key = lambda m: (shape, storage, m, is_transposed)
    wanted = [m for m in rows if key(m) not in dense]
    if wanted:
      plain = (shape.out, shape.inputs)
      plain = plain if storage is Storage.OUT_IN else plain[::-1]
      drawn = jax.random.normal(jax.random.key(0), plain, _DTYPE)
      copies = inputs.copies(drawn, num_sets(drawn.nbytes))
      contract = int((storage is Storage.OUT_IN) != is_transposed)
      for m in wanted:
        labels.append((m, "cublas"))
        makers.append(functools.partial(
            _cublas, contract, [(xs[m][i % len(ws)], d)
                                for i, d in enumerate(copies)]))
    found = _measure(timer, labels, makers)
    for m in wanted:
      dense[key(m)] = found[m, "cublas"]
    is_cached = len(ws) * matrix_bytes < CACHE_BYTES
    return [
        _product_row(
            kernel, case, name, m, bits, found[m, name], dense[key(m)],
            matrix_bytes + 2 * m * (size + other), is_cached, timer)
        for m in rows for name in implementations]

  return Job(f"{kernel}, {case}", run)


def _product_row(kernel, case, name, rows, bits, timing, peer, nbytes,
                 is_cached, timer):
  row = _row(kernel, name, f"{rows} rows, {case}", timing, peer, "dense bf16")
  row |= _bandwidth(timing, nbytes, timer)
  # Goals are of device memory: small matrices may stay in the cache.
  if kernel == "codebook_matmul" and rows <= FEW_ROWS and not is_cached:
    row["goals"] = {"share_of_copy": GOAL_OF_COPY}
    if bits == 6:
      row["goals"]["over_peer"] = GOAL_OVER_DENSE
  return row | {"rows": rows, "bits": bits, "is_cached": is_cached}


def _cublas(contract: int, sets) -> Program:
  """x times a dense matrix, over the matrix's dimension `contract`."""

  def product(x, w):
    return jax.lax.dot_general(x, w, (((1,), (contract,)), ((), ())))

  return Program(product, sets, options=_CUBLAS)


def _lookup(rng, implementations, interpret, shape) -> Job:
  """Dequantizing a whole matrix: reads codes, writes bfloat16."""
  case = f"{shape.model} {shape.name} [{shape.out}, {shape.inputs}], 6 bits"

  def run(timer: Timer) -> list[dict[str, Any]]:
    w = inputs.matrix(rng, shape.out, shape.inputs, 64, Storage.OUT_IN)
    nbytes = Packed.of(w).nbytes + 2 * shape.out * shape.inputs
    sets = [(w,) for w in inputs.copies(w, num_sets(nbytes))]
    names = [*implementations, "reference"]
    found = _measure(timer, names, [
        functools.partial(Program, functools.partial(
            codebook.codebook_lookup,
            **how(name, interpret and name != "reference")), sets)
        for name in names])
    return [_row("codebook_lookup", name, case, found[name],
                 found["reference"], "plain jnp")
            | _bandwidth(found[name], nbytes, timer)
            for name in implementations]

  return Job(f"codebook_lookup, {case}", run)


def _attention_jobs(rng, interpret, name: str, shape: Shape, *,
                    is_decode: bool) -> Iterator[Job]:
  kernel = "shared_prefix_" + ("decode" if is_decode else "attention")
  case = (f"{name} ({shape.prompts} x {shape.samples} samples, prefix "
          f"{shape.prefix}, suffix {shape.suffix})")
  options = how("pallas", interpret)

  def decode(timer: Timer) -> list[dict[str, Any]]:
    nbytes = shape.decode_bytes()
    calls = [inputs.attention(rng, shape, _DTYPE, is_decode=True,
                              is_ragged=False)
             for _ in range(num_sets(nbytes))]
    run = functools.partial(attention.shared_prefix_decode, **options)
    found = _measure(timer, ["ours", "peer"], [
        lambda: Program(run, [(*c.floats, *c.lengths) for c in calls]),
        lambda: _peer(shape, 1, is_decode=True)])
    row = _row(kernel, "pallas", case, found["ours"], found["peer"],
               "dot_product_attention, unshared")
    row |= _bandwidth(found["ours"], nbytes, timer)
    return [row | {"goals": {"share_of_copy": GOAL_OF_COPY}}]

  def train(timer: Timer) -> list[dict[str, Any]]:
    call = inputs.attention(rng, shape, _DTYPE, is_decode=False,
                            is_ragged=False)
    run = functools.partial(attention.shared_prefix_attention, **options)

    def both(*args):
      out, pull = jax.vjp(lambda *floats: run(*floats, *args[5:7]), *args[:5])
      return out, pull(args[7])

    args = (*call.floats, *call.lengths)
    found = _measure(timer, ["forward", "both", "peer", "peer_both"], [
        lambda: Program(run, [args]),
        lambda: Program(both, [(*args, call.grad)]),
        lambda: _peer(shape, shape.suffix, is_decode=False),
        lambda: _peer(shape, shape.suffix, is_decode=False, has_grad=True)])
    rows = []
    for what, products in (("forward", 1.0), ("both", 3.5)):
      timing = found[what]
      peer = found["peer" if what == "forward" else "peer_both"]
      rows.append(_row(
          kernel, "pallas", f"{what.replace('both', 'with backward')}, {case}",
          timing, peer, "dot_product_attention, unshared, no mask"))
      if not isinstance(timing, Exception):
        rows[-1]["flops_per_second"] = (
            products * shape.forward_flops() / timing.seconds)
    return rows

  yield Job(f"{kernel}, {case}", decode if is_decode else train)


def _peer(s: Shape, queries: int, *, is_decode: bool, has_grad: bool = False
          ) -> Program:
  """Attention where each sample has all keys; cuDNN's if it takes them."""
  batch, keys = s.prompts * s.samples, s.prefix + s.suffix
  draw = lambda i, *shape: jax.random.normal(jax.random.key(i), shape, _DTYPE)
  q = draw(0, batch, queries, s.heads, s.head_dim)
  k, v = (draw(i, batch, keys, s.kv_heads, s.head_dim) for i in (1, 2))
  error = None
  for implementation in ("cudnn", "xla"):
    def run(*qkv, implementation=implementation):
      with jax.numpy_dtype_promotion("standard"):
        return jax.nn.dot_product_attention(
            *qkv, implementation=implementation)

    def both(q, k, v, grad, run=run):
      out, pull = jax.vjp(run, q, k, v)
      return out, pull(grad)

    sets = [(q, k, v)]
    if is_decode:
      sets = inputs.copies(sets[0], num_sets(k.nbytes + v.nbytes))
    try:
      if has_grad:
        return Program(both, [(q, k, v, q)])
      return Program(run, sets)
    except Exception as found:  # cuDNN isn't there, or not for this shape.
      error = found
  raise error


def _measure(timer, labels, makers) -> dict[Any, Any]:
  """By label a `Timing`, or the exception of what didn't compile or run."""
  found = dict(zip(labels, compile_all(makers)))
  good = {label: p for label, p in found.items()
          if not isinstance(p, Exception)}
  try:
    timings = timer.measure(list(good.values()))
  except Exception:  # Which of them does not run?
    timings = compile_all([lambda p=p: timer.measure([p])[0]
                           for p in good.values()], threads=1)
  return found | dict(zip(good, timings))


def _row(kernel, implementation, case, timing, peer, peer_name):
  """What is the same for all measurements."""
  row = {"kernel": kernel, "implementation": implementation, "case": case,
         "peer": peer_name, "goals": {}}
  if isinstance(timing, Exception):
    return row | {"error": f"{type(timing).__name__}: {str(timing)[:300]}"}
  row |= dataclasses.asdict(timing)
  if isinstance(peer, Exception):
    return row | {"peer_error": f"{type(peer).__name__}: {str(peer)[:300]}"}
  return row | {"peer_seconds": peer.seconds,
                "peer_kernels": list(peer.kernels),
                "over_peer": peer.seconds / timing.seconds}


def _bandwidth(timing, nbytes: int, timer: Timer) -> dict[str, float]:
  if isinstance(timing, Exception):
    return {"bytes": nbytes}
  reached = nbytes / timing.seconds
  return {"bytes": nbytes, "bytes_per_second": reached,
          "floor_seconds": nbytes / timer.copy_bandwidth,
          "share_of_copy": reached / timer.copy_bandwidth}
