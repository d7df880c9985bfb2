"""Checkpoints in Hugging Face's layout: safetensors shards and config.json.

Loading checks names, shapes and dtypes both ways before anything is computed:
a tensor that is missing, unexpected or of another shape is an error that names
it. Export writes to a temporary folder and renames it.
"""

from __future__ import annotations

from collections.abc import Iterator
import json
import os
import pathlib
import shutil
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors
from safetensors.numpy import save_file

from rollplex_jax.errors import InputError
from rollplex_jax.models import vlm
from rollplex_jax.models.config import ModelConfig
from rollplex_jax.models.weights import Params, Weight, is_weight
from rollplex_jax.placement.host import to_host
from rollplex_jax.placement.processes import is_first

_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16),
           "BF16": np.dtype(ml_dtypes.bfloat16)}
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD_BYTES = 4 << 30
# Ways in which library versions prefix the published names.
_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.visual.", "visual."),
    ("model.lm_head.", "lm_head."),
)
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
  raw = _read_json(folder / "config.json")
  generation = folder / "generation_config.json"
  if generation.exists():
    eos = _read_json(generation).get("eos_token_id")
    if eos is not None:
      raw["eos_token_id"] = eos
  return ModelConfig.from_hf(raw, str(folder / "config.json"))


def load_checkpoint(
    path: str | os.PathLike, dtype=None, config: ModelConfig | None = None,
    shardings: Any = None) -> tuple[ModelConfig, Params]:
  """Loads a checkpoint folder, tensor by tensor.

  Args:
    path: folder with config.json and safetensors.
    dtype: of the parameters; None keeps each tensor's own.
    config: if given, used in place of the folder's config.json.
    shardings: of the parameters, a tree like theirs; a process then copies
      only what its devices hold. None puts them whole on one device.

  Returns:
    The configuration and the parameters, {"text": ..., "visual": ...}. Host
    memory holds at most one tensor beside what is already on the device.

  Raises:
    InputError: naming the file or tensor that is wrong.
  """
  folder = pathlib.Path(path)
  config = config or load_config(folder)
  files = _tensor_files(folder)
  tree = vlm.weights(config)
  leaves, structure = jax.tree.flatten(tree, is_leaf=is_weight)
  with _Shards(folder, files) as shards:
    _check(shards, leaves, config, folder)
    arrays, last = [], (None, None)
    places = [None] * len(leaves) if shardings is None else jax.tree.leaves(
        shardings)
    for weight, place in zip(leaves, places, strict=True):
      if last[0] != weight.name:
        last = (weight.name, shards.read(weight.name))
      # jnp.array copies: an array that shared the buffer of a tensor that is
      # cut in parts would keep the whole of it alive.
      value = weight.from_checkpoint(last[1])
      arrays.append(jnp.array(value, dtype=dtype) if place is None
                    else _spread(value, dtype, place))
  return config, structure.unflatten(arrays)


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
    (folder / "part-0").rename(folder / _SINGLE)
    return written
  where = {}
  for i, names in enumerate(shards):
    file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
    (folder / f"part-{i}").rename(folder / file)
    where |= dict.fromkeys(names, file)
  index = {"metadata": {"total_size": total}, "weight_map": where}
  (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
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


def _tensor_files(folder: pathlib.Path) -> list[str]:
  """Names of the safetensors files that make up the checkpoint.

  An index decides; without one, model.safetensors; then a lone other file.
  """
  index = folder / _INDEX
  if index.exists():
    raw = _read_json(index)
    if not isinstance(raw.get("weight_map"), dict):
      raise InputError(f"{index}: has no weight_map")
    files = sorted(set(raw["weight_map"].values()))
    missing = [f for f in files if not (folder / f).exists()]
    if missing:
      raise InputError(
          f"{folder}: {len(missing)} of {len(files)} shards that the index "
          f"names are missing: {', '.join(missing)}")
    return files
  if (folder / _SINGLE).exists():
    return [_SINGLE]
  found = sorted(p.name for p in folder.glob("*.safetensors"))
  if len(found) != 1:
    raise InputError(
        f"{folder}: expected {_SINGLE} or {_INDEX}, found "
        f"{', '.join(found) or 'no safetensors file'}")
  return found


class _Shards:
  """Open safetensors files, addressed by published tensor names."""

  def __init__(self, folder: pathlib.Path, files: list[str]):
    self._handles = {}
    self.where = {}  # Published name -> (file, name in that file).
    self.shapes, self.dtypes = {}, {}
    for file in files:
      path = folder / file
      try:
        handle = safetensors.safe_open(path, framework="np").__enter__()
      except (OSError, safetensors.SafetensorError) as e:
        raise InputError(f"{path}: not a whole safetensors file ({e})") from e
      self._handles[file] = handle
      for name in handle.keys():
        published = published_name(name)
        if published in self.where:
          other = self.where[published]
          raise InputError(
              f"{path}: tensor {name} stands also as {other[1]} in {other[0]}")
        part = handle.get_slice(name)
        self.where[published] = (file, name)
        self.shapes[published] = tuple(part.get_shape())
        self.dtypes[published] = part.get_dtype()

  def __enter__(self):
    return self

  def __exit__(self, *args):
    for handle in self._handles.values():
      handle.__exit__(*args)

  def read(self, published: str) -> np.ndarray:
    file, name = self.where[published]
    return self._handles[file].get_tensor(name)


def published_name(name: str) -> str:
  """Maps a tensor name of any library version to the published one."""
  for prefix, published in _PREFIXES:
    if name.startswith(prefix):
      return published + name[len(prefix):]
  return name


def _check(shards: _Shards, leaves, config: ModelConfig, folder) -> None:
  """Compares the files with the declared weights, both ways."""
  expected = {w.name: w.checkpoint_shape for w in leaves}
  # Rotary tables were once saved; they are computed.
  found = {n: s for n, s in shards.shapes.items()
           if not n.endswith("inv_freq")}
  missing = sorted(expected.keys() - found.keys())
  extra = sorted(found.keys() - expected.keys())
  tied = config.text.tie_word_embeddings and "lm_head.weight" in extra
  if tied:
    extra.remove("lm_head.weight")
  if missing:
    raise InputError(
        f"{folder}: {len(missing)} tensors are missing, first {missing[0]}"
        + (f"; {len(extra)} are unexpected, first {extra[0]}" if extra else ""))
  if extra:
    raise InputError(
        f"{folder}: {len(extra)} tensors are unexpected for this config, "
        f"first {extra[0]}")
  for name, shape in expected.items():
    if found[name] != shape:
      raise InputError(
          f"{folder}: tensor {name} has shape {list(found[name])}, the config "
          f"expects {list(shape)}")
    if shards.dtypes[name] not in _DTYPES:
      raise InputError(
          f"{folder}: tensor {name} has dtype {shards.dtypes[name]}, expected "
          f"one of {', '.join(_DTYPES)}")
  if tied:
    head, table = (shards.read(n) for n in
                   ("lm_head.weight", "model.embed_tokens.weight"))
    if head.shape != table.shape or not np.array_equal(head, table):
      raise InputError(
          f"{folder}: lm_head.weight differs from model.embed_tokens.weight, "
          "but the config ties them")


def _read_json(path: pathlib.Path) -> dict[str, Any]:
  try:
    raw = json.loads(path.read_text())
  except OSError as e:
    raise InputError(f"{path}: cannot be read ({e.strerror})") from e
  except ValueError as e:
    raise InputError(f"{path}: not valid JSON ({e})") from e
  if not isinstance(raw, dict):
    raise InputError(f"{path}: expected a JSON object")
  return raw
