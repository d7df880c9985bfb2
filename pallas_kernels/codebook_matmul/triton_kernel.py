"""The product over inputs in Triton: a warp per band, tensor cores.

A program is one warp. It walks along the words of a band, 16 at a time, and holds
such a block in the very registers in which tensor cores want it, so that weights
don't move between lanes: of a lane's number the two low bits choose words (the
product's inner dimension), the three high bits outputs, and the rest of both is
in the lane's own registers. With W a block, [o, w, s],

    W [32, 16, 8] -> [32, 128] . x^T [128, rows], summed in float32.

*Codes.* A plane's word holds eight codes. They are spread to two words of four
bytes, of the even and the odd places, by a few operations for all eight. A byte
is an offset into the table, which lies in shared memory: with 64 codes of two
bytes it is one row of the 32 banks, so that no lookup waits for another.

*Outliers.* The escape's entry is 0, so that the tensor cores need not know of it.
Words that have one (one in twelve, if one weight in a hundred is an outlier) are
listed in shared memory, by output, with the rank of their first outlier. When a
list may run over, and in the end, every lane works off the list of one output;
what a word has left goes to the list's end again. A rank is a sum of counts over
the outputs before and the words before, of four words in one int32.

What is written in PTX has a plain equivalent, for Triton's interpreter.
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
    word_of,
)

# Words that the list of an output holds; a block adds up to 16.
LIST = 32

_LIST: tl.constexpr = tl.constexpr(LIST)
_FULL: tl.constexpr = tl.constexpr(LIST - 16)
_BYTES: tl.constexpr = tl.constexpr(0x01010101)
_PLACES: tl.constexpr = tl.constexpr(0xC0C0C0C0)
_HIGH_OF_BYTES: tl.constexpr = tl.constexpr(0x80808080)


@triton.jit
def matmul_kernel(
    x, plane_a, plane_b, plane_c, codebook, scale, outliers, offsets, y, lists,
    rows: tl.constexpr, out: tl.constexpr, words: tl.constexpr,
    section_out: tl.constexpr, section_words: tl.constexpr,
    shards_out: tl.constexpr, shards_in: tl.constexpr, longest: tl.constexpr,
    splits: tl.constexpr, bits: tl.constexpr, num_codes: tl.constexpr,
    has_scale: tl.constexpr, has_outliers: tl.constexpr,
    is_words_first: tl.constexpr, block_rows: tl.constexpr,
    gather_rows: tl.constexpr, slots: tl.constexpr, use_ptx: tl.constexpr):
  """Writes [shards_in * splits, rows, out], float32: parts of the product.

  Programs: bands, parts, blocks of rows. `x` is [rows, words * 8]; `plane_b`,
  `plane_c`, `scale`, `outliers`, `offsets` are anything where there are none.
  `lists` is uint32 [programs * LIST * 32, 2] without PTX, else anything.
  """
  band, part = tl.program_id(0), tl.program_id(1)
  row = tl.program_id(2) * block_rows
  bands_per_section: tl.constexpr = (section_out + 31) // 32
  tiles_per_section: tl.constexpr = (section_words + 15) // 16
  bands: tl.constexpr = out // section_out * bands_per_section
  tiles: tl.constexpr = words // section_words * tiles_per_section
  section = band // bands_per_section
  first_out = section * section_out + band % bands_per_section * 32
  end_out = (section + 1) * section_out
  shard = part // splits
  shard_tiles: tl.constexpr = tiles // shards_in
  per_part: tl.constexpr = (shard_tiles + splits - 1) // splits
  first_tile = tl.minimum(part % splits * per_part, shard_tiles)
  last_tile = tl.minimum(first_tile + per_part, shard_tiles)
  first_tile += shard * shard_tiles
  start = first_word(first_tile, section_words)
  end = first_word(last_tile + shard * shard_tiles, section_words)
  # What is known of where words and outputs begin, for wide loads.
  step: tl.constexpr = 4 if section_words % 4 == 0 else 1
  start = tl.multiple_of(start, step)
  end = tl.multiple_of(end, step)

  of_out, of_word = block_of(is_words_first)
  o = first_out + of_out
  is_out = o < end_out
  r = tl.arange(0, 4)[:, None, None, None]
  i = tl.arange(0, 4)[None, None, None, :]
  o_in_band = 4 * tl.arange(0, 8)[None, :, None, None] + r
  dtype: tl.constexpr = x.dtype.element_ty
  # How many neighbors of the inner dimension, of two bytes each, Triton wants side
  # by side in a lane; any number is right, the true one needs no exchange.
  neighbors: tl.constexpr = 2 if is_words_first else 4
  table, at_lists = _shared(codebook, lists, dtype, num_codes, use_ptx)
  sums = tl.zeros((32, block_rows), tl.float32)
  others = tl.zeros((gather_rows, 32), tl.float32)
  length = tl.zeros((8,), tl.uint32)
  if has_outliers:
    shard_out = section // (out // section_out // shards_out)
    if is_words_first:
      list_of = shard * shards_out + shard_out
      where = first_tile * bands + band
    else:
      list_of = shard_out * shards_in + shard
      where = band * tiles + first_tile
    outliers += list_of.to(tl.int64) * longest
    outliers += tl.load(offsets + where, mask=first_tile < tiles, other=0).to(
        tl.int64)
  counted = tl.zeros((), tl.int32)
  listed_from = start

  a, b, c = load_planes(plane_a, plane_b, plane_c, o, start + of_word, is_out,
                         end, out, words, bits, is_words_first)
  for word in range(start, end, 16):
    word = tl.multiple_of(word, step)
    even, odd = codes(a, b, c, bits, use_ptx)
    even = canonical(even, is_words_first)
    odd = canonical(odd, is_words_first)
    # The next words are on their way while these are decoded.
    a, b, c = load_planes(plane_a, plane_b, plane_c, o, word + 16 + of_word,
                           is_out, end, out, words, bits, is_words_first)
    escapes = even
    if has_outliers:
      escapes = escapes_of(even, odd, bits, num_codes)
    if bits < 8 and dtype != tl.float32:
      even <<= 1
      odd <<= 1
    # Two places at a time have room in registers, if they have four bytes.
    places: tl.constexpr = 2 if dtype == tl.float32 else 8
    for first in tl.static_range(0, 8, places):
      xs = _load_x(x, row, word, end, rows, words, block_rows, is_words_first,
                   first, places, neighbors)
      if dtype == tl.float32:
        weights = _two_places(even, odd, table, first, dtype, bits, use_ptx)
      else:
        weights = _weights(even, odd, table, dtype, bits, use_ptx, neighbors)
      if not use_ptx:  # The interpreter has no products of 16-bit numbers.
        weights, xs = weights.to(tl.float32), xs.to(tl.float32)
      sums = tl.dot(weights, xs, sums, input_precision="tf32x3")
    if has_outliers:
      before, earlier, total = ranks(escapes, is_words_first, use_ptx)
      # Rank and word since the lists were empty, 16 bits each.
      earlier += counted + ((word - listed_from + word_of(is_words_first)) << 16)
      rank = byte_of(before[:, :, :, None], i, use_ptx) + earlier[None, None]
      slot, length = _slots(escapes, length)
      _list_block(at_lists, slot[None], r, o_in_band, escapes, rank, use_ptx)
      counted += total
      is_full = tl.max((length + _BYTES * (127 - _FULL)) & _HIGH_OF_BYTES, 0)
      if (is_full != 0) | (word + 16 >= end):
        # By output, 4 g + r.
        long = (length[:, None] >> (8 * tl.arange(0, 4).to(tl.uint32))[None]) & 255
        others = _work_off(
            others, at_lists, long.to(tl.int32, bitcast=True).reshape(32),
            outliers, x, row, listed_from, rows, words, slots, use_ptx)
        length = tl.zeros((8,), tl.uint32)
        listed_from = word + 16
        outliers += counted
        counted = tl.zeros((), tl.int32)

  n = row + tl.arange(0, block_rows)[:, None]
  o = first_out + tl.arange(0, 32)
  sums = sums.reshape(4, 8, block_rows).permute(2, 1, 0).reshape(block_rows, 32)
  if has_scale:
    sums *= tl.load(scale + o, mask=o < end_out, other=0).to(tl.float32)[None]
  where = y + (part * rows + n) * out + o[None]
  mask = (n < rows) & (o < end_out)[None]
  tl.store(where, sums, mask=mask)
  if has_outliers:
    n = row + tl.arange(0, gather_rows)[:, None]
    where = y + (part * rows + n) * out + o[None]
    mask = (n < rows) & (o < end_out)[None]
    tl.debug_barrier()
    tl.store(where, tl.load(where, mask=mask) + others, mask=mask)


@triton.jit
def _load_x(x, row, word, end, rows: tl.constexpr, words: tl.constexpr,
            block_rows: tl.constexpr, is_words_first: tl.constexpr,
            first: tl.constexpr, places: tl.constexpr, neighbors: tl.constexpr):
  """[16 * places, block_rows] in the order of `_weights` or `_two_places`."""
  high: tl.constexpr = block_rows // 8
  n_high = tl.arange(0, high)[:, None, None, None, None]
  i = tl.arange(0, 4)[None, :, None, None, None]
  n_low = tl.arange(0, 8)[None, None, :, None, None]
  t = tl.arange(0, 4)[None, None, None, :, None]
  place = first + tl.arange(0, places)[None, None, None, None, :]
  w = word + (i * 4 + t if is_words_first else t * 4 + i)
  n = row + n_high * 8 + n_low
  found = tl.load(x + n * (words * 8) + w * 8 + place,
                  mask=(n < rows) & (w < end), other=0)
  if places == 2:
    return found.permute(1, 4, 3, 0, 2).reshape(32, block_rows)
  else:
    found = found.reshape(high, 4, 8, 4, 2, 2, 2)
    if neighbors == 2:
      return found.permute(1, 4, 5, 3, 6, 0, 2).reshape(128, block_rows)
    else:
      return found.permute(1, 4, 3, 5, 6, 0, 2).reshape(128, block_rows)


@triton.jit
def _weights(even, odd, table, dtype: tl.constexpr, bits: tl.constexpr,
             use_ptx: tl.constexpr, neighbors: tl.constexpr):
  """[32, 128]: rows 8 r + g, columns in the order that needs no exchange."""
  # [r, g, t, i, lowest bit of the place, next, highest].
  codes = tl.join(even, odd)
  v0 = _lookup(codes, table, 0, dtype, bits, use_ptx)
  v1 = _lookup(codes, table, 1, dtype, bits, use_ptx)
  v2 = _lookup(codes, table, 2, dtype, bits, use_ptx)
  v3 = _lookup(codes, table, 3, dtype, bits, use_ptx)
  v = tl.join(tl.join(v0, v1), tl.join(v2, v3))
  if neighbors == 2:
    return v.permute(0, 1, 3, 6, 5, 2, 4).reshape(32, 128)
  else:
    return v.permute(0, 1, 3, 6, 2, 5, 4).reshape(32, 128)


@triton.jit
def _two_places(even, odd, table, first: tl.constexpr, dtype: tl.constexpr,
                bits: tl.constexpr, use_ptx: tl.constexpr):
  """[32, 32]: the same of places `first` and the next, for one neighbor."""
  v = _lookup(tl.join(even, odd), table, first // 2, dtype, bits, use_ptx)
  return v.permute(0, 1, 3, 4, 2).reshape(32, 32)


@triton.jit
def _lookup(codes, table, byte: tl.constexpr, dtype: tl.constexpr,
            bits: tl.constexpr, use_ptx: tl.constexpr):
  """The table's entries; `codes` count bytes if two-byte entries allow that."""
  if use_ptx:
    if dtype == tl.float32:
      return tl.inline_asm_elementwise(
          "{ .reg .b32 a; prmt.b32 a, $1, 0, $3; shl.b32 a, a, 2;"
          " add.u32 a, a, $2; ld.shared.f32 $0, [a]; }",
          "=f,r,r,r", [codes, table, 0x4440 + byte], tl.float32,
          is_pure=True, pack=1)
    elif bits == 8:
      return tl.inline_asm_elementwise(
          "{ .reg .b32 a, b, c, d;"
          " prmt.b32 a, $1, 0, $5; add.u32 a, a, a; add.u32 a, a, $3;"
          " prmt.b32 b, $2, 0, $6; add.u32 b, b, b; add.u32 b, b, $4;"
          " ld.shared.u16 c, [a]; ld.shared.u16 d, [b];"
          " mad.lo.u32 $0, d, 65536, c; }",
          "=r,r,r,r,r,r,r", [codes, table, 0x4440 + byte], tl.int16,
          is_pure=True, pack=2).to(dtype, bitcast=True)
    else:
      return tl.inline_asm_elementwise(
          "{ .reg .b32 a, b, c, d;"
          " prmt.b32 a, $1, 0, $5; add.u32 a, a, $3;"
          " prmt.b32 b, $2, 0, $6; add.u32 b, b, $4;"
          " ld.shared.u16 c, [a]; ld.shared.u16 d, [b];"
          " mad.lo.u32 $0, d, 65536, c; }",
          "=r,r,r,r,r,r,r", [codes, table, 0x4440 + byte], tl.int16,
          is_pure=True, pack=2).to(dtype, bitcast=True)
  else:
    code = (codes >> (8 * byte)) & 255
    if bits < 8 and dtype != tl.float32:
      code >>= 1
    return tl.load(table + code.to(tl.int32)).to(dtype)


