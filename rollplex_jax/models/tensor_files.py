"""The tensors of a checkpoint folder, plain or compressed, by published name.

    with tensor_files.open_tensors(folder) as tensors:
      tensors.check(weights, tied)
      array = tensors.read("model.norm.weight")
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
import os
import pathlib

import ml_dtypes
import numpy as np
import safetensors

from legolm_jax import checkpoint as lego_checkpoint
from legolm_jax.array import LegoArray
from legolm_jax.safetensors_files import read_json
from rollplex_jax.errors import InputError
from rollplex_jax.models.weights import Weight

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16),
           "BF16": np.dtype(ml_dtypes.bfloat16)}
# Ways in which library versions prefix the published names.
_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.visual.", "visual."),
    ("model.lm_head.", "lm_head."),
    ("transformer.", ""),
)
# Tables and masks that were once saved; they are computed.
_COMPUTED = ("inv_freq", ".attn.bias", ".attn.masked_bias")
_HEAD = "lm_head.weight"


def published_name(name: str) -> str:
  """Maps a tensor name of any library version to the published one."""
  for prefix, published in _PREFIXES:
    if name.startswith(prefix):
      return published + name[len(prefix):]
  return name


def is_compressed(path: str | os.PathLike) -> bool:
  """Whether a folder holds a compressed checkpoint. Raises InputError."""
  return lego_checkpoint.is_compressed(path)


def compressed_bits(path: str | os.PathLike) -> dict[str, float]:
  """Bits in memory of each weight of compressed tensors, by published names.

  Empty for a checkpoint that is not compressed. Raises InputError.
  """
  if not is_compressed(path):
    return {}
  stored = lego_checkpoint.Checkpoint(path)
  return {published_name(name): bits
          for name, bits in stored.bits_per_weight().items()}


def open_tensors(folder: str | os.PathLike) -> Tensors:
  """Opens a folder.

  Raises:
    InputError: naming the file that is missing or damaged.
  """
  folder = pathlib.Path(folder)
  if is_compressed(folder):
    return _Compressed(folder)
  return _Plain(folder)


class Tensors(abc.ABC):
  """The tensors of one folder.

  Attributes:
    folder: where they are.
    where: published name -> (file, name in that file).
    shapes, dtypes: by published name; dtypes as safetensors names them.
  """

  def __init__(self, folder: pathlib.Path):
    self.folder = folder
    self.where: dict[str, tuple[str, str]] = {}
    self.shapes: dict[str, tuple[int, ...]] = {}
    self.dtypes: dict[str, str] = {}

  def __enter__(self):
    return self

  def __exit__(self, *args):
    del args  # Nothing to close, unless a kind of folder says so.

  @abc.abstractmethod
  def read(self, published: str) -> np.ndarray | LegoArray:
    """A tensor on the host, as it is stored. Raises InputError."""

  def check(self, weights: Sequence[Weight], tied: bool) -> None:
    """Compares what is stored with declared weights, both ways.

    Args:
      weights: all that the model has.
      tied: a head that is stored must be the embedding.

    Raises:
      InputError: naming the tensor that is missing, unexpected or different.
    """
    folder = self.folder
    expected = {w.name: w.checkpoint_shape for w in weights}
    found = {n: s for n, s in self.shapes.items() if not n.endswith(_COMPUTED)
             or n in expected}
    missing = sorted(expected.keys() - found.keys())
    extra = sorted(found.keys() - expected.keys())
    tied = tied and _HEAD in extra
    if tied:
      extra.remove(_HEAD)
    if missing:
      raise InputError(
          f"{folder}: {len(missing)} tensors are missing, first {missing[0]}"
          + (f"; {len(extra)} are unexpected, first {extra[0]}" if extra
             else ""))
    if extra:
      raise InputError(
          f"{folder}: {len(extra)} tensors are unexpected for this config, "
          f"first {extra[0]}")
    for name, shape in expected.items():
      if found[name] != shape:
        raise InputError(
            f"{folder}: tensor {name} has shape {list(found[name])}, the "
            f"config expects {list(shape)}")
      if self.dtypes[name] not in _DTYPES:
        raise InputError(
            f"{folder}: tensor {name} has dtype {self.dtypes[name]}, expected "
            f"one of {', '.join(_DTYPES)}")
    if tied:
      self._check_tie(next(w.name for w in weights if w.axes[0] == "vocab"))

  def _check_tie(self, table_name: str) -> None:
    head, table = self.read(_HEAD), self.read(table_name)
    if head.shape != table.shape or not np.array_equal(head, table):
      raise InputError(
          f"{self.folder}: {_HEAD} differs from {table_name}, but the config "
          "ties them")

  def _add(self, name: str, file: str, shape, dtype: str) -> None:
    published = published_name(name)
    if published in self.where:
      other = self.where[published]
      raise InputError(f"{self.folder / file}: tensor {name} stands also as "
                       f"{other[1]} in {other[0]}")
    self.where[published] = (file, name)
    self.shapes[published] = tuple(shape)
    self.dtypes[published] = dtype


class _Plain(Tensors):
  """Open safetensors files."""

  def __init__(self, folder: pathlib.Path):
    super().__init__(folder)
    self._handles = {}
    for file in _files(folder):
      path = folder / file
      try:
        handle = safetensors.safe_open(path, framework="np").__enter__()
      except (OSError, safetensors.SafetensorError) as e:
        raise InputError(f"{path}: not a whole safetensors file ({e})") from e
      self._handles[file] = handle
      for name in handle.keys():
        part = handle.get_slice(name)
        self._add(name, file, part.get_shape(), part.get_dtype())

  def __exit__(self, *args):
    for handle in self._handles.values():
      handle.__exit__(*args)

  def read(self, published):
    file, name = self.where[published]
    return self._handles[file].get_tensor(name)


class _Compressed(Tensors):
  """A compressed checkpoint; what is compressed in it comes as LegoArrays."""

  def __init__(self, folder: pathlib.Path):
    super().__init__(folder)
    self._checkpoint = lego_checkpoint.Checkpoint(folder)
    for name in self._checkpoint.names():
      entry = self._checkpoint.entries[name]
      self._add(name, entry["file"], entry["shape"], entry["dtype"])

  def read(self, published):
    return self._checkpoint.read(self.where[published][1])


def _files(folder: pathlib.Path) -> list[str]:
  """Names of the safetensors files that make up the checkpoint.

  An index decides; without one, model.safetensors; then a lone other file.
  """
  index = folder / INDEX
  if index.exists():
    raw = read_json(index)
    if not isinstance(raw.get("weight_map"), dict):
      raise InputError(f"{index}: has no weight_map")
    files = sorted(set(raw["weight_map"].values()))
    missing = [f for f in files if not (folder / f).exists()]
    if missing:
      raise InputError(
          f"{folder}: {len(missing)} of {len(files)} shards that the index "
          f"names are missing: {', '.join(missing)}")
    return files
  if (folder / SINGLE).exists():
    return [SINGLE]
  found = sorted(p.name for p in folder.glob("*.safetensors"))
  if len(found) != 1:
    raise InputError(
        f"{folder}: expected {SINGLE} or {INDEX}, found "
        f"{', '.join(found) or 'no safetensors file'}")
  return found

