"""What a model consumes: padded prompts and packed patches, built on the host.

Everything that depends on sizes (which patch attends to which, which token
takes which feature) is decided here in numpy and handed to the compiled
programs as index arrays, so programs depend on bucket sizes only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
from typing import NamedTuple

from flax import struct
import jax
import numpy as np

from rollplex_jax.models.config import VisionConfig


@struct.dataclass
class VisionInputs:
  """Patches of all media of a batch, packed, with their attention layout.

  Where a batch is split over devices its media are packed in as many parts:
  then every array has the part as its first dimension.

  Attributes:
    patches: float32 [n, patch_dim], medium after medium, each in the reference
      processor's order (merged blocks together).
    rows_columns: int32 [n, 2], a patch's row and column in its frame.
    window_index: int32 [W, S], the patches of each window, -1 for padding.
    window_slot: int32 [n], where a patch stands in the flattened window_index.
    frame_index: int32 [F, S2], the patches of each frame, -1 for padding.
    frame_slot: int32 [n], where a patch stands in the flattened frame_index.
  """

  patches: jax.Array
  rows_columns: jax.Array
  window_index: jax.Array
  window_slot: jax.Array
  frame_index: jax.Array
  frame_slot: jax.Array


@struct.dataclass
class PromptInputs:
  """A batch of right-padded prompts.

  Attributes:
    token_ids: int32 [B, P].
    lengths: int32 [B], real tokens of each prompt.
    positions: int32 [3, B, P], M-RoPE rows (temporal, height, width).
    feature_index: int32 [B, P], row in the batch's merged features, -1 = text.
    next_position: int32 [B], position of the first response token.
    row_ids: int32 [B], identity of each prompt, which keys its sampling.
  """

  token_ids: jax.Array
  lengths: jax.Array
  positions: jax.Array
  feature_index: jax.Array
  next_position: jax.Array
  row_ids: jax.Array


@struct.dataclass
class Suffixes:
  """What follows the prefixes of episodes, where responses and observations
  take turns.

  A sample's suffix is its last prompt token, its first response, an
  observation, its second response and so on, without the very last token.

  Attributes:
    token_ids: int32 [B, G, S], right padded.
    lengths: int32 [B, G].
    positions: int32 [B, G, S, 3], M-RoPE rows.
    feature_index: int32 [B, G, S], row of the observations' merged features,
      -1 for text.
    predicts: int32 [B, G, R], from which of the S inputs each response token
      is predicted.
  """

  token_ids: jax.Array
  lengths: jax.Array
  positions: jax.Array
  feature_index: jax.Array
  predicts: jax.Array


def plan_vision(patches: np.ndarray, grids: Sequence[Sequence[int]],
                config: VisionConfig,
                bucket: Callable[[int], int] = lambda n: n) -> VisionInputs:
  """Lays out packed patches for windowed and per-frame attention.

  Args:
    patches: float32 [n, patch_dim].
    grids: (t, h, w) of each medium, in patches; they must account for all n.
    config: the vision tower's configuration.
    bucket: rounds a size up, so that few different shapes are compiled.

  Returns:
    Numpy `VisionInputs`; n, W and F are rounded up by `bucket`, and n further
    to whole merged features.

  Raises:
    ValueError: if the grids and the patches disagree.
  """
  m, units = config.spatial_merge_size, config.window_units
  windows, frames, coordinates = [], [], []
  start = 0
  for t, h, w in (map(int, g) for g in grids):
    if h % m or w % m:
      raise ValueError(f"grid {t}x{h}x{w} is no multiple of merge size {m}")
    frame_coordinates, unit_index = _frame(h, w, m)
    blocks = [
        unit_index[i:i + units, j:j + units].reshape(-1)
        for i in range(0, h // m, units) for j in range(0, w // m, units)
    ]
    for _ in range(t):
      frames.append(start + np.arange(h * w))
      windows.extend(start + block for block in blocks)
      coordinates.append(frame_coordinates)
      start += h * w
  if start != len(patches):
    raise ValueError(f"grids hold {start} patches, found {len(patches)}")
  size = bucket(start)
  size += -size % (m * m)
  pad = size - start
  full = (units * m) ** 2
  window_index, window_slot = _pack(windows, size, bucket, width=full)
  frame_index, frame_slot = _pack(frames, size, bucket)
  rows_columns = np.concatenate(coordinates).astype(np.int32)
  return VisionInputs(
      patches=np.pad(patches, ((0, pad), (0, 0))),
      rows_columns=np.pad(rows_columns, ((0, pad), (0, 0))),
      window_index=window_index, window_slot=window_slot,
      frame_index=frame_index, frame_slot=frame_slot)


class PackedSize(NamedTuple):
  """Sizes of packed media, to which several parts are padded.

  Attributes:
    patches: n.
    windows: W and S.
    frames: F and S2.
  """

  patches: int
  windows: tuple[int, int]
  frames: tuple[int, int]

  @classmethod
  def of(cls, part: VisionInputs) -> PackedSize:
    """Of one part."""
    return cls(len(part.patches), part.window_index.shape,
               part.frame_index.shape)

  @classmethod
  def largest(cls, sizes: Sequence[PackedSize]) -> PackedSize:
    """What holds each of them. At least one must be given."""
    most = lambda pairs: tuple(map(max, zip(*pairs)))
    patches, windows, frames = zip(*sizes)
    return cls(max(patches), most(windows), most(frames))


def stack_parts(parts: Sequence[VisionInputs | None], patch_dim: int,
                size: PackedSize | None = None) -> VisionInputs:
  """One `VisionInputs` of several packed parts, padded to the same sizes.

  Args:
    parts: numpy arrays of each part; None for one without media.
    patch_dim: numbers of a patch.
    size: to pad to; by default the largest of the parts, of which one at least
      must then have media.
  """
  if size is None:
    size = PackedSize.largest([PackedSize.of(p) for p in parts if p is not None])
  n = size.patches

  def pad(a, shape, value=0):
    return np.pad(a, [(0, size - have) for size, have in zip(shape, a.shape)],
                  constant_values=value)

  def widen(part):
    if part is None:
      part = VisionInputs(
          np.zeros((0, patch_dim), np.float32), np.zeros((0, 2), np.int32),
          np.zeros((0, 0), np.int32), np.zeros(0, np.int32),
          np.zeros((0, 0), np.int32), np.zeros(0, np.int32))
    out = {"patches": pad(part.patches, (n, patch_dim)),
           "rows_columns": pad(part.rows_columns, (n, 2))}
    for kind, wide in (("window", size.windows), ("frame", size.frames)):
      index, slot = getattr(part, f"{kind}_index"), getattr(part, f"{kind}_slot")
      # A slot counts through rows whose width has changed.
      width = max(index.shape[1], 1)
      slot = slot // width * wide[1] + slot % width
      out[f"{kind}_index"] = pad(index, wide, -1)
      out[f"{kind}_slot"] = pad(slot.astype(np.int32), (n,))
    return VisionInputs(**out)

  wide = [widen(part) for part in parts]
  return jax.tree.map(lambda *arrays: np.stack(arrays), *wide)


@functools.lru_cache(maxsize=256)
def _frame(h: int, w: int, m: int):
  """Coordinates of a frame's patches in order, and patches by merged unit.

  Frames of one size are alike, so the arrays are kept; they are read only.

  Patches come merged block after merged block: [h/m, w/m, m, m].
  """
  rows, columns = np.meshgrid(np.arange(h), np.arange(w), indexing="ij")
  order = lambda a: a.reshape(h // m, m, w // m, m).transpose(0, 2, 1, 3)
  coordinates = np.stack(
      [order(rows).reshape(-1), order(columns).reshape(-1)], axis=-1)
  return coordinates, np.arange(h * w).reshape(h // m, w // m, m * m)


def _pack(groups: list[np.ndarray], size: int, bucket, width: int = 0):
  """Stacks index groups, padded with -1, and inverts the map."""
  longest = max(len(g) for g in groups)
  # Frames that never fill a window (small pictures) need no full-size slots.
  width = min(width, longest) if width else bucket(longest)
  index = np.full((bucket(len(groups)), width), -1, np.int32)
  slot = np.zeros(size, np.int32)
  for i, group in enumerate(groups):
    index[i, :len(group)] = group
    slot[group] = i * width + np.arange(len(group))
  return index, slot