@triton.jit
def _shared(codebook, lists, dtype: tl.constexpr, num_codes: tl.constexpr,
            use_ptx: tl.constexpr):
  """Where the table lies and the lists do, with the table filled."""
  if use_ptx:
    # With the lists: 1 KiB of up to 256 entries, then 8 KiB.
    at = tl.inline_asm_elementwise(
        "{ .shared .align 1024 .b8 codebook_matmul_shared[9216];"
        " mov.u32 $0, codebook_matmul_shared; }", "=r,r", [tl.program_id(0)],
        tl.int32, is_pure=False, pack=1)
    entry = tl.arange(0, 256)
    value = tl.load(codebook + entry, mask=entry < num_codes, other=0).to(dtype)
    if dtype == tl.float32:
      tl.inline_asm_elementwise(
          "st.shared.f32 [$1], $2; mov.b32 $0, 0;", "=r,r,f",
          [at + 4 * entry, value], tl.int32, is_pure=False, pack=1)
    else:
      tl.inline_asm_elementwise(
          "st.shared.b16 [$1], $2; mov.b32 $0, 0;", "=r,r,h",
          [at + 2 * entry, value.to(tl.int16, bitcast=True)], tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()
    # Lookups use this value, so that none can be moved before the barrier.
    at = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [at], tl.int32,
                                   is_pure=False, pack=1)
    return at, at + 1024
  else:
    programs = tl.num_programs(0) * tl.num_programs(1)
    program = (tl.program_id(0) + tl.num_programs(0) * tl.program_id(1)
               + programs * tl.program_id(2))
    lists = lists.to(tl.pointer_type(tl.int64))
    return codebook, lists + program * (_LIST * 32)


