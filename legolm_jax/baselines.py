"""What LegoLM is compared with, each as a stream of dequantized tensors.

Every function takes an opened checkpoint and returns a `Reconstruction`, so that
an evaluator treats them, and LegoLM itself, alike. Which matrices are replaced is
decided by the same rules for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import dataclasses
import math

import numpy as np

from legolm_jax import accounting, packing, sharding, vectors
from legolm_jax import codebook as codebook_lib
from legolm_jax import rules as rules_lib
from legolm_jax.array import Storage
from legolm_jax.codebook import Fit
from legolm_jax.compress import (
    PUBLISHED,
    CompressionConfig,
    Compressor,
    Scope,
    parallel,
)
from legolm_jax.encoding import Matrix
from legolm_jax.errors import InputError
from legolm_jax.histogram import Distribution, bins_for
from legolm_jax.rules import Rules
from legolm_jax.safetensors_files import CheckpointFolder, is_floating

_SCALE_BITS = 32
# An outlier of a vector codebook, which has no escape: its place and its value.
_PLACE_BITS = 16
_SAMPLE_VECTORS = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reconstruction:
  """A checkpoint as a method leaves it.

  Attributes:
    name: of the method with its settings.
    bits_per_compressed_weight: of what is replaced, everything counted.
    bits_per_parameter: of the whole model; names and headers left out.
    tensors: yields name and array of every tensor, in the checkpoint's order,
      shapes and dtypes; may be called again.
  """

  name: str
  bits_per_compressed_weight: float
  bits_per_parameter: float
  tensors: Callable[[], Iterator[tuple[str, np.ndarray]]]


def uncompressed(folder: CheckpointFolder) -> Reconstruction:
  """The checkpoint itself."""
  total = sum(t.nbytes for t in folder.tensors.values())
  bits = 8 * total / folder.num_parameters
  return Reconstruction(
      name="uncompressed", bits_per_compressed_weight=bits,
      bits_per_parameter=bits,
      tensors=lambda: ((name, folder.read(name)) for name in folder.tensors))


def legolm(folder: CheckpointFolder, config: CompressionConfig,
           name: str | None = None, threads: int | None = None
           ) -> Reconstruction:
  """LegoLM with any settings, without files.

  Raises:
    InputError: as `Compressor`.
  """
  compressor = Compressor(folder, config, threads=threads)
  compressor.fit()
  size = sum(accounting.codebook_bytes(c.centroids.size)
             for c in compressor.codebooks.values())
  for decision, array in compressor.encoded():
    size += accounting.matrix_bytes(
        array.layout, array.num_codes,
        None if array.outliers is None else sharding.num_outliers(array),
        decision.info.dtype.itemsize, array.scale is not None)
  return _reconstruction(
      name or f"legolm K={config.num_centroids} p={config.percentile:g} "
      f"{config.codebook_scope.value} scale={config.row_scale.value}",
      folder, compressor.decisions, 8 * size, compressor.tensors)


def full_replacement(folder: CheckpointFolder, num_centroids: int, *,
                     fit: Fit = Fit.LLOYD_MAX) -> Reconstruction:
  """Every number of a checkpoint by one global codebook: what fails.

  Tables, biases and norms are replaced too. A few large ones draw centroids away
  from where nearly all weights are.

  Raises:
    InputError: if there are fewer distinct values than centroids.
  """
  infos = [t for t in folder.tensors.values() if is_floating(t.dtype) and t.size
           and "mask" not in t.name]  # GPT-2's hold infinities.
  parts = []
  for info in infos:
    bins = bins_for(info.dtype, False)
    counts = np.zeros(bins.size, np.int64)
    for _, x in _rows(folder.read(info.name)).chunks():
      counts += bins.count(x)
    parts.append(Distribution.of(bins, counts))
  centroids = Distribution.merged(parts).fit(num_centroids, fit)
  names = {info.name for info in infos}

  def replaced(name):
    data = folder.read(name)
    if name not in names:
      return data
    rows = [centroids[codebook_lib.nearest(x.astype(np.float64), centroids)]
            for _, x in _rows(data).chunks()]
    return np.concatenate(rows).astype(data.dtype).reshape(data.shape)

  weights = sum(info.size for info in infos)
  bits = packing.code_bits(num_centroids) + (
      8 * accounting.codebook_bytes(num_centroids) / weights)
  return Reconstruction(
      name=f"full replacement K={num_centroids}",
      bits_per_compressed_weight=bits, bits_per_parameter=bits,
      tensors=lambda: zip(
          folder.tensors, parallel(replaced, folder.tensors, 2)))


def all_blocks(folder: CheckpointFolder, num_centroids: int, *,
               rules: Rules = Rules(protected_blocks=()),  # noqa: B008
               fit: Fit = Fit.EXACT) -> Reconstruction:
  """The matrices of all blocks by one global codebook, no outliers."""
  config = dataclasses.replace(
      PUBLISHED, num_centroids=num_centroids, percentile=100, fit=fit,
      rules=rules)
  return legolm(folder, config, f"all blocks replaced K={num_centroids}")


def kmeans_per_layer(folder: CheckpointFolder, num_centroids: int,
                     percentile: float | None, *,
                     rules: Rules = Rules()) -> Reconstruction:  # noqa: B008
  """A codebook per layer, with selection by percentile or without (None)."""
  config = dataclasses.replace(
      PUBLISHED, num_centroids=num_centroids, percentile=percentile or 100,
      codebook_scope=Scope.LAYER, fit=Fit.EXACT, rules=rules)
  selection = f"p={percentile:g}" if percentile else "all"
  return legolm(
      folder, config, f"k-means per layer K={num_centroids} {selection}")


def int8(folder: CheckpointFolder, *, per_row: bool,
         rules: Rules = Rules()) -> Reconstruction:  # noqa: B008
  """Symmetric 8-bit rounding, a float32 scale per output row or per tensor."""
  decisions = rules_lib.decide(folder, rules)
  bits = sum(8 * d.info.size + _SCALE_BITS * (
      Matrix(folder.read(d.name), d.storage).out if per_row else 1)
             for d in decisions if d.compress)
  return _reconstruction(
      f"8-bit per {'row' if per_row else 'tensor'}", folder, decisions, bits,
      lambda: _replaced(folder, decisions, lambda m: _round8(m, per_row)))


def vector_blocks(folder: CheckpointFolder, dim: int, num_centroids: int,
                  percentile: float = 99.0, *,
                  rules: Rules = Rules(),  # noqa: B008
                  threads: int = 1, seed: int = 0) -> Reconstruction:
  """One global codebook of blocks of `dim` weights, neighbors along the inputs.

  Weights beyond the percentile are put back after the blocks are replaced; the
  blocks that hold one are not fitted to. A matrix whose inputs `dim` does not
  divide is kept.

  Raises:
    InputError: if there are fewer distinct blocks than centroids, or no matrix
      is left to replace.
  """
  decisions = [
      dataclasses.replace(d, compress=False, reason=f"inputs not in blocks of {dim}")
      if d.compress and Matrix(folder.read(d.name), d.storage).inputs % dim
      else d for d in rules_lib.decide(folder, rules)]
  chosen = [d for d in decisions if d.compress]
  if not chosen:
    raise InputError(f"{folder.path}: no matrix to replace by blocks of {dim}")
  matrices = [Matrix(folder.read(d.name), d.storage) for d in chosen]
  threshold, outliers = _threshold(matrices, percentile)
  sample = _sample_blocks(matrices, dim, threshold, seed)
  quantize = vectors.Quantizer(
      vectors.fit(sample, num_centroids, seed=seed, threads=threads), threads)

  def replace(matrix):
    parts = []
    for _, x in matrix.chunks():
      x32 = x.astype(np.float32)
      coded = quantize(np.clip(x32, -threshold, threshold)).astype(x.dtype)
      parts.append(np.where(np.abs(x32) > threshold, x, coded))
    return np.concatenate(parts)

  weights = sum(d.info.size for d in chosen)
  itemsize = chosen[0].info.dtype.itemsize
  code_bits = math.ceil(math.log2(num_centroids))
  bits = (weights * code_bits / dim + outliers * (8 * itemsize + _PLACE_BITS)
          + 32 * num_centroids * dim)
  return _reconstruction(
      f"vector blocks d={dim} K={num_centroids} p={percentile:g}", folder,
      decisions, bits, lambda: _replaced(folder, decisions, replace, threads=1))


def _rows(tensor: np.ndarray) -> Matrix:
  """A tensor of any rank as a matrix that is read in pieces."""
  return Matrix(tensor.reshape(-1, tensor.shape[-1] if tensor.ndim else 1))


def _reconstruction(name, folder, decisions, bits, tensors) -> Reconstruction:
  """With the bits of what is kept added to those of what is replaced."""
  weights = sum(d.info.size for d in decisions if d.compress)
  if not weights:
    raise InputError(f"{folder.path}: no matrix is to be replaced")
  kept = sum(d.info.nbytes for d in decisions
             if not d.compress and not d.tied_to)
  return Reconstruction(
      name=name, bits_per_compressed_weight=bits / weights,
      bits_per_parameter=(bits + 8 * kept) / folder.num_parameters,
      tensors=tensors)


def _replaced(folder, decisions, function, threads: int = 2):
  """All tensors; those to compress through `function` of their Matrix."""

  def tensor(decision):
    data = folder.read(decision.tied_to or decision.name)
    if not decision.compress:
      return data
    rows = function(Matrix(data, decision.storage))
    return rows if decision.storage is Storage.OUT_IN else rows.T

  for decision, result in zip(
      decisions, parallel(tensor, decisions, threads)):
    yield decision.name, result


def _round8(matrix: Matrix, per_row: bool) -> np.ndarray:
  peaks = np.concatenate([
      np.abs(x.astype(np.float32)).max(axis=1) for _, x in matrix.chunks()])
  if not per_row:
    peaks = np.full_like(peaks, peaks.max())
  scale = np.where(peaks > 0, peaks / 127, 1).astype(np.float32)
  parts = []
  for start, x in matrix.chunks():
    s = scale[start:start + len(x), None]
    parts.append((np.rint(x.astype(np.float32) / s) * s).astype(x.dtype))
  return np.concatenate(parts)


def _threshold(matrices, percentile) -> tuple[float, int]:
  """Of the weights of all matrices, and how many exceed it."""
  parts = []
  for matrix in matrices:
    bins = bins_for(matrix.data.dtype, False)
    counts = sum(bins.count(x) for _, x in matrix.chunks())
    parts.append(Distribution.of(bins, counts))
  merged = Distribution.merged(parts)
  threshold = merged.threshold(percentile)
  return threshold, merged.total - merged.within(threshold).total


def _sample_blocks(matrices, dim, threshold, seed) -> np.ndarray:
  """About 2^20 blocks without outliers, every matrix by its size."""
  rng = np.random.default_rng(seed)
  share = min(1.0, _SAMPLE_VECTORS * dim / sum(m.data.size for m in matrices))
  found = []
  for matrix in matrices:
    for _, x in matrix.chunks():
      blocks = x.reshape(-1, dim)
      count = math.ceil(share * len(blocks))
      blocks = blocks[rng.choice(len(blocks), count, replace=False)]
      blocks = blocks.astype(np.float32)
      found.append(blocks[np.abs(blocks).max(axis=1) <= threshold])
  return np.concatenate(found)
