"""Pictures and videos from files, good and bad."""

import os
import tempfile

from absl.testing import absltest, parameterized
import av
import numpy as np
import PIL.Image

from rollplex_jax.data import media
from rollplex_jax.data.row_schema import RowError
from tests.goldens import inputs


def _noise(height, width):
  return PIL.Image.fromarray(inputs.pixels(0, height, width))


class ImageTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = self.enterContext(tempfile.TemporaryDirectory())

  def test_turned_upright_by_exif(self):
    path = os.path.join(self.folder, "a.png")
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # To be turned by 90 degrees clockwise.
    picture = _noise(20, 30)
    picture.save(path, exif=exif)
    loaded = np.asarray(media.load_image(path, "here"))
    np.testing.assert_array_equal(loaded, np.rot90(np.asarray(picture), -1))
    self.assertEqual(media.image_size(path, "here"), (30, 20))

  @parameterized.parameters("L", "RGBA", "P", "1", "CMYK")
  def test_converted_to_rgb(self, mode):
    path = os.path.join(self.folder, "a.tiff" if mode == "CMYK" else "a.png")
    _noise(6, 8).convert(mode).save(path)
    loaded = media.load_image(path, "here")
    self.assertEqual(loaded.mode, "RGB")
    self.assertEqual(media.image_size(path, "here"), (6, 8))

  def test_in_memory(self):
    array = inputs.pixels(1, 5, 7)
    for source in (array, PIL.Image.fromarray(array)):
      np.testing.assert_array_equal(media.load_image(source, "here"), array)
      self.assertEqual(media.image_size(source, "here"), (5, 7))

  def test_missing(self):
    for read in (media.load_image, media.image_size):
      with self.assertRaisesRegex(
          RowError, "^rows:3: no such file: /no/a.png$") as caught:
        read("/no/a.png", "rows:3")
      self.assertEqual(caught.exception.reason, media.MISSING)

  @parameterized.parameters("png", "jpg", "gif", "bmp", "webp")
  def test_truncated(self, suffix):
    path = os.path.join(self.folder, f"a.{suffix}")
    _noise(64, 64).save(path)
    with open(path, "r+b") as file:
      file.truncate(os.path.getsize(path) // 2)
    with self.assertRaisesRegex(
        RowError, f"^rows:3: can't read {path}") as caught:
      media.load_image(path, "rows:3")
    self.assertEqual(caught.exception.reason, media.UNREADABLE)
    self.assertNotIn("\n", str(caught.exception))

  @parameterized.parameters(b"", b"not a picture", b"\x89PNG\r\n\x1a\n")
  def test_unreadable(self, content):
    path = os.path.join(self.folder, "a.png")
    with open(path, "wb") as file:
      file.write(content)
    for read in (media.load_image, media.image_size):
      with self.assertRaisesRegex(RowError, f"^here: can't read {path} "):
        read(path, "here")

  def test_frames_must_agree_in_size(self):
    frames = [inputs.pixels(0, 4, 6), inputs.pixels(0, 4, 8)]
    with self.assertRaisesRegex(
        RowError, "frame 2 of a video: expected 6x4 .* found 8x4"):
      media.load_frames(frames, "here")
    frames[1] = PIL.Image.fromarray(frames[0])
    self.assertEqual(media.load_frames(frames, "here").shape, (2, 4, 6, 3))


class VideoTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = self.enterContext(tempfile.TemporaryDirectory())

  def _write(self, name, frames=24, codec="mpeg4", options=None):
    path = os.path.join(self.folder, name)
    with av.open(path, "w", options=options or {}) as container:
      stream = container.add_stream(codec, rate=12)
      stream.height, stream.width, stream.pix_fmt = 32, 48, "yuv420p"
      for i in range(frames):
        frame = np.full((32, 48, 3), 10 * i, np.uint8)
        container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, "rgb24")))
      container.mux(stream.encode())
    return path

  @parameterized.parameters("a.mp4", "a.mkv", "a.avi")
  def test_info_and_frames(self, name):
    path = self._write(name)
    self.assertEqual(media.video_info(path, "here"),
                     media.VideoInfo(24, 12.0, 32, 48))
    frames = media.read_video(path, [0, 5, 23], "here")
    self.assertEqual(frames.shape, (3, 32, 48, 3))
    self.assertEqual(frames.dtype, np.uint8)
    np.testing.assert_allclose(
        frames.mean((1, 2, 3)), [0, 50, 230], atol=3)

  def test_missing(self):
    with self.assertRaisesRegex(RowError, "^here: no such file: /no/a.mp4$"):
      media.video_info("/no/a.mp4", "here")

  def test_truncated(self):
    # With the index in front, the file opens and ends early.
    path = self._write("a.mp4", options={"movflags": "faststart"})
    with open(path, "r+b") as file:
      file.truncate(os.path.getsize(path) * 2 // 3)
    info = media.video_info(path, "here")
    with self.assertRaisesRegex(
        RowError, f"^here: can't read {path} ") as caught:
      media.read_video(path, range(info.num_frames), "here")
    self.assertEqual(caught.exception.reason, media.UNREADABLE)
    # With the index at the end it doesn't open.
    path = self._write("b.mp4")
    with open(path, "r+b") as file:
      file.truncate(os.path.getsize(path) * 2 // 3)
    with self.assertRaisesRegex(RowError, f"^here: can't read {path} "):
      media.video_info(path, "here")

  def test_unreadable(self):
    path = os.path.join(self.folder, "a.mp4")
    with open(path, "wb") as file:
      file.write(b"not a video" * 100)
    with self.assertRaisesRegex(RowError, f"^here: can't read {path} "):
      media.video_info(path, "here")

  def test_no_video_stream(self):
    path = os.path.join(self.folder, "a.wav")
    with av.open(path, "w") as container:
      stream = container.add_stream("pcm_s16le", rate=8000)
      frame = av.AudioFrame.from_ndarray(
          np.zeros((1, 800), np.int16), format="s16", layout="mono")
      frame.sample_rate = 8000
      container.mux(stream.encode(frame))
      container.mux(stream.encode())
    with self.assertRaisesRegex(RowError, "no video stream"):
      media.video_info(path, "here")


if __name__ == "__main__":
  absltest.main()
