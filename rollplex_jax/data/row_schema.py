"""What a row, the JSON object that a run is fed with, may hold.

    {"prompt": [{"role": "user", "content": [
        {"type": "video", "video": PATH or [PATHS], "fps": 2.0},
        {"type": "image", "image": PATH},
        {"type": "text", "text": "..."}]}],
     "response": "...", "response_token_ids": [...], "answer": "..."}

`prompt` is a list of messages, which goes through the checkpoint's chat
template, or a plain string, which is used as it is. Media are named in the
message parts, or by `images` and `videos` on the row: lists that fill, in
order, the placeholders of a string prompt and the parts that name no medium of
their own (`{"type": "image"}`). `fps` on the row is the rate of those `videos`: one
number, or one per video. Further keys are left alone for reward functions; null
values count as absent.

In memory a medium may also be an array, uint8 [h, w, 3], or a PIL image, and a
video a list of those or one array, uint8 [t, h, w, 3].
"""

from __future__ import annotations

import math
import numbers
import os
from typing import Any

import numpy as np
import PIL.Image

from rollplex_jax.errors import InputError

_PART_KEYS = {
    "text": {"type", "text"},
    "image": {"type", "image"},
    "video": {"type", "video", "fps"},
}


class RowError(InputError):
  """One bad row. `where` locates it and `reason` is the kind, for counting."""

  def __init__(self, where: str, reason: str, detail: str):
    super().__init__(f"{where}: {detail}")
    self.where = where
    self.reason = reason


def first_line(error: Exception) -> str:
  """An error's message as one line, or its type where it has none."""
  return (str(error).strip() or type(error).__name__).splitlines()[0]


def validate_row(row: Any, where: str, folder: str = "") -> dict[str, Any]:
  """Checks a row's shape and resolves its media paths.

  Media files are not opened here: a missing or unreadable one shows when the
  row is processed.

  Args:
    row: a parsed JSON value.
    where: names the row in errors.
    folder: what relative media paths are relative to.

  Returns:
    A new dict with null values dropped and media paths resolved.

  Raises:
    RowError: naming the key, what was expected and what was found.
  """
  if not isinstance(row, dict):
    raise _bad(where, "row", "a JSON object", row)
  row = _drop_nulls(row)
  if "prompt" not in row:
    raise RowError(where, "invalid row", "the row has no \"prompt\"")
  prompt = row["prompt"]
  if isinstance(prompt, str):
    if not prompt:
      raise RowError(where, "invalid row", "prompt is an empty string")
  elif isinstance(prompt, (list, tuple)) and prompt:
    row["prompt"] = [
        _message(message, f"prompt[{i}]", where, folder)
        for i, message in enumerate(prompt)
    ]
  else:
    raise _bad(where, "prompt", "a string or a non-empty list of messages",
               prompt)
  if "images" in row:
    row["images"] = [
        _image(value, f"images[{i}]", where, folder)
        for i, value in enumerate(_list(row["images"], "images", where))
    ]
  if "videos" in row:
    row["videos"] = [
        _video(value, f"videos[{i}]", where, folder)
        for i, value in enumerate(_list(row["videos"], "videos", where))
    ]
    if "fps" in row:
      rates = row["fps"]
      if not isinstance(rates, (list, tuple)):
        rates = [rates] * len(row["videos"])
      if len(rates) != len(row["videos"]):
        raise RowError(
            where, "invalid row",
            f"fps: expected {len(row['videos'])} rates, one per video, found "
            f"{len(rates)}")
      row["fps"] = [_rate(value, "fps", where) for value in rates]
  if not isinstance(row.get("response", ""), str):
    raise _bad(where, "response", "a string", row["response"])
  if "response_token_ids" in row:
    ids = _list(row["response_token_ids"], "response_token_ids", where)
    for value in ids:
      # bool is an int to Python, but no token id.
      if (not isinstance(value, (int, np.integer)) or isinstance(value, bool)
          or value < 0):
        raise _bad(where, "response_token_ids", "token ids >= 0", value)
    row["response_token_ids"] = [int(value) for value in ids]
  return row


