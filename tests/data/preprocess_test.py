"""Sizes, sampling and patches, against the reference or a plain loop."""

import importlib
import importlib.util
import itertools

from absl.testing import absltest, parameterized
import numpy as np
import PIL.Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
  Qwen2VLImageProcessorPil,
)

from rollplex_jax.data.preprocess import ImagePreprocessor, VideoPreprocessor
from rollplex_jax.data.row_schema import RowError
from rollplex_jax.errors import InputError
from tests.goldens import inputs
from tests.helpers import tiny_tokenizer


class ImageTest(parameterized.TestCase):

  @parameterized.product(
      size=[(56, 56), (84, 112), (31, 57), (200, 90), (300, 299), (2, 3)],
      config=[
          {},
          {"min_pixels": 3136, "max_pixels": 40_000},  # As published.
          {"patch_size": 16, "merge_size": 3, "temporal_patch_size": 1,
           "size": {"shortest_edge": 4000, "longest_edge": 30_000}}])
  def test_equals_reference(self, size, config):
    image = PIL.Image.fromarray(inputs.pixels(1, *size))
    ours = ImagePreprocessor(config)
    expected = Qwen2VLImageProcessorPil(**config)(
        images=[image], return_tensors="np")
    patches = ours.patches(image)
    self.assertEqual(patches.dtype, np.float32)
    np.testing.assert_array_equal(patches, expected["pixel_values"])
    self.assertEqual(ours.grid(*size, "here"),
                     tuple(expected["image_grid_thw"][0]))

  def test_size_it_cannot_do(self):
    with self.assertRaisesRegex(
        RowError, "^here: a picture of 1x201 pixels: .*aspect ratio"):
      ImagePreprocessor({}).grid(201, 1, "here")
    with self.assertRaisesRegex(
        RowError, "60x56 pixels: .* expected multiples of 28"):
      ImagePreprocessor({"do_resize": False}).grid(56, 60, "here")

  def test_bad_config(self):
    with self.assertRaisesRegex(InputError, "^c.json: can't be used"):
      ImagePreprocessor({"size": {"height": 4, "width": 4}}, "c.json")


class VideoTest(parameterized.TestCase):

  def test_sampling_equals_reference(self):
    if importlib.util.find_spec("torch") is None:
      self.skipTest("torch isn't installed")
    torch = importlib.import_module("torch")
    video = VideoPreprocessor(min_frames=4, max_frames=96)
    for frames, rate, fps in itertools.product(
        [*range(2, 130), 997, 3000], [10.0, 23.976, 30.0],
        [0.5, 1.0, 2.0, 7.3]):
      # The reference's rule, as it is written there.
      most = min(96, frames) // 2 * 2
      count = min(max(frames / rate * fps, 4), most, frames) // 2 * 2
      expected = torch.arange(0, frames, frames / count).int().numpy()
      np.testing.assert_array_equal(
          video.sample(frames, rate, fps), expected,
          err_msg=f"{frames} frames at {rate} by {fps}")

  def test_sampling(self):
    video = VideoPreprocessor()
    np.testing.assert_array_equal(video.sample(40, 10.0, 1.0), [0, 10, 20, 30])
    np.testing.assert_array_equal(video.sample(40, 10.0, 2.0),
                                  np.arange(0, 40, 5))
    # Never fewer than min_frames, never more than there are.
    np.testing.assert_array_equal(video.sample(40, 10.0, 0.1), [0, 10, 20, 30])
    np.testing.assert_array_equal(video.sample(6, 10.0, 50.0), np.arange(6))
    # Where the reference's float32 steps add a frame, so do ours.
    self.assertLen(video.sample(30, 30.0, 26.0), 27)
    # Shorter than a temporal patch.
    np.testing.assert_array_equal(video.sample(1, 10.0, 2.0), [0])

  @parameterized.parameters((2, 2, 14), (3, 3, 8), (1, 1, 4))
  def test_patch_order(self, t, m, p):
    video = VideoPreprocessor(
        patch_size=p, merge_size=m, temporal_patch_size=t, min_pixels=1,
        do_rescale=False, do_normalize=False)
    frames = inputs.pixels(2, 2 * t + 1, 2 * m * p, m * p)
    if t == 1:
      frames = frames[:2]
    grid = video.grid(*frames.shape[:3], "here")
    padded = np.concatenate([frames] + [frames[-1:]] * (-len(frames) % t))
    expected = []
    for f, big_row, big_col, row, col in itertools.product(
        range(grid[0]), range(grid[1] // m), range(grid[2] // m), range(m),
        range(m)):
      y, x = (big_row * m + row) * p, (big_col * m + col) * p
      block = padded[f * t:(f + 1) * t, y:y + p, x:x + p]
      expected.append(block.transpose(3, 0, 1, 2).reshape(-1))
    np.testing.assert_array_equal(video.patches(frames, "here"), expected)

  def test_still_video_equals_image(self):
    picture = inputs.pixels(3, 61, 90)
    config = {"size": {"shortest_edge": 3136, "longest_edge": 5000}}
    video = VideoPreprocessor.from_config(config)
    image = ImagePreprocessor(config)
    np.testing.assert_allclose(
        video.patches(picture[None], "here"),
        image.patches(PIL.Image.fromarray(picture)), rtol=0, atol=1e-6)

  def test_share_of_pixels(self):
    video = VideoPreprocessor.from_config({
        "size": {"shortest_edge": 28 * 28, "longest_edge": 560 * 560},
        "cap_pixels_per_frame": True, "max_video_tokens": 1000})
    # 1000 tokens x 0.9 x 28^2 pixels x 2 frames / 16 frames = 112 tokens each.
    height, width = video.size(16, 560, 560, "here")
    self.assertLessEqual(height * width, 112.5 * 28 * 28)
    self.assertEqual((height, width), (280, 280))
    self.assertEqual(video.size(2, 560, 560, "here"), (560, 560))

  def test_reads_config(self):
    video = VideoPreprocessor.from_config(tiny_tokenizer.VIDEO_PREPROCESSOR)
    self.assertEqual((video.min_pixels, video.max_pixels), (784, 7056))
    self.assertEqual(video.fps, 2.0)
    video = VideoPreprocessor.from_config(
        {"min_pixels": 3136, "max_pixels": 12845056, "fps": None})
    self.assertEqual((video.min_pixels, video.max_pixels), (3136, 12845056))

  @parameterized.parameters(
      ({"size": {"height": 4}},
       "size: expected shortest_edge and longest_edge"),
      ({"patch_size": 0}, "patch_size: expected a number > 0, found 0"),
      ({"fps": "two"}, "fps: expected a number > 0, found 'two'"))
  def test_bad_config(self, config, message):
    with self.assertRaisesRegex(InputError, f"^v.json: {message}"):
      VideoPreprocessor.from_config(config, "v.json")


if __name__ == "__main__":
  absltest.main()
