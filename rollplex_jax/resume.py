"""Whether a run may go on from what its folder holds.

What it may not: under a configuration that would lead elsewhere, with another
model, or with other rows. Each is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import dataclasses
import json
import os
import pathlib
from typing import Any
import zlib

import numpy as np

from legolm_jax.safetensors_files import CheckpointFolder
from rollplex_jax.checkpoint import Checkpoint, Checkpoints
from rollplex_jax.config import TrainConfig, to_config_dict
from rollplex_jax.errors import InputError
from rollplex_jax.models import hf
from rollplex_jax.run_record import RunRecord

# Keys, and groups of them, that a run may go on with another value of, and why.
MAY_CHANGE: dict[str, str] = {
    "policy.path": "what lies there is compared instead",
    "reference.path": "what lies there is compared instead",
    "policy.remat": "the same sums, recomputed",
    "total_steps": "where the run ends, not how it goes there",
    "max_seconds": "where the run ends",
    "stop_at_success": "where the run ends",
    "eval_every": "evaluations only look",
    "eval_batch_size": "evaluations only look",
    "with_entropy": "a measurement",
    "timeline_every": "a measurement",
    "mesh": "the same sums, on other devices",
    "micro_batch_size": "the same sums, in other parts",
    "schedule": "the same sums, in another order",
    "residency": "the same sums, with other buffers kept",
    "checkpoint": "what is kept of the run",
    "health": "what it warns of, and where it ends",
    "data.reward_timeout": "what the machine allows",
    "data.reward_memory_gb": "what the machine allows",
    "data.reward_num_workers": "what the machine allows",
    "data.reward_max_timeouts": "where the run ends",
    "data.reward_dry_run": "a check before the start",
    "data.environment.num_workers": "what the machine allows",
}
# Bytes that are looked at in each of three places of a tensor.
_SAMPLE_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class Found:
  """What a folder holds of the run.

  Attributes:
    checkpoint: to go on from; None where the run ended before its first.
    changed: lines about keys that differ and were allowed to.
  """

  checkpoint: Checkpoint | None
  changed: tuple[str, ...] = ()

  @property
  def step(self) -> int:
    return self.checkpoint.step if self.checkpoint else 0


def find(folder: str | os.PathLike, config: TrainConfig, *,
         allow_config_change: bool = False) -> Found | None:
  """Looks for a run to go on with, and checks that it may. Changes nothing.

  Args:
    folder: the run's.
    config: of the run that is to go on, if its checkpoints are enabled.
    allow_config_change: a change of the configuration is only told.

  Returns:
    None if the folder holds no run.

  Raises:
    InputError: it holds a run that can't go on; says why.
  """
  folder = pathlib.Path(folder)
  checkpoint = Checkpoints(folder / "checkpoints").read()
  if checkpoint is not None:
    changes = [*_changes(checkpoint.facts["config"], _plain(config))]
    if changes and not allow_config_change:
      raise InputError(
          f"{folder}: holds a run whose result these would change: "
          f"{'; '.join(changes)}; pass --allow_config_change to go on with "
          "them, or --overwrite to begin anew")
    check_models(checkpoint, policy=config.policy.path,
                 reference=config.reference.path)
    return Found(checkpoint, tuple(changes))
  if (config.checkpoint.enabled and not (folder / "summary.json").exists()
      and _was_saving(folder / "config.json", config)):
    return Found(None)
  if (folder / "metrics.jsonl").exists():
    raise InputError(f"{folder}: holds a run already, and no checkpoint to go "
                     "on from; pass --overwrite to remove it")
  return None


def finished(folder: str | os.PathLike, found: Found,
             config: TrainConfig) -> dict[str, Any] | None:
  """The summary of a run that has nothing left to do, or None."""
  summary = pathlib.Path(folder) / "summary.json"
  if found.checkpoint is None or not summary.exists():
    return None
  record = RunRecord.of(found.checkpoint.facts["record"])
  if not record.is_over(config, record.is_out_of_time(config)):
    return None
  return json.loads(summary.read_text())


def _was_saving(path: pathlib.Path, config: TrainConfig) -> bool:
  """Whether a configuration is this run's, which ended before its first save.
  """
  try:
    before = json.loads(path.read_text())
    saved = before["checkpoint"]
  except (OSError, ValueError, KeyError, TypeError):
    return False
  if not (saved["every"] or saved["every_minutes"]):
    return False
  return not [*_changes(before, _plain(config))]


def facts(config: TrainConfig) -> dict[str, Any]:
  """What `find` compares, for a checkpoint: the configuration and the model."""
  return {"config": _plain(config), "models": {
      "policy": _identity(config.policy.path),
      "reference": _identity(config.reference.path)}}


def check_models(checkpoint: Checkpoint, **paths: str) -> None:
  """Compares models with those that a run began with.

  Args:
    checkpoint: of the run.
    **paths: folders of its "policy" and "reference", empty for none.

  Raises:
    InputError: naming the first key or tensor that differs.
  """
  for name, path in paths.items():
    before, now = checkpoint.facts["models"][name], _identity(path)
    for kind, label in (("config", "config.json: "), ("tensors", "tensor ")):
      was, found = before[kind], now[kind]
      for key in [*was, *found]:
        if was.get(key) != found.get(key):
          raise InputError(
              f"{name}.path={path}: is another model than the one with which "
              f"{checkpoint.path} began: {label}{key} is "
              f"{found.get(key, 'missing')}, expected {was.get(key, 'none')}")


def _identity(path: str) -> dict[str, dict[str, Any]]:
  """What tells one model from another, without reading all of it."""
  if not path:
    return {"config": {}, "tensors": {}}
  model = dataclasses.asdict(hf.load_config(path))
  files = CheckpointFolder(path)
  return {
      "config": json.loads(json.dumps(dict(_flat(model)), default=str)),
      "tensors": {
          key: f"{info.dtype}{list(info.shape)} {_checksum(files.read(key))}"
          for key, info in sorted(files.tensors.items())}}


def _checksum(tensor: np.ndarray) -> str:
  """CRC-32 of a tensor's bytes at its start, its middle and its end."""
  data = tensor.reshape(-1).view(np.uint8)
  value = 0
  for start in (0, data.size // 2, max(data.size - _SAMPLE_BYTES, 0)):
    value = zlib.crc32(data[start:start + _SAMPLE_BYTES], value)
  return f"{value:08x}"


def _plain(config: TrainConfig) -> dict[str, Any]:
  """The configuration as it comes out of a JSON file."""
  return json.loads(json.dumps(to_config_dict(config).to_dict()))


def _changes(before: Mapping[str, Any], now: Mapping[str, Any],
             ) -> Iterator[str]:
  """Keys that differ and may not, with both values.

  A key that the saved run did not know had what is now its default.
  """
  defaults = dict(_flat(_plain(TrainConfig())))
  before, now = {**defaults, **dict(_flat(before))}, dict(_flat(now))
  constant = all(c.get("optimizer.lr_scheduler_type") == "constant"
                 for c in (before, now))
  for key in dict.fromkeys([*now, *before]):
    if before.get(key) == now.get(key) or _may_change(key):
      continue
    if key == "optimizer.total_steps" and constant:
      continue  # Nothing reads it.
    yield f"{key} was {before.get(key)!r}, is {now.get(key)!r}"


def _may_change(key: str) -> bool:
  parts = key.split(".")
  return any(".".join(parts[:i + 1]) in MAY_CHANGE for i in range(len(parts)))


def _flat(tree: Mapping[str, Any], prefix: str = "",
          ) -> Iterator[tuple[str, Any]]:
  for key, value in tree.items():
    if isinstance(value, Mapping):
      yield from _flat(value, f"{prefix}{key}.")
    else:
      yield f"{prefix}{key}", value
