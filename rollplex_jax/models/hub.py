"""Where a checkpoint is: a folder, or a model of the Hugging Face hub."""

from __future__ import annotations

import os
import pathlib
import re

import huggingface_hub

from rollplex_jax.errors import InputError

_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
# Weights, configurations, tokenizers and chat templates.
_FILES = ["*.safetensors", "*.json", "*.txt", "*.jinja"]


def resolve(path_or_id: str | os.PathLike) -> str:
  """Returns a checkpoint's folder; one of the hub is fetched, or found cached.

  A folder goes before a model of the same name, and what lies under a folder
  that exists is never looked for on the hub. Whether a folder that is not of
  the form owner/name exists is left to whoever reads it.

  Args:
    path_or_id: a folder, or a hub id such as Qwen/Qwen2.5-VL-3B-Instruct.

  Raises:
    InputError: if the hub has no such model or cannot be reached.
  """
  name = os.fspath(path_or_id)
  owner = pathlib.Path(name).parent
  if not _ID.fullmatch(name) or os.path.exists(name) or owner.is_dir():
    return name
  try:
    return huggingface_hub.snapshot_download(name, allow_patterns=_FILES)
  except Exception as error:  # Which one depends on the transport.
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    raise InputError(
        f"{name}: no such checkpoint folder, and the hub does not give it "
        f"({reason.removeprefix('Got: ')})") from error
