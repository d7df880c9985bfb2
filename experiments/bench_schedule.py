"""Step time of the schedules on the same prompts, tokens and weights.

The work is shaped like video: a long prefix of mostly video tokens and a short
response. Each schedule does a whole step (rollout, reference scoring, gradient)
from the same state, in turn, and its gradient is compared with that of one
program over whole sequences.
"""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import dataclasses
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from experiments import common
from rollplex_jax import programs, samples
from rollplex_jax import timeline as timeline_lib
from rollplex_jax.artifacts import Model
from rollplex_jax.data.processor import Prompt
from rollplex_jax.executor import Settings, Step
from rollplex_jax.models import vlm
from rollplex_jax.models.config import ModelConfig, TextConfig, VisionConfig
from rollplex_jax.models.positions import rope_index
from rollplex_jax.models.weights import num_parameters
from rollplex_jax.schedule import ScheduleConfig
from rollplex_jax.stages.objectives import ObjectiveConfig
from rollplex_jax.stages.prefix import SavePolicy
from rollplex_jax.stages.sampling import SamplingConfig
from rollplex_jax.timeline import Timeline

_VIDEO, _START, _END = 8189, 8190, 8191
CONFIG = ModelConfig(
    text=TextConfig(
        vocab_size=8192, hidden_size=384, intermediate_size=1152,
        num_hidden_layers=8, num_attention_heads=6, num_key_value_heads=2,
        mrope_section=(8, 12, 12), tie_word_embeddings=True),
    vision=VisionConfig(
        depth=4, hidden_size=192, intermediate_size=576, num_heads=4,
        out_hidden_size=384, patch_size=14, window_size=112,
        fullatt_block_indexes=(3,)),
    image_token_id=8188, video_token_id=_VIDEO, vision_start_token_id=_START,
    vision_end_token_id=_END)

