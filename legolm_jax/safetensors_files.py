"""Checkpoint folders: memory-mapped reading, and writing tensor by tensor.

The safetensors library reads and writes whole tensors or whole files; a model
larger than memory, with tensors whose size is known last, needs the format
itself, which is a JSON header before the data.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import json
import math
import os
import pathlib
from typing import Any
import zlib

import ml_dtypes
import numpy as np

from legolm_jax.errors import InputError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16,
    "BF16": ml_dtypes.bfloat16, "I64": np.int64, "I32": np.int32,
    "I16": np.int16, "I8": np.int8, "U64": np.uint64, "U32": np.uint32,
    "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
}
DTYPES = {name: np.dtype(dtype) for name, dtype in DTYPES.items()}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER = 100 << 20
# A header's room for one tensor's offsets.
_MAX_OFFSET = "9" * 16


def dtype_name(dtype: np.dtype) -> str:
  """The format's name of a dtype."""
  return _NAMES[np.dtype(dtype)]


@dataclasses.dataclass(frozen=True)
class TensorInfo:
  """Where a tensor lies."""

  name: str
  file: str
  dtype: np.dtype
  shape: tuple[int, ...]
  offset: int  # In the file.

  @property
  def size(self) -> int:
    return math.prod(self.shape)

  @property
  def nbytes(self) -> int:
    return self.size * self.dtype.itemsize


class CheckpointFolder:
  """A folder with config.json and safetensors, opened and checked.

  The index decides which files and tensors belong to it; without one,
  model.safetensors or a lone other file.

  Attributes:
    path: of the folder.
    config: what config.json holds.
    files: names of the safetensors files.
    tensors: by name, file by file in the order of the data.
  """

  def __init__(self, path: str | os.PathLike):
    """Opens a folder.

    Raises:
      InputError: naming the file or tensor that is missing, not whole, not
        where the index says, or of an unknown dtype.
    """
    self.path = pathlib.Path(path)
    if not self.path.is_dir():
      raise InputError(f"{path}: no such checkpoint folder")
    self.config = read_json(self.path / "config.json")
    where = self._index()
    self.files = sorted(set(where.values())) if where else self._lone_file()
    missing = [f for f in self.files if not (self.path / f).is_file()]
    if missing:
      raise InputError(
          f"{path}: {len(missing)} of {len(self.files)} shards that the index "
          f"names are missing: {', '.join(missing)}")
    self._maps = {}
    self.tensors: dict[str, TensorInfo] = {}
    for file in self.files:
      self._open(file, where)
    for name, file in where.items():
      if name not in self.tensors:
        raise InputError(f"{self.path / file}: tensor {name}, which the index "
                         "names, is missing")

  @property
  def weight_bytes(self) -> int:
    """Bytes of the safetensors files."""
    return sum((self.path / f).stat().st_size for f in self.files)

  @property
  def num_parameters(self) -> int:
    """Scalars of the floating tensors."""
    return sum(t.size for t in self.tensors.values() if is_floating(t.dtype))

  def read(self, name: str) -> np.ndarray:
    """A tensor as a read-only view of its file."""
    info = self.tensors[name]
    data = self._maps[info.file][info.offset:info.offset + info.nbytes]
    return data.view(info.dtype).reshape(info.shape)

  def _index(self) -> dict[str, str]:
    path = self.path / INDEX
    if not path.exists():
      return {}
    where = read_json(path).get("weight_map")
    if not isinstance(where, dict) or not where:
      raise InputError(f"{path}: expected a weight_map, found none")
    for name, file in where.items():
      if not isinstance(file, str) or os.path.basename(file) != file:
        raise InputError(f"{path}: expected a file name for tensor {name}, "
                         f"found {file!r}")
    return where

  def _lone_file(self) -> list[str]:
    if (self.path / SINGLE).exists():
      return [SINGLE]
    found = sorted(p.name for p in self.path.glob("*.safetensors"))
    if len(found) != 1:
      raise InputError(f"{self.path}: expected {SINGLE} or {INDEX}, found "
                       f"{', '.join(found) or 'no safetensors file'}")
    return found

  def _open(self, file: str, where: Mapping[str, str]) -> None:
    path = self.path / file
    header, start = _read_header(path)
    size = path.stat().st_size
    self._maps[file] = (np.memmap(path, np.uint8, "r") if size
                        else np.zeros(0, np.uint8))
    infos = []
    for name, entry in header.items():
      if name == "__metadata__":
        continue
      if where and where.get(name) != file:
        if name not in where:
          raise InputError(f"{path}: tensor {name} is not in the index")
        continue  # Another file's is the one that counts.
      infos.append(_tensor_info(path, name, entry, start, size))
    self.tensors |= {t.name: t for t in sorted(infos, key=lambda t: t.offset)}


