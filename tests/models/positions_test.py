"""M-RoPE positions, against values worked out by hand."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from rollplex_jax.models import decoder, positions
from rollplex_jax.models.config import ModelConfig
from tests.models import cases

CONFIG = ModelConfig.from_hf(cases.CONFIGS["published_like"])  # 2 a second
IMAGE, VIDEO = CONFIG.image_token_id, CONFIG.video_token_id


def rope_index(tokens, grids=(), modalities=(), seconds=()):
  return positions.rope_index(
      np.array(tokens), grids, modalities, seconds, CONFIG)


class RopeIndexTest(parameterized.TestCase):

  def test_text_counts(self):
    np.testing.assert_array_equal(
        rope_index([5, 6, 7]), [[0, 1, 2]] * 3)
    self.assertEqual(positions.next_position(rope_index([5, 6, 7])), 3)
    self.assertEqual(rope_index([]).shape, (3, 0))
    self.assertEqual(positions.next_position(rope_index([])), 0)

  def test_a_picture_spreads_over_height_and_width(self):
    # 4 x 6 patches are 2 x 3 merged ones; text goes on past the larger side.
    got = rope_index([5, *[IMAGE] * 6, 6, 7], [(1, 4, 6)], ["image"], [0.0])
    np.testing.assert_array_equal(got, [
        [0, 1, 1, 1, 1, 1, 1, 4, 5],
        [0, 1, 1, 1, 2, 2, 2, 4, 5],
        [0, 1, 2, 3, 1, 2, 3, 4, 5]])
    self.assertEqual(got.dtype, np.int32)
    self.assertEqual(positions.next_position(got), 6)

  def test_a_picture_has_no_rate(self):
    got = rope_index([IMAGE] * 2, [(2, 2, 2)], ["image"], [5.0])
    np.testing.assert_array_equal(got, [[0, 1], [0, 0], [0, 0]])

  def test_a_video_spreads_over_time(self):
    # Half a second between frames, 2 positions a second: steps of 1. Time may
    # run past the text that follows, and the response starts after both.
    tokens = [*[VIDEO] * 8, 6]
    grid, kind = [(4, 2, 4)], ["video"]
    got = rope_index(tokens, grid, kind, [0.5])
    np.testing.assert_array_equal(got, [
        [0, 0, 1, 1, 2, 2, 3, 3, 2],
        [0, 0, 0, 0, 0, 0, 0, 0, 2],
        [0, 1, 0, 1, 0, 1, 0, 1, 2]])
    self.assertEqual(positions.next_position(got), 4)
    got = rope_index(tokens, grid, kind, [0.7])  # 0, 1.4, 2.8, 4.2
    np.testing.assert_array_equal(got[0], [0, 0, 1, 1, 2, 2, 4, 4, 2])

  def test_the_same_frames_at_two_rates(self):
    tokens, grid, kind = [VIDEO] * 4, [(4, 2, 2)], ["video"]
    stride = CONFIG.vision.temporal_patch_size
    slow, fast = (rope_index(tokens, grid, kind, [stride / fps])
                  for fps in (1.0, 30.0))
    np.testing.assert_array_equal(slow[0], [0, 4, 8, 12])
    np.testing.assert_array_equal(fast[0], [0, 0, 0, 0])

  def test_media_in_order(self):
    got = rope_index(
        [*[VIDEO] * 2, 5, IMAGE, IMAGE, 6],
        [(2, 2, 2), (1, 4, 2)], ["video", "image"], [1.0, 0.0])
    np.testing.assert_array_equal(got, [
        [0, 2, 1, 2, 2, 4],
        [0, 0, 1, 2, 3, 4],
        [0, 0, 1, 2, 2, 4]])

  @parameterized.named_parameters(
      ("one_too_many", [*[IMAGE] * 7, 5],
       "medium 1 expected 6 image placeholder tokens, found 7 image ones"),
      ("one_too_few", [5, *[IMAGE] * 5],
       "medium 1 expected 6 image placeholder tokens, found 5 image ones"),
      ("of_the_other_kind", [5, *[VIDEO] * 6],
       "expected 6 image placeholder tokens, found 6 video ones"),
      ("none", [5, 6], "expected placeholders for 1 media, found 0"),
      ("a_second_run", [*[IMAGE] * 6, 5, IMAGE],
       "expected placeholders for 1 media, found 1 image placeholder tokens"),
  )
  def test_placeholders_that_disagree(self, tokens, message):
    with self.assertRaisesRegex(ValueError, message):
      rope_index(tokens, [(1, 4, 6)], ["image"], [0.0])

  def test_placeholders_without_media(self):
    with self.assertRaisesRegex(ValueError, "for 0 media, found 2 video"):
      rope_index([5, VIDEO, VIDEO])


class LayoutTest(parameterized.TestCase):

  @parameterized.parameters(((4, 2, 5),), ((2, 5),), ((2, 2, 5),), ((3, 5),))
  def test_rope_takes_three_rows(self, shape):
    with self.assertRaisesRegex(ValueError, r"positions must be \[3, B, T\]"):
      decoder.rope(CONFIG.text, jnp.zeros(shape, jnp.int32))

  @parameterized.parameters(((3, 1, 5),), ((3, 2, 4),), ((3, 5, 2),),
                            ((2, 5),))
  def test_hidden_states_take_one_layout(self, shape):
    params = jax.eval_shape(lambda: None)
    x = jnp.zeros((2, 5, CONFIG.text.hidden_size))
    with self.assertRaisesRegex(ValueError, "positions must be"):
      decoder.hidden_states(
          params, CONFIG.text, x, jnp.zeros(shape, jnp.int32))

  def test_pairs_follow_their_section(self):
    # Sections 4, 6 and 6 of 16 pairs; each row at another position.
    config = CONFIG.text
    places = jnp.array([3, 50, 700], jnp.int32).reshape(3, 1, 1)
    cos, sin = jax.jit(decoder.rope, static_argnums=0)(config, places)
    row = np.repeat([3.0, 50.0, 700.0], config.mrope_section)
    angles = row / config.rope_theta ** (np.arange(16) / 16)
    angles = np.concatenate([angles, angles])
    np.testing.assert_allclose(cos[0, 0], np.cos(angles), atol=1e-4)
    np.testing.assert_allclose(sin[0, 0], np.sin(angles), atol=1e-4)

  def test_frequencies_are_the_nearest_floats(self):
    # Far out an ulp of a frequency is 2e-3 of a cosine.
    config = CONFIG.text
    places = jnp.full((1, 1, 1), 32_000, jnp.int32)
    cos, _ = jax.jit(decoder.rope, static_argnums=0)(config, places)
    inverse = np.float32(1) / np.float32(
        config.rope_theta ** (np.arange(16) / 16))
    angles = np.float32(32_000) * inverse
    np.testing.assert_allclose(
        cos[0, 0, :16], np.cos(angles.astype(np.float64)), atol=1e-6)


if __name__ == "__main__":
  absltest.main()
