"""The dense matrix and the product over outputs in Triton, block by block.

A block is decoded in full, outliers in their places: [32, 16, 8], outputs, words
and places. Unlike in the product over inputs every place asks for its outlier, and
the table is read through the cache.
"""

import triton
import triton.language as tl

from pallas_kernels.codebook_matmul.triton_blocks import (
    block_of,
    byte_of,
    canonical,
    codes,
    escapes_of,
    first_word,
    load_planes,
    popc,
    ranks,
)


@triton.jit
def lookup_kernel(
    plane_a, plane_b, plane_c, codebook, scale, outliers, offsets, dense,
    out: tl.constexpr, words: tl.constexpr, section_out: tl.constexpr,
    section_words: tl.constexpr, section_inputs: tl.constexpr,
    shards_out: tl.constexpr, shards_in: tl.constexpr, longest: tl.constexpr,
    bits: tl.constexpr, num_codes: tl.constexpr, has_scale: tl.constexpr,
    has_outliers: tl.constexpr, is_words_first: tl.constexpr,
    use_ptx: tl.constexpr):
  """Writes the dense matrix as stored. Programs: tiles, bands."""
  tile, band = tl.program_id(0), tl.program_id(1)
  v = _values(
      plane_a, plane_b, plane_c, codebook, scale, outliers, offsets, tile, band,
      out, words, section_out, section_words, shards_out, shards_in, longest,
      bits, num_codes, has_scale, has_outliers, is_words_first, use_ptx)
  tiles: tl.constexpr = (section_words + 15) // 16
  inputs: tl.constexpr = words // section_words * section_inputs
  section = tile // tiles
  o, end_out = _outputs(band, out, section_out)
  of_out, of_word = block_of(is_words_first)
  o += of_out[:, :, :, :, None]
  column = ((tile % tiles * 16 + of_word) * 8)[:, :, :, :, None] + tl.arange(
      0, 8)[None, None, None, None, :]
  mask = (o < end_out) & (column < section_inputs)
  column += section * section_inputs
  if is_words_first:
    tl.store(dense + column.to(tl.int64) * out + o,
             v.permute(3, 1, 2, 0, 4).to(dense.dtype.element_ty), mask=mask)
  else:
    tl.store(dense + o.to(tl.int64) * inputs + column,
             v.to(dense.dtype.element_ty), mask=mask)


