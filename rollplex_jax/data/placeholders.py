"""Placeholder tokens: one for each feature that the vision tower will give.

A prompt is written with one placeholder per medium, or with as many as the
medium has features; either way it leaves here expanded, once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rollplex_jax.data.row_schema import RowError

COUNT = "placeholder count"


def expand(token_ids: Sequence[int], counts: Mapping[str, Sequence[int]],
           placeholder_ids: Mapping[str, int],
           where: str) -> tuple[np.ndarray, list[str]]:
  """Gives every medium its run of placeholders.

  Per modality the prompt holds one placeholder for each medium (they are
  repeated) or, already expanded, one for each feature (they stay). Each
  medium must end up as one run of its own: media that touch could not be told
  apart when positions are given.

  Args:
    token_ids: int [T] of the prompt as written.
    counts: features of each medium by modality ("image", "video"), in the
      order in which that modality's media appear.
    placeholder_ids: the token that stands for a feature, by modality.
    where: names the row in errors.

  Returns:
    int32 [T'] tokens, and the modality of each medium in order of appearance.

  Raises:
    RowError: giving the expected and found counts.
  """
  token_ids = np.asarray(token_ids, np.int32)
  repeats = np.ones(len(token_ids), np.int64)
  for modality, placeholder in placeholder_ids.items():
    at = np.flatnonzero(token_ids == placeholder)
    sizes = counts[modality]
    if len(at) == len(sizes):
      repeats[at] = sizes
    elif len(at) != sum(sizes):
      expected = f"{len(sizes)} {modality} placeholder{'s'[len(sizes) == 1:]}"
      if sizes:
        expected += f" (or {sum(sizes)}, already expanded)"
      raise RowError(where, COUNT, f"expected {expected}, found {len(at)}")
  expanded = np.repeat(token_ids, repeats)

  remaining = {modality: list(sizes) for modality, sizes in counts.items()}
  order = []
  for modality, size in _runs(expanded, placeholder_ids):
    place = len(counts[modality]) - len(remaining[modality])
    expected = remaining[modality].pop(0) if remaining[modality] else 0
    if size != expected:
      raise RowError(
          where, COUNT,
          f"{modality} {place + 1}: expected a run of {expected} placeholders, "
          f"found {size}; each medium needs its own run, between "
          "<|vision_start|> and <|vision_end|>")
    order.append(modality)
  return expanded, order


def _runs(token_ids, placeholder_ids) -> list[tuple[str, int]]:
  """Modality and length of each run of equal placeholders."""
  edges = np.flatnonzero(np.diff(token_ids)) + 1
  starts = np.concatenate([[0], edges])
  ends = np.concatenate([edges, [len(token_ids)]])
  names = {token: modality for modality, token in placeholder_ids.items()}
  return [
      (names[int(token_ids[start])], int(end - start))
      for start, end in zip(starts, ends, strict=True)
      if end > start and int(token_ids[start]) in names
  ]
