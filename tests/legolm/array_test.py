"""LegoArrays: encoding against plain definitions, decoding, shards."""

import functools
import itertools

from absl.testing import absltest, parameterized
import jax
from jax.experimental import mesh_utils
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
import numpy as np

from legolm_jax import encoding, sharding
from legolm_jax.array import Storage
from legolm_jax.encoding import Codebook, Matrix
from tests.helpers import devices
from tests.legolm import checkpoints
from tests.legolm.arrays import escapes, make
from tests.legolm.checkpoints import BF16, F16, F32

devices.use_virtual_devices()


# K with their bits: with an escape and without, few and many.
_KINDS = ((3, 90.0), (16, 95.0), (64, 99.0), (100, 98.0), (128, 97.0),
          (256, 97.0), (64, 100.0), (256, 100.0), (5, 30.0))


class EncodeTest(parameterized.TestCase):

  @parameterized.product(
      kind=_KINDS, dtype=(BF16, F16, F32), scaled=(False, True))
  def test_nearest_centroid_or_bit_identical(self, kind, dtype, scaled):
    num_codes, percentile = kind
    w, codebook, scale, kept, array = make(
        (72, 200), dtype=dtype, num_codes=num_codes, percentile=percentile,
        scaled=scaled, keep=0 if percentile == 100 else 3)
    self.assertEqual(array.shape, w.shape)
    self.assertEqual(array.num_codes, num_codes)
    found = encoding.decode(array)
    self.assertEqual(found.dtype, dtype)
    outlier = escapes(array)
    np.testing.assert_array_equal(found[outlier], w[outlier])
    self.assertTrue(outlier.ravel()[kept].all())
    multiples = w.astype(np.float64)
    if scaled:
      multiples /= scale.astype(np.float64)[:, None]
    distances = np.abs(multiples[..., None] - codebook.centroids)
    expected = codebook.centroids[distances.argmin(-1)]
    if scaled:
      expected = expected * scale.astype(np.float32)[:, None]
    np.testing.assert_array_equal(
        found[~outlier], expected.astype(dtype)[~outlier])
    beyond = np.abs(multiples) > codebook.threshold * (1 + 2 ** -9)
    self.assertTrue(outlier[beyond].all())
    self.assertLessEqual(
        outlier.mean(), 1 - percentile / 100 + (kept.size + 1) / w.size)

  @parameterized.product(shape=((64, 64), (40, 72), (1, 9), (33, 200),
                                (192, 1120), (100, 1000), (7, 13)),
                         storage=tuple(Storage), scaled=(False, True))
  def test_decoders_agree(self, shape, storage, scaled):
    w, *_, array = make(shape, num_codes=6, percentile=90.0, storage=storage,
                        scaled=scaled)
    host = encoding.decode(array)
    self.assertEqual(array.shape, host.shape)
    self.assertEqual(host.shape, w.shape if storage is Storage.OUT_IN
                     else w.shape[::-1])
    device = jax.jit(lambda a: a.dequantize())(array)
    self.assertEqual(device.dtype, BF16)
    np.testing.assert_array_equal(np.asarray(device), host)
    np.testing.assert_array_equal(
        np.asarray(array.T.dequantize()), host.T)
    out_in = array if storage is Storage.OUT_IN else array.T
    dense = host if storage is Storage.OUT_IN else host.T
    layout = out_in.layout
    for band, tile in itertools.product(
        range(layout.bands), range(layout.tiles)):
      part = dense[np.ix_(encoding.tile_rows(layout, band),
                          encoding.tile_columns(layout, tile))]
      np.testing.assert_array_equal(
          encoding.decode_tile(out_in, band, tile), part)

  def test_dequantize_rounds_once(self):
    _, codebook, scale, _, array = make((64, 64), scaled=True)
    values = np.asarray(array.dequantize(jnp.float32))
    products = codebook.centroids * scale.astype(np.float32)[:, None]
    kept = ~escapes(array)
    for row in (0, 63):
      self.assertTrue(np.isin(values[row][kept[row]], products[row]).all())
    np.testing.assert_array_equal(
        values.astype(BF16), np.asarray(array.dequantize()))

  @parameterized.parameters("no_outliers", "all_outliers", "empty_tiles")
  def test_extremes(self, kind):
    w = checkpoints.weights((64, 256), BF16)
    threshold = {"no_outliers": 1e3, "all_outliers": -1.0,
                 "empty_tiles": 0.1}[kind]
    if kind == "empty_tiles":
      w[:, 100:] = w[:, 100:] * BF16.type(1e-3)
    codebook = Codebook(
        name="test", centroids=np.array([-0.02, 0.0, 0.02], np.float32),
        threshold=threshold, has_escape=True)
    array = encoding.encode(Matrix(w), codebook)
    found = encoding.decode(array)
    if kind == "all_outliers":
      np.testing.assert_array_equal(found, w)
    np.testing.assert_array_equal(np.asarray(array.dequantize()), found)
    share = {"no_outliers": 0, "all_outliers": 1}.get(kind)
    if share is not None:
      self.assertEqual(escapes(array).mean(), share)
    self.assertEqual(sharding.num_outliers(array), escapes(array).sum())

  def test_damage_is_found(self):
    *_, array = make((64, 64))
    planes = [np.array(p) for p in array.planes]
    planes[0][20] = 0xFFFFFFFF  # A row of escapes.
    with self.assertRaisesRegex(ValueError, "escapes and .* outliers"):
      encoding.decode(array.replace(planes=tuple(planes)))


