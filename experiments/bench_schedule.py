"""Step time of the schedules on the same prompts, tokens and weights.

The work is shaped like video: a long prefix of mostly video tokens and a short
response. Each schedule does a whole step (rollout, reference scoring, gradient)
from the same state, in turn, and its gradient is compared with that of one
program over whole sequences. The disaggregated schedule needs cores of its own
for each pool: see `bench_disaggregated`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import statistics
import time
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from experiments import bench_disaggregated, common, schedule_report
from experiments.schedule_workload import (
  CONFIG,
  SCHEDULES,
  Steps,
  Workload,
  gradient_errors,
  make_models,
)
from rollplex_jax import programs
from rollplex_jax import timeline as timeline_lib
from rollplex_jax.models.config import ModelConfig
from rollplex_jax.models.weights import num_parameters
from rollplex_jax.stages import prefix_units, rollout
from rollplex_jax.timeline import Timeline

# As a table shows them: whole sequences count as scores and gradients.
_STAGES = ("vision", "prefix", "decode", "score", "gradient", "prefix_backward")
_SERIAL = ("serial_unshared", "serial_shared")
_WORKLOAD = Workload()
# Half of the video: a core alone takes minutes for a step of the whole.
_APART = Workload(prompts=2, frames=10)


def run(rounds: int = 5, config: ModelConfig = CONFIG,
        workload: Workload = _WORKLOAD, apart: Workload = _APART,
        timeline_stem: str = "") -> dict[str, Any]:
  """Compares the schedules and prints a table.

  Args:
    rounds: measurements of each schedule.
    config: the model; policy and reference are two random ones.
    workload: the step; a second comparison takes it at group 1.
    apart: the step of the comparison with the disaggregated schedule.
    timeline_stem: path without suffix for a picture and a trace of the steps.

  Returns:
    "ratios" (step time over rollplex's, medians), "flop_ratios" (of the
    compiled programs), "max_gradient_error" (largest relative error of a tensor
    but a key bias against the monolithic gradient), "max_key_bias_error" (see
    `gradient_errors`), "schedules", "group1" and "disaggregated"
    with the numbers behind them.
  """
  console = Console()
  models = make_models(config)
  size, where = num_parameters(models[0]), common.machine()
  console.print(
      f"{size / 1e6:.1f}M parameters, {workload.prompts} prompt(s) of "
      f"{workload.prefix} prefix tokens, group {workload.group}, responses of "
      f"{workload.response} tokens; {where['cpu']}, {where['cores']} cores")
  group, timelines = _compare(
      config, workload, models, (*_SERIAL, "rollplex"), rounds)
  if timeline_stem:
    schedule_report.write(
        timeline_stem, timelines, f"{size / 1e6:.0f}M parameters, "
        f"{workload.prefix} prefix tokens, group {workload.group}")
  _print(console, f"group {workload.group}", group)
  alone, _ = _compare(config, dataclasses.replace(workload, group=1), models,
                      (*_SERIAL, "rollplex"), rounds)
  _print(console, "group 1", alone)
  ratios, flop_ratios = _ratios(group, "seconds"), _ratios(group, "flops")
  # With nothing to share, the serial schedule that is the faster one.
  faster = min(_SERIAL, key=lambda name: alone[name]["seconds"])
  ratios["serial_group1"] = _ratios(alone, "seconds")[faster]
  flop_ratios["serial_group1"] = _ratios(alone, "flops")[faster]
  del models
  console.print(
      f"two processes on a core each: {apart.prompts} prompts of "
      f"{apart.prefix} prefix tokens, group {apart.group}")
  pools = bench_disaggregated.run(config, apart, rounds)
  ratios |= _ratios(pools, "seconds")
  for name, ratio in ratios.items():
    flops = (f" ({flop_ratios[name]:.2f}x fewer FLOPs)"
             if name in flop_ratios else "")
    console.print(f"rollplex is {ratio:.2f}x as fast as {name}{flops}")
  error, bias_error = (
      max(row[key] for rows in (group, alone, pools) for row in rows.values())
      for key in ("gradient_error", "key_bias_error"))
  console.print(
      f"largest gradient error {error:.1e} of a tensor's norm, of key biases "
      f"(whose terms cancel) {bias_error:.1e}")
  return {"ratios": ratios, "flop_ratios": flop_ratios,
          "max_gradient_error": error, "max_key_bias_error": bias_error,
          "schedules": group,
          "group1": alone, "disaggregated": pools, "num_parameters": size,
          "workload": dataclasses.asdict(workload),
          "disaggregated_workload": dataclasses.asdict(apart),
          "machine": where}


def _ratios(rows: dict[str, Any], key: str) -> dict[str, float]:
  """Each schedule's number over rollplex's."""
  return {name: row[key] / rows["rollplex"][key]
          for name, row in rows.items() if name != "rollplex"}


def _compare(config, workload, models, names, rounds,
             ) -> tuple[dict[str, Any], list[Timeline]]:
  """Runs schedules in turn: a row of numbers and a timeline for each."""
  steps = Steps(config, workload, *models)
  rows, gradients, timelines, tokens = {}, {}, [], None
  for name in names:
    with _counting(workload) as counts:
      done, gradients[name] = steps.run(SCHEDULES[name])
    rows[name] = {**counts, "all_seconds": []}
    if tokens is None:
      tokens = done.token_ids
    elif not np.array_equal(tokens, done.token_ids):
      raise ValueError(f"{name} sampled other tokens than {names[0]}")
  for _ in common.progress("measuring", rounds)(range(rounds)):
    for name in names:
      start = time.perf_counter()
      steps.run(SCHEDULES[name])
      rows[name]["all_seconds"].append(time.perf_counter() - start)
  for name, row in rows.items():
    timeline = Timeline(name, measure_bytes=True)
    steps.run(SCHEDULES[name], timeline=timeline)
    timelines.append(timeline)
    row["stages"] = timeline_lib.summary([timeline])[name]
    row["seconds"] = statistics.median(row["all_seconds"])
    row |= gradient_errors(gradients["serial_unshared"], gradients[name])
  return rows, timelines


@contextlib.contextmanager
def _counting(workload: Workload) -> Iterator[dict[str, Any]]:
  """Counts what runs inside: FLOPs of compiled programs, tokens by stage.

  The compiler counts a loop's body once. Decoding and the units of a window
  are therefore counted from one step and one unit, times how often they run.
  """
  counts: dict[str, Any] = {"flops": 0.0, "tokens": {}}
  originals = {name: f for name, f in vars(programs).items()
               if hasattr(f, "lower") and callable(f)}

  def counted(name: str, f: Callable) -> Callable:
    def call(*args, **kwargs):
      for stage, tokens in _tokens(name, args, workload).items():
        counts["tokens"][stage] = counts["tokens"].get(stage, 0) + tokens
      if name in ("decode", "decode_window"):
        counts["flops"] += _loop_flops(name, args, workload)
      else:
        counts["flops"] += _flops(f, *args, **kwargs)
      return f(*args, **kwargs)
    return call

  try:
    for name, f in originals.items():
      setattr(programs, name, counted(name, f))
    yield counts
  finally:
    for name, f in originals.items():
      setattr(programs, name, f)


def _flops(f: Callable, *args, **kwargs) -> float:
  return (f.lower(*args, **kwargs).compile().cost_analysis() or {}).get(
      "flops", 0.0)


def _tokens(name: str, args, workload: Workload) -> dict[str, int]:
  """Tokens that one call of a program processes, by stage."""
  size = lambda a: int(np.prod(a.shape))
  if name == "vision":
    return {"vision": args[2].patches.shape[0] // 4}
  if name == "prefix_forward":
    return {"prefix": size(args[2].token_ids)}
  if name == "prefix_backward":
    return {name: size(args[4].token_ids)}
  if name in ("decode", "decode_window"):
    made = {"decode": size(args[5] if name == "decode" else args[9])
            * workload.response}
    if name == "decode_window":
      made["prefix"] = size(args[5].token_ids)
    return made
  at = {"score_full": (4, 2), "score_suffix": (5, None),
        "gradient_full": (8, 5), "gradient_suffix": (10, None)}.get(name)
  if at is None:
    return {}
  responses, prompts = args[at[0]].token_ids, at[1] and args[at[1]]
  b, g, width = responses.shape
  if prompts is not None:
    width += prompts.token_ids.shape[1]
  return {name.rpartition("_")[0]: b * g * width}


def _loop_flops(name: str, args, workload: Workload) -> float:
  """FLOPs of decoding, and of the units of a window that makes a reference's.

  A unit is counted at its longest keys, more than the earlier ones read.
  """
  if name == "decode":
    params, config, sampling, prompts, kv, keys, _ = args
    text = params["text"]
  else:
    (text, reference, config, sampling, window, prompts, kv, _, features, keys,
     artifacts) = args
  t = config.text

  @jax.jit
  def step(text, prompts, kv, keys):
    inputs = rollout.decode_inputs(prompts, kv, keys)
    state = rollout.start(sampling, prompts, kv, keys.shape[1])
    return rollout.decode_step(text, t, sampling, inputs, state)

  total = workload.response * _flops(step, text, prompts, kv, keys)
  if name == "decode_window":
    shape = window.unit.within(prompts)

    @jax.jit
    def unit(text, prompts, features, buffers, place):
      return prefix_units.run_unit(
          text, t, prompts, features, buffers, place, shape)

    place = prefix_units.Place(np.int32(0), np.int32(0))
    units = prefix_units.plan_units(prompts, shape)
    total += int(units.total) * _flops(
        unit, reference, prompts, features, artifacts.reference, place)
  return total


def _print(console: Console, title: str, rows) -> None:
  table = Table(title=title)
  for column in ("schedule", "step", "TFLOP", "live MB", "gradient error"):
    table.add_column(
        column, justify="left" if column == "schedule" else "right")
  for name, row in rows.items():
    table.add_row(
        name, f"{row['seconds']:.2f} s", f"{row['flops'] / 1e12:.2f}",
        f"{(row['stages']['peak_bytes_live'] or 0) / 1e6:,.0f}",
        f"{row['gradient_error']:.1e}")
  console.print(table)
  table = Table(title="tokens and seconds by stage")
  table.add_column("schedule", no_wrap=True)
  for stage in _STAGES:
    table.add_column(stage.replace("_", " "), justify="right")
  for name, row in rows.items():
    seconds = row["stages"]["stage_seconds"]
    table.add_row(name, *(
        f"{row['tokens'].get(stage, 0):,}\n"
        f"{seconds.get(stage, 0) + seconds.get(f'{stage}_full', 0):.2f} s"
        for stage in _STAGES))
  console.print(table)
  console.print("Under rollplex decode and the reference's prefix share one "
                "program; their seconds overlap.")
