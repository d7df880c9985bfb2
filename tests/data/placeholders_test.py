"""Expansion of placeholders: once, and never with a wrong count."""

from absl.testing import absltest, parameterized
import numpy as np

from rollplex_jax.data import placeholders
from rollplex_jax.data.row_schema import RowError

_I, _V, _S, _E = 90, 91, 92, 93
_IDS = {"image": _I, "video": _V}


def _expand(tokens, images=(), videos=()):
  expanded, order = placeholders.expand(
      tokens, {"image": images, "video": videos}, _IDS, "rows:7")
  return expanded.tolist(), order


class ExpandTest(parameterized.TestCase):

  def test_text(self):
    self.assertEqual(_expand([1, 2, _S, _E]), ([1, 2, _S, _E], []))

  def test_one_for_each_medium(self):
    expanded, order = _expand(
        [1, _S, _V, _E, 2, _S, _I, _E, _S, _I, _E], [2, 3], [4])
    self.assertEqual(
        expanded, [1, _S] + [_V] * 4 + [_E, 2, _S, _I, _I, _E, _S]
        + [_I] * 3 + [_E])
    self.assertEqual(order, ["video", "image", "image"])

  def test_already_expanded_stays(self):
    tokens = [_S] + [_I] * 2 + [_E, _S] + [_V] * 4 + [_E, _S] + [_I] * 3 + [_E]
    expanded, order = _expand(tokens, [2, 3], [4])
    self.assertEqual(expanded, tokens)
    self.assertEqual(order, ["image", "video", "image"])
    again, _ = _expand(expanded, [2, 3], [4])
    self.assertEqual(again, tokens)

  def test_each_modality_by_itself(self):
    expanded, _ = _expand([_I, _I, 1, _V], [2], [3])
    self.assertEqual(expanded, [_I, _I, 1, _V, _V, _V])

  def test_media_of_one_feature(self):
    self.assertEqual(_expand([_I, 1, _I], [1, 1])[0], [_I, 1, _I])

  @parameterized.parameters(
      ([1, 2], [6], "expected 1 image placeholder (or 6, already expanded), "
       "found 0"),
      ([_I, 1, _I], [6], "expected 1 image placeholder (or 6, already "
       "expanded), found 2"),
      ([_I, 1, _I, _I], [6, 7], "expected 2 image placeholders (or 13, already "
       "expanded), found 3"),
      ([_I] * 7, [6], "expected 1 image placeholder (or 6, already expanded), "
       "found 7"),
      ([_I], [], "expected 0 image placeholders, found 1"))
  def test_wrong_count(self, tokens, images, message):
    with self.assertRaises(RowError) as caught:
      _expand(tokens, images)
    self.assertEqual(str(caught.exception), f"rows:7: {message}")
    self.assertEqual(caught.exception.reason, placeholders.COUNT)

  @parameterized.parameters(
      ([_I, _I], [2, 3], "image 1: expected a run of 2 placeholders, found 5"),
      ([_I, 1] + [_I] * 4, [2, 3],
       "image 1: expected a run of 2 placeholders, found 1"),
      ([_I] * 3 + [1] + [_I] * 2, [2, 3],
       "image 1: expected a run of 2 placeholders, found 3"),
      ([_I] * 2 + [1] + [_I] * 2 + [2] + [_I], [2, 3],
       "image 2: expected a run of 3 placeholders, found 2"))
  def test_runs_that_are_no_media(self, tokens, images, message):
    with self.assertRaises(RowError) as caught:
      _expand(tokens, images)
    self.assertStartsWith(str(caught.exception), f"rows:7: {message}")

  def test_long_video(self):
    expanded, _ = _expand([_S, _V, _E], videos=[100_000])
    self.assertLen(expanded, 100_002)
    self.assertEqual(np.unique(expanded).tolist(), [_V, _S, _E])


if __name__ == "__main__":
  absltest.main()
