"""Matrix to LegoArray and back on the host, in pieces that fit a cache."""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses

import numpy as np

from legolm_jax import codebook as codebook_lib
from legolm_jax import histogram, packing
from legolm_jax.array import LegoArray, Storage

# Weights that are handled at once.
_CHUNK = 1 << 18


@dataclasses.dataclass(frozen=True, kw_only=True)
class Codebook:
  """What the weights of one scope are encoded with.

  Attributes:
    name: of the scope.
    centroids: float32 [k] ascending.
    threshold: magnitudes (in scales, where there is one) above it are outliers.
    has_escape: whether there are outliers at all.
  """

  name: str
  centroids: np.ndarray
  threshold: float
  has_escape: bool

  @property
  def num_codes(self) -> int:
    return self.centroids.size + self.has_escape


@dataclasses.dataclass(frozen=True)
class Matrix:
  """A stored matrix, read by outputs.

  Attributes:
    data: [out, in] or [in, out], often a memory map.
    storage: which of them.
  """

  data: np.ndarray
  storage: Storage = Storage.OUT_IN

  @property
  def out(self) -> int:
    return self.data.shape[self.storage is Storage.IN_OUT]

  @property
  def inputs(self) -> int:
    return self.data.shape[self.storage is Storage.OUT_IN]

  def rows(self, start: int, stop: int) -> np.ndarray:
    """[stop - start, in], contiguous."""
    if self.storage is Storage.OUT_IN:
      return np.ascontiguousarray(self.data[start:stop])
    return np.ascontiguousarray(self.data[:, start:stop].T)

  def chunks(self) -> Iterator[tuple[int, np.ndarray]]:
    """Yields all rows in pieces, each with the number of its first row."""
    step = max(1, _CHUNK // max(self.inputs, 1))
    for start in range(0, self.out, step):
      yield start, self.rows(start, min(start + step, self.out))


def encode(matrix: Matrix, codebook: Codebook, scale: np.ndarray | None = None,
           keep: np.ndarray | None = None) -> LegoArray:
  """Compresses a matrix.

  Args:
    matrix: of bfloat16, float16 or float32, finite.
    codebook: its codebook.
    scale: bfloat16 [out], positive; None for 1.
    keep: int64, places in the matrix read as [out, in] that are outliers
      whatever their magnitude; needs an escape.

  Returns:
    A LegoArray on the host, in the storage of `matrix`.
  """
  dtype = matrix.data.dtype
  layout = packing.Layout.of(matrix.out, matrix.inputs)
  k = codebook.centroids.size
  escape = k if codebook.has_escape else None
  bits = packing.code_bits(codebook.num_codes)
  bins = histogram.bins_for(dtype, scale is not None)
  table, unsure = bins.code_table(
      codebook.centroids, codebook.threshold, escape)
  planes = [np.empty((matrix.out, layout.words), d)
            for d in packing.plane_dtypes(bits)]
  keep = np.zeros(0, np.int64) if keep is None else np.sort(keep)
  places, values = [], []
  for start, x in matrix.chunks():
    rows = slice(start, start + len(x))
    part = None if scale is None else scale[rows]
    codes = table.take(bins.keys(scaled(x, part)), mode="clip")
    # The rare ones: outliers, and weights near the border of two centroids.
    special = np.flatnonzero(codes >= k)
    found = codes.ravel()[special]
    border = special[found == unsure]
    codes.ravel()[border] = codebook_lib.nearest(
        _exact_multiples(x, part, border), codebook.centroids)
    begin = start * matrix.inputs
    kept = keep[slice(*np.searchsorted(keep, [begin, begin + x.size]))] - begin
    codes.ravel()[kept] = k
    outliers = special[found == k]
    if kept.size:
      outliers = np.union1d(outliers, kept)
    places.append(outliers + begin)
    values.append(x.ravel()[outliers])
    codes = layout.fill(codes.astype(np.uint8, copy=False))
    for plane, part in zip(planes, packing.pack(codes, bits)):
      plane[rows] = part
  entries = codebook.centroids.astype(np.float32)
  outliers = offsets = None
  if codebook.has_escape:
    entries = np.append(entries, np.float32(0))
    outliers, offsets = packing.order_outliers(
        layout, np.concatenate(places), np.concatenate(values))
    outliers = at_least_one(outliers)[None, None]
  array = LegoArray(
      planes=tuple(planes), codebook=entries, scale=scale, outliers=outliers,
      offsets=offsets, section_out=layout.section_out,
      section_inputs=layout.section_inputs, num_codes=codebook.num_codes,
      dtype=dtype, storage=Storage.OUT_IN)
  return array if matrix.storage is Storage.OUT_IN else contiguous(array.T)


def scaled(x: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
  """x [rows, in] over the rows' scale in float32; x itself without one."""
  if scale is None:
    return x
  inverse = np.float32(1) / scale.astype(np.float32)
  return x.astype(np.float32) * inverse[:, None]


def contiguous(array: LegoArray) -> LegoArray:
  """The same with every leaf contiguous in memory."""
  fix = lambda a: None if a is None else np.ascontiguousarray(a)
  return array.replace(planes=tuple(map(fix, array.planes)),
                       outliers=fix(array.outliers), offsets=fix(array.offsets))


def decode(array: LegoArray) -> np.ndarray:
  """The matrix, on the host: what `LegoArray.dequantize` gives, bit by bit."""
  rows = np.concatenate([part for _, part in decode_rows(array)])
  return rows if array.storage is Storage.OUT_IN else rows.T


def decode_rows(array: LegoArray) -> Iterator[tuple[int, np.ndarray]]:
  """Yields the rows of [out, in] in pieces, with the number of the first.

  Args:
    array: on the host and not sharded.

  Raises:
    ValueError: if the number of outliers is not that of escapes.
  """
  if array.storage is Storage.IN_OUT:
    array = array.T
  layout, bits = array.layout, array.bits
  starts = _band_starts(layout)
  step = max(1, _CHUNK // (packing.BAND * max(layout.inputs, 1)))
  for band in range(0, layout.bands, step):
    last = min(band + step, layout.bands)
    start, stop = starts[band], starts[last]
    codes = layout.unfill(packing.unpack(
        [np.ascontiguousarray(p[start:stop]) for p in array.planes], bits))
    if array.scale is None:
      values = array.codebook.astype(array.dtype)[codes]
    else:
      scale = array.scale[start:stop].astype(np.float32)
      values = (array.codebook[codes] * scale[:, None]).astype(array.dtype)
    if array.outliers is not None:
      flat = np.flatnonzero(codes == array.num_codes - 1)
      rank, _ = layout.places(flat + start * layout.inputs)
      first = int(array.offsets[band, 0])
      found = array.outliers[0, 0, first:first + flat.size]
      end = array.offsets[last, 0] if last < layout.bands else first + flat.size
      if found.size != flat.size or end != first + flat.size:
        raise ValueError(f"rows {start} to {stop} have {flat.size} escapes and "
                         f"{min(found.size, int(end) - first)} outliers")
      values.ravel()[flat[np.argsort(rank)]] = found
    yield start, values


def decode_tile(array: LegoArray, band: int, tile: int) -> np.ndarray:
  """One tile, [outputs, inputs]; the tile's own offset is used.

  Args:
    array: on the host, OUT_IN, not sharded.
    band, tile: its place in `offsets`.

  Raises:
    ValueError: if there are fewer outliers than escapes.
  """
  layout = array.layout
  codes, rows = tile_codes(array, band, tile), tile_rows(layout, band)
  values = array.codebook[codes]
  if array.scale is not None:
    values = values * array.scale[rows].astype(np.float32)[:, None]
  values = values.astype(array.dtype)
  if array.outliers is not None:
    # [word, output, code]: the order of outliers.
    ordered = lambda a: a.reshape(
        len(a), -1, packing.WORD).transpose(1, 0, 2)
    escaped = ordered(codes == array.num_codes - 1)
    first, count = int(array.offsets[band, tile]), np.count_nonzero(escaped)
    found = array.outliers[0, 0, first:first + count]
    if found.size != count:
      raise ValueError(f"tile {band}, {tile} has {count} escapes and "
                       f"{found.size} outliers")
    in_order = np.ascontiguousarray(ordered(values))
    in_order[escaped] = found
    values = in_order.transpose(1, 0, 2).reshape(values.shape)
  return values[:, :tile_columns(layout, tile).size]


def tile_rows(layout: packing.Layout, band: int) -> np.ndarray:
  """The outputs of a band."""
  section, band = divmod(band, layout.bands_per_section)
  first = band * packing.BAND
  last = min(first + packing.BAND, layout.section_out)
  return section * layout.section_out + np.arange(first, last)


def tile_columns(layout: packing.Layout, tile: int) -> np.ndarray:
  """The inputs of a tile."""
  section, tile = divmod(tile, layout.tiles_per_section)
  first = tile * packing.TILE_INPUTS
  last = min(first + packing.TILE_INPUTS, layout.section_inputs)
  return section * layout.section_inputs + np.arange(first, last)


def tile_codes(array: LegoArray, band: int, tile: int) -> np.ndarray:
  """The codes of one tile, uint8 [outputs, words * 8], for `decode_tile`."""
  layout = array.layout
  rows = tile_rows(layout, band)
  section, tile = divmod(tile, layout.tiles_per_section)
  per_tile = packing.TILE_INPUTS // packing.WORD
  first = section * layout.words_per_section + tile * per_tile
  last = min(first + per_tile, (section + 1) * layout.words_per_section)
  planes = [np.ascontiguousarray(p[rows[0]:rows[-1] + 1, first:last])
            for p in array.planes]
  return packing.unpack(planes, array.bits)


def _band_starts(layout: packing.Layout) -> np.ndarray:
  """First output of every band, and the number of outputs."""
  inside = np.arange(layout.bands_per_section) * packing.BAND
  sections = np.arange(0, layout.out, layout.section_out)
  return np.append((sections[:, None] + inside).ravel(), layout.out)


def _exact_multiples(x, scale, flat) -> np.ndarray:
  """float64 x / scale at places of x [rows, in]."""
  values = x.ravel()[flat].astype(np.float64)
  if scale is not None:
    values /= scale[flat // x.shape[1]].astype(np.float64)
  return values


def at_least_one(outliers: np.ndarray) -> np.ndarray:
  """An empty list can't be indexed on a device."""
  return outliers if outliers.size else np.zeros(1, outliers.dtype)
