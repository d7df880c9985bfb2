"""Matrices of published models, for tests and measurements."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
  """A matrix.

  Attributes:
    model, name: whose it is.
    out, inputs: its dimensions.
  """

  model: str
  name: str
  out: int
  inputs: int


def _of(model: str, hidden: int, intermediate: int, kv: int, vocab: int
        ) -> tuple[Shape, ...]:
  sizes = dict(
      q=(hidden, hidden), k=(kv, hidden), gate=(intermediate, hidden),
      down=(hidden, intermediate), head=(vocab, hidden))
  return tuple(Shape(model=model, name=name, out=out, inputs=inputs)
               for name, (out, inputs) in sizes.items())


# o is as q, v as k, up as gate. The smallest ties its head to its embedding.
QWEN2_5_1_5B = _of("Qwen2.5-1.5B", 1536, 8960, 256, 151936)
QWEN2_5_7B = _of("Qwen2.5-7B", 3584, 18944, 512, 152064)
QWEN2_5_32B = _of("Qwen2.5-32B", 5120, 27648, 1024, 152064)
ALL = QWEN2_5_1_5B + QWEN2_5_7B + QWEN2_5_32B
