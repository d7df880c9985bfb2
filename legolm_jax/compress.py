"""Compresses a checkpoint: count, select, fit, encode; streamed, without data.

1. Count: one pass over the matrices gives the distribution of their weights (or
   of their multiples of a scale per output), and finds what isn't finite.
2. Select: what exceeds the percentile of its codebook's scope is an outlier, and
   so are the largest few of every matrix. First and last blocks are kept whole.
3. Fit: one codebook per scope.
4. Encode: a second pass.

Matrices are memory maps and are read in pieces; only results are held, one
matrix per thread.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator
import concurrent.futures
import dataclasses
import enum
import os
import re
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from legolm_jax import encoding, histogram, packing, rules
from legolm_jax.array import LegoArray, Storage
from legolm_jax.codebook import Fit
from legolm_jax.encoding import Codebook, Matrix
from legolm_jax.errors import InputError
from legolm_jax.histogram import Distribution
from legolm_jax.safetensors_files import CheckpointFolder, is_floating

T, R = TypeVar("T"), TypeVar("R")

MIN_CODES, MAX_CODES = 3, 256
_MAX_THREADS = 8
# The smallest scale; its inverse is still a float32.
_MIN_SCALE = 2.0 ** -100
_UNSIGNED = {2: np.uint16, 4: np.uint32, 8: np.uint64}


class Scope(enum.Enum):
  """Whose weights share a codebook."""

  GLOBAL = "global"
  LAYER = "layer"
  TENSOR = "tensor"


class RowScale(enum.Enum):
  """What the weights of one output are divided by before they are coded.

  The published method has none. One codebook then serves rows of all scales.
  """

  NONE = "none"
  RMS = "rms"  # Root mean square.


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompressionConfig:
  """How a checkpoint is compressed.

  Attributes:
    num_centroids: K, the number of codes. Where there are outliers one of them
      is the escape.
    percentile: of the magnitudes of a scope; what exceeds it is an outlier.
    largest_per_tensor: so many of each matrix are outliers in any case.
    codebook_scope: see `Scope`.
    row_scale: see `RowScale`.
    finer_below: matrices of a kind that holds less than this share of a block's
      weights have codes of one bit more (up to 8) and a codebook of their own:
      what they add in error is not as small as they are. Keys and values of
      grouped-query attention are such. 0 for none, as published.
    fit: see `codebook.Fit`.
    rules: which tensors.
  """

  num_centroids: int = 128
  percentile: float = 99.2
  largest_per_tensor: int = 8
  codebook_scope: Scope = Scope.GLOBAL
  row_scale: RowScale = RowScale.RMS
  finer_below: float = 1 / 32
  fit: Fit = Fit.EXACT
  rules: rules.Rules = dataclasses.field(default_factory=rules.Rules)

  def __post_init__(self):
    if not MIN_CODES <= self.num_centroids <= MAX_CODES:
      raise InputError(f"num_centroids: expected {MIN_CODES} to {MAX_CODES}, "
                       f"found {self.num_centroids}")
    if not 0 < self.percentile <= 100:
      raise InputError("percentile: expected more than 0 and at most 100, found "
                       f"{self.percentile}")
    if self.largest_per_tensor < 0:
      raise InputError("largest_per_tensor: expected 0 or more, found "
                       f"{self.largest_per_tensor}")
    if not 0 <= self.finer_below <= 1:
      raise InputError("finer_below: expected 0 to 1, found "
                       f"{self.finer_below}")

  def to_json(self) -> dict[str, Any]:
    """Names and plain values, enums by their values."""
    found = dataclasses.asdict(self)
    found |= found.pop("rules")
    return {k: v.value if isinstance(v, enum.Enum) else v
            for k, v in found.items()}


# The published method: one codebook for plain weights, found by Lloyd-Max.
PUBLISHED = CompressionConfig(
    percentile=99.0, largest_per_tensor=0, row_scale=RowScale.NONE,
    finer_below=0.0, fit=Fit.LLOYD_MAX)


@dataclasses.dataclass(frozen=True)
class _Counted:
  """What the first pass finds in one matrix."""

  counts: np.ndarray | None  # int64, by key; None once they are added up.
  scale: np.ndarray | None  # bfloat16 [out].
  largest: np.ndarray  # int64, places in [out, in].


@dataclasses.dataclass(frozen=True)
class _Scope:
  """The weights of a scope, and those of them that centroids may stand for."""

  name: str
  num_codes: int
  all: Distribution
  coded: Distribution

  @classmethod
  def of(cls, name: str, num_codes: int,
         counts: dict[histogram.Bins, np.ndarray]) -> _Scope:
    parts = [(Distribution.of(bins, n),
              Distribution.of(bins, np.where(bins.always_outliers(), 0, n)))
             for bins, n in counts.items()]
    return cls(name, num_codes, *map(Distribution.merged, zip(*parts)))


class Compressor:
  """Compresses the tensors of one checkpoint.

  Attributes:
    folder: the checkpoint.
    config: how.
    decisions: one per tensor, in the checkpoint's order.
    codebooks: by scope; filled by `fit`.
  """

  def __init__(self, folder: CheckpointFolder, config: CompressionConfig, *,
               threads: int | None = None):
    """Decides what to do; nothing is read yet.

    Raises:
      InputError: if the checkpoint is quantized already, or a rule can't be
        followed.
    """
    quantized = folder.config.get("quantization_config")
    if quantized:
      method = (quantized.get("quant_method") if isinstance(quantized, dict)
                else quantized)
      raise InputError(f"{folder.path}: is quantized already ({method}); expected "
                       "a checkpoint of plain weights")
    self.folder, self.config = folder, config
    self.threads = threads or min(
        len(os.sched_getaffinity(0)), _MAX_THREADS)
    self.decisions = rules.decide(folder, config.rules)
    self._finer = (_small_kinds(self.compressed, config.finer_below)
                   if 2 * config.num_centroids <= MAX_CODES else set())
    self.codebooks: dict[str, Codebook] = {}
    self._counted: dict[str, _Counted] = {}

  @property
  def compressed(self) -> list[rules.Decision]:
    return [d for d in self.decisions if d.compress]

  def scope_of(self, decision: rules.Decision) -> str:
    """The name of the scope whose codebook a tensor uses."""
    scope, name = self.config.codebook_scope, "global"
    if scope is Scope.TENSOR:
      name = decision.name
    elif scope is Scope.LAYER and decision.block:
      name = "{}.{}".format(*decision.block)
    return f"{name}.finer" if decision.name in self._finer else name

  def matrix(self, decision: rules.Decision) -> Matrix:
    return Matrix(self.folder.read(decision.name), decision.storage)

  def num_codes_of(self, decision: rules.Decision) -> int:
    """K of the codebook that a tensor uses."""
    return self.config.num_centroids * (1 + (decision.name in self._finer))

  @property
  def has_scale(self) -> bool:
    return self.config.row_scale is not RowScale.NONE

  def layout(self, decision: rules.Decision) -> packing.Layout:
    out, inputs = decision.info.shape
    if decision.storage is Storage.IN_OUT:
      out, inputs = inputs, out
    return packing.Layout.of(out, inputs)

  def bins(self, decision: rules.Decision) -> histogram.Bins:
    return histogram.bins_for(decision.info.dtype, self.has_scale)

  def fit(self, progress: Callable[[Iterable], Iterable] = lambda x: x
          ) -> dict[str, Codebook]:
    """Counts, selects and fits.

    Args:
      progress: wraps the tensors as they are counted.

    Raises:
      InputError: if nothing is to be compressed; naming a tensor that isn't
        finite, or a scope with fewer distinct values than centroids.
    """
    if not self.compressed:
      reasons = collections.Counter(
          d.reason for d in self.decisions if len(d.info.shape) == 2)
      found = ", ".join(f"{n} {why}" for why, n in reasons.most_common(4))
      raise InputError(f"{self.folder.path}: no tensor is to be compressed; of "
                       f"its matrices are kept: {found or 'none found'}")
    waiting = collections.Counter(map(self.scope_of, self.compressed))
    counts: dict[str, dict[histogram.Bins, np.ndarray]] = {}
    scopes = []
    counted = parallel(self._count, self.decisions, self.threads)
    for decision, found in progress(zip(self.decisions, counted)):
      if found is None:
        continue
      scope, bins = self.scope_of(decision), self.bins(decision)
      of_scope = counts.setdefault(scope, {})
      of_scope[bins] = of_scope.get(bins, 0) + found.counts
      self._counted[decision.name] = dataclasses.replace(found, counts=None)
      waiting[scope] -= 1
      if not waiting[scope]:  # Counts are up to 8 MB, what they hold is less.
        scopes.append(_Scope.of(
            scope, self.num_codes_of(decision), counts.pop(scope)))
    for codebook in parallel(self._fit, scopes, self.threads):
      self.codebooks[codebook.name] = codebook
    return self.codebooks

  def encode(self, decision: rules.Decision) -> LegoArray:
    """Compresses one tensor; `fit` comes first."""
    counted = self._counted[decision.name]
    return encoding.encode(
        self.matrix(decision), self.codebooks[self.scope_of(decision)],
        counted.scale, counted.largest)

  def encoded(self) -> Iterator[tuple[rules.Decision, LegoArray]]:
    """All compressed tensors in turn, a few ahead of the reader."""
    yield from zip(self.compressed,
                   parallel(self.encode, self.compressed, self.threads))

  def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor of the checkpoint as compression leaves it, dequantized.

    Tensors that are kept, and their order, are the checkpoint's.
    """
    results = parallel(
        lambda d: (encoding.decode(self.encode(d)) if d.compress
                   else self.folder.read(d.tied_to or d.name)),
        self.decisions, self.threads)
    for decision, tensor in zip(self.decisions, results):
      yield decision.name, tensor

  def _count(self, decision: rules.Decision) -> _Counted | None:
    if not decision.compress:
      _check_kept(decision, self.folder.read(decision.name))
      return None
    matrix, bins = self.matrix(decision), self.bins(decision)
    counts = np.zeros(bins.size, np.int64)
    scales, peaks = [], []
    for _, x in matrix.chunks():
      peaks.append(_magnitudes(x).max(axis=1))
      if peaks[-1].max() >= _infinity(x.dtype):
        _raise_not_finite(decision.name, matrix.data)
      scale = None
      if self.config.row_scale is RowScale.RMS:
        scale = rms_scale(x)
        scales.append(scale)
      counts += bins.count(encoding.scaled(x, scale))
    largest = _largest(matrix, np.concatenate(peaks),
                       self.config.largest_per_tensor)
    return _Counted(counts, np.concatenate(scales) if scales else None, largest)

  def _fit(self, scope: _Scope) -> Codebook:
    threshold = scope.all.threshold(self.config.percentile)
    has_escape = bool(
        self.config.percentile < 100 or self.config.largest_per_tensor
        or scope.coded.total < scope.all.total)
    try:
      centroids = scope.coded.within(threshold).fit(
          scope.num_codes - has_escape, self.config.fit)
    except InputError as e:
      raise InputError(f"codebook of {scope.name}: {e}") from e
    return Codebook(name=scope.name, centroids=centroids, threshold=threshold,
                    has_escape=has_escape)


