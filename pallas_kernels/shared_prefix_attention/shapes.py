"""Real shapes, for tests and benchmarks."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
  """Sizes of one call.

  Attributes:
    prompts: B.
    samples: G, of each prompt.
    suffix: R, tokens of each sample.
    prefix: P, tokens of each prompt.
    heads: H, query heads on a device.
    kv_heads: K, heads of keys and values on a device.
    head_dim: D.
  """

  prompts: int
  samples: int
  suffix: int
  prefix: int
  heads: int
  kv_heads: int
  head_dim: int

  @property
  def group(self) -> int:
    """Query heads of a head of keys and values."""
    return self.heads // self.kv_heads

  def decode_bytes(self, itemsize: int = 2) -> int:
    """What a decode step must move: every key and value once, q and output."""
    keys = self.prefix + self.samples * self.suffix
    return self.prompts * itemsize * self.head_dim * (
        2 * self.kv_heads * keys + 2 * self.samples * self.heads)

  def forward_flops(self) -> int:
    """Of the products of the forward pass, both with full lengths."""
    keys = self.prefix + (self.suffix + 1) / 2
    rows = self.prompts * self.samples * self.suffix * self.heads
    return int(4 * rows * keys * self.head_dim)


# Groups of 8 over prompts of a long video, and of a short one; models as they
# lie on one device (32B under tensor parallelism of 4).
SHAPES = {
    "qwen2.5-vl-3b_video": Shape(
        prompts=4, samples=8, suffix=512, prefix=8192, heads=16, kv_heads=2,
        head_dim=128),
    "qwen2.5-vl-7b_video": Shape(
        prompts=2, samples=8, suffix=512, prefix=8192, heads=28, kv_heads=4,
        head_dim=128),
    "qwen2.5-vl-32b_tp4_video": Shape(
        prompts=4, samples=8, suffix=512, prefix=8192, heads=10, kv_heads=2,
        head_dim=128),
    "qwen2.5-vl-7b_image": Shape(
        prompts=8, samples=8, suffix=256, prefix=1000, heads=28, kv_heads=4,
        head_dim=128),
    "qwen2.5-vl-7b_group1": Shape(
        prompts=16, samples=1, suffix=512, prefix=8192, heads=28, kv_heads=4,
        head_dim=128),
    "qwen2.5-0.5b_text": Shape(
        prompts=8, samples=8, suffix=256, prefix=512, heads=14, kv_heads=2,
        head_dim=64),
    "head80_mha": Shape(
        prompts=2, samples=4, suffix=128, prefix=1024, heads=16, kv_heads=16,
        head_dim=80),
}
