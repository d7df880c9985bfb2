"""Reads what a checkpoint folder says about its inputs."""

from __future__ import annotations

import json
import os
from typing import Any

import transformers

from rollplex_jax.data.preprocess import ImagePreprocessor, VideoPreprocessor
from rollplex_jax.data.row_schema import first_line
from rollplex_jax.errors import InputError


def read_tokenizer(path: str) -> Any:
  """Reads the transformers tokenizer, never from the network.

  Raises:
    InputError: if a file is missing or malformed.
  """
  try:
    return transformers.AutoTokenizer.from_pretrained(
        path, local_files_only=True)
  except Exception as error:  # Which one depends on the file at fault.
    raise InputError(
        f"{path}: can't load the tokenizer ({first_line(error)})") from error


def read_preprocessors(
    path: str) -> tuple[ImagePreprocessor, VideoPreprocessor]:
  """Reads the settings for images and videos, from where transformers looks.

  `processor_config.json` holds both (transformers 5); before it came
  `video_preprocessor_config.json`, and before that `preprocessor_config.json`
  stood for both.

  Raises:
    InputError: if there are none, or they are malformed.
  """
  names = ("processor_config.json", "video_preprocessor_config.json",
           "preprocessor_config.json")
  nested, video, image = (_read_json(os.path.join(path, n)) for n in names)
  nested = nested or {}
  image = nested.get("image_processor") or image
  video = nested.get("video_processor") or video or image
  if image is None:
    raise InputError(
        f"{path}: expected {names[0]} or {names[2]} for a model with vision, "
        "found neither")
  return (ImagePreprocessor(image, path),
          VideoPreprocessor.from_config(video, path))


def read_chat_template(path: str) -> str | None:
  """The processor's own template, which goes before the tokenizer's.

  Found in `chat_template.jinja`, or in `chat_template.json` before that.
  Raises InputError if the file is unreadable.
  """
  try:
    with open(os.path.join(path, "chat_template.jinja"),
              encoding="utf-8") as file:
      return file.read()
  except FileNotFoundError:
    legacy = _read_json(os.path.join(path, "chat_template.json"))
    return (legacy or {}).get("chat_template")
  except (OSError, UnicodeDecodeError) as error:
    raise InputError(
        f"{path}/chat_template.jinja: can't read ({error})") from error


def _read_json(path) -> dict[str, Any] | None:
  """A JSON object, or None where there is no such file."""
  try:
    with open(path, encoding="utf-8") as file:
      value = json.load(file)
  except FileNotFoundError:
    return None
  except (OSError, ValueError) as error:
    raise InputError(f"{path}: can't read ({error})") from error
  if not isinstance(value, dict):
    raise InputError(f"{path}: expected a JSON object")
  return value
