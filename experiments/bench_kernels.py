"""What compressed weights cost on a CPU, in time, and save, in memory.

Decoding from a compressed checkpoint, its weights decoded while they are loaded
(the default) or kept packed, against decoding from the same checkpoint made
plain; and products with single matrices against dense ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import ctypes
import dataclasses
import functools
import gc
import pathlib
import statistics
import tempfile
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from experiments import bench_decode, common
from legolm_jax import checkpoint, checkpoint_writer
from legolm_jax.array import LegoArray
from legolm_jax.compress import CompressionConfig, Compressor
from legolm_jax.safetensors_files import CheckpointFolder
from rollplex_jax.errors import InputError
from rollplex_jax.models import hf, layers, vlm
from rollplex_jax.models.config import ModelConfig, TextConfig

# How the sides' weights are held; the first is what others are compared with.
_SIDES = {"plain": ("plain", False), "dense": ("small", True),
          "packed": ("small", False)}
_ROWS = (1, 16, 256)
WORKLOAD = bench_decode.Workload(new_tokens=64)
_CODES = 128


def run(rounds: int = 5, size: TextConfig = bench_decode.SIZES["100M"],
        workload: bench_decode.Workload = WORKLOAD,
        rows: Sequence[int] = _ROWS) -> dict[str, Any]:
  """Compares and prints two tables.

  Args:
    rounds: measurements of each side.
    size: of the model that decodes.
    workload: what it generates.
    rows: of x, in products with one of its matrices.

  Returns:
    "decode": per way to hold weights, "ratio" of the plain checkpoint's seconds
    over its own (median over rounds) with "ratio_range", "weight_bytes",
    "program_bytes" (weights, cache and temporaries of the compiled loop) and
    "peak_bytes" (of the process while it loads and decodes, over what it held
    before); "saved": what packed weights lower the plain "program_bytes" and
    "peak_bytes" by, as shares of the bytes by which the weights are smaller;
    "products": seconds by matrix; and "machine".

  Raises:
    InputError: with JAX on an accelerator.
    ValueError: if the sides draw different tokens where they have the same
      weights.
  """
  if jax.default_backend() != "cpu":
    raise InputError(
        "--suite=kernels compares on the CPU, found JAX on "
        f"{jax.default_backend()}: set JAX_PLATFORMS=cpu; a GPU has "
        "experiments.gpu_check")
  with tempfile.TemporaryDirectory() as folder:
    folders = _write(pathlib.Path(folder), ModelConfig(text=size))
    decode = _decode(folders, workload, rounds)
    products = _products(folders["small"], rows, rounds)
  plain, packed = decode["plain"], decode["packed"]
  smaller = plain["weight_bytes"] - packed["weight_bytes"]
  result = {
      "decode": decode,
      "saved": {name: (plain[name] - packed[name]) / smaller
                for name in ("program_bytes", "peak_bytes")},
      "products": products, "rounds": rounds,
      "workload": dataclasses.asdict(workload), "machine": common.machine()}
  _print(result)
  return result


def _write(folder: pathlib.Path, config: ModelConfig
           ) -> dict[str, pathlib.Path]:
  """A random checkpoint, compressed, and that made plain."""
  hf.save_checkpoint(folder / "model", config,
                     vlm.init_params(config, jax.random.key(0)))
  compressor = Compressor(CheckpointFolder(folder / "model"),
                          CompressionConfig(num_centroids=_CODES))
  compressor.fit()
  checkpoint_writer.save(folder / "small", compressor)
  checkpoint_writer.decompress(folder / "small", folder / "plain")
  return {name: folder / name for name in ("small", "plain")}


def _decode(folders: Mapping[str, pathlib.Path],
            workload: bench_decode.Workload, rounds: int) -> dict[str, Any]:
  found: dict[str, dict[str, Any]] = {}
  ready = {}
  for side, (folder, is_decoded) in _SIDES.items():
    load = functools.partial(hf.load_checkpoint, folders[folder], jnp.float32,
                             decode=is_decoded)
    # Its program is compiled before memory is watched.
    config, params = load()
    token_ids = np.random.default_rng(0).integers(
        0, config.text.vocab_size, (workload.batch, workload.prompt_length))
    generate = bench_decode.our_side(config, params, token_ids, workload)
    found[side] = {
        "weight_bytes": sum(a.nbytes for a in jax.tree.leaves(params)),
        "program_bytes": generate.program_bytes}
    del params
    found[side]["peak_bytes"] = _peak(
        lambda load=load, run=generate.run: run(load()[1]))
    ready[side] = functools.partial(generate.run, load()[1])
  tokens = {side: generate() for side, generate in ready.items()}
  if (tokens["dense"] != tokens["plain"]).any():
    raise ValueError("weights decoded at load draw other tokens than plain ones")
  seconds = {side: [] for side in ready}
  for _ in common.progress("decoding", rounds)(range(rounds)):
    for side, generate in ready.items():
      seconds[side].append(_timed(generate))
  for side, values in seconds.items():
    ratios = [a / b for a, b in zip(seconds["plain"], values)]
    found[side] |= {
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        "tokens_per_second": workload.tokens / statistics.median(values),
        "same_tokens": float((tokens[side] == tokens["plain"]).mean())}
  return found


def _products(folder: pathlib.Path, rows: Sequence[int], rounds: int
              ) -> list[dict[str, Any]]:
  """Seconds of products with the matrices of one block."""
  opened = checkpoint.Checkpoint(folder)
  middle = opened.config["num_hidden_layers"] // 2
  out = []
  for name in opened.names():
    packed = opened.read(name) if f"layers.{middle}." in name else None
    if not isinstance(packed, LegoArray):
      continue
    packed = jax.tree.map(jnp.asarray, packed)
    dense = jax.jit(lambda w: w.dequantize(jnp.float32))(packed)
    for count in rows:
      x = jnp.asarray(np.random.default_rng(0).standard_normal(
          (count, packed.shape[1])), jnp.float32)
      sides = {}
      for side, w in (("dense", dense), ("packed", packed)):
        product = jax.jit(layers.dense_out_in).lower(x, w).compile()
        sides[side] = functools.partial(product, x, w)
        jax.block_until_ready(sides[side]())
      seconds = {side: [] for side in sides}
      for _ in range(rounds):
        for side, f in sides.items():
          seconds[side].append(_timed(
              lambda f=f: jax.block_until_ready(f())))
      out.append({
          "name": name, "shape": list(packed.shape), "rows": count,
          "seconds": {s: statistics.median(v) for s, v in seconds.items()},
          "ratio": statistics.median(
              a / b for a, b in zip(seconds["dense"], seconds["packed"]))})
  return out


def _timed(f: Callable[[], Any]) -> float:
  start = time.perf_counter()
  f()
  return time.perf_counter() - start


def _peak(f: Callable[[], Any]) -> int:
  """By how much the process's own memory grows at most while f runs."""
  gc.collect()
  _give_back()
  before, most = _own_bytes(), 0
  done = threading.Event()

  def watch():
    nonlocal most
    while not done.wait(0.002):
      most = max(most, _own_bytes())

  watcher = threading.Thread(target=watch)
  watcher.start()
  try:
    f()
  finally:
    done.set()
    watcher.join()
  return max(most, _own_bytes()) - before


