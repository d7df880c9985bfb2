"""The prompts whose processing is pinned by golden values.

Shared by the script that records the reference's outputs and by the tests
that compare with them. Needs neither torch nor jax.
"""

import os

import numpy as np

FOLDER = os.path.dirname(os.path.abspath(__file__))
CLIP = os.path.join(FOLDER, "clip.mp4")
PROCESSOR_GOLDENS = os.path.join(FOLDER, "processor.npz")
# About this many values of each case's patches are recorded.
SAMPLED_VALUES = 1000


def pixels(seed: int, *shape: int) -> np.ndarray:
  """Noise, uint8 [*shape, 3]: the hardest picture to resize alike."""
  rng = np.random.default_rng(seed)
  return rng.integers(0, 256, (*shape, 3), dtype=np.uint8)


def sample(patches: np.ndarray) -> np.ndarray:
  """Evenly strided values of a case's patches, float32."""
  flat = patches.reshape(-1)
  stride = max(1, flat.size // SAMPLED_VALUES)
  # An odd stride walks through channels, rows and columns alike.
  return flat[::stride | 1]


def _user(*parts):
  return [{"role": "user", "content": list(parts)}]


def _text(text):
  return {"type": "text", "text": text}


def _image(seed, height, width):
  return {"type": "image", "image": pixels(seed, height, width)}


def _video(seed, frames, height, width, fps):
  return {"type": "video", "video": pixels(seed, frames, height, width),
          "fps": fps}


def cases() -> dict[str, dict]:
  """Rows by name. `_exact` cases need no resizing."""
  ask = _text("What does the picture show?")
  watch = _text("Where does the ball go?")
  rows = {
      "text_exact": [{"role": "user", "content": "go to the red ball"}],
      "system_exact": [{"role": "system", "content": "Be brief."},
                       *_user(_text("pick up the key"))],
      "image_exact": _user(_image(1, 56, 84), ask),
      "image_enlarged": _user(_image(2, 20, 33), ask),
      "image_reduced": _user(ask, _image(3, 171, 230)),
      "images_exact": _user(_image(4, 56, 56), ask, _image(5, 112, 84),
                            _image(6, 84, 140)),
      "images_resized": _user(_image(7, 57, 57), _image(8, 90, 44), ask),
      "frames_1fps_exact": _user(_video(9, 4, 56, 56, 1.0), watch),
      "frames_2fps_exact": _user(_video(9, 4, 56, 56, 2.0), watch),
      "frames_4fps_exact": _user(_video(9, 4, 56, 56, 4.0), watch),
      "frames_odd_exact": _user(_video(10, 5, 56, 84, 3.0), watch),
      "frames_single_exact": _user(_video(11, 1, 28, 28, 2.0), watch),
      "frames_enlarged": _user(_video(12, 3, 17, 25, 2.0), watch),
      "frames_reduced": _user(_video(13, 2, 120, 200, 2.0), watch),
      "file_1fps_exact": _user({"type": "video", "video": CLIP, "fps": 1.0},
                               watch),
      "file_2fps_exact": _user({"type": "video", "video": CLIP, "fps": 2.0},
                               watch),
      "file_4fps_exact": _user({"type": "video", "video": CLIP, "fps": 4.0},
                               watch),
      "mixed_exact": _user(
          _image(14, 56, 56), _text("then"), _video(15, 4, 56, 28, 2.0),
          ask, _image(16, 84, 56), _video(17, 3, 28, 56, 1.0)),
      "turns_exact": [
          *_user(_image(18, 56, 56), ask),
          {"role": "assistant", "content": "a blue key"},
          *_user(_video(19, 2, 56, 56, 4.0), watch)],
  }
  return {name: {"prompt": prompt} for name, prompt in rows.items()}
