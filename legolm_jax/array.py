"""A weight matrix as codes, held in a parameter tree in place of an array."""

from __future__ import annotations

import enum
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from legolm_jax import packing
from pallas_kernels.codebook_matmul import api as codebook

Array = jax.Array | np.ndarray


class Storage(enum.Enum):
  """Which dimension comes first: that of the outputs, or of the inputs."""

  OUT_IN = "out_in"
  IN_OUT = "in_out"


@struct.dataclass
class LegoArray:
  """A compressed matrix, [out, in] or [in, out] by `storage`.

  A weight is codebook[code], times its output's scale, or the next outlier if
  the code is the escape. `packing.Layout` says where codes and outliers lie.
  The leaves are ordinary arrays (on the host or on devices), all of which shard
  as the matrix does, and shapes are read from them: inside `shard_map` a shard
  is itself a LegoArray.

  In the shapes below OUT_IN is meant; IN_OUT has the first two dimensions
  swapped.

  Attributes:
    planes: the codes' bits, from the lowest: [out, words] each, uint32 for four
      bits, uint16 for two, uint8 for one.
    codebook: float32 [num_codes], ascending; the entry of the escape is 0.
    scale: bfloat16 [out], or None.
    outliers: [out shards, in shards, n] of `dtype`; None without an escape. The
      shards have a list each, filled up to the longest and to at least one.
    offsets: uint32 [bands, tiles], how many outliers of its shard come before
      each tile; None without an escape.
    section_out, section_inputs: sizes of the layout's sections.
    num_codes: K, escape included. The escape is code K - 1.
    dtype: of the matrix that was compressed.
    storage: see above.
  """

  planes: tuple[Array, ...]
  codebook: Array
  scale: Array | None
  outliers: Array | None
  offsets: Array | None
  section_out: int = struct.field(pytree_node=False)
  section_inputs: int = struct.field(pytree_node=False)
  num_codes: int = struct.field(pytree_node=False)
  dtype: Any = struct.field(pytree_node=False)
  storage: Storage = struct.field(pytree_node=False)

  @property
  def bits(self) -> int:
    """Bits of a code."""
    return packing.code_bits(self.num_codes)

  @property
  def layout(self) -> packing.Layout:
    out, words = self._out_first(self.planes[0].shape)
    per_section = -(-self.section_inputs // packing.WORD)
    return packing.Layout(
        out, words // per_section * self.section_inputs, self.section_out,
        self.section_inputs)

  @property
  def shape(self) -> tuple[int, int]:
    """Of the matrix."""
    return self._out_first((self.layout.out, self.layout.inputs))

  @property
  def ndim(self) -> int:
    return 2

  @property
  def size(self) -> int:
    """Number of weights."""
    return self.layout.out * self.layout.inputs

  @property
  def nbytes(self) -> int:
    """Of all leaves."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

  @property
  def T(self) -> LegoArray:
    """The transpose: the same codes in the other storage."""
    swap = lambda a: None if a is None else a.swapaxes(0, 1)
    other = (Storage.IN_OUT if self.storage is Storage.OUT_IN
             else Storage.OUT_IN)
    return self.replace(
        planes=tuple(map(swap, self.planes)), outliers=swap(self.outliers),
        offsets=swap(self.offsets), storage=other)

  def dequantize(self, dtype=None) -> jax.Array:
    """The matrix, in plain jnp.

    Args:
      dtype: None for the matrix's own. Centroid times scale is computed in
        float32 and rounded to `dtype` once.

    Returns:
      An array of `shape`.
    """
    return codebook.codebook_lookup(
        self, dtype=dtype, implementation="reference")

  def take_rows(self, index: jax.Array, dtype=None) -> jax.Array:
    """`dequantize(dtype)[index]`, of which only the rows' bands are decoded.

    Args:
      index: int [...], rows of an OUT_IN matrix, each below their number.
      dtype: as of `dequantize`.

    Returns:
      [..., in].
    """
    layout, flat = self.layout, index.reshape(-1)
    # A row is decoded with its band: at some number of them all are.
    if (self.storage is Storage.IN_OUT
        or flat.size * packing.BAND >= layout.out):
      return self.dequantize(dtype)[index]
    section, row = jnp.divmod(flat, layout.section_out)
    band, row = jnp.divmod(row, packing.BAND)
    inside = band[:, None] * packing.BAND + jnp.arange(packing.BAND)
    is_there = (inside < layout.section_out).reshape(-1)
    rows = jnp.where(is_there, (
        section[:, None] * layout.section_out + inside).reshape(-1), 0)
    # What is beyond a section's end gets code 0, which is no escape.
    blank = lambda a: jnp.where(is_there[:, None], a, a.dtype.type(0))
    outliers = offsets = None
    if self.outliers is not None:
      shards, _, longest = self.outliers.shape
      outliers = jnp.asarray(self.outliers).swapaxes(0, 1).reshape(
          1, -1, shards * longest)
      shard = section // (layout.out // layout.section_out // shards)
      offsets = jnp.asarray(self.offsets)[
          section * layout.bands_per_section + band]
      offsets += (shard * longest).astype(offsets.dtype)[:, None]
    bands = self.replace(
        planes=tuple(blank(jnp.asarray(p)[rows]) for p in self.planes),
        scale=None if self.scale is None else jnp.asarray(self.scale)[rows],
        outliers=outliers, offsets=offsets, section_out=packing.BAND)
    found = bands.dequantize(dtype).reshape(
        flat.size, packing.BAND, layout.inputs)
    return found[jnp.arange(flat.size), row].reshape(*index.shape, -1)

  def divides(self, first: int, second: int = 1) -> bool:
    """Whether so many equal parts by each dimension are LegoArrays again."""
    layout, ways = self.layout, (first, second)
    sections = self._out_first((layout.out // layout.section_out,
                                layout.inputs // layout.section_inputs))
    if any(n % w for n, w in zip(sections, ways)):
      return False
    # Each part needs lists of outliers of its own.
    return self.outliers is None or not any(
        n % w for n, w in zip(self.outliers.shape, ways))

  def partition_specs(self, spec: PartitionSpec) -> LegoArray:
    """The leaves' specs where a dense matrix has `spec`."""
    first, second = (*spec, None, None)[:2]
    both = PartitionSpec(first, second)
    out, _ = self._out_first((first, second))
    present = lambda leaf, spec: None if leaf is None else spec
    return self.replace(
        planes=(both,) * len(self.planes), codebook=PartitionSpec(),
        scale=present(self.scale, PartitionSpec(out)),
        outliers=present(
            self.outliers, PartitionSpec(first, second, None)),
        offsets=present(self.offsets, both))

  def _out_first(self, pair):
    """(out, in) from the order of storage, and back."""
    return pair if self.storage is Storage.OUT_IN else pair[::-1]