def _own_bytes() -> int:
  """Anonymous memory; pages of files that are mapped are not counted."""
  for line in pathlib.Path("/proc/self/status").read_text().splitlines():
    if line.startswith("RssAnon:"):
      return int(line.split()[1]) * 1024
  raise InputError("--suite=kernels reads /proc/self/status, which has no "
                   "RssAnon here: expected Linux")


def _give_back() -> None:
  """Returns freed memory to the system, so that it is not counted."""
  try:
    ctypes.CDLL(None).malloc_trim(0)
  except (AttributeError, OSError):
    pass  # Another C library: peaks then include what it keeps.


def _print(result: dict[str, Any]) -> None:
  machine, workload = result["machine"], result["workload"]
  caption = (
      f"median of {result['rounds']} rounds in turn; {machine['cpu']}, "
      f"{machine['cores']} cores, load {machine['load']:.1f}; jax "
      f"{machine['jax']}")
  table = Table(
      title="decoding from a compressed checkpoint, float32, greedy",
      caption=f"batch {workload['batch']}, prompt {workload['prompt_length']}, "
      f"{workload['new_tokens']} new tokens, K={_CODES}; {caption}")
  table.add_column("weights")
  for column in ("tokens/s", "of plain", "range", "weights MB", "program MB",
                 "peak MB"):
    table.add_column(column, justify="right")
  for side, found in result["decode"].items():
    low, high = found["ratio_range"]
    table.add_row(
        side, f"{found['tokens_per_second']:,.0f}", f"{found['ratio']:.2f}",
        f"{low:.2f}-{high:.2f}", *(f"{found[name] / 1e6:,.0f}" for name in (
            "weight_bytes", "program_bytes", "peak_bytes")))
  console = Console()
  console.print(table)
  saved = result["saved"]
  console.print(
      f"Packed weights lower the program's bytes by {saved['program_bytes']:.0%}"
      f" of what they are smaller by, the peak by {saved['peak_bytes']:.0%}.")
  table = Table(title="products with one matrix", caption=caption)
  table.add_column("matrix")
  for column in ("rows of x", "dense ms", "packed ms", "of dense"):
    table.add_column(column, justify="right")
  for found in result["products"]:
    seconds = found["seconds"]
    table.add_row(
        f"{found['name'].removesuffix('.weight')} {found['shape']}",
        str(found["rows"]), f"{1e3 * seconds['dense']:.2f}",
        f"{1e3 * seconds['packed']:.2f}", f"{found['ratio']:.2f}")
  console.print(table)
