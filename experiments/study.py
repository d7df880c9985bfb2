"""The published grid on one checkpoint: `python -m experiments.study`.

Compresses a checkpoint in every way that the paper compares (block size d,
number of centroids K, percentile, protected blocks, scope, baselines), and
measures each: squared error, true bits, perplexity and KL to the checkpoint on
the same text. Writes study.csv, study.md with a row for each published claim,
and two plots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
import csv
import dataclasses
import json
import pathlib
import time
from typing import Any

from absl import flags
import jax.numpy as jnp
import numpy as np

from experiments import common, study_report, texts
from experiments.study_subjects import Episodes, Texts
from legolm_jax import accounting, baselines, benchmarks, folders
from legolm_jax import rules as rules_lib
from legolm_jax.baselines import Reconstruction
from legolm_jax.codebook import Fit
from legolm_jax.compress import (
  PUBLISHED,
  CompressionConfig,
  Compressor,
  RowScale,
  Scope,
)
from legolm_jax.errors import InputError as LegoInputError
from legolm_jax.rules import Rules
from legolm_jax.safetensors_files import CheckpointFolder
from rollplex_jax.data.processor import Processor
from rollplex_jax.data.settings import EnvironmentConfig
from rollplex_jax.errors import InputError
from rollplex_jax.models import architectures, hf, hub, tensor_files

_MODEL = flags.DEFINE_string(
    "model_path", "runs/quickstart/policy",
    "Checkpoint folder or hub id; by default what the quick start trained.")
_DATA = flags.DEFINE_string(
    "data", None, "Text file, or JSONL of {\"text\": ...}; by default modules of "
    "Python's standard library, or for a quick start's policy its own world.")
_WORLD = flags.DEFINE_multi_string(
    "world", [], "In place of a text, KEY=VALUE of an EnvironmentConfig: held-out "
    "episodes with the checkpoint's own greedy plans.")
_LENGTH = flags.DEFINE_integer(
    "max_completion_length", 32, "Longest plan, in tokens.", lower_bound=1)
_OUTPUT = flags.DEFINE_string(
    "output_dir", None, "Folder to make; empty or not there yet.")
_WINDOW = flags.DEFINE_integer(
    "window_length", 256, "Tokens of a window.", lower_bound=2)
_WINDOWS = flags.DEFINE_integer(
    "num_windows", 16, "So many windows, spread over the text, or so many episodes; 0: all.",
    lower_bound=0)
_LAMBADA = flags.DEFINE_string("lambada", None, "File of LAMBADA's format.")
_HELLASWAG = flags.DEFINE_string("hellaswag", None, "File of HellaSwag's.")
_ITEMS = flags.DEFINE_integer(
    "limit", 0, "Items of each of these; 0: all.", lower_bound=0)
_CENTROIDS = flags.DEFINE_multi_integer(
    "num_centroids", [16, 64, 128], "Values of K.", lower_bound=4,
    upper_bound=256)
_VECTOR_CENTROIDS = flags.DEFINE_multi_integer(
    "vector_centroids", [128, 1024], "Values of K for blocks of two and four.",
    lower_bound=2, upper_bound=1 << 16)
_GROUPS = flags.DEFINE_multi_string(
    "groups", [], "Groups of the grid, as study.md names them; by default all.")
_DTYPE = flags.DEFINE_enum(
    "dtype", "float32", ["float32", "bfloat16"], "Of the parameters.")
_BATCH = flags.DEFINE_integer("batch_size", 4, "Windows at a time.",
                              lower_bound=1)


@dataclasses.dataclass(frozen=True)
class Entry:
  """One point of the grid.

  Attributes:
    group: what it belongs to in the report.
    dim: size of a block.
    num_centroids: K, or None for what has no codebook.
    percentile: of what is coded, or None.
    make: compresses.
  """

  group: str
  dim: int
  num_centroids: int | None
  percentile: float | None
  make: Callable[[CheckpointFolder], Reconstruction]


def grid(centroids: list[int], vector_centroids: list[int]
         ) -> Iterator[Entry]:
  """The points, those that claims need among them."""
  def lego(group, k, p, base=PUBLISHED, **kwargs):
    config = dataclasses.replace(
        base, num_centroids=k, percentile=p, **kwargs)
    return Entry(group, 1, k, p, lambda folder: baselines.legolm(
        folder, config, f"{group} K={k} p={p:g}"))

  centroids = sorted({*centroids, 64, 128})
  for k in centroids:
    yield lego("published", k, 99.0)
  for p in (80.0, 90.0, 99.9):
    yield lego("other percentiles", 128, p)
  # What the default recipe adds, one thing after another.
  yield lego("exact fit", 128, 99.0, fit=Fit.EXACT)
  yield lego("row scale", 128, 99.0, fit=Fit.EXACT, row_scale=RowScale.RMS)
  recipe = CompressionConfig()
  for k in centroids:
    yield lego("recipe", k, recipe.percentile, recipe)
  # Bits that the embedding does not need are worth more in the blocks.
  for k in (128, 256):
    yield lego("recipe with embedding", k, recipe.percentile, recipe,
               rules=Rules(embedding=True))
  yield lego("nothing protected", 128, 99.0, rules=Rules(protected_blocks=()))
  yield lego("scope layer", 128, 99.0, codebook_scope=Scope.LAYER)
  yield lego("scope tensor", 128, 99.0, codebook_scope=Scope.TENSOR)
  for k in centroids:
    yield Entry("full replacement", 1, k, None,
                lambda folder, k=k: baselines.full_replacement(folder, k))
  yield Entry("all blocks replaced", 1, 128, None,
              lambda folder: baselines.all_blocks(folder, 128))
  for percentile in (99.0, None):
    group = "k-means per layer" + (", all" if percentile is None else "")
    yield Entry(group, 1, 128, percentile,
                lambda folder, p=percentile: baselines.kmeans_per_layer(
                    folder, 128, p))
  for dim in (2, 4):
    for k in sorted({*vector_centroids, 128}):
      yield Entry("vector blocks", dim, k, 99.0,
                  lambda folder, dim=dim, k=k: baselines.vector_blocks(
                      folder, dim, k, threads=common.cores()))
  for per_row in (False, True):
    yield Entry(f"8-bit per {'row' if per_row else 'tensor'}", 1, None, None,
                lambda folder, r=per_row: baselines.int8(folder, per_row=r))


class Study:
  """A checkpoint, and what every reconstruction of it is measured by."""

  def __init__(self, path: str, world: Sequence[str], documents: list[str],
               questions: dict):
    """Loads the checkpoint and runs it. Raises InputError."""
    self.folder = CheckpointFolder(path)
    self._compared = {d.name for d in rules_lib.decide(self.folder, Rules())
                      if d.compress}
    if not self._compared:
      raise InputError(f"--model_path={path}: has no matrix to compress between "
                       "its first block and its last")
    processor = Processor.from_checkpoint(path)
    self._config, params = hf.load_checkpoint(path, jnp.dtype(_DTYPE.value))
    shared = dict(limit=_WINDOWS.value, batch_size=_BATCH.value)
    if world:
      architectures.check_decodes(self._config, path)
      self._subject = Episodes(
          self._config, processor, params, world,
          max_completion_length=_LENGTH.value, **shared)
    else:
      self._subject = Texts(
          self._config, processor, params, documents,
          window_length=_WINDOW.value, questions=questions, **shared)
    self.tokens = self._subject.tokens
    self._outcomes = self._subject.outcomes(params)

  def measure(self, made: Reconstruction, *, ask: bool) -> dict[str, Any]:
    """Squared error, bits, perplexity, KL, and outcomes if `ask`."""
    distortion = _Distortion(self.folder, self._compared)
    params = hf.params_from_tensors(
        self._config, distortion.watch(made.tensors()),
        jnp.dtype(_DTYPE.value))
    plain = baselines.uncompressed(self.folder).bits_per_parameter
    row = {"name": made.name,
           "true_ratio": plain / made.bits_per_parameter,
           "bits_per_compressed_weight": made.bits_per_compressed_weight,
           "bits_per_parameter": made.bits_per_parameter,
           "relative_squared_error": distortion.value,
           **self._subject.compare(params).summary()}
    if ask:
      for name, outcomes in self._subject.outcomes(params).items():
        values = benchmarks.summary(outcomes, self._outcomes[name])
        row |= {f"{name}_{k}": v for k, v in values.items()}
    return row

  def share_beyond(self, num_centroids: int) -> float:
    """The share of weights beyond the outermost of the K - 1 thresholds between
    the centroids of a full replacement."""
    compressor = Compressor(self.folder, dataclasses.replace(
        PUBLISHED, num_centroids=num_centroids, percentile=100.0))
    centroids = compressor.fit()["global"].centroids
    low, high = centroids[:2].mean(), centroids[-2:].mean()
    beyond = total = 0
    for decision in compressor.compressed:
      for _, x in compressor.matrix(decision).chunks():
        x = x.astype(np.float32)
        beyond += int(np.count_nonzero((x < low) | (x > high)))
        total += x.size
    return beyond / total


class _Distortion:
  """Squared error over squared norm of the named tensors as they pass by.

  They are the matrices of all blocks but the first and the last, the same for
  whatever protects them.
  """

  def __init__(self, folder: CheckpointFolder, names: set[str]):
    self._folder, self._names = folder, names
    self._error = self._norm = 0.0

  def watch(self, tensors: Iterable[tuple[str, np.ndarray]]
            ) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors themselves."""
    for name, tensor in tensors:
      if name in self._names:
        source = self._folder.read(name).astype(np.float32)
        self._norm += float(np.vdot(source, source))
        source -= tensor.astype(np.float32)
        self._error += float(np.vdot(source, source))
      yield name, tensor

  @property
  def value(self) -> float:
    return self._error / self._norm


