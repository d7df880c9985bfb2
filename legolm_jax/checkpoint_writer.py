"""Writes compressed checkpoints, and ordinary ones from them."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
import json
import os
import pathlib
import time
from typing import Any

import numpy as np

from legolm_jax import (
  accounting,
  compress,
  encoding,
  folders,
  rules,
  sharding,
)
from legolm_jax import codebook as codebook_lib
from legolm_jax.array import LegoArray, Storage
from legolm_jax.checkpoint import (
  COMPRESSED,
  KEPT,
  METHOD,
  REPORT,
  TIED,
  VERSION,
  Checkpoint,
  codebook_name,
  piece_shapes,
)
from legolm_jax.safetensors_files import (
  INDEX,
  SINGLE,
  CheckpointFolder,
  Writer,
  checksum,
  dtype_name,
)

Progress = Callable[[Iterable], Iterable]


def save(path: str | os.PathLike, compressor: compress.Compressor,
         progress: Progress = lambda x: x) -> dict[str, Any]:
  """Writes what a fitted compressor makes of its checkpoint.

  Args:
    path: folder to make.
    compressor: after `fit`.
    progress: wraps the tensors as they are written.

  Returns:
    The accounting: see `_account`, and "tensors", one entry for each.

  Raises:
    InputError: if the folder is there and not empty.
  """
  with folders.new(path) as work:
    report, seconds = _write(work, compressor, progress)
    result = _account(work, compressor, report)
  return result | {"write_seconds": seconds}


def decompress(path: str | os.PathLike, output: str | os.PathLike, *,
               threads: int = 2, progress: Progress = lambda x: x) -> None:
  """Writes an ordinary checkpoint from a compressed one.

  Args:
    path: the compressed checkpoint.
    output: folder to make.
    threads: that decode.
    progress: wraps the tensors as they are written.

  Raises:
    InputError: if anything is missing or damaged, or `output` is not empty.
  """
  folders.check_new(output)
  source = Checkpoint(path)

  def dense(name):
    tensor = source.read(name)
    return (encoding.decode(tensor) if isinstance(tensor, LegoArray)
            else tensor)

  with folders.new(output) as work:
    names = source.names()
    expected = collections.defaultdict(dict)
    for name in names:
      entry = source.entries[name]
      expected[entry["file"]][name] = len(entry["shape"])
    with _Shards(work, source.folder, expected) as shards:
      for name, tensor in progress(
          zip(names, compress.parallel(dense, names, threads))):
        shards.write(source.entries[name]["file"], name, tensor)
    _write_json(work / "config.json", source.config)
    folders.copy_assets(source.folder.path, work, leave_out=(REPORT,))


class _Shards:
  """Files of a new checkpoint, one open at a time, and their index."""

  def __init__(self, work: pathlib.Path, source: CheckpointFolder,
               expected: dict[str, dict[str, int]]):
    """Args:
      work: the new folder.
      source: whose files these are.
      expected: the number of dimensions of all tensors to come, by file.
    """
    self._work, self._expected = work, expected
    # A lone file needs no index, and a name that needs none.
    self._is_single = not (source.path / INDEX).exists()
    self._where: dict[str, str] = {}
    self._total = 0
    self._file, self._writer = None, None
    self.seconds = 0.0

  def write(self, file: str, name: str, tensor: np.ndarray) -> None:
    start = time.perf_counter()
    if file != self._file:
      self._finish()
      self._file = file
      self._writer = Writer(self._work / (SINGLE if self._is_single else file),
                            self._expected[file])
    self._writer.write(name, tensor)
    self._where[name] = file
    self._total += tensor.nbytes
    self.seconds += time.perf_counter() - start

  def __enter__(self):
    return self

  def __exit__(self, kind, *_):
    if kind is not None:
      if self._writer is not None:
        self._writer.abort()
      return
    self._finish()
    if not self._is_single:
      _write_json(self._work / INDEX, {
          "metadata": {"total_size": self._total},
          "weight_map": dict(sorted(self._where.items()))})

  def _finish(self):
    if self._writer is not None:
      self._writer.close()


def _write(work, compressor, progress):
  """Writes all files; returns the report and the seconds spent writing."""
  folder = compressor.folder
  checksums: dict[str, int] = {}
  entries = []
  with _Shards(work, folder, _expected(compressor)) as shards:

    def put(file, name, tensor):
      checksums[name] = checksum(tensor)
      shards.write(file, name, tensor)

    for scope, codebook in compressor.codebooks.items():
      put(folder.files[0], codebook_name(scope), codebook.centroids)
    encoded = compressor.encoded()
    for decision in progress(compressor.decisions):
      if decision.compress:
        _, array = next(encoded)
        for name, piece in _pieces(decision, array).items():
          put(decision.info.file, name, piece)
        entries.append(_compressed_entry(compressor, decision, array))
      else:
        entries.append(_kept_entry(decision))
        if not decision.tied_to:
          put(decision.info.file, decision.name, folder.read(decision.name))
  report = {
      "format": METHOD, "version": VERSION, **compressor.config.to_json(),
      "codebooks": {
          name: {"num_codes": c.num_codes, "has_escape": c.has_escape,
                 "threshold": c.threshold if np.isfinite(c.threshold) else None}
          for name, c in compressor.codebooks.items()},
      "tensors": entries, "checksums": checksums}
  _write_json(work / REPORT, report, indent=None)
  _write_json(work / "config.json", folder.config | {
      "quantization_config": {
          "quant_method": METHOD, "version": VERSION,
          **compressor.config.to_json(), "report": REPORT}})
  folders.copy_assets(folder.path, work)
  return report, shards.seconds


def _expected(compressor) -> dict[str, dict[str, int]]:
  """Dimensions of what will be written, by file."""
  expected = {file: {} for file in compressor.folder.files}
  first = expected[compressor.folder.files[0]]
  first |= {codebook_name(scope): 1 for scope in compressor.codebooks}
  for decision in compressor.decisions:
    file = expected[decision.info.file]
    if decision.compress:
      codebook = compressor.codebooks[compressor.scope_of(decision)]
      shapes = piece_shapes(
          decision.name, compressor.layout(decision), decision.storage,
          codebook.num_codes, 0 if codebook.has_escape else None,
          decision.info.dtype, compressor.has_scale)
      file |= {name: len(shape) for name, (_, shape) in shapes.items()}
    elif not decision.tied_to:
      file[decision.name] = len(decision.info.shape)
  return expected


def _pieces(decision: rules.Decision, array: LegoArray
            ) -> dict[str, np.ndarray]:
  """What is stored of a compressed tensor."""
  name = decision.name
  pieces = {f"{name}.plane{i}": p for i, p in enumerate(array.planes)}
  if array.outliers is not None:
    pieces[f"{name}.offsets"] = array.offsets
    pieces[f"{name}.outliers"] = array.outliers[0, 0, :sharding.num_outliers(array)]
  if array.scale is not None:
    pieces[f"{name}.scale"] = array.scale
  return pieces


def _kept_entry(decision: rules.Decision) -> dict[str, Any]:
  info = decision.info
  entry = {"name": info.name, "file": info.file, "dtype": dtype_name(info.dtype),
           "shape": list(info.shape), "decision": KEPT,
           "reason": decision.reason,
           "bits_per_weight": 8.0 * info.dtype.itemsize}
  if decision.tied_to:
    entry |= {"decision": TIED, "tied_to": decision.tied_to,
              "bits_per_weight": 0.0}
  return entry


def _compressed_entry(compressor, decision: rules.Decision, array: LegoArray
                      ) -> dict[str, Any]:
  outliers = None if array.outliers is None else sharding.num_outliers(array)
  pieces = _pieces(decision, array)
  return _kept_entry(decision) | {
      "decision": COMPRESSED,
      "bits_per_weight": 8 * sum(p.nbytes for p in pieces.values()) / array.size,
      "codebook": compressor.scope_of(decision),
      "storage": array.storage.value, "num_outliers": outliers,
      "has_scale": array.scale is not None,
      "section_out": array.section_out, "section_inputs": array.section_inputs,
      "self_test": _self_test(compressor, decision, array)}


def _self_test(compressor, decision, array) -> list[dict[str, Any]]:
  """Checksums of a few tiles, computed from the source and not from the code.

  Raises:
    RuntimeError: if what was encoded decodes to anything else.
  """
  matrix = compressor.matrix(decision)
  if array.storage is Storage.IN_OUT:
    array = array.T
  layout = array.layout
  codebook = compressor.codebooks[compressor.scope_of(decision)]
  tests = []
  for band, tile in {
      (0, 0), (layout.bands // 2, layout.tiles // 2),
      (layout.bands - 1, layout.tiles - 1)}:
    rows = encoding.tile_rows(layout, band)
    columns = encoding.tile_columns(layout, tile)
    source = np.ascontiguousarray(
        matrix.rows(rows[0], rows[-1] + 1)[:, columns])
    expected = _nearest_values(
        source, codebook, None if array.scale is None else array.scale[rows])
    codes = encoding.tile_codes(array, band, tile)[:, :columns.size]
    escaped = (codes == codebook.centroids.size) & codebook.has_escape
    expected = np.where(escaped, source, expected)
    found = encoding.decode_tile(array, band, tile)
    if not np.array_equal(found, expected):
      raise RuntimeError(
          f"tensor {decision.name}: tile {band}, {tile} decodes to other values")
    tests.append({"tile": [band, tile], "crc32": checksum(expected)})
  return sorted(tests, key=lambda test: test["tile"])


def _nearest_values(source: np.ndarray, codebook: encoding.Codebook,
                    scale: np.ndarray | None) -> np.ndarray:
  """What source [rows, columns] becomes where it is no outlier."""
  multiples = source.astype(np.float64)
  if scale is not None:
    multiples /= scale.astype(np.float64)[:, None]
  values = codebook.centroids[
      codebook_lib.nearest(multiples, codebook.centroids)]
  if scale is not None:
    values = values * scale.astype(np.float32)[:, None]
  return values.astype(source.dtype)


def _account(work: pathlib.Path, compressor, report) -> dict[str, Any]:
  """Sizes, everything counted: weights, index, config and report.

  Returns:
    "nominal_ratio" (the paper's), "true_ratio" (bytes in over bytes out),
    "true_ratio_fp32" (the same for a source in float32),
    "bits_per_compressed_weight" (with codebooks), "bits_per_parameter" (of the
    whole model), "bytes_in", "bytes_out", "num_parameters",
    "num_compressed" weights, "outlier_share" of those, and "tensors".
  """
  config, folder = compressor.config, compressor.folder
  entries = report["tensors"]
  compressed = [e for e in entries if e["decision"] == COMPRESSED]
  sizes = [int(np.prod(e["shape"])) for e in compressed]
  bits = sum(e["bits_per_weight"] * n for e, n in zip(compressed, sizes))
  bits += 8 * sum(accounting.codebook_bytes(c.centroids.size)
                  for c in compressor.codebooks.values())
  bytes_in = _weight_bytes(folder.path, folder.files, ("config.json", INDEX))
  bytes_out = _weight_bytes(
      work, [p.name for p in work.glob("*.safetensors")],
      ("config.json", INDEX, REPORT))
  parameters, weights = folder.num_parameters, sum(sizes)
  return {
      "nominal_ratio": accounting.nominal_ratio(
          config.num_centroids, config.percentile),
      "true_ratio": bytes_in / bytes_out,
      "true_ratio_fp32": 4 * parameters / bytes_out,
      "bits_per_compressed_weight": bits / weights,
      "bits_per_parameter": 8 * bytes_out / parameters,
      "bytes_in": bytes_in, "bytes_out": bytes_out,
      "num_parameters": parameters, "num_compressed": weights,
      "outlier_share": sum(e["num_outliers"] or 0 for e in compressed) / weights,
      "tensors": [{k: v for k, v in e.items() if k != "self_test"}
                  for e in entries]}


def _weight_bytes(folder: pathlib.Path, files, others) -> int:
  return sum((folder / f).stat().st_size for f in (*files, *others)
             if (folder / f).exists())


def _write_json(path: pathlib.Path, value: Any, indent: int | None = 2) -> None:
  path.write_text(json.dumps(value, indent=indent) + "\n")