# Saved activations: on a CPU memory is there, and running a layer again is not
# free. The same in every schedule.
_SAVE = SavePolicy.ACTIVATIONS
SCHEDULES = {
    "serial_unshared": ScheduleConfig(share_prefix=False),
    "serial_shared": ScheduleConfig(save=_SAVE),
    "rollplex": ScheduleConfig(name="rollplex", save=_SAVE, window_chunk=512),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
  """What a step holds: prompts of one video and a question.

  Attributes:
    prompts: B.
    group: G.
    frames, rows, columns: the video's grid in patches; a quarter of their
      product is its tokens.
    text: further prompt tokens.
    response: R; every completion has the full length.
    micro_batch_size: samples per pass.
  """

  prompts: int = 1
  group: int = 8
  frames: int = 20
  rows: int = 20
  columns: int = 20
  text: int = 46
  response: int = 64
  micro_batch_size: int = 2

  @property
  def prefix(self) -> int:
    return self.frames * self.rows * self.columns // 4 + 2 + self.text


def run(rounds: int = 5, config: ModelConfig = CONFIG,
        workload: Workload = Workload()) -> dict[str, Any]:
  """Compares the schedules and prints a table.

  Args:
    rounds: measurements of each schedule.
    config: the model; policy and reference are two random ones.
    workload: the step; a second comparison takes it at group 1.

  Returns:
    "ratios" (step time over rollplex's, medians), "flop_ratios" (of the
    compiled programs), "max_gradient_error" (largest relative error of a tensor
    against the monolithic gradient), "schedules" with the numbers behind them.
  """
  console = Console()
  params = vlm.init_params(config, jax.random.key(0))
  reference = {**vlm.init_params(config, jax.random.key(1)),
               "visual": params["visual"]}
  size, where = num_parameters(params), common.machine()
  console.print(
      f"{size / 1e6:.1f}M parameters, {workload.prompts} prompt(s) of "
      f"{workload.prefix} prefix tokens, group {workload.group}, responses of "
      f"{workload.response} tokens; {where['cpu']}, {where['cores']} cores")
  group = _compare(config, workload, params, reference, SCHEDULES, rounds)
  alone = _compare(
      config, dataclasses.replace(workload, group=1), params, reference,
      {name: SCHEDULES[name] for name in ("serial_unshared", "rollplex")},
      rounds)
  ours = group["rollplex"]
  ratios = {name: row["seconds"] / ours["seconds"]
            for name, row in group.items() if name != "rollplex"}
  flop_ratios = {name: row["flops"] / ours["flops"]
                 for name, row in group.items() if name != "rollplex"}
  ratios["serial_group1"] = (
      alone["serial_unshared"]["seconds"] / alone["rollplex"]["seconds"])
  flop_ratios["serial_group1"] = (
      alone["serial_unshared"]["flops"] / alone["rollplex"]["flops"])
  _print(console, f"group {workload.group}", group)
  _print(console, "group 1", alone)
  for name, ratio in ratios.items():
    console.print(f"rollplex is {ratio:.2f}x as fast as {name} "
                  f"({flop_ratios[name]:.2f}x fewer FLOPs)")
  error = max(row["gradient_error"] for row in (*group.values(),
                                                *alone.values()))
  console.print(f"largest gradient error {error:.1e} of a tensor's norm")
  return {"ratios": ratios, "flop_ratios": flop_ratios,
          "max_gradient_error": error, "schedules": group, "group1": alone,
          "num_parameters": size, "workload": dataclasses.asdict(workload),
          "machine": where}


def make_prompt(config: ModelConfig, workload: Workload, seed: int) -> Prompt:
  """A prompt of one random video and random text."""
  rng = np.random.default_rng(seed)
  grid = (workload.frames, workload.rows, workload.columns)
  tokens = int(np.prod(grid)) // 4
  ids = np.array([_START, *[_VIDEO] * tokens, _END,
                  *rng.integers(0, 8000, workload.text + 1)], np.int32)
  seen = ids == _VIDEO
  grids = np.array([grid], np.int64)
  return Prompt(
      token_ids=ids,
      positions=rope_index(ids, grids, ("video",), (0.5,), config),
      feature_index=np.where(seen, np.cumsum(seen) - 1, -1).astype(np.int32),
      patches=rng.normal(size=(4 * tokens, config.vision.patch_dim)).astype(
          np.float32),
      grids=grids, modalities=("video",), seconds_per_grid=(0.5,))


def _compare(config, workload, params, reference, schedules, rounds):
  """Runs every schedule in turn; a row of numbers for each."""
  prompts = [make_prompt(config, workload, seed)
             for seed in range(workload.prompts)]
  batch = samples.make_batch(config, prompts, list(range(len(prompts))))
  sampling = SamplingConfig(max_completion_length=workload.response)
  advantages = np.random.default_rng(0).normal(
      size=(workload.prompts, workload.group)).astype(np.float32)

  def step(name, timeline=None):
    settings = Settings(
        config=config, schedule=schedules[name], sampling=sampling,
        objective=ObjectiveConfig(loss_type="dapo", beta=0.05),
        micro_batch_size=workload.micro_batch_size, with_entropy=False)
    work = Step(settings, batch, Model(params, 0), Model(reference, 0),
                num_generations=workload.group, seed=0, step=0,
                timeline=timeline)
    done = work.roll_out()
    groups = work.score(samples.Groups(
        rows=np.arange(workload.prompts, dtype=np.int32),
        token_ids=done.token_ids, lengths=done.lengths, advantages=advantages))
    grads, _, _ = work.gradient(groups, first=True)
    return done, jax.block_until_ready(grads)

  rows, tokens = {}, None
  gradients = {}
  for name in schedules:
    start = time.perf_counter()
    with _counting() as flops:
      done, gradients[name] = step(name)
    rows[name] = {"flops": flops(), "first_step_seconds":
                  time.perf_counter() - start, "all_seconds": []}
    if tokens is None:
      tokens = done.token_ids
    elif not np.array_equal(tokens, done.token_ids):
      raise ValueError(f"{name} sampled other tokens than the first schedule")
  for _ in common.progress("measuring", rounds)(range(rounds)):
    for name in schedules:
      start = time.perf_counter()
      step(name)
      rows[name]["all_seconds"].append(time.perf_counter() - start)
  exact = gradients["serial_unshared"]
  for name, row in rows.items():
    timeline = Timeline(name, measure_bytes=True)
    step(name, timeline)
    row["stages"] = timeline_lib.summary([timeline])[name]
    row["seconds"] = statistics.median(row["all_seconds"])
    row["gradient_error"] = _error(exact, gradients[name])
  return rows


def _error(exact, got) -> float:
  """Largest relative error of a tensor; zero gradients do not count."""
  worst = 0.0
  largest = max(float(jnp.linalg.norm(a)) for a in jax.tree.leaves(exact))
  for a, b in zip(jax.tree.leaves(exact), jax.tree.leaves(got)):
    norm = float(jnp.linalg.norm(a))
    if norm > 1e-6 * largest:
      worst = max(worst, float(jnp.linalg.norm(a - b)) / norm)
  return worst


@contextlib.contextmanager
def _counting():
  """Counts the FLOPs of all programs that run inside.

  As the compiler counts them; the body of a loop counts once, so decoding is
  counted as one token, the same in every schedule.
  """
  total = 0.0
  originals = {name: f for name, f in vars(programs).items()
               if hasattr(f, "lower") and callable(f)}

  def counted(f: Callable) -> Callable:
    def call(*args, **kwargs):
      nonlocal total
      cost = f.lower(*args, **kwargs).cost_analysis() or {}
      total += cost.get("flops", 0.0)
      return f(*args, **kwargs)
    return call

  try:
    for name, f in originals.items():
      setattr(programs, name, counted(f))
    yield lambda: total
  finally:
    for name, f in originals.items():
      setattr(programs, name, f)


def _print(console: Console, title: str, rows) -> None:
  table = Table(title=title)
  for column in ("schedule", "step", "TFLOP", "live MB", "gradient error",
                 "where the time goes"):
    table.add_column(column, justify="left" if column[0] in "sw" else "right")
  for name, row in rows.items():
    stages = row["stages"]["stage_seconds"]
    parts = ", ".join(f"{k} {v:.2f}" for k, v in sorted(
        stages.items(), key=lambda item: -item[1])[:5])
    table.add_row(
        name, f"{row['seconds']:.2f} s", f"{row['flops'] / 1e12:.2f}",
        f"{(row['stages']['peak_bytes_live'] or 0) / 1e6:,.0f}",
        f"{row['gradient_error']:.1e}", parts)
  console.print(table)
