"""From single prompts to padded batches of a bounded number of shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses

import numpy as np

from rollplex_jax.data.processor import Prompt
from rollplex_jax.models.config import VisionConfig
from rollplex_jax.models.inputs import (
  PackedSize,
  PromptInputs,
  VisionInputs,
  plan_vision,
  stack_parts,
)
from rollplex_jax.models.positions import next_position
from rollplex_jax.placement.processes import Spread, exchange


def bucket(size: int, smallest: int = 4) -> int:
  """The smallest bucket that holds `size`: 4, 5, 6 or 7 times a power of two.

  Four buckets per doubling: at most a quarter is padding (a tenth on average)
  and programs up to a million tokens come in 72 lengths.
  """
  size = max(size, smallest, 4)
  scale = 1 << max((size - 1).bit_length() - 3, 0)
  return -(-size // scale) * scale


def stack_prompts(prompts: Sequence[Prompt], row_ids: Sequence[int],
                  num_rows: int | None = None, length: int | None = None,
                  parts: int = 1, part_features: int = 0) -> PromptInputs:
  """Pads prompts to one rectangle.

  Feature indices are shifted to count through the media of the whole batch, in
  the order of `prompts`, as `pack_vision` packs them.

  Args:
    prompts: B prompts.
    row_ids: their identities, which key sampling.
    num_rows: rows of the result; empty rows of length 0 fill it up.
    length: padded length P; the bucket of the longest prompt if None.
    parts: into how many parts media are packed; it must divide the rows.
    part_features: merged features of each part, with its padding.

  Returns:
    Numpy `PromptInputs`.
  """
  num_rows = num_rows or len(prompts)
  length = length or bucket(max(len(p.token_ids) for p in prompts))
  out = PromptInputs(
      token_ids=np.zeros((num_rows, length), np.int32),
      lengths=np.zeros(num_rows, np.int32),
      positions=np.zeros((3, num_rows, length), np.int32),
      feature_index=np.full((num_rows, length), -1, np.int32),
      next_position=np.zeros(num_rows, np.int32),
      row_ids=np.zeros(num_rows, np.int32),
  )
  offset = 0
  for b, (prompt, row_id) in enumerate(zip(prompts, row_ids, strict=True)):
    if parts > 1 and b % (num_rows // parts) == 0:
      offset = b // (num_rows // parts) * part_features
    t = len(prompt.token_ids)
    index = prompt.feature_index
    out.token_ids[b, :t] = prompt.token_ids
    out.lengths[b] = t
    out.positions[:, b, :t] = prompt.positions
    out.feature_index[b, :t] = np.where(index >= 0, index + offset, -1)
    out.next_position[b] = next_position(prompt.positions)
    out.row_ids[b] = row_id
    offset += int((index >= 0).sum())
  return out


@dataclasses.dataclass(frozen=True)
class Media:
  """Packed media, such as those of all observations of an episode.

  Attributes:
    patches: float32 [n, patch_dim], medium after medium.
    grids: int64 [M, 3], frames, rows and columns of patches.
  """

  patches: np.ndarray
  grids: np.ndarray

  @classmethod
  def join(cls, parts: Sequence[Media | Prompt], patch_dim: int) -> Media:
    """The media of several, in order."""
    return cls(
        np.concatenate([p.patches for p in parts]) if parts
        else np.zeros((0, patch_dim), np.float32),
        np.concatenate([p.grids for p in parts]) if parts
        else np.zeros((0, 3), np.int64))


def coarse_bucket(size: int, smallest: int = 4) -> int:
  """2 or 3 times a power of two: for what differs from step to step."""
  size = max(size, smallest, 4)
  scale = 1 << ((size - 1).bit_length() - 2)
  return -(-size // scale) * scale


def pack_vision(prompts: Sequence[Prompt | Media], config: VisionConfig | None,
                parts: int = 1, spread: Spread | None = None,
                bucket: Callable[[int], int] = bucket) -> VisionInputs | None:
  """Packs the media of a batch, or None where there are none.

  Args:
    prompts: of the batch.
    config: of the tower, if there is one.
    parts: into how many equal parts the batch is split, each packed on its own.
    spread: which of those are this process's; the arrays are then spread over
      all processes, which must all call this. Other parts' prompts need no
      patches.
    bucket: rounds sizes up.
  """
  if config is None or not any(len(p.grids) for p in prompts):
    return None
  if parts > 1:
    size = len(prompts) // parts
    packed = [pack_vision(prompts[i * size:(i + 1) * size], config,
                          bucket=bucket)
              for i in (range(parts) if spread is None else spread.local)]
    if spread is None:
      return stack_parts(packed, config.patch_dim)
    sizes = exchange([PackedSize.of(p) for p in packed if p is not None])
    return spread.place(stack_parts(
        packed, config.patch_dim, PackedSize.largest(
            [size for theirs in sizes for size in theirs])))
  unit = config.spatial_merge_size ** 2
  return plan_vision(
      np.concatenate([p.patches for p in prompts]),
      np.concatenate([p.grids for p in prompts]), config,
      lambda n: unit * bucket(-(-n // unit)))


def pack_observations(
    media: np.ndarray, index: np.ndarray, config: VisionConfig | None,
    parts: int = 1) -> tuple[np.ndarray, VisionInputs | None]:
  """Packs what samples have seen after their prompts.

  Args:
    media: objects `Media` [b, g]; None for a sample that has seen nothing.
    index: int32 [b, g, S], which of its own features stands at a token, -1 for
      text.
    config: of the tower, if there is one.
    parts: into how many the batch is split over devices.

  Returns:
    The index, counting through the features of all, and the patches, or None
    where there are none.
  """
  if config is None:
    return index, None
  none = Media.join((), config.patch_dim)
  flat = [m or none for m in media.reshape(-1)]
  vision = pack_vision(flat, config, parts, bucket=coarse_bucket)
  if vision is None:
    return index, None
  unit = config.spatial_merge_size ** 2
  counts = np.array([len(m.patches) // unit for m in flat]).reshape(parts, -1)
  rows = np.prod(vision.patches.shape[:-1]) // unit
  first = np.arange(parts)[:, None] * (rows // parts)
  first = first + np.cumsum(counts, axis=1) - counts
  shifted = index + first.reshape(*media.shape, 1)
  return np.where(index >= 0, shifted, -1).astype(np.int32), vision


def take_rows(prompts: PromptInputs, rows: np.ndarray) -> PromptInputs:
  """Some rows of a numpy batch; feature indices keep their meaning."""
  return PromptInputs(
      token_ids=prompts.token_ids[rows], lengths=prompts.lengths[rows],
      positions=prompts.positions[:, rows],
      feature_index=prompts.feature_index[rows],
      next_position=prompts.next_position[rows],
      row_ids=prompts.row_ids[rows])


def stack_responses(responses: Sequence[Sequence[int]],
                    num_rows: int | None = None,
                    length: int | None = None) -> tuple[np.ndarray, np.ndarray]:
  """Pads responses to int32 [N, R] token ids and int32 [N] lengths."""
  num_rows = num_rows or len(responses)
  length = length or bucket(max(map(len, responses)))
  token_ids = np.zeros((num_rows, length), np.int32)
  lengths = np.zeros(num_rows, np.int32)
  for i, response in enumerate(responses):
    token_ids[i, :len(response)] = response
    lengths[i] = len(response)
  return token_ids, lengths
