"""Mean reward of greedy completions, for `experiments.evaluate`."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
import dataclasses
import json
from typing import Any

import ml_collections

from legolm_jax.evaluate import mean_and_error
from rollplex_jax import inference
from rollplex_jax.config import from_config_dict
from rollplex_jax.data import fallbacks
from rollplex_jax.data.reward_workers import RewardWorkers
from rollplex_jax.data.rows import RowFile
from rollplex_jax.data.settings import DataConfig, EnvironmentConfig
from rollplex_jax.data.workers import Limits
from rollplex_jax.errors import InputError
from rollplex_jax.evaluation import Evaluation, evaluate
from rollplex_jax.models import architectures
from rollplex_jax.stages.sampling import SamplingConfig
from rollplex_jax.tasks import Task, make_task


def settings(data: str | None, reward: str, world: Sequence[str], limit: int,
             *, timeout: float = DataConfig.reward_timeout) -> DataConfig:
  """Rows with a reward, or a world.

  Args:
    data: JSONL file of rows, or None.
    reward: "module:function" for rows.
    world: KEY=VALUE of an EnvironmentConfig.
    limit: so many episodes; 0 for those of the world's settings.
    timeout: seconds that the reward may take for a completion.

  Raises:
    InputError: naming the flag or file that is wrong.
  """
  world = _world(world)
  if not (data or world.name):
    raise InputError("--data is not set: expected rows, or a level in "
                     "--world=level=LEVEL")
  if data and not reward:
    raise InputError("--reward is not set: expected module:function or "
                     "file.py:function")
  if limit and world.name:
    world = dataclasses.replace(world, eval_episodes=limit)
  if data:
    RowFile(data)
    workers = RewardWorkers(reward, Limits(num_workers=1))
    workers.check()
    workers.close()
  return DataConfig(rows=data or "", reward=reward, reward_timeout=timeout,
                    environment=world)


def _world(pairs: Sequence[str]) -> EnvironmentConfig:
  raw = ml_collections.ConfigDict(allow_dotted_keys=True)
  for pair in pairs:
    name, _, value = pair.partition("=")
    # Numbers and truth values are written as in JSON, all else is text.
    try:
      raw[name] = json.loads(value)
    except (ValueError, TypeError):
      raw[name] = value
  return from_config_dict(EnvironmentConfig, raw, "--world")


def playing(task: Task) -> dict[str, Any]:
  """What `evaluate` is told of a task whose episodes have several turns."""
  if task.max_turns == 1:
    return {}
  return {"player": task.player(), "max_turns": task.max_turns}


def run(config: DataConfig, model: Any, reference: Any, *, limit: int,
        max_completion_length: int, batch_size: int,
        progress: Callable) -> dict[str, Any]:
  """Completes and scores every row once.

  Args:
    config: what `settings` returned.
    model: with `config`, `params`, `processor` and `name`.
    reference: another such, or None.
    limit: so many rows; 0 for all.
    max_completion_length: in tokens.
    batch_size: rows at a time.
    progress: makes a progress bar of a label and a total.
  """
  def of(model) -> Evaluation:
    architectures.check_decodes(model.config, model.name)
    task = make_task(config, model.processor, supervised=False)
    rows = task.eval_rows
    if config.rows:
      rows = task.train_rows
      rows = dataclasses.replace(rows, indices=rows.indices[:limit or None])
    sampling = SamplingConfig(
        max_completion_length=max_completion_length, temperature=0.0,
        eos_token_ids=inference.eos_token_ids(model.config, model.processor),
        banned_token_ids=model.config.vision_token_ids)
    return evaluate(
        model.params, model.config, model.processor, rows, task.score, sampling,
        batch_size=batch_size, **playing(task),
        progress=progress("completing", -(-len(rows) // batch_size)))

  found = of(model)
  values = [s["overall"] for s in found.scores]
  out: dict[str, Any] = {"rows": len(values)}
  out["reward"], out["reward_stderr"] = mean_and_error(values)
  if found.success is not None:
    out["success"], out["success_low"], out["success_high"] = found.success
  out["reward_errors"] = dict(collections.Counter(
      kind for _, kind in map(fallbacks.split, found.scores) if kind))
  if reference is not None:
    base = of(reference)
    before = [s["overall"] for s in base.scores]
    out["reference_reward"] = base.mean()
    if base.success is not None:
      out["reference_success"] = base.success[0]
    out["reward_change"], out["reward_change_stderr"] = mean_and_error(
        [a - b for a, b in zip(values, before, strict=True)])
    out["same_completions"] = sum(
        a == b for a, b in zip(found.completions, base.completions)
    ) / len(values)
  return out
