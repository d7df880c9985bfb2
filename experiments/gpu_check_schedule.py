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

from experiments.schedule_workload import Steps, Workload, gradient_errors
from rollplex_jax import timeline as timeline_lib
from rollplex_jax.models import vlm
from rollplex_jax.models.config import ModelConfig, TextConfig, VisionConfig
from rollplex_jax.models.weights import num_parameters
from rollplex_jax.schedule import ScheduleConfig
from rollplex_jax.stages.prefix import SavePolicy
from rollplex_jax.timeline import Timeline

GOAL = 1.3  # Of rollplex over serial at group 1.
_VIDEO, _START, _END = 8189, 8190, 8191
_TOKENS = dict(image_token_id=8188, video_token_id=_VIDEO,
               vision_start_token_id=_START, vision_end_token_id=_END)
# Layers of Qwen2.5-VL-3B, ten of 36, and of its tower, eight of 32.
CONFIG = ModelConfig(
    text=TextConfig(
        vocab_size=32768, hidden_size=2048, intermediate_size=11008,
        num_hidden_layers=10, num_attention_heads=16, num_key_value_heads=2,
        mrope_section=(16, 24, 24), tie_word_embeddings=True),
    vision=VisionConfig(
        depth=8, hidden_size=1280, intermediate_size=3420, num_heads=16,
        out_hidden_size=2048, fullatt_block_indexes=(7,)), **_TOKENS)
WORKLOAD = Workload(prompts=4, group=8, frames=20, rows=20, columns=20,
                    text=46, response=128, micro_batch_size=8)
_TINY = ModelConfig(
    text=TextConfig(
        vocab_size=8192, hidden_size=32, intermediate_size=64,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        mrope_section=(2, 3, 3), tie_word_embeddings=True),
    vision=VisionConfig(
        depth=1, hidden_size=32, intermediate_size=64, num_heads=2,
        out_hidden_size=32, fullatt_block_indexes=(0,)), **_TOKENS)
_TINY_WORKLOAD = Workload(prompts=1, group=2, frames=1, rows=4, columns=4,
                          text=8, response=4, micro_batch_size=2)
_GROUPS = (1, 8)
_ROUNDS = 5


def schedules(chunk: int) -> dict[str, ScheduleConfig]:
  """What is compared; the window's units have `chunk` tokens."""
  save = SavePolicy.LAYER_INPUTS
  rollplex = ScheduleConfig(name="rollplex", save=save, window_chunk=chunk)
  return {
      "serial": ScheduleConfig(save=save), "rollplex": rollplex,
      "rollplex, one stream": dataclasses.replace(
          rollplex, window_streams=False)}


def run(*, interpret: bool, deadline: float, log: Callable[[str], None]
        ) -> dict[str, Any]:
  """Compares the schedules.

  Args:
    interpret: take a tiny model, one round and no second group.
    deadline: of `time.monotonic`; no schedule begins after it. One that has
      begun ends: compiling it may take half a minute.
    log: told what begins.

  Returns:
    "groups": by size "seconds" of each schedule (medians), their range,
    "stage_seconds", "over_serial", "gradient_error" against the serial schedule;
    "num_parameters", "workload", "failed", "left_out", "skipped".
  """
  config, workload = ((_TINY, _TINY_WORKLOAD) if interpret
                      else (CONFIG, WORKLOAD))
  policy, reference = _models(config)
  result = {
      "num_parameters": num_parameters(policy), "groups": {}, "goal": GOAL,
      "workload": dataclasses.asdict(workload) | {"prefix": workload.prefix},
      "failed": [], "left_out": [], "skipped": []}
  for group in _GROUPS[:1] if interpret else _GROUPS:
    steps = Steps(config, dataclasses.replace(workload, group=group), policy,
                  reference)
    rows, gradients, tokens = {}, {}, None
    found = schedules(8 if interpret else 512)
    if interpret:
      del found["rollplex, one stream"]
    for name, schedule in found.items():
      if time.monotonic() > deadline:
        result["left_out"].append(f"{name} at group {group}")
        continue
      log(f"{name} at group {group}: compiling")
      start = time.perf_counter()
      done, gradients[name] = steps.run(schedule)
      rows[name] = {"first_seconds": time.perf_counter() - start, "all": []}
      tokens = done.token_ids if tokens is None else tokens
      rows[name]["same_tokens"] = bool(np.array_equal(tokens, done.token_ids))
    for _ in range(1 if interpret else _ROUNDS):
      if time.monotonic() > deadline and all(r["all"] for r in rows.values()):
        break
      for name, row in rows.items():
        start = time.perf_counter()
        steps.run(found[name])
        row["all"].append(time.perf_counter() - start)
    for name, row in rows.items():
      timeline = Timeline(name)
      steps.run(found[name], timeline=timeline)
      row["stage_seconds"] = timeline_lib.summary([timeline])[name][
          "stage_seconds"]
      row["seconds"] = statistics.median(row["all"])
      if "serial" in rows:
        row["over_serial"] = rows["serial"]["seconds"] / row["seconds"]
        row |= gradient_errors(
            _float32(gradients["serial"]), _float32(gradients[name]))
    if rows:
      result["groups"][group] = rows
  result["peak_bytes"] = (jax.devices()[0].memory_stats() or {}).get(
      "peak_bytes_in_use")
  return result


def _models(config: ModelConfig):
  """A random policy, and a random reference with the policy's tower."""
  draw = jax.jit(vlm.init_params, static_argnums=(0, 2))
  policy = draw(config, jax.random.key(0), jnp.bfloat16)
  reference = draw(config, jax.random.key(1), jnp.bfloat16)
  return policy, {**reference, "visual": policy["visual"]}


def _float32(tree):
  return jax.tree.map(lambda a: a.astype(jnp.float32), tree)
