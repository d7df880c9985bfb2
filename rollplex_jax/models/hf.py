"""Checkpoints in Hugging Face's layout: safetensors shards and config.json.

Loading checks names, shapes and dtypes both ways before anything is computed:
a tensor that is missing, unexpected or of another shape is an error that names
it. Export writes to a temporary folder and renames it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
import functools
import json
import os
import pathlib
import shutil
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from legolm_jax import sharding as lego_sharding
from legolm_jax.array import LegoArray
from legolm_jax.safetensors_files import read_json
from rollplex_jax.errors import InputError
from rollplex_jax.models import architectures, tensor_files, vlm
from rollplex_jax.models.config import ModelConfig
from rollplex_jax.models.weights import Params, Weight, is_weight
from rollplex_jax.placement.host import to_host
from rollplex_jax.placement.processes import is_first

_SHARD_BYTES = 4 << 30
# Files beside the weights that belong to a usable checkpoint.
_ASSETS = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
    "chat_template.json", "preprocessor_config.json",
    "video_preprocessor_config.json", "processor_config.json",
    "generation_config.json",
)


def load_config(path: str | os.PathLike) -> ModelConfig:
  """Reads config.json, and the EOS ids of generation_config.json if there.

  Raises:
    InputError: if the folder or file is missing or not JSON, or the
      architecture is not supported.
  """
  folder = pathlib.Path(path)
  if not folder.is_dir():
    raise InputError(f"{path}: no such checkpoint folder")
  raw = read_json(folder / "config.json")
  generation = folder / "generation_config.json"
  if generation.exists():
    eos = read_json(generation).get("eos_token_id")
    if eos is not None:
      raw["eos_token_id"] = eos
  return architectures.config_from_hf(raw, str(folder / "config.json"))


def load_checkpoint(
    path: str | os.PathLike, dtype=None, config: ModelConfig | None = None,
    shardings: Any = None, finest: Any = None, decode: bool = False
    ) -> tuple[ModelConfig, Params]:
  """Loads a checkpoint folder, tensor by tensor.

  One that is compressed is loaded as it is: what is compressed in it becomes
  LegoArrays, in the storage that the models have.

  Args:
    path: folder with config.json and safetensors.
    dtype: of the parameters; None keeps each tensor's own. LegoArrays then
      stand for matrices of this dtype; their bytes are the same.
    config: if given, used in place of the folder's config.json.
    shardings: of the parameters, a tree like theirs; a process then copies
      only what its devices hold. None puts them whole on one device.
    finest: a tree of shardings too, of the finest split that any program asks
      of a compressed matrix; by default `shardings`.
    decode: make dense what is compressed, as fast to read as any weight; the
      numbers are the same.

  Returns:
    The configuration and the parameters, {"text": ..., "visual": ...}. Host
    memory holds at most one tensor beside what is already on the device.

  Raises:
    InputError: naming the file or tensor that is wrong.
  """
  folder = pathlib.Path(path)
  config = config or load_config(folder)
  leaves, structure = jax.tree.flatten(vlm.weights(config), is_leaf=is_weight)
  with tensor_files.open_tensors(folder) as tensors:
    tensors.check(leaves, config.text.tie_word_embeddings)
    arrays, last = [], (None, None)
    none = [None] * len(leaves)
    places = none if shardings is None else jax.tree.leaves(shardings)
    finest = places if finest is None else jax.tree.leaves(finest)
    for weight, place, finer in zip(leaves, places, finest, strict=True):
      if last[0] != weight.name:
        last = (weight.name, tensors.read(weight.name))
      arrays.append(_put(
          weight.from_checkpoint(last[1]), dtype, place, finer, decode))
  return config, structure.unflatten(arrays)


def params_from_tensors(
    config: ModelConfig, tensors: Iterable[tuple[str, np.ndarray]],
    dtype=None) -> Params:
  """The parameters in a stream of a checkpoint's tensors, by any version's names.

  Args:
    config: the model's.
    tensors: names and arrays, as in the checkpoint's files; what the model
      doesn't have is passed over.
    dtype: of the parameters; None keeps each tensor's own.

  Raises:
    InputError: if a tensor is missing.
  """
  leaves, structure = jax.tree.flatten(vlm.weights(config), is_leaf=is_weight)
  places: dict[str, list[int]] = {}
  for i, weight in enumerate(leaves):
    places.setdefault(weight.name, []).append(i)
  out: list[jax.Array | None] = [None] * len(leaves)
  for name, tensor in tensors:
    for i in places.pop(tensor_files.published_name(name), ()):
      out[i] = jnp.array(leaves[i].from_checkpoint(tensor), dtype=dtype)
  if places:
    raise InputError(f"{len(places)} tensors are missing, first "
                     f"{min(places)}")
  return structure.unflatten(out)


def _put(value: np.ndarray | LegoArray, dtype, place, finest, decode
         ) -> jax.Array | LegoArray:
  """A host array on the device, or where its sharding has it."""
  if isinstance(value, LegoArray):
    value = value.replace(dtype=jnp.dtype(value.dtype if dtype is None
                                          else dtype))
    if place is None:
      value = jax.tree.map(_copy, value)
      return _decode(value, None) if decode else value
    value = lego_sharding.device_put(
        value, place.mesh, place.spec, finest.spec)
    return _decode(value, place) if decode else value
  return (_copy(value, dtype) if place is None
          else _spread(value, dtype, place))


def _copy(value: np.ndarray, dtype=None) -> jax.Array:
  """A host array on the device, without another copy of it on the way there.

  On a CPU what is put there may be the host's buffer itself. It would keep all
  of a tensor alive that is cut in parts, and reads a file that is mapped.
  """
  there = jax.block_until_ready(jax.device_put(value))
  if dtype is not None and there.dtype != dtype:
    return jax.block_until_ready(there.astype(dtype))
  is_borrowed = (jax.default_backend() == "cpu" and value.size and
                 there.unsafe_buffer_pointer() == value.ctypes.data)
  return jax.block_until_ready(jnp.copy(there)) if is_borrowed else there


@functools.partial(jax.jit, static_argnames="place")
def _decode(array: LegoArray, place) -> jax.Array:
  dense = array.dequantize()
  return dense if place is None else jax.lax.with_sharding_constraint(
      dense, place)


def _spread(value: np.ndarray, dtype, sharding) -> jax.Array:
  """An array of which every device gets its part."""
  dtype = value.dtype if dtype is None else dtype
  return jax.make_array_from_callback(
      value.shape, sharding,
      lambda index: np.array(value[index]).astype(dtype))


def save_checkpoint(
    path: str | os.PathLike, config: ModelConfig, params: Params, *,
    dtype=None, assets_from: str | os.PathLike | None = None,
    shard_bytes: int = _SHARD_BYTES) -> None:
  """Writes a folder that transformers and `load_checkpoint` both load.

  Of several processes all must call this; the first one writes.

  Args:
    path: folder to make; replaced if it exists and holds a checkpoint.
    config: the model's configuration.
    params: its parameters.
    dtype: to write; None keeps each tensor's own.
    assets_from: checkpoint folder whose tokenizer, chat template and
      preprocessor files are copied along.
    shard_bytes: largest shard file.

  Raises:
    InputError: if `path` exists and is not a checkpoint folder.
  """
  if not is_first():
    for _ in _checkpoint_tensors(config, params, dtype):
      pass  # Gathered for the one that writes.
    return
  target = pathlib.Path(path)
  if target.exists() and not (
      target.is_dir() and ((target / "config.json").exists()
                           or not any(target.iterdir()))):
    raise InputError(f"{path}: exists and is not a checkpoint folder")
  target.parent.mkdir(parents=True, exist_ok=True)
  work = pathlib.Path(tempfile.mkdtemp(
      prefix=f".{target.name}.", dir=target.parent))
  work.chmod(0o755)
  try:
    written = _write_shards(work, config, params, dtype, shard_bytes)
    raw = config.to_hf(dtype=written)
    (work / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    for name in _ASSETS if assets_from is not None else ():
      source = pathlib.Path(assets_from) / name
      if source.exists():
        shutil.copyfile(source, work / name)
    if target.exists():
      # A folder cannot be renamed over another: move the old one aside first.
      old = pathlib.Path(tempfile.mkdtemp(
          prefix=f".{target.name}.old.", dir=target.parent))
      target.rename(old / "checkpoint")
      try:
        work.rename(target)
      except BaseException:
        (old / "checkpoint").rename(target)
        raise
      finally:
        shutil.rmtree(old)
    else:
      work.rename(target)
  except BaseException:
    shutil.rmtree(work, ignore_errors=True)
    raise


def _write_shards(folder, config, params, dtype, shard_bytes) -> str:
  """Writes the tensors and, if there are several shards, their index."""
  shards, shard, size, total, written = [], {}, 0, 0, "float32"
  for name, tensor in _checkpoint_tensors(config, params, dtype):
    if shard and size + tensor.nbytes > shard_bytes:
      shards.append(_write_part(folder, len(shards), shard))
      shard, size = {}, 0
    shard[name] = tensor
    size += tensor.nbytes
    total += tensor.nbytes
    written = str(tensor.dtype)
  shards.append(_write_part(folder, len(shards), shard))
  if len(shards) == 1:
    (folder / "part-0").rename(folder / tensor_files.SINGLE)
    return written
  where = {}
  for i, names in enumerate(shards):
    file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
    (folder / f"part-{i}").rename(folder / file)
    where |= dict.fromkeys(names, file)
  index = {"metadata": {"total_size": total}, "weight_map": where}
  (folder / tensor_files.INDEX).write_text(json.dumps(index, indent=2) + "\n")
  return written


def _write_part(folder, i, tensors) -> list[str]:
  path = folder / f"part-{i}"
  save_file(tensors, path, metadata={"format": "pt"})
  path.chmod(0o644)  # The library leaves it unreadable to others.
  return list(tensors)


def _checkpoint_tensors(
    config: ModelConfig, params: Params, dtype
) -> Iterator[tuple[str, np.ndarray]]:
  """Yields published names with tensors in the checkpoint's own layout."""
  leaves = jax.tree.leaves(vlm.weights(config), is_leaf=is_weight)
  arrays = jax.tree.leaves(params)
  by_name: dict[str, list[tuple[Weight, Any]]] = {}
  for weight, array in zip(leaves, arrays, strict=True):
    by_name.setdefault(weight.name, []).append((weight, array))
  for name, parts in by_name.items():
    parts.sort(key=lambda p: p[0].part)
    pieces = [w.to_checkpoint(np.asarray(to_host(a))) for w, a in parts]
    tensor = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    yield name, np.ascontiguousarray(
        tensor if dtype is None else tensor.astype(dtype))
