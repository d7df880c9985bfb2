"""Compressed checkpoints on disk: `docs/legolm_format.md`.

The folder holds the safetensors shards of its source. A kept tensor stands in
its shard as it was; a compressed one in pieces, NAME.plane0 and so on.
legolm.json lists every tensor with what became of it and why, the checksum of
everything stored, and for a self-test those of a few decoded tiles.
"""

from __future__ import annotations

from collections.abc import Callable
import math
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import ml_dtypes
import numpy as np

from legolm_jax import accounting, encoding, packing, sharding
from legolm_jax.array import LegoArray, Storage
from legolm_jax.errors import InputError
from legolm_jax.safetensors_files import (
    DTYPES,
    CheckpointFolder,
    checksum,
    read_json,
)

METHOD, VERSION, REPORT = "legolm", 1, "legolm.json"
COMPRESSED, KEPT, TIED = "compressed", "kept", "tied"
_BF16 = np.dtype(ml_dtypes.bfloat16)


def is_compressed(path: str | os.PathLike) -> bool:
  """Whether a folder holds a compressed checkpoint."""
  config = pathlib.Path(path) / "config.json"
  if not config.is_file():
    return False
  quantized = read_json(config).get("quantization_config")
  return isinstance(quantized, dict) and quantized.get("quant_method") == METHOD


def codebook_name(scope: str) -> str:
  """The stored tensor that holds a scope's centroids."""
  return f"legolm.codebook.{scope}"


def piece_shapes(name: str, layout: packing.Layout, storage: Storage,
                 num_codes: int, num_outliers: int | None, dtype: np.dtype,
                 has_scale: bool) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
  """Dtype and shape by stored name of a compressed tensor's pieces, in order.

  Args:
    name: of the tensor.
    layout, storage, num_codes, dtype: as in `LegoArray`.
    num_outliers: None without an escape.
    has_scale: whether outputs have scales.
  """
  order = (lambda a, b: (a, b)) if storage is Storage.OUT_IN else (
      lambda a, b: (b, a))
  planes = packing.plane_dtypes(packing.code_bits(num_codes))
  pieces = {f"{name}.plane{i}": (d, order(layout.out, layout.words))
            for i, d in enumerate(planes)}
  if num_outliers is not None:
    pieces[f"{name}.offsets"] = (
        np.dtype(np.uint32), order(layout.bands, layout.tiles))
    pieces[f"{name}.outliers"] = (dtype, (num_outliers,))
  if has_scale:
    pieces[f"{name}.scale"] = (_BF16, (layout.out,))
  return pieces