def _message(message, name, where, folder):
  if not isinstance(message, dict):
    raise _bad(where, name, "an object with role and content", message)
  message = _drop_nulls(message)
  if not isinstance(message.get("role"), str):
    raise _bad(where, f"{name}.role", "a string", message.get("role"))
  content = message.get("content")
  if isinstance(content, (list, tuple)):
    message["content"] = [
        _part(part, f"{name}.content[{i}]", where, folder)
        for i, part in enumerate(content)
    ]
  elif not isinstance(content, str):
    raise _bad(where, f"{name}.content", "a string or a list of parts", content)
  return message


def _part(part, name, where, folder):
  if not isinstance(part, dict):
    raise _bad(where, name, "an object with a type", part)
  part = _drop_nulls(part)
  kind = part.get("type")
  if kind not in _PART_KEYS:
    raise _bad(where, f"{name}.type", "text, image or video", kind)
  # A key that is passed over in silence (max_pixels, nframes, ...) would change
  # what the model sees without a word.
  unknown = sorted(set(part) - _PART_KEYS[kind])
  if unknown:
    raise RowError(
        where, "invalid row",
        f"{name}: unknown key {unknown[0]!r}; expected "
        f"{', '.join(sorted(_PART_KEYS[kind]))}")
  if kind == "text" and not isinstance(part.get("text"), str):
    raise _bad(where, f"{name}.text", "a string", part.get("text"))
  if "image" in part:
    part["image"] = _image(part["image"], f"{name}.image", where, folder)
  if "video" in part:
    part["video"] = _video(part["video"], f"{name}.video", where, folder)
  if "fps" in part:
    part["fps"] = _rate(part["fps"], f"{name}.fps", where)
  return part


def _image(value, name, where, folder):
  if isinstance(value, (str, os.PathLike)):
    return _resolve(value, name, where, folder)
  if isinstance(value, PIL.Image.Image) or _is_pixels(value, 3):
    return value
  raise _bad(where, name, "a path, a PIL image or uint8 [h, w, 3]", value)


def _video(value, name, where, folder):
  if isinstance(value, (str, os.PathLike)):
    return _resolve(value, name, where, folder)
  if _is_pixels(value, 4):
    return value
  if isinstance(value, (list, tuple)) and value:
    return [
        _image(frame, f"{name}[{i}]", where, folder)
        for i, frame in enumerate(value)
    ]
  raise _bad(
      where, name, "a path, a non-empty list of frames or uint8 [t, h, w, 3]",
      value)


def _is_pixels(value, rank):
  return (isinstance(value, np.ndarray) and value.dtype == np.uint8
          and value.ndim == rank and value.shape[-1] == 3 and value.size > 0)


def _resolve(value, name, where, folder):
  path = os.fspath(value).removeprefix("file://")
  if "://" in path or path.startswith("data:"):
    raise RowError(
        where, "invalid row",
        f"{name}: expected a local path, found {_show(path)}; remote and "
        "inline media are not fetched")
  if not path:
    raise _bad(where, name, "a path", path)
  return os.path.join(folder, path)


def _rate(value, name, where):
  if (isinstance(value, bool) or not isinstance(value, numbers.Real)
      or not math.isfinite(value) or value <= 0):
    raise _bad(where, name, "frames per second > 0", value)
  return float(value)


def _list(value, name, where):
  if not isinstance(value, (list, tuple)):
    raise _bad(where, name, "a list", value)
  return value


def _drop_nulls(mapping):
  return {key: value for key, value in mapping.items() if value is not None}


def _bad(where, name, expected, found) -> RowError:
  return RowError(
      where, "invalid row",
      f"{name}: expected {expected}, found {_show(found)}")


def _show(value) -> str:
  """A value in a few characters and one line; arrays by shape and dtype."""
  if isinstance(value, np.ndarray):
    return f"{value.dtype} {list(value.shape)}"
  if value is None:
    return "nothing"
  text = repr(value)
  return text if len(text) <= 60 else f"{text[:57]}..."
