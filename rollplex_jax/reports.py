"""What a training step leaves behind beside a better policy.

Its metrics, how long its phases took, the lines of its samples and, if it was
recorded, its timeline.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import os
import pathlib
import time
from typing import Any

import numpy as np

from rollplex_jax import metrics, timeline_plot
from rollplex_jax.config import Algorithm, TrainConfig
from rollplex_jax.data.pipeline import Example
from rollplex_jax.samples import Groups, PromptBatch
from rollplex_jax.stages import objectives
from rollplex_jax.stages.rollout import Completions
from rollplex_jax.timeline import Timeline, write_trace


class PhaseTimer:
  """Wall time per phase of a step, under names like timing_s/gen.

  Attributes:
    seconds: by phase, those of one name added up.
    timeline: of the step; may be one that records nothing.
  """

  def __init__(self, timeline: Timeline | None = None):
    self.seconds: dict[str, float] = {}
    self.timeline = timeline or Timeline("", enabled=False)

  @contextlib.contextmanager
  def phase(self, name: str, lane: str | None = None):
    """Takes the time of a block; with a lane it is an event there too."""
    start = time.perf_counter()
    with (self.timeline.event(name, lane) if lane
          else contextlib.nullcontext()):
      yield
    elapsed = time.perf_counter() - start
    self.seconds[name] = self.seconds.get(name, 0.0) + elapsed

  def metrics(self) -> dict[str, float]:
    return {f"timing_s/{name}": s for name, s in self.seconds.items()}


def rollout_metrics(batch: PromptBatch, completions: Completions,
                    rewards: np.ndarray, scores: Sequence[Mapping[str, float]],
                    episode_lengths: np.ndarray | None = None,
                    ) -> dict[str, float]:
  """Numbers of a rollout under verl's names.

  Args:
    batch: B prompts.
    completions: numpy, G of each.
    rewards: float [B, G].
    scores: of all samples in order, with "overall" among them.
    episode_lengths: int [B, G], tokens after the prompts where those are more
      than the completions: of episodes with several turns.
  """
  lengths = completions.lengths.reshape(-1)
  prompt_lengths = batch.inputs.lengths
  g = completions.lengths.shape[1]
  mixed = rewards.max(axis=1) != rewards.min(axis=1)
  size = batch.inputs.token_ids.size
  num_tokens = lengths.sum()
  values = {}
  if episode_lengths is not None:
    num_tokens = episode_lengths.sum()
    values |= metrics.spread("episode_length", episode_lengths.reshape(-1))
  values |= {
      **metrics.spread("critic/score", rewards.reshape(-1)),
      **metrics.spread("response_length", lengths),
      "response_length/clip_ratio": float(1 - completions.finished.mean()),
      **metrics.spread("prompt_length", prompt_lengths),
      "train/frac_reward_zero_std": float(1 - mixed.mean()),
      "actor/entropy": sampled_entropy(completions),
      "perf/total_num_tokens": float(num_tokens + prompt_lengths.sum() * g),
      "perf/prompt_padding": float(1 - prompt_lengths.sum() / size),
  }
  for name, value in metrics.mean_scores(scores).items():
    if name != "overall":
      values[f"reward/{name}"] = value
  return values


def sampled_entropy(completions: Completions) -> float:
  """Estimate of the sampling policy's entropy, in nats per token.

  The mean of -log p over sampled tokens, which is right on average where they
  are drawn from all of p; top-k and top-p leave its tail out. 0 without tokens.
  """
  places = np.arange(completions.logprobs.shape[-1])
  drawn = completions.logprobs[places < completions.lengths[..., None]]
  return -float(drawn.mean()) if drawn.size else 0.0


def logprob_gap(completions: Completions, groups: Groups,
                logprobs: np.ndarray) -> dict[str, float]:
  """How far training log-probs are from those recorded in the rollout.

  Also as an estimate of the KL of the training policy to the one that sampled
  (k1 and k3 of http://joschu.net/blog/kl-approx.html, in nats per token).
  """
  recorded = completions.logprobs[groups.rows]
  gap = (logprobs - recorded)[groups.mask]
  if not gap.size:
    return {}
  k3 = np.expm1(np.minimum(gap, objectives.LOG_RATIO_BOUND)) - gap
  return {"training/rollout_logprobs_diff_mean": float(np.abs(gap).mean()),
          "training/rollout_logprobs_diff_max": float(np.abs(gap).max()),
          "rollout_corr/kl": -float(gap.mean()),
          "rollout_corr/k3_kl": float(k3.mean())}


def sample_lines(step: int, examples: Sequence[Example], texts: Sequence[str],
                 scores: Sequence[Mapping[str, float]], num_generations: int,
                 ) -> Iterator[dict[str, Any]]:
  """Lines of samples.jsonl, but for whether a sample was trained on.

  Args:
    step: number of the step, from 1.
    examples: B prompts.
    texts: completions of all samples in order.
    scores: of the same.
    num_generations: completions of each prompt.
  """
  for b, example in enumerate(examples):
    for g in range(num_generations):
      n = b * num_generations + g
      yield {"step": step, "row": example.index, "sample": g,
             "prompt": prompt_text(example.row), "completion": texts[n],
             "reward": scores[n]["overall"],
             "scores": scores[n]}


def prompt_text(row: Mapping[str, Any]) -> str:
  """A row's prompt in words: its text parts, media named by kind."""
  prompt = row["prompt"]
  if isinstance(prompt, str):
    return prompt
  parts = []
  for message in prompt:
    content = message["content"]
    if isinstance(content, str):
      content = [{"type": "text", "text": content}]
    parts += [p["text"] if p["type"] == "text" else f"<{p['type']}>"
              for p in content]
  return " ".join(parts)


def step_timeline(config: TrainConfig, step: int) -> Timeline:
  """The timeline of a step, which records only if the run asks for it.

  A run's first step compiles its programs, which is no picture of a step: it is
  recorded only where no other follows.

  Args:
    config: the run.
    step: number of the step, from 1.
  """
  every = config.timeline_every
  recorded = every > 0 and step % every == 0 and (
      step > 1 or config.total_steps == 1)
  name = str(config.schedule.name)
  if not config.schedule.share_prefix:
    name += " (unshared)"
  if config.algorithm == Algorithm.SUPERVISED:
    name = "supervised"
  return Timeline(f"{name}, step {step}", measure_bytes=True, enabled=recorded)


def write_timeline(folder: str | os.PathLike, timeline: Timeline, step: int,
                   compilations: int) -> None:
  """Writes a recorded step as a trace and a picture; others leave nothing.

  Args:
    folder: gets step_000010.json and step_000010.png.
    timeline: of the step.
    step: its number, from 1.
    compilations: programs that it compiled, for the picture's title.
  """
  if not timeline.enabled:
    return
  path = pathlib.Path(folder) / f"step_{step:06d}"
  write_trace(path.with_suffix(".json"), [timeline])
  title = None
  if compilations:
    title = f"this step includes compiling {compilations} program(s)"
  timeline_plot.plot(path.with_suffix(".png"), [timeline], title)