class Checkpoint:
  """A compressed checkpoint, opened and checked; tensors are memory maps.

  Attributes:
    folder: its files.
    report: what legolm.json holds.
    entries: the report's entry of every tensor of the source, by name.
  """

  def __init__(self, path: str | os.PathLike):
    """Opens a folder.

    Raises:
      InputError: if it is no compressed checkpoint, of a newer version, or its
        files don't hold exactly what the report lists.
    """
    self.folder = CheckpointFolder(path)
    quantized = self.folder.config.get("quantization_config")
    if not is_compressed(path):
      raise InputError(f"{path}: expected a compressed checkpoint (quant_method "
                       f"{METHOD}), found quantization_config {quantized}")
    if quantized.get("version") != VERSION:
      raise InputError(f"{path}: has version {quantized.get('version')} of the "
                       f"format, expected {VERSION}")
    self._where = self.folder.path / REPORT
    self.report = read_json(self._where)
    try:
      self.entries = {e["name"]: e for e in self.report["tensors"]}
      self._pieces = {n: self._expected(e) for n, e in self.entries.items()}
      self._checksums = dict(self.report["checksums"])
      codebooks = {codebook_name(scope): (np.dtype(np.float32), (
          c["num_codes"] - c["has_escape"],))
          for scope, c in self.report["codebooks"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as e:
      raise InputError(f"{self._where}: is damaged ({e!r})") from e
    expected = codebooks
    for pieces in self._pieces.values():
      expected = expected | pieces
    self._check(expected)

  @property
  def config(self) -> dict[str, Any]:
    """The source's config.json."""
    config = dict(self.folder.config)
    del config["quantization_config"]
    return config

  def names(self) -> list[str]:
    """Tensors that can be read: all but those that a tie stands for."""
    return [n for n, e in self.entries.items() if e["decision"] != TIED]

  def read(self, name: str, verify: bool = True) -> np.ndarray | LegoArray:
    """A tensor as memory maps.

    Args:
      name: of the tensor in the source.
      verify: compare checksums, for which all of it is read. A compressed
        tensor's self-test runs in any case.

    Returns:
      An array, or a LegoArray with host arrays as leaves.

    Raises:
      InputError: naming the tensor, if it is damaged.
    """
    entry = self.entries[name]
    stored = list(self._pieces[name])
    if entry["decision"] == COMPRESSED:
      stored.append(codebook_name(entry["codebook"]))
    for piece in stored if verify else ():
      found = checksum(self.folder.read(piece))
      if found != self._checksums.get(piece):
        raise InputError(
            f"{self.folder.path / self.folder.tensors[piece].file}: tensor "
            f"{piece} is damaged (CRC-32 {found}, expected "
            f"{self._checksums.get(piece)})")
    if entry["decision"] == KEPT:
      return self.folder.read(name)
    array = self._array(name, entry)
    self._self_test(name, entry, array)
    return array

  def bits_per_weight(self) -> dict[str, float]:
    """Bits in memory of each weight of a compressed tensor, by its name; every
    LegoArray has a codebook of its own."""
    found = {}
    for name, entry in self.entries.items():
      if entry["decision"] == COMPRESSED:
        codes = self.report["codebooks"][entry["codebook"]]["num_codes"]
        size = math.prod(entry["shape"])
        found[name] = entry["bits_per_weight"] + (
            8 * accounting.codebook_bytes(codes) / size)
    return found

  def _array(self, name: str, entry: dict[str, Any]) -> LegoArray:
    codebook = self.report["codebooks"][entry["codebook"]]
    pieces = {piece.removeprefix(name + "."): self.folder.read(piece)
              for piece in self._pieces[name]}
    centroids = np.array(self.folder.read(codebook_name(entry["codebook"])))
    outliers = pieces.get("outliers")
    if codebook["has_escape"]:
      centroids = np.append(centroids, np.float32(0))
      outliers = encoding.at_least_one(outliers)[None, None]
    return LegoArray(
        planes=tuple(v for k, v in pieces.items() if k.startswith("plane")),
        codebook=centroids, scale=pieces.get("scale"), outliers=outliers,
        offsets=pieces.get("offsets"), section_out=entry["section_out"],
        section_inputs=entry["section_inputs"],
        num_codes=codebook["num_codes"], dtype=DTYPES[entry["dtype"]],
        storage=Storage(entry["storage"]))

  def _self_test(self, name: str, entry: dict[str, Any], array: LegoArray
                 ) -> None:
    if array.storage is Storage.IN_OUT:
      array = array.T
    for test in entry["self_test"]:
      try:
        found = checksum(encoding.decode_tile(array, *test["tile"]))
      except (ValueError, IndexError) as e:
        raise InputError(
            f"{self.folder.path}: tensor {name} is damaged ({e})") from e
      if found != test["crc32"]:
        raise InputError(
            f"{self.folder.path}: tensor {name} fails its self-test: tile "
            f"{test['tile']} decodes to CRC-32 {found}, expected "
            f"{test['crc32']}")

  def _expected(self, entry: dict[str, Any]
                ) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """Stored tensors of one entry."""
    shape, dtype = tuple(entry["shape"]), DTYPES[entry["dtype"]]
    if entry["decision"] == KEPT:
      return {entry["name"]: (dtype, shape)}
    if entry["decision"] == TIED:
      return {}
    storage = Storage(entry["storage"])
    out, inputs = shape if storage is Storage.OUT_IN else shape[::-1]
    layout = packing.Layout(
        out, inputs, entry["section_out"], entry["section_inputs"])
    codebook = self.report["codebooks"][entry["codebook"]]
    return piece_shapes(
        entry["name"], layout, storage, codebook["num_codes"],
        entry["num_outliers"], dtype, entry["has_scale"])

  def _check(self, expected) -> None:
    """Compares what is stored with what is listed, both ways."""
    stored = self.folder.tensors
    for name, (dtype, shape) in expected.items():
      if name not in stored:
        raise InputError(f"{self.folder.path}: tensor {name} is missing")
      info = stored[name]
      if (info.dtype, info.shape) != (dtype, shape):
        raise InputError(
            f"{self.folder.path / info.file}: tensor {name} is {info.dtype} "
            f"{list(info.shape)}, expected {dtype} {list(shape)}")
    extra = sorted(stored.keys() - expected.keys())
    if extra:
      raise InputError(f"{self.folder.path}: {len(extra)} tensors are not in "
                       f"{REPORT}, first {extra[0]}")


def load(path: str | os.PathLike, *, mesh: Mesh | None = None,
         spec_of: Callable[[str], PartitionSpec] | None = None,
         verify: bool = True) -> dict[str, Any]:
  """Loads a compressed checkpoint into a tree.

  Args:
    path: its folder.
    mesh: devices to shard over; None for the default device.
    spec_of: with `mesh`, the spec of the dense tensor of a given name.
    verify: compare checksums. A process that holds a part of every tensor reads
      no more than that part without.

  Returns:
    Dictionaries nested by the dots in the names, {"model": {"layers": {"0":
    ...}}}, whose leaves are jax arrays and LegoArrays. A tied head is not in it:
    it is the embedding.

  Raises:
    InputError: if anything is missing or damaged.
  """
  checkpoint = Checkpoint(path)
  tree: dict[str, Any] = {}
  for name in checkpoint.names():
    leaf = checkpoint.read(name, verify)
    if mesh is None:
      leaf = jax.tree.map(jnp.array, leaf)
    elif isinstance(leaf, LegoArray):
      leaf = sharding.device_put(leaf, mesh, spec_of(name))
    else:
      leaf = sharding.put_leaf(leaf, NamedSharding(mesh, spec_of(name)))
    *above, last = name.split(".")
    node = tree
    for key in above:
      node = node.setdefault(key, {})
    node[last] = leaf
  return tree
