"""Blocks of a compressed matrix in Triton: 32 outputs times 16 words.

Of a lane's number the two low bits choose words, the three high bits outputs, and
the rest of both is in the lane's own registers, so that a warp holds a block as
tensor cores want it. A block is [r, g, t, i]: output 4 g + r; word 4 t + i, or
4 i + t where words come first in memory.

What is written in PTX has a plain equivalent, for Triton's interpreter.
"""

import triton
import triton.language as tl

_BYTES: tl.constexpr = tl.constexpr(0x01010101)


@triton.jit
def first_word(tile, section_words: tl.constexpr):
  """Of a tile, or the number of words."""
  tiles: tl.constexpr = (section_words + 15) // 16
  return tile // tiles * section_words + tile % tiles * 16


@triton.jit
def block_of(is_words_first: tl.constexpr):
  """(output, word) of the places of a block [4, 8, 4, 4] as it is loaded.

  Dimensions: registers, three bits of the lane, two bits of the lane, registers
  that lie side by side in memory.
  """
  a = tl.arange(0, 4)[:, None, None, None]
  g = tl.arange(0, 8)[None, :, None, None]
  t = tl.arange(0, 4)[None, None, :, None]
  b = tl.arange(0, 4)[None, None, None, :]
  if is_words_first:
    return g * 4 + b, a * 4 + t
  else:
    return g * 4 + a, t * 4 + b


@triton.jit
def word_of(is_words_first: tl.constexpr):
  """[t, i]: which word of a block."""
  t, i = tl.arange(0, 4)[:, None], tl.arange(0, 4)[None, :]
  if is_words_first:
    return 4 * i + t
  else:
    return 4 * t + i


@triton.jit
def canonical(v, is_words_first: tl.constexpr):
  """A block from the order of loading to [r, g, t, i]: output 4 g + r."""
  if is_words_first:
    return v.permute(3, 1, 2, 0)
  else:
    return v


@triton.jit
def byte_of(v, index, use_ptx: tl.constexpr):
  """int32: one of the four bytes of each."""
  if use_ptx:
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, 0, $2;", "=r,r,r", [v, 0x4440 + index], tl.int32,
        is_pure=True, pack=1)
  else:
    return ((v >> (8 * index).to(tl.uint32)) & 255).to(tl.int32, bitcast=True)


@triton.jit
def load_planes(plane_a, plane_b, plane_c, o, word, is_out, end,
                 out: tl.constexpr, words: tl.constexpr, bits: tl.constexpr,
                 is_words_first: tl.constexpr):
  """A block of up to three planes, zeros where there is nothing."""
  where = word * out + o if is_words_first else o * words + word
  mask = is_out & (word < end)
  a = tl.load(plane_a + where, mask=mask, other=0)
  b = a
  c = a
  if bits != 2 and bits != 4:
    b = tl.load(plane_b + where, mask=mask, other=0)
  if bits == 7:
    c = tl.load(plane_c + where, mask=mask, other=0)
  return a, b, c


@triton.jit
def spread_crumbs(v, use_ptx: tl.constexpr):
  """Byte j gets codes 2 j and 2 j + 1 of a word of two bits each at 4 and 6."""
  if use_ptx:
    # Two words that share a register. In one piece, lest masks that follow be
    # moved to where they cost more.
    return tl.inline_asm_elementwise(
        "{ .reg .b32 a, b, c, d;"
        " prmt.b32 a, $2, 0, 0x1100; shl.b32 b, a, 4;"
        " lop3.b32 $0, b, a, 0x00FF00FF, 0xE4;"
        " prmt.b32 c, $2, 0, 0x3322; shl.b32 d, c, 4;"
        " lop3.b32 $1, d, c, 0x00FF00FF, 0xE4; }", "=r,=r,r", [v], tl.uint32,
        is_pure=True, pack=2)
  else:
    v = v.to(tl.uint32)
    v = (v & 255) * 0x0101 | (v >> 8) * 0x01010000
    return ((v << 4) & 0x00FF00FF) | (v & 0xFF00FF00)


