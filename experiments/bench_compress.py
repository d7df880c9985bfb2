"""Seconds to compress a checkpoint, its memory, and what of it is files."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import json
import pathlib
import statistics
import tempfile
import threading
import time
from typing import Any

from absl import flags
import ml_dtypes
import numpy as np
from rich.console import Console
from rich.table import Table
from safetensors.numpy import save_file

from experiments import common
from legolm_jax import checkpoint_writer
from legolm_jax.compress import CompressionConfig, Compressor, RowScale
from legolm_jax.safetensors_files import CheckpointFolder

_MODEL = flags.DEFINE_string(
    "model_path", None, "Checkpoint that suite compress compresses; by default "
    "one of random weights.")
# Of the checkpoint that is made if none is given: 205M parameters.
_LAYERS, _WIDTH, _VOCABULARY = 10, 1024, 32768
_SAMPLE_SECONDS = 0.01


def run(rounds: int = 5, path: str | None = None,
        layers: int = _LAYERS) -> dict[str, Any]:
  """Compresses a checkpoint several times and prints a table.

  Args:
    rounds: how often, for each row scale.
    path: of the checkpoint; None for the flag, or random weights.
    layers: of the random weights.

  Returns:
    "seconds_per_billion" parameters and "peak_anonymous_bytes" of the process,
    both for the slower scale; "read_share" and "write_share" of the seconds;
    "scales" with the numbers of each, "machine".
  """
  machine = common.machine()
  with contextlib.ExitStack() as stack:
    work = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
    path = path or _MODEL.value or _random_checkpoint(work / "model", layers)
    folder = CheckpointFolder(path)
    _read_all(folder)  # From now on the files are in the page cache.
    scales = {scale.value: _measure(folder, scale, work / "out", rounds)
              for scale in RowScale}
  slowest = max(scales.values(), key=lambda s: s["seconds"])
  result = {
      "seconds_per_billion": slowest["seconds_per_billion"],
      "peak_anonymous_bytes": max(
          s["peak_anonymous_bytes"] for s in scales.values()),
      "read_share": slowest["read_share"],
      "write_share": slowest["write_share"], "scales": scales,
      "num_parameters": folder.num_parameters, "rounds": rounds,
      "machine": machine}
  _print(result)
  return result


def _measure(folder, scale, output, rounds) -> dict[str, Any]:
  config = CompressionConfig(row_scale=scale)
  seconds, writing, reading, peaks = [], [], [], []
  for _ in common.progress(f"row_scale {scale.value}", rounds)(range(rounds)):
    with _peak_anonymous() as peak, tempfile.TemporaryDirectory(
        dir=output.parent) as work:
      start = time.perf_counter()
      compressor = Compressor(folder, config)
      compressor.fit()
      result = checkpoint_writer.save(pathlib.Path(work) / "out", compressor)
      seconds.append(time.perf_counter() - start)
    writing.append(result["write_seconds"])
    # Matrices are read twice: to count, and to encode.
    reading.append(_read_all(folder) + _read_all(
        folder, [d.name for d in compressor.compressed]))
    peaks.append(peak["bytes"])
  middle = statistics.median(seconds)
  return {
      "seconds": middle, "seconds_range": [min(seconds), max(seconds)],
      "seconds_per_billion": middle / (folder.num_parameters / 1e9),
      "peak_anonymous_bytes": max(peaks),
      "read_share": statistics.median(reading) / middle,
      "write_share": statistics.median(writing) / middle}


def _read_all(folder: CheckpointFolder, names=None) -> float:
  """Seconds to read tensors through their memory maps, in pieces."""
  start = time.perf_counter()
  piece = np.empty(1 << 20, np.uint8)
  for name in folder.tensors if names is None else names:
    data = folder.read(name).reshape(-1).view(np.uint8)
    for at in range(0, data.size, piece.size):
      part = data[at:at + piece.size]
      np.copyto(piece[:part.size], part)
  return time.perf_counter() - start


@contextlib.contextmanager
def _peak_anonymous() -> Iterator[dict[str, int]]:
  """Samples this process's anonymous memory; the peak is in "bytes"."""
  peak, end = {"bytes": 0}, threading.Event()

  def sample():
    while not end.wait(_SAMPLE_SECONDS):
      peak["bytes"] = max(peak["bytes"], _anonymous_bytes())

  thread = threading.Thread(target=sample)
  thread.start()
  try:
    yield peak
  finally:
    end.set()
    thread.join()
    peak["bytes"] = max(peak["bytes"], _anonymous_bytes())


def _anonymous_bytes() -> int:
  for line in pathlib.Path("/proc/self/status").read_text().splitlines():
    if line.startswith("RssAnon:"):
      return int(line.split()[1]) << 10
  return 0


def _random_checkpoint(path: pathlib.Path, layers: int) -> str:
  """A checkpoint with matrices of a decoder's shapes."""
  path.mkdir()
  rng = np.random.default_rng(0)

  def matrix(out, inputs):
    values = 0.02 * rng.standard_normal((out, inputs), np.float32)
    return values.astype(ml_dtypes.bfloat16)

  tensors = {"model.embed_tokens.weight": matrix(_VOCABULARY, _WIDTH)}
  for i in range(layers):
    block = f"model.layers.{i}."
    for name in ("q", "k", "v", "o"):
      tensors[f"{block}self_attn.{name}_proj.weight"] = matrix(_WIDTH, _WIDTH)
    for name in ("gate", "up"):
      tensors[f"{block}mlp.{name}_proj.weight"] = matrix(4 * _WIDTH, _WIDTH)
    tensors[f"{block}mlp.down_proj.weight"] = matrix(_WIDTH, 4 * _WIDTH)
  save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
  (path / "config.json").write_text(json.dumps(
      {"model_type": "llama", "tie_word_embeddings": True}))
  return str(path)


def _print(result: dict[str, Any]) -> None:
  machine = result["machine"]
  table = Table(
      title=f"compress: {result['num_parameters'] / 1e9:.3f} billion parameters "
      "in the page cache",
      caption=f"median of {result['rounds']} rounds; writing overlaps with the "
      "rest, reading is measured alone, on one thread; "
      f"{machine['cpu']}, {machine['cores']} cores, load {machine['load']:.1f}")
  for column in ("row scale", "seconds", "range", "per billion", "reading",
                 "writing", "peak anonymous MB"):
    table.add_column(column, justify="right")
  for name, found in result["scales"].items():
    low, high = found["seconds_range"]
    table.add_row(
        name, f"{found['seconds']:.2f}", f"{low:.2f}-{high:.2f}",
        f"{found['seconds_per_billion']:.2f}", f"{found['read_share']:.0%}",
        f"{found['write_share']:.0%}",
        f"{found['peak_anonymous_bytes'] / 1e6:,.0f}")
  Console().print(table)