def main() -> dict[str, Any]:
  """Runs the command."""
  start = time.perf_counter()
  output = common.required(_OUTPUT)
  folders.check_new(output)
  path = hub.resolve(common.required(_MODEL))
  if tensor_files.is_compressed(path):
    raise InputError(f"--model_path={path}: is compressed; expected the "
                     "checkpoint itself")
  entries = _entries()
  world = _world(path)
  study = Study(path, world, _documents(), _questions())
  rows = []
  for entry in common.progress("studying", len(entries))(entries):
    row = {"group": entry.group, "dim": entry.dim,
           "num_centroids": entry.num_centroids,
           "percentile": entry.percentile, "nominal_ratio": _nominal(entry)}
    try:
      made = entry.make(study.folder)
    except LegoInputError as e:  # Too small a checkpoint for this point.
      rows.append(row | {"skipped": str(e)})
      continue
    rows.append(row | study.measure(
        made, ask=entry.num_centroids == 64
        and entry.group in ("published", "recipe")))
  shares = {k: study.share_beyond(k) for k in (64, 128)}
  data = _DATA.value or ", ".join(texts.LIBRARY_MODULES)
  if world:
    data = f"the checkpoint's plans in {' '.join(world)}"
  result = {"model_path": path, "data": data,
            "tokens": study.tokens, "rows": rows,
            "claims": study_report.claims(rows, shares)}
  result["seconds"] = time.perf_counter() - start
  with folders.new(output) as work:
    _write_csv(work / "study.csv", rows)
    (work / "study.md").write_text(study_report.markdown(result))
    study_report.plot(rows, work)
  print(study_report.markdown(result))
  print(f"{len(rows)} points in {result['seconds']:.0f} s -> {output}")
  return result


