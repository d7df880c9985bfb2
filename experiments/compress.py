"""Compresses a checkpoint without data: `python -m experiments.compress`.

The result is a folder of its own format (`docs/legolm_format.md`);
`experiments.decompress` makes an ordinary checkpoint of it.
"""

from __future__ import annotations

import collections
import math
import time
from typing import Any

from absl import flags
from rich.console import Console
from rich.table import Table

from experiments import common
from legolm_jax import accounting, checkpoint_writer, folders
from legolm_jax.codebook import Fit
from legolm_jax.compress import (
    CompressionConfig,
    Compressor,
    RowScale,
    Scope,
)
from legolm_jax.rules import Rules
from legolm_jax.safetensors_files import CheckpointFolder
from rollplex_jax.errors import InputError
from rollplex_jax.models import hub

_DEFAULTS = CompressionConfig()
_MODEL = flags.DEFINE_string(
    "model_path", None, "Checkpoint folder, or hub id.")
_OUTPUT = flags.DEFINE_string(
    "output_path", None, "Folder to make; empty or not there yet.")
_CENTROIDS = flags.DEFINE_integer(
    "num_centroids", _DEFAULTS.num_centroids,
    "Number of codes, 3 to 256; where there are outliers, one stands for them.")
_PERCENTILE = flags.DEFINE_float(
    "percentile", _DEFAULTS.percentile,
    "Weights of a magnitude beyond it are kept as they are; 100: none.")
_LARGEST = flags.DEFINE_integer(
    "largest_per_tensor", _DEFAULTS.largest_per_tensor,
    "So many of every matrix are kept as they are in any case.")
_BLOCKS = flags.DEFINE_list(
    "protected_blocks", ["first", "last"],
    "Blocks that are not compressed: numbers (negative from the end), first, "
    "last; or none.")
_SCOPE = flags.DEFINE_enum_class(
    "codebook_scope", _DEFAULTS.codebook_scope, Scope,
    "What has a codebook, and a threshold of outliers, of its own.")
_SCALE = flags.DEFINE_enum_class(
    "row_scale", _DEFAULTS.row_scale, RowScale,
    "What the weights of one output channel are divided by.")
_FINER = flags.DEFINE_float(
    "finer_below", _DEFAULTS.finer_below,
    "Matrices of a kind that holds less than this share of its block's weights, "
    "such as keys and values, have codes of one bit more; 0: none.")
_FIT = flags.DEFINE_enum_class(
    "fit", _DEFAULTS.fit, Fit, "How centroids are found: the optimum, or as "
    "published.")
_EMBEDDING = flags.DEFINE_bool(
    "compress_embedding", _DEFAULTS.rules.embedding,
    "Compress the table of tokens too, and a head that is tied to it.")
_COMPRESS = flags.DEFINE_multi_string(
    "compress_tensors", [], "Regular expression searched in names; matrices that "
    "fit are compressed although they are embeddings, say.")
_KEEP = flags.DEFINE_multi_string(
    "keep_tensors", [], "The same for tensors that are not compressed.")
_IN_OUT = flags.DEFINE_multi_string(
    "in_out_tensors", [], "The same for matrices that are stored as [in, out]. "
    "Those of GPT-2 are known.")
_THREADS = flags.DEFINE_integer(
    "threads", 0, "Threads; 0: one per core, up to eight.", lower_bound=0)
_DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "Only list every tensor and what would become of it.")

# What names of blocks in --protected_blocks mean.
_BLOCK_NAMES = {"first": 0, "last": -1}


def main():
  """Runs the command."""
  start = time.perf_counter()
  config = _config()
  model = common.required(_MODEL)
  if not _DRY_RUN.value:
    folders.check_new(common.required(_OUTPUT))
  compressor = Compressor(
      CheckpointFolder(hub.resolve(model)), config,
      threads=_THREADS.value or None)
  if _DRY_RUN.value:
    return _list(compressor)
  tensors = len(compressor.decisions)
  compressor.fit(common.progress("counting", tensors))
  result = checkpoint_writer.save(
      _OUTPUT.value, compressor, common.progress("writing", tensors))
  result["seconds"] = time.perf_counter() - start
  _print(result, compressor)
  return result


def _config() -> CompressionConfig:
  return CompressionConfig(
      num_centroids=_CENTROIDS.value, percentile=_PERCENTILE.value,
      largest_per_tensor=_LARGEST.value, codebook_scope=_SCOPE.value,
      row_scale=_SCALE.value, finer_below=_FINER.value, fit=_FIT.value,
      rules=Rules(
          protected_blocks=_blocks(_BLOCKS.value),
          embedding=_EMBEDDING.value,
          compress=tuple(_COMPRESS.value), keep=tuple(_KEEP.value),
          in_out=tuple(_IN_OUT.value)))


def _blocks(words: list[str]) -> tuple[int, ...]:
  if words == ["none"]:
    return ()
  try:
    return tuple(_BLOCK_NAMES[w] if w in _BLOCK_NAMES else int(w)
                 for w in words)
  except ValueError as e:
    raise InputError(f"--protected_blocks={','.join(words)}: expected numbers, "
                     "first, last or none") from e


def _list(compressor: Compressor) -> dict[str, Any]:
  """Prints and returns the decisions."""
  table = Table("tensor", "shape", "dtype", "becomes", "because")
  found = []
  for d in compressor.decisions:
    becomes = ("tied" if d.tied_to else
               "compressed" if d.compress else "kept")
    shape = list(d.info.shape)
    table.add_row(d.name, str(shape), str(d.info.dtype), becomes, d.reason)
    found.append({"name": d.name, "shape": shape, "dtype": str(d.info.dtype),
                  "decision": becomes, "reason": d.reason,
                  "storage": d.storage.value})
  Console(width=max(120, Console().width)).print(table)
  return {"nominal_ratio": accounting.nominal_ratio(
      compressor.config.num_centroids, compressor.config.percentile),
          "tensors": found}


def _print(result: dict[str, Any], compressor: Compressor) -> None:
  groups: dict[str, list] = collections.defaultdict(list)
  for entry in result["tensors"]:
    groups[f"{entry['decision']}: {_group(entry['reason'])}"].append(entry)
  table = Table("what became of them", "tensors", "parameters",
                "bits per parameter")
  for column in table.columns[1:]:
    column.justify = "right"
  for group, entries in groups.items():
    sizes = [math.prod(e["shape"]) for e in entries]
    bits = sum(e["bits_per_weight"] * n for e, n in zip(entries, sizes))
    table.add_row(group, f"{len(entries)}", f"{sum(sizes):,}",
                  f"{bits / max(sum(sizes), 1):.3f}")
  Console().print(table)
  first = next(iter(compressor.compressed))
  width = compressor.bins(first).width
  if width:
    print(f"weights were counted in bins of {width}")
  print(
      f"nominal ratio {result['nominal_ratio']:.2f} (published formula), true "
      f"ratio {result['true_ratio']:.2f} ({result['true_ratio_fp32']:.2f} "
      "against float32)\n"
      f"{result['bits_per_compressed_weight']:.3f} bits per compressed weight, "
      f"{result['outlier_share']:.2%} outliers; "
      f"{result['bits_per_parameter']:.3f} bits per parameter of the whole "
      "model\n"
      f"{result['bytes_in']:,} -> {result['bytes_out']:,} bytes in "
      f"{result['seconds']:.1f} s -> {_OUTPUT.value}")


def _group(reason: str) -> str:
  return "protected block" if reason.startswith("protected") else reason


if __name__ == "__main__":
  common.run(main)