class RowsTest(parameterized.TestCase):

  @parameterized.product(
      # 8 sections, sections that fill no band, an odd one, one band.
      shape=((512, 200), (320, 1120), (301, 130), (20, 64)),
      kind=((8, 90.0), (200, 100.0)), storage=tuple(Storage))
  def test_rows_of_a_table(self, shape, kind, storage):
    num_codes, percentile = kind
    *_, array = make(shape, storage=storage, scaled=True, num_codes=num_codes,
                     percentile=percentile)
    dense = encoding.decode(array)
    rng = np.random.default_rng(0)
    last = len(dense) - 1
    for index in (np.array([[0, last], [last, 1]]), np.array([last]),
                  rng.integers(0, last, 5), np.arange(last + 1)):
      found = jax.jit(lambda i: array.take_rows(i))(index)
      np.testing.assert_array_equal(np.asarray(found), dense[index])
    found = array.take_rows(jnp.array([last]), np.float32)
    np.testing.assert_array_equal(
        found, np.asarray(array.dequantize(np.float32))[[last]])

  @parameterized.parameters((("x", None),), ((None, "x"),))
  def test_rows_of_a_table_on_devices(self, spec):
    *_, array = make((512, 512), scaled=True)
    mesh = Mesh(mesh_utils.create_device_mesh((4,), jax.devices()[:4]), ("x",))
    placed = sharding.device_put(array, mesh, PartitionSpec(*spec))
    index = np.array([3, 511, 130, 256, 3])
    found = jax.jit(lambda a, i: a.take_rows(i))(placed, index)
    np.testing.assert_array_equal(
        np.asarray(found), encoding.decode(array)[index])

  def test_only_bands_are_decoded(self):
    *_, array = make((2048, 64), scaled=True)
    lowered = jax.jit(lambda i: array.take_rows(i)).lower(jnp.arange(2))
    self.assertNotIn("2048x64", lowered.as_text())
    lowered = jax.jit(lambda i: array.take_rows(i)).lower(jnp.arange(64))
    self.assertIn("2048x64", lowered.as_text())


class ShardTest(parameterized.TestCase):

  @parameterized.product(
      shape=((64, 512), (256, 1536), (200, 192), (96, 1000), (80, 48)),
      cuts=((1, 8), (8, 1), (4, 2), (2, 4)), storage=tuple(Storage))
  def test_parts_are_arrays(self, shape, cuts, storage):
    # 48 inputs have fewer sections than 8: the codes are then packed again.
    *_, array = make(shape, num_codes=8, percentile=90.0, storage=storage,
                     scaled=True)
    dense = encoding.decode(array)
    cut = sharding.with_shards(array, *cuts)
    specs = cut.partition_specs(PartitionSpec("a", "b"))
    sizes = dict(a=cuts[0], b=cuts[1])
    steps = tuple(n // c for n, c in zip(dense.shape, cuts))
    for at in itertools.product(range(cuts[0]), range(cuts[1])):
      index = dict(a=at[0], b=at[1])

      def part(leaf, spec, index=index):
        slices = []
        for name, size in zip(spec, leaf.shape):
          step = size // sizes.get(name, 1)
          begin = index.get(name, 0) * step
          slices.append(slice(begin, begin + step))
        return leaf[tuple(slices)]

      shard = jax.tree.map(part, cut, specs)
      self.assertEqual(shard.shape, steps)
      rows, columns = (slice(i * s, i * s + s) for i, s in zip(at, steps))
      np.testing.assert_array_equal(
          encoding.decode(shard), dense[rows, columns])

  @parameterized.product(
      degree=(1, 2, 4, 8), spec=(("x", None), (None, "x")),
      storage=tuple(Storage))
  def test_on_devices(self, degree, spec, storage):
    *_, array = make((64, 512), storage=storage, scaled=True)
    dense = encoding.decode(array)
    mesh = Mesh(mesh_utils.create_device_mesh(
        (degree,), jax.devices()[:degree]), ("x",))
    spec = PartitionSpec(*spec)
    placed = sharding.device_put(array, mesh, spec)
    for plane in placed.planes:
      self.assertLen(plane.addressable_shards, degree)
      self.assertEqual(plane.addressable_shards[0].data.size,
                       plane.size // degree)
    inside = jax.shard_map(
        lambda a: a.dequantize(), mesh=mesh,
        in_specs=(placed.partition_specs(spec),), out_specs=spec)
    np.testing.assert_array_equal(np.asarray(jax.jit(inside)(placed)), dense)
    outside = jax.jit(lambda a: a.dequantize())(placed)
    np.testing.assert_array_equal(np.asarray(outside), dense)

  def test_indivisible(self):
    *_, array = make((64, 100), num_codes=8)
    with self.assertRaisesRegex(ValueError, "100 can't be cut into 8"):
      sharding.with_shards(array, 1, 8)


class PytreeTest(absltest.TestCase):

  def test_shapes_come_from_the_leaves(self):
    *_, array = make((64, 512), scaled=True)
    abstract = jax.eval_shape(lambda a: a, array)
    self.assertEqual(abstract.shape, (64, 512))
    self.assertEqual(array.size, 64 * 512)
    self.assertEqual(
        array.nbytes, sum(x.nbytes for x in jax.tree.leaves(array)))
    doubled = jax.tree.map(functools.partial(np.repeat, repeats=1, axis=0),
                           array)
    self.assertEqual(doubled.num_codes, array.num_codes)


if __name__ == "__main__":
  absltest.main()
