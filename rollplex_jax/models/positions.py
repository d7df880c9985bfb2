"""M-RoPE positions of a prompt, on the host.

Text advances all three rows together; a picture or video spreads over time,
height and width and advances the text position by its larger side. Temporal
positions of a video honor its sampling rate: frames further apart in time get
positions further apart (arXiv:2502.13923, section 2.1.3).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollplex_jax.models.config import ModelConfig

_KINDS = ("text", "image", "video")


def rope_index(token_ids: np.ndarray, grids: Sequence[Sequence[int]],
               modalities: Sequence[str], seconds_per_grid: Sequence[float],
               config: ModelConfig) -> np.ndarray:
  """Positions of one prompt whose placeholders are already expanded.

  Args:
    token_ids: int [T].
    grids: (t, h, w) in patches of each medium, in order of appearance.
    modalities: "image" or "video" for each medium.
    seconds_per_grid: seconds between temporal patches of each medium (ignored
      for images).
    config: the model's configuration.

  Returns:
    int32 [3, T]: temporal, height and width positions.

  Raises:
    ValueError: if the runs of placeholders and the media disagree (each medium
      is one run); the message gives the expected and the found count.
  """
  token_ids = np.asarray(token_ids)
  out = np.zeros((3, len(token_ids)), np.int32)
  if config.vision is None:
    out[:] = np.arange(len(token_ids))
    return out
  kinds = np.zeros(len(token_ids), np.int8)
  kinds[token_ids == config.image_token_id] = _KINDS.index("image")
  kinds[token_ids == config.video_token_id] = _KINDS.index("video")
  m = config.vision.spatial_merge_size
  media = iter(zip(grids, modalities, seconds_per_grid, strict=True))
  seen = start = position = 0
  while start < len(token_ids):
    kind = kinds[start]
    other = np.flatnonzero(kinds[start:] != kind)
    found = int(other[0]) if len(other) else len(token_ids) - start
    end = start + found
    if kind == 0:
      out[:, start:end] = position + np.arange(found)
      position += found
    else:
      seen += 1
      medium = next(media, None)
      if medium is None:
        raise ValueError(
            f"expected placeholders for {len(grids)} media, found {found} "
            f"{_KINDS[kind]} placeholder tokens more")
      (t, h, w), modality, seconds = medium
      t, h, w = int(t), int(h) // m, int(w) // m
      if _KINDS[kind] != modality or found != t * h * w:
        raise ValueError(
            f"medium {seen} expected {t * h * w} {modality} placeholder "
            f"tokens, found {found} {_KINDS[kind]} ones")
      # All in float32 before truncation, as the reference computes it.
      interval = np.float32(1)
      if modality == "video":
        interval = (np.float32(config.vision.tokens_per_second)
                    * np.float32(seconds))
      times = (np.arange(t, dtype=np.float32) * interval).astype(np.int32)
      grid = np.meshgrid(times, np.arange(h), np.arange(w), indexing="ij")
      out[:, start:end] = position + np.stack(grid).reshape(3, -1)
      position += max(h, w)
    start = end
  if seen != len(grids):
    raise ValueError(
        f"expected placeholders for {len(grids)} media, found {seen}")
  return out


def next_position(positions: np.ndarray) -> int:
  """Position of the first token after a prompt with `positions` [3, T]."""
  return int(positions.max()) + 1 if positions.shape[1] else 0
