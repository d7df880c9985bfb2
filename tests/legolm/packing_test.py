"""The layout: words, planes, sections, and the order of outliers."""

import math

from absl.testing import absltest, parameterized
import numpy as np

from legolm_jax import packing
from legolm_jax.packing import Layout


class PlanesTest(parameterized.TestCase):

  @parameterized.parameters(*range(2, 9))
  def test_round_trip(self, bits):
    codes = np.random.default_rng(0).integers(
        0, 1 << bits, (5, 48)).astype(np.uint8)
    planes = packing.pack(codes, bits)
    self.assertEqual(tuple(p.dtype for p in planes), packing.plane_dtypes(bits))
    self.assertEqual(sum(p.nbytes for p in planes), codes.size * bits // 8)
    np.testing.assert_array_equal(packing.unpack(planes, bits), codes)

  @parameterized.parameters(*range(2, 9))
  def test_one_code_by_shifts(self, bits):
    codes = np.random.default_rng(0).integers(
        0, 1 << bits, (3, 24)).astype(np.uint8)
    planes = packing.pack(codes, bits)
    for row, word, place in ((0, 0, 0), (2, 1, 5), (1, 2, 7)):
      code, shift = 0, 0
      for plane, width in zip(planes, packing.plane_widths(bits)):
        part = int(plane[row, word]) >> (width * place) & ((1 << width) - 1)
        code |= part << shift
        shift += width
      self.assertEqual(code, codes[row, word * 8 + place])

  @parameterized.parameters(
      (3, 2), (4, 2), (5, 3), (64, 6), (65, 7), (127, 7), (128, 7), (129, 8),
      (256, 8))
  def test_bits(self, num_codes, bits):
    self.assertEqual(packing.code_bits(num_codes), bits)


class LayoutTest(parameterized.TestCase):

  @parameterized.parameters(
      (1536, 1536, 192, 192), (1536, 8960, 192, 1120), (256, 1536, 32, 192),
      (3420, 1280, 855, 160), (1280, 3420, 160, 855), (7, 13, 7, 13),
      (64, 32, 8, 8), (100, 1000, 25, 125))
  def test_sections(self, out, inputs, section_out, section_inputs):
    layout = Layout.of(out, inputs)
    self.assertEqual((layout.section_out, layout.section_inputs),
                     (section_out, section_inputs))
    # Nothing but tiny matrices is filled up by more than 1/32.
    if inputs > 32:
      self.assertLessEqual(layout.words * 8, inputs * (1 + 1 / 32))

  @parameterized.parameters((70, 72), (100, 1000), (64, 640), (33, 17))
  def test_fill(self, out, inputs):
    layout = Layout.of(out, inputs)
    codes = np.random.default_rng(0).integers(
        1, 9, (out, inputs)).astype(np.uint8)
    filled = layout.fill(codes)
    self.assertEqual(filled.shape, (out, layout.words * 8))
    np.testing.assert_array_equal(layout.unfill(filled), codes)
    self.assertEqual(np.count_nonzero(filled), codes.size)

  @parameterized.parameters((70, 72), (100, 1000), (64, 640), (33, 17))
  def test_order_by_plain_loops(self, out, inputs):
    layout = Layout.of(out, inputs)
    expected, tile_of = [], []
    for band_start in range(0, out, layout.section_out):
      for first in range(band_start, band_start + layout.section_out, 32):
        rows = range(first, min(first + 32, band_start + layout.section_out))
        for section in range(0, inputs, layout.section_inputs):
          for word in range(layout.words_per_section):
            for row in rows:
              for place in range(8):
                column = word * 8 + place
                if column < layout.section_inputs:
                  expected.append(row * inputs + section + column)
                  tile_of.append((first, section, column // 128))
    rank, tile = layout.places(np.arange(out * inputs))
    np.testing.assert_array_equal(np.argsort(rank), expected)
    tiles = sorted(set(tile_of))
    self.assertLen(tiles, layout.bands * layout.tiles)
    np.testing.assert_array_equal(
        tile[expected], [tiles.index(t) for t in tile_of])

  def test_matrices_of_2_to_the_31_and_more(self):
    layout = Layout.of(1 << 20, 1 << 16)
    last = np.array([(1 << 36) - 1, 0])
    rank, tile = layout.places(last)
    self.assertEqual(rank[0], (1 << 36) - 1)
    self.assertEqual(tile[0], layout.bands * layout.tiles - 1)
    self.assertEqual(rank[1], 0)
    self.assertEqual(math.prod((layout.out, layout.words, 8)), 1 << 36)
    values, offsets = packing.order_outliers(
        Layout.of(1 << 16, 1 << 15), np.array([(1 << 31) - 1, 1 << 30, 0]),
        np.array([3, 2, 1]))
    np.testing.assert_array_equal(values, [1, 2, 3])
    self.assertEqual(offsets[-1, -1], 2)
    self.assertEqual(offsets[0, 0], 0)
    self.assertEqual(offsets[0, 1], 1)


if __name__ == "__main__":
  absltest.main()
