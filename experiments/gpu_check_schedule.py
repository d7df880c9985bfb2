"""A step of a bfloat16 model of about 1B parameters under two schedules.

rollplex against the serial schedule that shares prefixes too, at group 1 and 8:
the rollout, the reference's scores and the gradient, as in `bench --suite=schedule`.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.schedule_workload import (
    TOKENS,
    Steps,
    Workload,
    gradient_errors,
)
from rollplex_jax import timeline as timeline_lib
from rollplex_jax.models import vlm
from rollplex_jax.models.config import ModelConfig, TextConfig, VisionConfig
from rollplex_jax.models.weights import num_parameters
from rollplex_jax.schedule import ScheduleConfig
from rollplex_jax.stages.prefix import SavePolicy
from rollplex_jax.timeline import Timeline

GOAL = 1.3  # Of rollplex over serial at group 1.
# Layers of Qwen2.5-VL-7B, four of 28, and of its tower, four of 32: wide rather
# than deep, so that programs compile in seconds.
CONFIG = ModelConfig(
    text=TextConfig(
        vocab_size=8192, hidden_size=3584, intermediate_size=18944,
        num_hidden_layers=4, num_attention_heads=28, num_key_value_heads=4,
        mrope_section=(16, 24, 24), tie_word_embeddings=True),
    vision=VisionConfig(
        depth=4, hidden_size=1280, intermediate_size=3420, num_heads=16,
        out_hidden_size=3584, fullatt_block_indexes=(3,)), **TOKENS)
WORKLOAD = Workload(prompts=4, group=8, frames=40, rows=20, columns=20,
                    text=46, response=128, micro_batch_size=8)
_TINY = ModelConfig(
    text=TextConfig(
        vocab_size=8192, hidden_size=32, intermediate_size=64,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        mrope_section=(2, 3, 3), tie_word_embeddings=True),
    vision=VisionConfig(
        depth=1, hidden_size=32, intermediate_size=64, num_heads=2,
        out_hidden_size=32, fullatt_block_indexes=(0,)), **TOKENS)
_TINY_WORKLOAD = Workload(prompts=1, frames=1, rows=4, columns=4,
                          text=8, response=4, micro_batch_size=2)
_ROUNDS = 5
# In this order, as far as time goes: (group, schedules that run in turn).
_COMPARED = (
    (1, ("serial", "rollplex")), (8, ("serial", "rollplex")),
    (1, ("rollplex, one stream",)), (8, ("rollplex, one stream",)))
# Less than all activations, of which a prompt of this length has 30 GB.
_SAVE = SavePolicy.LAYER_INPUTS


def schedules(chunk: int) -> dict[str, ScheduleConfig]:
  """What is compared; the window's units have `chunk` tokens."""
  rollplex = ScheduleConfig(name="rollplex", save=_SAVE, window_chunk=chunk)
  return {
      "serial": ScheduleConfig(save=_SAVE), "rollplex": rollplex,
      "rollplex, one stream": dataclasses.replace(
          rollplex, window_streams=False)}


def run(*, interpret: bool, deadline: float, log: Callable[[str], None]
        ) -> dict[str, Any]:
  """Compares the schedules.

  Args:
    interpret: take a tiny model, one round and no second group.
    deadline: of `time.monotonic`; no schedule begins that would not be compiled
      by then if it took as long as the longest before it.
    log: told what begins.

  Returns:
    "groups": by size and schedule "seconds" (the median of "all"),
    "first_seconds" (with compiling), "stage_seconds", "over_serial",
    and, beside the serial one, "same_tokens" as it and, if so, "gradient_error"
    against it; "num_parameters", "workload", "peak_bytes", "failed" and
    "left_out".
  """
  config, workload = ((_TINY, _TINY_WORKLOAD) if interpret
                      else (CONFIG, WORKLOAD))
  policy, reference = _models(config)
  found = schedules(8 if interpret else 512)
  result = {
      "num_parameters": num_parameters(policy), "groups": {}, "goal": GOAL,
      "workload": dataclasses.asdict(workload) | {"prefix": workload.prefix},
      "failed": [], "left_out": []}
  for group, names in _COMPARED[:1] if interpret else _COMPARED:
    steps = Steps(config, dataclasses.replace(workload, group=group), policy,
                  reference)
    rows = result["groups"].get(group, {})
    longest = max((row["first_seconds"] for known in result["groups"].values()
                   for row in known.values()), default=0.0)
    left_out = _compare(steps, {name: found[name] for name in names}, rows,
                        1 if interpret else _ROUNDS, deadline, longest,
                        lambda name, group=group: log(
                            f"{name} at group {group}: compiling"))
    result["left_out"] += [f"{name} at group {group}" for name in left_out]
    for row in rows.values():
      if "serial" in rows:
        row["over_serial"] = rows["serial"]["seconds"] / row["seconds"]
    if rows:
      result["groups"][group] = rows
  result["peak_bytes"] = (jax.devices()[0].memory_stats() or {}).get(
      "peak_bytes_in_use")
  return result


def _compare(steps: Steps, found: dict[str, ScheduleConfig],
             rows: dict[str, Any], rounds: int, deadline: float,
             longest: float, log: Callable[[str], None]) -> list[str]:
  """Runs schedules in turn and adds their rows. Returns what is left out."""
  exact = tokens = None
  new: dict[str, Any] = {}
  for name, schedule in found.items():
    if time.monotonic() + longest > deadline:
      continue
    log(name)
    start = time.perf_counter()
    done, gradient = steps.run(schedule)
    new[name] = {"first_seconds": time.perf_counter() - start, "all": []}
    if tokens is None:
      exact, tokens = gradient, done.token_ids
    longest = max(longest, new[name]["first_seconds"])
    if "serial" not in new:
      continue
    new[name]["same_tokens"] = bool(np.array_equal(tokens, done.token_ids))
    # In bfloat16 a near-tie may fall otherwise in another program; gradients of
    # other tokens are not to be compared.
    if new[name]["same_tokens"]:
      new[name] |= gradient_errors(_float32(exact), _float32(gradient))
  del exact  # As large as two models.
  gradient = done = None
  for i in range(rounds):
    if i and time.monotonic() > deadline:
      break
    for name, row in new.items():
      start = time.perf_counter()
      steps.run(found[name])
      row["all"].append(time.perf_counter() - start)
  for name, row in new.items():
    timeline = Timeline(name)
    steps.run(found[name], timeline=timeline)
    row["stage_seconds"] = timeline_lib.summary([timeline])[name][
        "stage_seconds"]
    row["seconds"] = statistics.median(row["all"])
  rows |= new
  return [name for name in found if name not in new]


def _models(config: ModelConfig):
  """A random policy, and a random reference with the policy's tower."""
  draw = jax.jit(vlm.init_params, static_argnums=(0, 2))
  policy = draw(config, jax.random.key(0), jnp.bfloat16)
  reference = draw(config, jax.random.key(1), jnp.bfloat16)
  return policy, {**reference, "visual": policy["visual"]}


def _float32(tree):
  return jax.tree.map(lambda a: a.astype(jnp.float32), tree)
