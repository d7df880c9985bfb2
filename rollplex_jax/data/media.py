"""Reads pictures and videos into RGB pixels.

A picture is a path, a PIL image or uint8 [h, w, 3]. A video is a path, which is
sampled, or its frames, which are taken as they are: a list of pictures or
uint8 [t, h, w, 3].
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import os
from typing import Any

import av
import numpy as np
import PIL.Image
import PIL.ImageOps

from rollplex_jax.data.row_schema import RowError, first_line

MISSING = "missing media file"
UNREADABLE = "unreadable media"

_ORIENTATION = 0x0112  # EXIF tag; values 5 to 8 turn the picture on its side.


@dataclasses.dataclass(frozen=True)
class VideoInfo:
  """What a container says of its video: length, frames per second, size."""

  num_frames: int
  fps: float
  height: int
  width: int


def image_size(source: Any, where: str) -> tuple[int, int]:
  """Height and width of a picture as `load_image` gives it.

  Reads the file's header alone where the format allows it (a PNG may hold its
  EXIF tag behind the pixels, so it is read to the end). Raises as `load_image`.
  """
  if isinstance(source, np.ndarray):
    return source.shape[0], source.shape[1]
  if isinstance(source, PIL.Image.Image):
    return source.height, source.width
  try:
    with _open_image(source, where) as image:
      width, height = image.size
      turned = image.getexif().get(_ORIENTATION, 1) >= 5
  except RowError:
    raise
  except Exception as error:
    raise _unreadable(source, where, error) from error
  return (width, height) if turned else (height, width)


def load_image(source: Any, where: str) -> PIL.Image.Image:
  """Returns a picture in RGB.

  A file is turned upright by its EXIF tag, as the reference does; a picture in
  memory is taken as it is.

  Raises:
    RowError: if the file is missing, or can't be decoded to its end.
  """
  if isinstance(source, np.ndarray):
    return PIL.Image.fromarray(source)
  if isinstance(source, PIL.Image.Image):
    return source.convert("RGB")
  try:
    with _open_image(source, where) as image:
      return PIL.ImageOps.exif_transpose(image).convert("RGB")
  except RowError:
    raise
  # Decoders of broken files raise about anything: OSError, SyntaxError,
  # struct.error, decompression bombs.
  except Exception as error:
    raise _unreadable(source, where, error) from error


def frames_size(frames: Any, where: str) -> tuple[int, int, int]:
  """Number, height and width of a video given by its frames."""
  if isinstance(frames, np.ndarray):
    return frames.shape[:3]
  return (len(frames), *image_size(frames[0], where))


def load_frames(frames: Any, where: str) -> np.ndarray:
  """Returns frames as uint8 [t, h, w, 3].

  Raises:
    RowError: as `load_image`, or if the frames differ in size.
  """
  if isinstance(frames, np.ndarray):
    return frames
  arrays = [
      frame if isinstance(frame, np.ndarray)
      else np.asarray(load_image(frame, where)) for frame in frames
  ]
  for i, array in enumerate(arrays):
    if array.shape != arrays[0].shape:
      expected, found = ("x".join(map(str, a.shape[1::-1]))
                         for a in (arrays[0], array))
      raise RowError(
          where, UNREADABLE,
          f"frame {i + 1} of a video: expected {expected} pixels as the first "
          f"frame, found {found}")
  return np.stack(arrays)


def video_info(path: str, where: str) -> VideoInfo:
  """Reads a video file's metadata without decoding it.

  Raises:
    RowError: if the file is missing, holds no video, or gives no frame rate.
  """
  try:
    with _open_video(path, where) as container:
      stream = container.streams.video[0]
      # Matroska and some others don't store the count; packets tell it.
      num_frames = stream.frames or sum(
          packet.size > 0 for packet in container.demux(stream))
      if not num_frames or not stream.average_rate:
        raise ValueError("no frames or no frame rate")
      return VideoInfo(num_frames, float(stream.average_rate),
                       stream.height, stream.width)
  except RowError:
    raise
  except Exception as error:
    raise _unreadable(path, where, error) from error


def read_video(path: str, indices: Sequence[int], where: str) -> np.ndarray:
  """Decodes the frames at `indices` (ascending).

  Returns:
    uint8 [len(indices), h, w, 3].

  Raises:
    RowError: if the file is missing or ends before the last of the frames.
  """
  wanted = [int(i) for i in indices]
  frames = []
  try:
    with _open_video(path, where) as container:
      container.streams.video[0].thread_type = "AUTO"
      for i, frame in enumerate(container.decode(video=0)):
        if i == wanted[len(frames)]:
          frames.append(frame.to_ndarray(format="rgb24"))
          if len(frames) == len(wanted):
            break
      else:
        raise ValueError(
            f"ends before frame {wanted[len(frames)] + 1}, truncated?")
    return np.stack(frames)
  except RowError:
    raise
  except Exception as error:
    raise _unreadable(path, where, error) from error


def _open_image(source, where):
  _check_exists(source, where)
  return PIL.Image.open(source)


def _open_video(path, where):
  _check_exists(path, where)
  container = av.open(path)
  if not container.streams.video:
    container.close()
    raise ValueError("no video stream")
  return container


def _check_exists(path, where):
  if not os.path.isfile(path):
    raise RowError(where, MISSING, f"no such file: {path}")


def _unreadable(path, where, error) -> RowError:
  # FFmpeg's and Pillow's messages repeat the path.
  detail = first_line(error)
  for repeated in (f": {path!r}", f" {path!r}"):
    detail = detail.replace(repeated, "")
  return RowError(where, UNREADABLE, f"can't read {path} ({detail})")
