"""The quick start's last part: one step of RL under each schedule, in turn.

All of them start from the same policy, prompts and sampling keys, so they draw
the same tokens and come to the same gradient; what differs is the time.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from experiments import common, schedule_report
from rollplex_jax.config import TrainConfig
from rollplex_jax.data.pipeline import input_pipeline
from rollplex_jax.schedule import ScheduleConfig, ScheduleName
from rollplex_jax.timeline import Timeline, summary
from rollplex_jax.trainer import Trainer

_TURNS = 7
_BETA = 0.04  # Of the KL term, if the run has none; any value costs the same.
_ROUNDING = 1e-6  # A gradient norm below this is no gradient.


def schedules(config: ScheduleConfig) -> dict[str, ScheduleConfig]:
  """What is compared: a run's schedule settings under each name."""
  def choose(name, share_prefix):
    return dataclasses.replace(config, name=name, share_prefix=share_prefix)

  return {
      "serial_unshared": choose(ScheduleName.SERIAL, False),
      "serial_shared": choose(ScheduleName.SERIAL, True),
      "rollplex": choose(ScheduleName.ROLLPLEX, True),
  }


def compare(config: TrainConfig,
            turns: int = _TURNS) -> tuple[dict[str, Any], list[Timeline]]:
  """Takes the time of whole steps, reward and optimizer update included.

  A step trains on all of `train_batch_size` prompts and scores a reference
  model: the policy itself, for its weights don't change the work. The learning
  rate is zero, so that every step starts from the same weights. All steps are
  recorded, which makes them wait after each unit.

  Args:
    config: of the RL, with the policy to take.
    turns: steps of each schedule, after one that compiles.

  Returns:
    Numbers as JSON: the step ("prompts", "num_generations", "added_reference":
    whether the run itself goes without), "turns", "same_completions",
    "gradient_norm_spread" (largest relative difference; None where no sample
    has an advantage, so that there is no gradient), "ratios" (step time over
    rollplex's) and "rows": for each schedule "seconds" (the median),
    "all_seconds", "window_seconds", "stage_seconds" and "peak_bytes_live" (all
    arrays; not what programs use inside). And of each schedule the timeline of
    its median step.
  """
  choices, objective = schedules(config.schedule), config.objective
  trainer = Trainer(dataclasses.replace(
      config, schedule=choices["rollplex"], gen_batch_size=0,
      objective=dataclasses.replace(objective, beta=objective.beta or _BETA),
      optimizer=dataclasses.replace(
          config.optimizer, learning_rate=0.0, warmup_steps=0)))
  examples = next(iter(input_pipeline(
      trainer.task.train_rows, trainer.processor.prompt, seed=config.seed,
      batch_size=config.train_batch_size)))

  def step(name: str, schedule: ScheduleConfig, measure_bytes=False):
    trainer.settings = dataclasses.replace(trainer.settings, schedule=schedule)
    timeline = Timeline(name, measure_bytes=measure_bytes)
    values, samples = trainer.step(examples, 0, timeline)
    return timeline, values, [sample["completion"] for sample in samples]

  bar = common.progress("schedules", len(choices) * (turns + 1))
  order = bar([*choices.items()] * (turns + 1))
  found = {name: [] for name in choices}
  for name, schedule in order:
    found[name].append(step(name, schedule))
  rows, timelines = {}, []
  for name, schedule in choices.items():
    # The first compiled. With an odd number of turns the middle is the median.
    recorded = sorted((t for t, _, _ in found[name][1:]),
                      key=lambda t: t.seconds)
    seconds = [t.seconds for t, _, _ in found[name][1:]]
    shown = schedule_report.with_bytes(
        recorded[len(recorded) // 2], step(name, schedule, True)[0])
    timelines.append(shown)
    numbers = summary([shown])[name]
    rows[name] = {
        "seconds": statistics.median(seconds), "all_seconds": seconds,
        **{key: numbers[key] for key in (
            "window_seconds", "stage_seconds", "peak_bytes_live")}}
  steps = [s for all_steps in found.values() for s in all_steps]
  norms = [values["actor/grad_norm"] for _, values, _ in steps]
  largest = max(norms)
  ours = rows["rollplex"]["seconds"]
  return {
      "prompts": len(examples),
      "num_generations": config.rollout.num_generations,
      "added_reference": not objective.beta,
      "turns": turns,
      "same_completions": all(texts == steps[0][2] for _, _, texts in steps),
      "gradient_norm_spread": ((largest - min(norms)) / largest
                               if largest > _ROUNDING else None),
      "ratios": {name: row["seconds"] / ours for name, row in rows.items()
                 if name != "rollplex"},
      "rows": rows,
  }, timelines


def describe(numbers: dict[str, Any]) -> str:
  """The comparison as a small table."""
  beside = (", scored with a\nreference model too (the RL above has none)"
            if numbers["added_reference"] else "")
  same = ("All drew the same completions" if numbers["same_completions"]
          else "Near-ties gave other completions to some")
  if numbers["gradient_norm_spread"] is not None:
    same += f"; gradient norms differ by {numbers['gradient_norm_spread']:.0e}"
  return f"""One step of RL under each schedule: {numbers['prompts']} prompts x \
{numbers['num_generations']} completions{beside}.
Medians of {numbers['turns']} in turn, to rollplex's; arrays are the most that \
live at once.

{schedule_report.table(numbers['rows'], 'rollplex')}

{same}."""


def title(numbers: dict[str, Any]) -> str:
  """What the steps of `compare` hold, in a line."""
  return (f"One step of RL on {numbers['prompts']} prompts × "
          f"{numbers['num_generations']} completions, reward, reference and "
          f"update included; median of {numbers['turns']}")
