"""Finds a row's media and puts them in order."""

from __future__ import annotations

import dataclasses
from typing import Any

from rollplex_jax.data import placeholders
from rollplex_jax.data.row_schema import RowError


@dataclasses.dataclass(frozen=True)
class Layout:
  """A row's prompt, apart from its media.

  Attributes:
    prompt: text, or messages for a chat template; media parts of messages name
      their kind only.
    images: sources in the order of the prompt's image placeholders.
    videos: (source, fps or None) in the order of its video placeholders.
  """

  prompt: str | list[dict[str, Any]]
  images: list[Any]
  videos: list[tuple[Any, float | None]]


def lay_out(row: dict[str, Any], where: str) -> Layout:
  """Takes media from message parts, then from the row's own lists.

  The lists fill the parts that name no medium. Without such parts they belong
  to placeholders written out in the text.

  Raises:
    RowError: if the lists hold too few or too many media.
  """
  images = list(row.get("images", ()))
  videos = list(row.get("videos", ()))
  rates = row["fps"] if videos and "fps" in row else [None] * len(videos)
  videos = list(zip(videos, rates, strict=True))
  if isinstance(row["prompt"], str):
    return Layout(row["prompt"], images, videos)

  spare = {"image": images, "video": videos}
  own = {"image": [], "video": []}
  messages = []
  for message in row["prompt"]:
    if not isinstance(message["content"], str):
      parts = []
      for part in message["content"]:
        kind = part["type"]
        if kind != "text":
          own[kind].append(_take(part, spare[kind], where))
          # Templates look at which keys are there, not at pixels.
          part = {"type": kind, kind: kind}
        parts.append(part)
      message = {**message, "content": parts}
    messages.append(message)
  for kind, left in spare.items():
    # Next to parts nobody could tell which placeholder in the text is whose.
    if left and own[kind]:
      raise RowError(
          where, placeholders.COUNT,
          f"{kind}s: expected one for each {kind} part without its own, found "
          f"{len(left)} more")
    own[kind] += left
  return Layout(messages, own["image"], own["video"])


def _take(part, spare, where):
  """The medium of a part: its own, or the next of the row's."""
  kind = part["type"]
  if kind in part:
    return part[kind] if kind == "image" else (part[kind], part.get("fps"))
  if not spare:
    raise RowError(
        where, placeholders.COUNT,
        f"expected a path for each {kind} part or in {kind}s, found too few")
  if kind == "image":
    return spare.pop(0)
  source, fps = spare.pop(0)
  return source, part.get("fps", fps)
