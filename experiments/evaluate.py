"""Quality of a checkpoint, plain or compressed.

    python -m experiments.evaluate --model_path=SMALL --reference_path=CHECKPOINT \\
      --task=perplexity --data=text.txt

perplexity, kl: --data is a text file, or JSONL of {"text": ...}. lambada and
hellaswag: the benchmark's own JSONL. reward: greedy completions of rows, scored
by --reward, or episodes of a --world.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
import dataclasses
import pathlib
import time
from typing import Any

from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

from experiments import (
  common,
  compressed_weights,
  evaluate_reward,
  texts,
)
from legolm_jax import accounting, benchmarks, checkpoint, evaluate
from rollplex_jax import programs
from rollplex_jax.data.processor import Processor
from rollplex_jax.data.settings import DataConfig
from rollplex_jax.errors import InputError
from rollplex_jax.models import hf, hub
from rollplex_jax.models.config import ModelConfig
from rollplex_jax.models.weights import Params

_MODEL = flags.DEFINE_string(
    "model_path", None, "Checkpoint folder, plain or compressed, or hub id.")
_REFERENCE = flags.DEFINE_string(
    "reference_path", None, "Checkpoint to compare with: the uncompressed one.")
_TASK = flags.DEFINE_enum(
    "task", "perplexity",
    ["perplexity", "kl", "lambada", "hellaswag", "reward"], "What is measured.")
_DATA = flags.DEFINE_string("data", None, "File of the task.")
_WINDOW = flags.DEFINE_integer(
    "window_length", 1024, "Tokens of a window of perplexity and kl.",
    lower_bound=2)
_LIMIT = flags.DEFINE_integer(
    "limit", 0, "So many windows, items or rows, the first ones; 0: all.",
    lower_bound=0)
_BATCH = flags.DEFINE_integer(
    "batch_size", 1, "Windows, questions or rows at a time.", lower_bound=1)
_DTYPE = flags.DEFINE_enum(
    "dtype", "float32", ["float32", "bfloat16"], "Of the parameters.")
_REWARD = flags.DEFINE_string(
    "reward", "", "module:function or file.py:function, for rows.")
_REWARD_TIMEOUT = flags.DEFINE_float(
    "reward_timeout", DataConfig.reward_timeout,
    "Seconds that --reward may take for a completion.", lower_bound=0.001)
_LENGTH = flags.DEFINE_integer(
    "max_completion_length", 256, "Longest completion, in tokens.",
    lower_bound=1)
_WORLD = flags.DEFINE_multi_string(
    "world", [], "In place of rows, KEY=VALUE of an EnvironmentConfig, such as "
    "--world=level=BabyAI-GoToObjS6-v1 --world=image_size=56.")


@dataclasses.dataclass(frozen=True)
class Model:
  """A loaded checkpoint; `name` stands for it in errors."""

  name: str
  config: ModelConfig
  params: Params
  processor: Processor

  @classmethod
  def load(cls, folder: str) -> Model:
    """Raises InputError."""
    processor = Processor.from_checkpoint(folder)
    config, params = hf.load_checkpoint(
        folder, jnp.dtype(_DTYPE.value), decode=compressed_weights.are_decoded(
            decodes=_TASK.value == "reward"))
    return cls(folder, config, params, processor)

  def logits(self, tokens: np.ndarray) -> jax.Array:
    """float32 [B, T, V]."""
    return programs.text_logits(self.params, self.config, tokens)

  @property
  def max_length(self) -> int | None:
    return self.config.text.max_length

  @property
  def prefix(self) -> list[int]:
    """Tokens that the tokenizer puts before a text by itself."""
    return list(self.processor.tokenizer("", verbose=False)["input_ids"])


def main() -> dict[str, Any]:
  """Runs the command."""
  start = time.perf_counter()
  read = _checked_task()
  folder = hub.resolve(common.required(_MODEL))
  other = _REFERENCE.value and hub.resolve(_REFERENCE.value)
  _check_vocabularies(folder, other)
  model = Model.load(folder)
  reference = Model.load(other) if other else None
  result = {"task": _TASK.value, **read(model, reference), **sizes(folder)}
  result["seconds"] = time.perf_counter() - start
  _print(result)
  return result


def _checked_task() -> Callable[[Model, Model | None], dict[str, Any]]:
  """What computes the task, once its flags and files are seen to be there."""
  task = _TASK.value
  if task == "reward":
    settings = evaluate_reward.settings(
        _DATA.value, _REWARD.value, _WORLD.value, _LIMIT.value,
        timeout=_REWARD_TIMEOUT.value)
    return lambda model, reference: evaluate_reward.run(
        settings, model, reference, limit=_LIMIT.value,
        max_completion_length=_LENGTH.value, batch_size=_BATCH.value, progress=common.progress)
  path = common.required(_DATA)
  if task == "kl" and not _REFERENCE.value:
    raise InputError("--reference_path is not set: kl is a distance from it")
  if task in ("perplexity", "kl"):
    documents = texts.read_documents(path)
    return lambda *models: _perplexity(documents, *models)
  questions = (benchmarks.read_lambada if task == "lambada"
               else benchmarks.read_hellaswag)(path, _LIMIT.value)
  return lambda *models: _questions(task, questions, *models)


def _check_vocabularies(folder: str, other: str | None) -> None:
  if other is None:
    return
  ours, theirs = (hf.load_config(f).text.vocab_size for f in (folder, other))
  if ours != theirs:
    raise InputError(f"--reference_path={other}: expected a vocabulary of "
                     f"{ours} tokens, as {folder} has, found {theirs}")


def _perplexity(documents: list[str], model: Model,
                reference: Model | None) -> dict[str, Any]:
  length, limit = _WINDOW.value, model.max_length
  if limit is not None and length > limit:
    raise InputError(f"--window_length={length}: expected at most the model's "
                     f"{limit} tokens")
  tokens = evaluate.windows(
      map(model.processor.encode, documents), length, model.prefix)
  tokens = tokens[:_LIMIT.value or None]
  found = evaluate.compare(
      model.logits, tokens, reference=reference and reference.logits,
      num_prefix=len(model.prefix), batch_size=_BATCH.value,
      progress=common.progress("windows", -(-len(tokens) // _BATCH.value)))
  return {"window_length": length, **found.summary()}


def _questions(task: str, questions, model: Model,
               reference: Model | None) -> dict[str, Any]:
  def outcomes(model):
    count = sum(len(q.choices) for q in questions)
    scores = benchmarks.ask(
        model.logits, questions, model.processor.encode, prefix=model.prefix,
        batch_size=_BATCH.value, max_length=model.max_length,
        progress=common.progress(task, -(-count // _BATCH.value)))
    if task == "lambada":
      return benchmarks.lambada_outcomes(scores)
    return benchmarks.hellaswag_outcomes(questions, scores)

  return benchmarks.summary(
      outcomes(model), reference and outcomes(reference))


def sizes(folder: str) -> dict[str, Any]:
  """What a compressed checkpoint weighs; nothing for a plain one."""
  if not checkpoint.is_compressed(folder):
    return {}
  stored = checkpoint.Checkpoint(folder)
  config = stored.report
  source = sum(
      np.prod(e["shape"], dtype=np.int64) * checkpoint.DTYPES[e["dtype"]].itemsize
      for e in stored.entries.values())
  parameters = sum(np.prod(e["shape"], dtype=np.int64)
                   for e in stored.entries.values())
  files = [*pathlib.Path(folder).glob("*.safetensors"), *(
      pathlib.Path(folder, name) for name in (
          "config.json", "model.safetensors.index.json", checkpoint.REPORT))]
  size = sum(f.stat().st_size for f in files if f.exists())
  return {
      "nominal_ratio": accounting.nominal_ratio(
          config["num_centroids"], config["percentile"]),
      "true_ratio": float(source / size),
      "bits_per_parameter": float(8 * size / parameters)}


def _print(result: dict[str, Any]) -> None:
  shown = collections.OrderedDict(
      (k, v) for k, v in result.items()
      if not k.endswith("_stderr") and v != {})
  for name, value in shown.items():
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    error = result.get(f"{name}_stderr")
    if error is not None:
      text += f" +- {error:.2g}"
    print(f"{name}: {text}")


if __name__ == "__main__":
  common.run(main)