@triton.jit
def codes(a, b, c, bits: tl.constexpr, use_ptx: tl.constexpr):
  """uint32 twice, a byte per code: of the even places, of the odd places."""
  low: tl.constexpr = 4 if bits >= 4 else 0
  if bits >= 4:
    even = a & 0x0F0F0F0F
    odd = (a >> 4) & 0x0F0F0F0F
  else:
    even = a.to(tl.uint32) & 0
    odd = even
  if bits == 8:
    even |= (b << 4) & 0xF0F0F0F0
    odd |= b & 0xF0F0F0F0
  elif bits & 2:
    t = spread_crumbs(a if bits < 4 else b, use_ptx)
    even |= (t >> (4 - low)) & (_BYTES * (3 << low))
    odd |= (t >> (6 - low)) & (_BYTES * (3 << low))
  if bits & 1:
    s = (c if bits == 7 else b).to(tl.uint32)
    # Sums carry, but never into a bit that is kept.
    factor: tl.constexpr = (1 | 1 << 6 | 1 << 12 | 1 << 18) << (bits - 2)
    even |= ((s & 0x55) * (2 * factor)) & (_BYTES << (bits - 1))
    odd |= ((s & 0xAA) * factor) & (_BYTES << (bits - 1))
  return even, odd


@triton.jit
def escapes_of(even, odd, bits: tl.constexpr, num_codes: tl.constexpr):
  """uint32: which places hold the escape.

  Bit 8 j + 6 is of place 2 j, bit 8 j + 7 of place 2 j + 1, and the rest is 0.
  """
  if bits < 8:
    # No code is above the escape: it alone reaches a byte's highest bit, or that
    # below.
    odd += _BYTES * (129 - num_codes)
    even += _BYTES * ((65 if bits < 7 else 129) - num_codes)
  else:
    even ^= _BYTES * (256 - num_codes)
    odd ^= _BYTES * (256 - num_codes)
    even &= (even & 0x7F7F7F7F) + _BYTES
    odd &= (odd & 0x7F7F7F7F) + _BYTES
  if bits > 6:
    even >>= 1
  return (even & 0x40404040) | (odd & 0x80808080)


@triton.jit
def popc(v, use_ptx: tl.constexpr):
  """int32: how many bits are set."""
  if use_ptx:
    return tl.inline_asm_elementwise(
        "popc.b32 $0, $1;", "=r,r", [v], tl.int32, is_pure=True, pack=1)
  v = (v & 0x55555555) + ((v >> 1) & 0x55555555)
  v = (v & 0x33333333) + ((v >> 2) & 0x33333333)
  v = (v + (v >> 4)) & 0x0F0F0F0F
  return ((v * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def ranks(escapes, is_words_first: tl.constexpr, use_ptx: tl.constexpr):
  """Of a block's outliers, [r, g, t, i].

  Returns:
    uint32 [r, g, t], a byte per word i: how many come before its first, in its
    word's outputs; int32 [t, i], how many come in the words before; the number
    of all, a scalar.
  """
  # A byte each for four words. Before a word's last output come at most 248, so
  # that a carry of the last one's own never shows.
  byte = 1 << (8 * tl.arange(0, 4)).to(tl.uint32)
  counts = tl.sum(popc(escapes, use_ptx).to(tl.uint32, bitcast=True)
                  * byte[None, None, None, :], 3)
  of_four = tl.sum(counts, 0)
  before = (tl.cumsum(counts, 0) - counts) + (
      tl.cumsum(of_four, 0) - of_four)[None]
  # Of all outputs [t]: words 0 and 2, words 1 and 3, 16 bits each.
  low = tl.sum(of_four & 0x00FF00FF, 0)
  high = tl.sum((of_four >> 8) & 0x00FF00FF, 0)
  # Of all words; a half's sum is at most 2048.
  total = tl.sum(low + high, 0)
  total = (total & 0xFFFF) + (total >> 16)
  if is_words_first:
    # Word 4 i + t.
    sums_low, sums_high = tl.sum(low, 0), tl.sum(high, 0)
    low = tl.cumsum(low, 0) - low
    high = tl.cumsum(high, 0) - high
    w0 = low & 0xFFFF
    until = sums_low & 0xFFFF
    w1 = until + (high & 0xFFFF)
    until += sums_high & 0xFFFF
    w2 = until + (low >> 16)
    until += sums_low >> 16
    w3 = until + (high >> 16)
  else:
    # Word 4 t + i.
    own = low + high
    own = (own & 0xFFFF) + (own >> 16)
    w0 = tl.cumsum(own, 0) - own
    w1 = w0 + (low & 0xFFFF)
    w2 = w1 + (high & 0xFFFF)
    w3 = w2 + (low >> 16)
  earlier = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(4, 4)
  return before, earlier.to(tl.int32, bitcast=True), total.to(
      tl.int32, bitcast=True)