def _small_kinds(decisions: Iterable[rules.Decision], share: float) -> set[str]:
  """Names of matrices of kinds that hold less than a share of their block.

  All experts of a layer are of one kind: names that differ in numbers.
  """
  kind = lambda d: (d.block, re.sub(r"\d+", "*", d.name))
  of_kind, of_block = collections.Counter(), collections.Counter()
  decisions = [d for d in decisions if d.block]
  for d in decisions:
    of_kind[kind(d)] += d.info.size
    of_block[d.block] += d.info.size
  return {d.name for d in decisions
          if of_kind[kind(d)] < share * of_block[d.block]}


def rms_scale(x: np.ndarray) -> np.ndarray:
  """Root mean square of each row, bfloat16 [rows]; 1 for a row of zeros."""
  x = x.astype(np.float32)
  squares = np.einsum("ij,ij->i", x, x)
  unfit = ~((squares > 1e-30) & (squares < 1e30))
  if unfit.any():  # Squares that leave the range of float32.
    squares = squares.astype(np.float64)
    squares[unfit] = np.square(x[unfit], dtype=np.float64).sum(axis=1)
  scale = np.sqrt(squares / x.shape[1])
  scale[scale == 0] = 1
  return np.maximum(scale, _MIN_SCALE).astype(ml_dtypes.bfloat16)