def is_floating(dtype: np.dtype) -> bool:
  """Whether a dtype is one of the format's floats."""
  return dtype.kind == "f" or dtype == ml_dtypes.bfloat16


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """Reads a JSON object.

  Raises:
    InputError: naming the file, if it isn't one.
  """
  try:
    raw = json.loads(path.read_text())
  except OSError as e:
    raise InputError(f"{path}: cannot be read ({e.strerror})") from e
  except ValueError as e:
    raise InputError(f"{path}: not valid JSON ({e})") from e
  if not isinstance(raw, dict):
    raise InputError(f"{path}: expected a JSON object")
  return raw


def _read_header(path: pathlib.Path) -> tuple[dict[str, Any], int]:
  """The header, and where the data begin."""
  try:
    with path.open("rb") as file:
      size = int.from_bytes(file.read(8), "little")
      if not 2 <= size <= min(_MAX_HEADER, path.stat().st_size - 8):
        raise ValueError(f"a header of {size} bytes")
      header = json.loads(file.read(size))
    if not isinstance(header, dict):
      raise ValueError("the header is no object")
  except (OSError, ValueError) as e:
    raise InputError(f"{path}: not a whole safetensors file ({e})") from e
  return header, 8 + size


def _tensor_info(path, name, entry, start, file_size) -> TensorInfo:
  try:
    kind, shape = entry["dtype"], tuple(map(int, entry["shape"]))
    begin, end = map(int, entry["data_offsets"])
  except (KeyError, TypeError, ValueError) as e:
    raise InputError(f"{path}: tensor {name} has no valid entry") from e
  if kind not in DTYPES:
    raise InputError(f"{path}: tensor {name} has dtype {kind}, expected one of "
                     f"{', '.join(DTYPES)}")
  info = TensorInfo(name, path.name, DTYPES[kind], shape, start + begin)
  if (min(shape, default=0) < 0 or begin < 0 or end - begin != info.nbytes
      or start + end > file_size):
    raise InputError(
        f"{path}: not a whole safetensors file (tensor {name} of {kind} "
        f"{list(shape)} at bytes {begin} to {end} of {file_size - start})")
  return info


class Writer:
  """Writes one safetensors file tensor by tensor.

  The header comes first but is known last, so room for it is left: a tensor's
  name, dtype and number of dimensions must be told in advance.
  """

  def __init__(self, path: pathlib.Path, expected: Mapping[str, int]):
    """Opens a file.

    Args:
      path: of the file.
      expected: number of dimensions by name of every tensor to come.
    """
    self._path = path
    self._entries: dict[str, dict[str, Any]] = {}
    self._offset = 0
    longest = {
        name: {"dtype": "BF16", "shape": [int(_MAX_OFFSET)] * ndim,
               "data_offsets": [int(_MAX_OFFSET)] * 2}
        for name, ndim in expected.items()}
    self._room = len(self._header(longest))
    self._file = path.open("wb")
    self._file.write(b"\0" * self._room)

  @staticmethod
  def _header(entries) -> bytes:
    text = json.dumps({"__metadata__": {"format": "pt"}} | entries,
                      separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text

  def write(self, name: str, tensor: np.ndarray) -> None:
    """Appends a tensor."""
    self._entries[name] = {
        "dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape),
        "data_offsets": [self._offset, self._offset + tensor.nbytes]}
    self._offset += tensor.nbytes
    if tensor.size:
      self._file.write(flat_bytes(tensor))

  def close(self) -> None:
    """Writes the header."""
    header = self._header(self._entries)
    spaces = self._room - len(header)
    header = (self._room - 8).to_bytes(8, "little") + header[8:] + b" " * spaces
    self._file.seek(0)
    self._file.write(header)
    self._file.close()

  def abort(self) -> None:
    """Closes the file as it is; nothing can read it."""
    self._file.close()


def flat_bytes(tensor: np.ndarray) -> np.ndarray:
  """A tensor's bytes, uint8 [n]; no copy if it is contiguous."""
  return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)


def checksum(tensor: np.ndarray) -> int:
  """CRC-32 of a tensor's bytes."""
  return zlib.crc32(flat_bytes(tensor))