@triton.jit
def _slots(escapes, length):
  """Where the words that have escapes go in the lists of their outputs.

  Args:
    escapes: [r, g, t, i].
    length: uint32 [g], of the lists, a byte for each r.

  Returns:
    uint32 [g, t, i], a byte for each r; and the lengths afterwards.
  """
  byte = 1 << (8 * tl.arange(0, 4)).to(tl.uint32)
  has = tl.sum(tl.minimum(escapes, 1) * byte[:, None, None, None], 0)
  before_i = tl.cumsum(has, 2) - has
  of_four = tl.sum(has, 2)
  before_t = tl.cumsum(of_four, 1) - of_four
  slots = before_i + (before_t + length[:, None])[:, :, None]
  return slots, length + tl.sum(of_four, 1)


@triton.jit
def _list(lists, slot, o, escapes, rank, use_ptx: tl.constexpr):
  """Lists words that have escapes, at a slot of an output's list."""
  if use_ptx:
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0;"
        " @p st.shared.v2.b32 [$1], {$2, $3}; mov.b32 $0, 0; }", "=r,r,r,r",
        [lists + (slot * 32 + o) * 8, escapes, rank], tl.int32, is_pure=False,
        pack=1)
  else:
    tl.store(lists + slot * 32 + o,
             (rank.to(tl.int64) << 32) | escapes.to(tl.int64),
             mask=escapes != 0)