def parallel(function: Callable[[T], R], items: Iterable[T], threads: int
             ) -> Iterator[R]:
  """Maps in threads, in order, at most one finished result per thread ahead."""
  if threads <= 1:
    yield from map(function, items)
    return
  with concurrent.futures.ThreadPoolExecutor(threads) as pool:
    waiting: collections.deque = collections.deque()
    try:
      for item in items:
        waiting.append(pool.submit(function, item))
        if len(waiting) > threads:
          yield waiting.popleft().result()
      while waiting:
        yield waiting.popleft().result()
    finally:
      for future in waiting:
        future.cancel()


def _magnitudes(x: np.ndarray) -> np.ndarray:
  """Floats without their sign, as unsigned integers of the same order."""
  kind = _UNSIGNED[x.dtype.itemsize]
  return x.view(kind) & kind((1 << (8 * x.dtype.itemsize - 1)) - 1)


def _infinity(dtype: np.dtype) -> int:
  return int(np.array([np.inf], dtype).view(_UNSIGNED[dtype.itemsize])[0])


def _largest(matrix: Matrix, peaks: np.ndarray, count: int) -> np.ndarray:
  """Places of the `count` largest magnitudes, given each row's largest."""
  count = min(count, matrix.out * matrix.inputs)
  if not count:
    return np.zeros(0, np.int64)
  # They all lie in the `count` rows with the largest peaks.
  rows = np.argsort(peaks, kind="stable")[-count:]
  sizes = np.concatenate(
      [_magnitudes(matrix.rows(row, row + 1)) for row in rows])
  best = np.argsort(sizes, axis=None, kind="stable")[-count:]
  return rows[best // matrix.inputs] * matrix.inputs + best % matrix.inputs


def _check_kept(decision: rules.Decision, tensor: np.ndarray) -> None:
  """Weights that are kept must be finite; masks may be anything."""
  is_weight = (decision.name.endswith(("weight", "bias"))
               and "mask" not in decision.name)
  if not (is_weight and is_floating(tensor.dtype) and tensor.size):
    return
  flat = tensor.reshape(-1)
  step = 1 << 20
  for start in range(0, flat.size, step):
    sizes = _magnitudes(flat[start:start + step])
    if sizes.max() >= _infinity(flat.dtype):
      _raise_not_finite(decision.name, tensor)


def _raise_not_finite(name: str, tensor: np.ndarray) -> None:
  """Says where and how many."""
  flat = tensor.reshape(-1)
  count, first, step = 0, None, 1 << 20
  for start in range(0, flat.size, step):
    bad = np.flatnonzero(
        _magnitudes(flat[start:start + step]) >= _infinity(flat.dtype))
    count += bad.size
    if bad.size and first is None:
      first = start + int(bad[0])
  at = [int(i) for i in np.unravel_index(first, tensor.shape)]
  raise InputError(f"tensor {name} has {count} values that are not finite, the "
                   f"first at {at}: {flat[first]}")
