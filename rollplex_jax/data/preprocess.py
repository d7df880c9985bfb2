"""From pixels to the flat patches that the vision tower takes.

Sizes, sampling and normalization are those of the checkpoint's preprocessor
configs and equal the reference implementation's (transformers). A patch is
flattened as [C, Tp, P, P]: channels, frames, height, width. Patches of one
merged feature (m x m of them) stand together, then the columns, rows and
frames of the grid follow.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import PIL.Image

# The class that needs no torch; the public name picks by what is installed.
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
  Qwen2VLImageProcessorPil,
  smart_resize,
)

from rollplex_jax.data.row_schema import RowError, first_line
from rollplex_jax.errors import InputError

BAD_SIZE = "media size"


class ImagePreprocessor:
  """Pictures, by the reference's PIL processor."""

  def __init__(self, config: dict[str, Any], where: str = "preprocessor"):
    """`config` is a parsed preprocessor config. Raises InputError."""
    try:
      self._processor = Qwen2VLImageProcessorPil.from_dict(config)
      self._min_pixels = int(self._processor.size["shortest_edge"])
      self._max_pixels = int(self._processor.size["longest_edge"])
    except (TypeError, ValueError, KeyError) as error:
      raise InputError(
          f"{where}: can't be used for images: "
          f"{first_line(error)}") from error
    self.patch_size = self._processor.patch_size
    self.temporal_patch_size = self._processor.temporal_patch_size
    self.merge_size = self._processor.merge_size

  def grid(self, height: int, width: int,
           where: str) -> tuple[int, int, int]:
    """(1, rows, columns) of patches. Raises RowError for a size it can't do."""
    height, width = _target_size(
        height, width, self.patch_size * self.merge_size, self._min_pixels,
        self._max_pixels, self._processor.do_resize, where)
    return 1, height // self.patch_size, width // self.patch_size

  def patches(self, image: PIL.Image.Image) -> np.ndarray:
    """float32 [rows * columns, C * Tp * P * P] of an RGB picture."""
    out = self._processor(images=[image], return_tensors="np")
    return out["pixel_values"].astype(np.float32, copy=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VideoPreprocessor:
  """Videos, as the reference's video processor, which needs torch, does them.

  Equal to it bit for bit where nothing is resized. Resizing is PIL's, which
  differs from torch's by at most 2 of 255 on a few pixels.

  Attributes:
    min_pixels, max_pixels: bounds on height x width of a resized frame.
    min_frames, max_frames: bounds on the frames sampled from a file.
    fps: rate at which a file is sampled when its row doesn't say.
    cap_pixels_per_frame: bound a frame also by its share of
      `max_video_tokens`.
    The others as in the checkpoint's config.
  """

  patch_size: int = 14
  temporal_patch_size: int = 2
  merge_size: int = 2
  min_pixels: int = 128 * 28 * 28
  max_pixels: int = 28 * 28 * 768
  min_frames: int = 4
  max_frames: int = 768
  fps: float = 2.0
  cap_pixels_per_frame: bool = False
  max_video_tokens: int = 128000
  do_resize: bool = True
  do_rescale: bool = True
  do_normalize: bool = True
  rescale_factor: float = 1 / 255
  image_mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
  image_std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)
  resample: int = PIL.Image.Resampling.BICUBIC

  @classmethod
  def from_config(cls, config: dict[str, Any],
                  where: str = "video preprocessor") -> VideoPreprocessor:
    """Reads a parsed config. Raises InputError if a size is missing or bad."""
    names = {field.name for field in dataclasses.fields(cls)}
    values = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in config.items()
        if key in names and value is not None
    }
    size = config.get("size") or {}
    for name, edge in (("min_pixels", "shortest_edge"),
                       ("max_pixels", "longest_edge")):
      if name not in values and size:
        if edge not in size:
          raise InputError(
              f"{where}: size: expected shortest_edge and longest_edge, found "
              f"{', '.join(size)}")
        values[name] = size[edge]
    for name in ("patch_size", "temporal_patch_size", "merge_size",
                 "min_pixels", "max_pixels", "min_frames", "max_frames", "fps"):
      value = values.get(name, 1)
      if not isinstance(value, (int, float)) or value <= 0:
        raise InputError(
            f"{where}: {name}: expected a number > 0, found {value!r}")
    return cls(**values)

  def sample(self, num_frames: int, video_fps: float, fps: float) -> np.ndarray:
    """Indices of the frames to take from a file.

    Aims at `fps` frames per second, within the bounds on frames, a multiple of
    `temporal_patch_size`. A file with less than one temporal patch of frames
    is taken whole (the reference fails on it).

    Args:
      num_frames, video_fps: of the file.
      fps: the rate wanted.

    Returns:
      int [k], ascending.
    """
    unit = self.temporal_patch_size
    most = min(self.max_frames, num_frames) // unit * unit
    count = max(num_frames / video_fps * fps, self.min_frames)
    count = math.floor(min(count, most, num_frames) / unit) * unit
    if not count:
      return np.arange(num_frames)
    # The reference steps in float32, which decides where a product falls just
    # short of an integer, and whether one frame more comes out.
    step = num_frames / count
    steps = np.arange(math.ceil(num_frames / step)) * step
    return steps.astype(np.float32).astype(np.int64)

  def size(self, num_frames: int, height: int, width: int,
           where: str) -> tuple[int, int]:
    """Height and width to which frames are resized. Raises RowError."""
    factor = self.patch_size * self.merge_size
    most = self.max_pixels
    if self.cap_pixels_per_frame:
      total = int(self.max_video_tokens * factor * factor * 0.9)
      share = total * self.temporal_patch_size // num_frames
      most = max(min(most, share), int(self.min_pixels * 1.05))
    return _target_size(height, width, factor, self.min_pixels, most,
                        self.do_resize, where)

  def grid(self, num_frames: int, height: int, width: int,
           where: str) -> tuple[int, int, int]:
    """(frames, rows, columns) of patches. Raises RowError."""
    height, width = self.size(num_frames, height, width, where)
    return (math.ceil(num_frames / self.temporal_patch_size),
            height // self.patch_size, width // self.patch_size)

  def patches(self, frames: np.ndarray, where: str) -> np.ndarray:
    """Patches of uint8 frames [t, h, w, 3].

    Frames that don't fill the last temporal patch are made up by repeating
    the last one.

    Returns:
      float32 [n, C * Tp * P * P], n the product of the grid.
    """
    num_frames, height, width, _ = frames.shape
    target = self.size(num_frames, height, width, where)
    if target != (height, width):
      frames = np.stack([
          np.asarray(PIL.Image.fromarray(frame).resize(
              target[::-1], resample=self.resample)) for frame in frames
      ])
    pixels = self._normalized(frames)
    t, p, m = self.temporal_patch_size, self.patch_size, self.merge_size
    if pad := -num_frames % t:
      pixels = np.concatenate([pixels, np.repeat(pixels[-1:], pad, axis=0)])
    pixels = pixels.reshape(
        -1, t, target[0] // (m * p), m, p, target[1] // (m * p), m, p, 3)
    # [frames, rows, columns, m, m, C, Tp, P, P]
    pixels = pixels.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    return pixels.reshape(-1, 3 * t * p * p)

  def _normalized(self, frames: np.ndarray) -> np.ndarray:
    pixels = frames.astype(np.float32)
    mean = np.asarray(self.image_mean, np.float32)
    std = np.asarray(self.image_std, np.float32)
    if self.do_normalize:
      # Rescaling goes into the constants, in float32 and in this order, to
      # round as the reference does.
      if self.do_rescale:
        mean = mean * np.float32(1 / self.rescale_factor)
        std = std * np.float32(1 / self.rescale_factor)
      pixels -= mean
      pixels /= std
    elif self.do_rescale:
      pixels *= np.float32(self.rescale_factor)
    return pixels


def _target_size(height, width, factor, min_pixels, max_pixels, do_resize,
                 where) -> tuple[int, int]:
  if do_resize:
    try:
      return smart_resize(height, width, factor, min_pixels, max_pixels)
    except ValueError as error:
      raise RowError(
          where, BAD_SIZE,
          f"a picture of {width}x{height} pixels: {error}") from error
  if height % factor or width % factor:
    raise RowError(
        where, BAD_SIZE,
        f"a picture of {width}x{height} pixels: the checkpoint doesn't resize, "
        f"so expected multiples of {factor}")
  return height, width