@triton.jit
def _list_block(lists, slots, r, o, escapes, rank, use_ptx: tl.constexpr):
  """The same for a block: its slots are bytes, one for each r."""
  if use_ptx:
    # An entry has 8 bytes and a slot 256: the address in one instruction.
    tl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 a; setp.ne.b32 p, $5, 0;"
        " prmt.b32 a, $2, $3, $4; add.u32 a, a, $1;"
        " @p st.shared.v2.b32 [a], {$5, $6}; mov.b32 $0, 0; }",
        "=r,r,r,r,r,r,r",
        [lists, slots, 8 * o, 0x5504 + 16 * r, escapes, rank], tl.int32,
        is_pure=False, pack=1)
  else:
    _list(lists, byte_of(slots, r, use_ptx), o, escapes, rank, use_ptx)


@triton.jit
def _listed(lists, slot, o, use_ptx: tl.constexpr):
  """What `_list` stored: (escapes, rank)."""
  if use_ptx:
    return tl.inline_asm_elementwise(
        "ld.shared.v2.b32 {$0, $1}, [$2];", "=r,=r,r",
        [lists + (slot * 32 + o) * 8], (tl.uint32, tl.int32), is_pure=False,
        pack=1)
  else:
    both = tl.load(lists + slot * 32 + o)
    return both.to(tl.uint32), (both >> 32).to(tl.int32)