def _entries() -> list[Entry]:
  """Those of the grid that were asked for. Raises InputError."""
  entries = list(grid(_CENTROIDS.value, _VECTOR_CENTROIDS.value))
  groups = list(dict.fromkeys(entry.group for entry in entries))
  for name in _GROUPS.value:
    if name not in groups:
      raise InputError(f"--groups={name}: expected some of {', '.join(groups)}")
  return [e for e in entries if e.group in (_GROUPS.value or groups)]


def _nominal(entry: Entry) -> float | None:
  """The published figure, which is of scalar codebooks."""
  if entry.num_centroids is None or entry.dim > 1:
    return None
  return accounting.nominal_ratio(entry.num_centroids, entry.percentile or 100)


def _world(path: str) -> list[str]:
  """The world that was asked for, or that of the quick start that trained it."""
  run = pathlib.Path(path).absolute().parent / common.QUICKSTART
  texts_given = _DATA.value or _LAMBADA.value or _HELLASWAG.value
  if _WORLD.value or texts_given or not run.is_file():
    return _WORLD.value
  environment = json.loads(run.read_text())["environment"]
  defaults = dataclasses.asdict(EnvironmentConfig())
  return [f"{name}={json.dumps(value)}" for name, value in environment.items()
          if name in defaults and value != defaults[name]]


def _documents() -> list[str]:
  if _WORLD.value and (_DATA.value or _LAMBADA.value or _HELLASWAG.value):
    raise InputError("--world with --data, --lambada or --hellaswag: expected "
                     "either a world or texts")
  if _DATA.value:
    return texts.read_documents(_DATA.value)
  return texts.library_documents()


def _questions() -> dict[str, list[benchmarks.Question]]:
  files = {"lambada": (_LAMBADA.value, benchmarks.read_lambada),
           "hellaswag": (_HELLASWAG.value, benchmarks.read_hellaswag)}
  return {name: read(path, _ITEMS.value)
          for name, (path, read) in files.items() if path}


def _write_csv(path: pathlib.Path, rows: list[dict[str, Any]]) -> None:
  names = dict.fromkeys(name for row in rows for name in row)
  with path.open("w", newline="") as file:
    writer = csv.DictWriter(file, list(names))
    writer.writeheader()
    writer.writerows(rows)


if __name__ == "__main__":
  common.run(main)