@triton.jit
def transposed_kernel(
    y, plane_a, plane_b, plane_c, codebook, scale, outliers, offsets, z,
    rows: tl.constexpr, out: tl.constexpr, words: tl.constexpr,
    section_out: tl.constexpr, section_words: tl.constexpr,
    shards_out: tl.constexpr, shards_in: tl.constexpr, longest: tl.constexpr,
    splits: tl.constexpr, bits: tl.constexpr, num_codes: tl.constexpr,
    has_scale: tl.constexpr, has_outliers: tl.constexpr,
    is_words_first: tl.constexpr, block_rows: tl.constexpr,
    use_ptx: tl.constexpr):
  """Writes [splits, rows, words * 8], float32: parts of the product.

  Programs: tiles, parts of the bands, blocks of rows. `y` is [rows, out].
  """
  tile, part = tl.program_id(0), tl.program_id(1)
  n = tl.program_id(2) * block_rows + tl.arange(0, block_rows)[None, :]
  dtype: tl.constexpr = y.dtype.element_ty
  bands: tl.constexpr = out // section_out * ((section_out + 31) // 32)
  per_part: tl.constexpr = (bands + splits - 1) // splits
  first = tl.minimum(part * per_part, bands)
  last = tl.minimum(first + per_part, bands)
  sums = tl.zeros((128, block_rows), tl.float32)
  for band in range(first, last):
    v = _values(
        plane_a, plane_b, plane_c, codebook, scale, outliers, offsets, tile,
        band, out, words, section_out, section_words, shards_out, shards_in,
        longest, bits, num_codes, has_scale, has_outliers, is_words_first,
        use_ptx)
    # [t, i, place] by [g, r].
    v = v.permute(2, 3, 4, 1, 0).reshape(128, 32).to(dtype)
    o, end_out = _outputs(band, out, section_out)
    o += tl.arange(0, 32)[:, None]
    ys = tl.load(y + n * out + o, mask=(n < rows) & (o < end_out), other=0)
    if not use_ptx:  # The interpreter has no products of 16-bit numbers.
      v, ys = v.to(tl.float32), ys.to(tl.float32)
    sums = tl.dot(v, ys, sums, input_precision="tf32x3")
  k = tl.arange(0, 128)[:, None]
  t, i = k // 32, k // 8 % 4
  if is_words_first:
    of_word = 4 * i + t
  else:
    of_word = 4 * t + i
  tiles: tl.constexpr = (section_words + 15) // 16
  word = first_word(tile, section_words) + of_word
  mask = (n < rows) & (word < (tile // tiles + 1) * section_words)
  tl.store(z + (part * rows + n) * (words * 8) + word * 8 + k % 8, sums,
           mask=mask)


@triton.jit
def _outputs(band, out: tl.constexpr, section_out: tl.constexpr):
  """The first output of a band, and where those of its section end."""
  bands: tl.constexpr = (section_out + 31) // 32
  section = band // bands
  return (section * section_out + band % bands * 32,
          (section + 1) * section_out)


@triton.jit
def _values(plane_a, plane_b, plane_c, codebook, scale, outliers, offsets,
            tile, band, out: tl.constexpr, words: tl.constexpr,
            section_out: tl.constexpr, section_words: tl.constexpr,
            shards_out: tl.constexpr, shards_in: tl.constexpr,
            longest: tl.constexpr, bits: tl.constexpr, num_codes: tl.constexpr,
            has_scale: tl.constexpr, has_outliers: tl.constexpr,
            is_words_first: tl.constexpr, use_ptx: tl.constexpr):
  """A tile's weights [r, g, t, i, place], float32; 0 or so beyond the matrix."""
  tiles_per_section: tl.constexpr = (section_words + 15) // 16
  first = first_word(tile, section_words)
  end = (tile // tiles_per_section + 1) * section_words
  step: tl.constexpr = 4 if section_words % 4 == 0 else 1
  first = tl.multiple_of(first, step)
  end = tl.multiple_of(end, step)
  first_out, end_out = _outputs(band, out, section_out)
  of_out, of_word = block_of(is_words_first)
  o = first_out + of_out
  a, b, c = load_planes(plane_a, plane_b, plane_c, o, first + of_word,
                        o < end_out, end, out, words, bits, is_words_first)
  even, odd = codes(a, b, c, bits, use_ptx)
  even = canonical(even, is_words_first)
  odd = canonical(odd, is_words_first)
  byte = tl.arange(0, 4)[None, None, None, None, :, None]
  code = byte_of(tl.join(even, odd)[:, :, :, :, None, :], byte, use_ptx)
  # [r, g, t, i, 4, 2]: places 2 j and 2 j + 1.
  v = tl.load(codebook + code.reshape(4, 8, 4, 4, 8))
  if has_scale:
    r = tl.arange(0, 4)[:, None]
    g = tl.arange(0, 8)[None, :]
    o = first_out + 4 * g + r
    v *= tl.load(scale + o, mask=o < end_out, other=0).to(tl.float32)[
        :, :, None, None, None]
  if has_outliers:
    bands: tl.constexpr = out // section_out * ((section_out + 31) // 32)
    tiles: tl.constexpr = words // section_words * tiles_per_section
    shard_out = band // (bands // shards_out)
    shard_in = tile // (tiles // shards_in)
    if is_words_first:
      list_of = shard_in * shards_out + shard_out
      where = tile * bands + band
    else:
      list_of = shard_out * shards_in + shard_in
      where = band * tiles + tile
    outliers += list_of.to(tl.int64) * longest + tl.load(offsets + where).to(
        tl.int64)
    escapes = escapes_of(even, odd, bits, num_codes)
    before, earlier, _ = ranks(escapes, is_words_first, use_ptx)
    i = tl.arange(0, 4)[None, None, None, :]
    rank = byte_of(before[:, :, :, None], i, use_ptx) + earlier[None, None]
    place = tl.arange(0, 8)[None, None, None, None, :]
    bit = (1 << (place // 2 * 8 + place % 2 + 6)).to(tl.uint32)
    escapes = escapes[:, :, :, :, None]
    rank = rank[:, :, :, :, None] + popc(escapes & (bit - 1), use_ptx)
    is_outlier = (escapes & bit) != 0
    v = tl.where(
        is_outlier,
        tl.load(outliers + rank, mask=is_outlier, other=0).to(tl.float32), v)
  return v