@triton.jit
def _gather(where, mask, use_ptx: tl.constexpr):
  """Loads as float32, in the layout as it is; 0 where not in the mask."""
  dtype: tl.constexpr = where.dtype.element_ty
  if not use_ptx:
    return tl.load(where, mask=mask, other=0).to(tl.float32)
  elif dtype == tl.float32:
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0;"
        " @p ld.global.f32 $0, [$1]; }", "=f,l,r",
        [where.to(tl.int64), mask.to(tl.int32)], tl.float32, is_pure=True,
        pack=1)
  elif dtype == tl.bfloat16:
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 v; setp.ne.b32 p, $2, 0; mov.b32 v, 0;"
        " @p ld.global.u16 v, [$1]; shl.b32 v, v, 16; mov.b32 $0, v; }",
        "=f,l,r", [where.to(tl.int64), mask.to(tl.int32)], tl.float32,
        is_pure=True, pack=1)
  else:
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b16 v; setp.ne.b32 p, $2, 0; mov.b16 v, 0;"
        " @p ld.global.b16 v, [$1]; cvt.f32.f16 $0, v; }", "=f,l,r",
        [where.to(tl.int64), mask.to(tl.int32)], tl.float32, is_pure=True,
        pack=1)


@triton.jit
def _work_off(sums, lists, length, outliers, x, row, first_word,
              rows: tl.constexpr, words: tl.constexpr, slots: tl.constexpr,
              use_ptx: tl.constexpr):
  """Adds x times the outliers that are listed: to [rows, 32] by output."""
  o = tl.arange(0, 32)[None, :]
  n = row + tl.arange(0, sums.shape[0])[:, None, None]
  first = tl.zeros((32,), tl.int32)
  tl.debug_barrier()
  while tl.max(length - first) > 0:
    slot = first[None, :] + tl.arange(0, slots)[:, None]
    escapes, rank = _listed(lists, slot & (_LIST - 1), o, use_ptx)
    is_listed = slot < length[None, :]
    escapes = tl.where(is_listed, escapes, 0)
    # How many places are below the lowest escape.
    place = popc((escapes - 1) & ~escapes & _PLACES, use_ptx)
    value = _gather(outliers + (rank & 0xFFFF), is_listed, use_ptx)
    where = (first_word + (rank >> 16)) * 8 + place
    if sums.shape[0] == 1:
      found = _gather(x + row * (words * 8) + where, is_listed, use_ptx)
      sums += tl.sum(found * value, 0)[None]
    else:
      found = _gather(x + n * (words * 8) + where[None],
                      is_listed[None] & (n < rows), use_ptx)
      sums += tl.sum(found * value[None], 1)
    # What is left goes to the end: never more than was taken from the front.
    escapes &= escapes - 1
    is_left = (escapes != 0).to(tl.int32)
    end = length[None, :] + tl.cumsum(is_left, 0) - is_left
    tl.debug_barrier()
    _list(lists, end & (_LIST - 1), o, escapes, rank + 1, use_ptx)
    first = tl.minimum(first + slots, length)
    length += tl.sum(is_left, 0)
    tl.debug_barrier()
  return sums
