"""From nothing to a policy that sees: `python -m experiments.quickstart`.

1. build a small policy of the Qwen2.5-VL architecture, with its tokenizer
2. warm it up on demonstrations of BabyAI's expert bot (supervised learning)
3. improve it by RL on start states that it has never seen
4. for comparison, spend the time that RL took on more supervised learning
5. evaluate all of them on held-out episodes, and the last one blindfolded too
6. compress the policy without data, and evaluate what comes of it
7. run one step of RL under each schedule, and draw where its time goes

The policy sees a room from above and is told where to go; it answers with the
whole plan, which the world executes. With --step_by_step it answers with one
action, sees what comes of it, and goes on. Every key of `QuickstartConfig` is a flag,
such as --config.rl.total_steps=100.
"""

from __future__ import annotations

from collections.abc import Sequence
import contextlib
import dataclasses
import os
import pathlib
import platform
import shutil
import time

from absl import flags
import jax
from ml_collections import config_flags

from experiments import (
  common,
  quickstart_compression,
  quickstart_report,
  quickstart_schedules,
  schedule_report,
)
from experiments.display import TrainDisplay
from experiments.quickstart_config import QuickstartConfig, step_by_step
from rollplex_jax import metrics as metrics_lib
from rollplex_jax import small_policy
from rollplex_jax.config import (
  TrainConfig,
  from_config_dict,
  to_config_dict,
)
from rollplex_jax.data.environments import PlanTask, Split
from rollplex_jax.data.settings import EnvironmentConfig
from rollplex_jax.data.worlds import World
from rollplex_jax.errors import InputError
from rollplex_jax.evaluation import Evaluation
from rollplex_jax.loop import Run
from rollplex_jax.small_policy import ShapeConfig
from rollplex_jax.stages.update import OptimizerConfig
from rollplex_jax.trainer import Trainer

_TOKENIZER_EPISODES = 300

common.check_config_keys(QuickstartConfig)
_CONFIG = config_flags.DEFINE_config_dict(
    "config", to_config_dict(QuickstartConfig()), "The run's configuration.")
_OUTPUT = flags.DEFINE_string(
    "output_dir", "runs/quickstart", "Folder for the run's files.")
_OVERWRITE = flags.DEFINE_bool(
    "overwrite", False, "Remove a run that output_dir already holds.")
_STEP_BY_STEP = flags.DEFINE_bool(
    "step_by_step", False, "Train a policy that acts one step at a time and sees "
    "what comes of it, in place of one that writes whole plans.")
_SEED = flags.DEFINE_integer("seed", None, "In place of config.seed.")
_BOARD = flags.DEFINE_bool("tensorboard", True, "Write TensorBoard events.")
_WANDB = flags.DEFINE_string(
    "wandb_project", "", "Also log the RL to this wandb project.")


class _Phases:
  """Announces the parts of a run and takes their time."""

  def __init__(self):
    self.seconds: dict[str, float] = {}

  @contextlib.contextmanager
  def __call__(self, name: str, title: str):
    print(f"\n{title}", flush=True)
    start = time.perf_counter()
    yield
    self.seconds[name] = time.perf_counter() - start


def main():
  """Runs the command."""
  start = time.perf_counter()
  config = read_config()
  if _SEED.value is not None:
    config = dataclasses.replace(config, seed=_SEED.value)
  output = pathlib.Path(common.required(_OUTPUT))
  environment = config.environment
  task = plan_task(environment)  # Refuses a bad level before anything else.
  prepare_folder(output, _OVERWRITE.value)
  metrics_lib.write_json(
      output / common.QUICKSTART, to_config_dict(config).to_dict())

  phases = _Phases()
  with phases("build", "1  building a policy and its tokenizer"):
    build_policy(output / "initial_policy", task, config.shape, config.seed)

  with phases("warm_start", "2  warm start on "
              f"{config.demonstrations:,} demonstrations of an expert"):
    supervised = dataclasses.replace(
        config.warm_start, seed=config.seed, data=dataclasses.replace(
            config.warm_start.data, environment=dataclasses.replace(
                environment, train_split="warm_start",
                num_episodes=config.demonstrations)))
    warm_start = output / "warm_start"
    *_, warm_summary = run_phase(
        supervised, output / "initial_policy", warm_start, "warm start")

  with phases("rl", "3  RL on new episodes"):
    rl = dataclasses.replace(
        config.rl, seed=config.seed, data=dataclasses.replace(
            config.rl.data, environment=dataclasses.replace(
                environment, train_split="train")))
    trainer, rl_run, rl_summary = run_phase(
        rl, warm_start / "policy", output, "RL", wandb_project=_WANDB.value)

  with phases("supervised_only", "4  as much time on more supervised learning"):
    *_, more_summary = run_phase(
        dataclasses.replace(
            supervised, seed=config.seed + 1, total_steps=1 << 20,
            stop_at_success=0.0, eval_every=100,
            max_seconds=rl_summary["train_seconds"],
            optimizer=_constant(supervised.optimizer)),
        warm_start / "policy", output / "supervised_only", "supervised")

  with phases("evaluation", "5  evaluating the policy with black frames"):
    blind = trainer.evaluate(
        trainer.task.held_out(blind=True), progress=common.progress("blind"))
    shuffled = trainer.evaluate(OtherWords(trainer.task.eval_rows))

  (_, before), (_, after) = rl_run.evaluations[0], rl_run.evaluations[-1]
  with phases("compression", "6  compressing the policy without data"):
    compression = quickstart_compression.compress(
        output / "policy", output / "compressed_policy", trainer, after)

  with phases("schedules", "7  one step of RL under each schedule, in turn"):
    schedules, timelines = quickstart_schedules.compare(
        _with_policy(rl, output / "policy"))
    schedule_report.write(output / "timeline", timelines,
                          quickstart_schedules.title(schedules))

  summary = summarize(
      config, warm_summary, rl_summary, more_summary, phases.seconds,
      {"before": before, "after": after, "blind": blind,
       "other_words": shuffled})
  summary["schedules"], summary["compression"] = schedules, compression
  quickstart_report.plot_learning(
      output / "learning_curve.png", rl_summary, more_summary, summary)
  quickstart_report.draw_episodes(
      output / "episode.gif", environment,
      [Split.EVAL.seed(i) for i in range(config.gif_episodes)],
      {"after warm start": before.completions,
       "after RL": after.completions})
  summary["wall_seconds"] = time.perf_counter() - start
  metrics_lib.write_json(output / "summary.json", summary)
  print(quickstart_report.describe(summary, output))
  return summary


def read_config() -> QuickstartConfig:
  """The configuration that the flags give."""
  tree = _CONFIG.value
  if _STEP_BY_STEP.value:
    tree = to_config_dict(step_by_step())
    tree.update_from_flattened_dict(
        config_flags.get_override_values(flags.FLAGS["config"]))
  return from_config_dict(QuickstartConfig, tree)


def prepare_folder(output: pathlib.Path, overwrite: bool) -> None:
  """Makes the folder; refuses one that holds a run, or removes it if asked.

  Raises:
    InputError: if `output` is no folder, or holds a run.
  """
  if output.exists() and not output.is_dir():
    raise InputError(f"--output_dir={output}: is not a folder")
  if (output / common.QUICKSTART).exists() or (output / "metrics.jsonl").exists():
    if not overwrite:
      raise InputError(f"--output_dir={output}: holds a run already; pass "
                       "--overwrite to remove it")
    shutil.rmtree(output)
  try:
    output.mkdir(parents=True, exist_ok=True)
  except OSError as e:
    raise InputError(f"--output_dir={output}: {e.strerror}") from e


def plan_task(config: EnvironmentConfig) -> PlanTask:
  """The world of an environment config with whole plans, also where the
  config has several turns."""
  if config.max_turns > 1:
    config = dataclasses.replace(
        config, max_turns=1, actions_per_turn=1,
        max_actions=config.max_turns * config.actions_per_turn)
  return World.of(config).task()


def build_policy(folder: pathlib.Path, task: PlanTask, shape: ShapeConfig,
                 seed: int) -> None:
  """Writes a checkpoint with fresh weights and a tokenizer for the task.

  Args:
    folder: for the checkpoint.
    task: whose instructions and plans the tokenizer learns its words from.
    shape: size of the policy.
    seed: of the weights.
  """
  texts = []
  for i in range(_TOKENIZER_EPISODES):
    episode = Split.WARM_START.seed(i)
    texts.append(task.row(episode)["prompt"][0]["content"][-1]["text"])
    plan = task.demonstration(episode)
    if plan is not None:
      # A plan's first word has no space before it, all others do.
      texts += [plan, f" {plan}"]
  small_policy.write(
      folder, texts, shape, seed=seed,
      # The drawings are bright on black: black is nothing.
      image_mean=(0.0, 0.0, 0.0), image_std=(0.25, 0.25, 0.25))


def run_phase(config: TrainConfig, policy: pathlib.Path, output: pathlib.Path,
              title: str, wandb_project: str = ""):
  """Trains `policy` into `output`, with a display.

  Returns:
    The trainer, its run and the run's summary.
  """
  trainer = Trainer(_with_policy(config, policy))
  with TrainDisplay(title, config.total_steps) as display:
    run = Run(trainer, output, on_step=display, tensorboard=_BOARD.value,
              wandb_project=wandb_project)
    summary = run.train()
  return trainer, run, summary


class OtherWords(Sequence):
  """Held-out episodes, each with the instruction of the next one."""

  def __init__(self, rows: Sequence):
    self._rows = rows

  def __len__(self) -> int:
    return len(self._rows)

  def where(self, index: int) -> str:
    return self._rows.where(index)

  def __getitem__(self, index: int):
    row = self._rows[index]
    other = self._rows[(index + 1) % len(self._rows)]
    (video, _), (_, text) = (
        r["prompt"][0]["content"] for r in (row, other))
    return {**row, "prompt": [{"role": "user", "content": [video, text]}]}


def summarize(config: QuickstartConfig, warm: dict, rl: dict, more: dict,
              phase_seconds: dict[str, float],
              evaluations: dict[str, Evaluation]) -> dict:
  """The run in numbers; the command adds its wall time.

  Args:
    config: the run.
    warm: the warm start's summary.
    rl: the RL's.
    more: that of the further supervised learning.
    phase_seconds: wall time of each part.
    evaluations: by name.
  """
  rates = {name: e.success for name, e in evaluations.items()}
  last = more["evaluations"][-1]
  rates["supervised_only"] = tuple(
      last[f"val/success{suffix}"] for suffix in ("", "_low", "_high"))
  compiled = rl["compilations"], rl["compile_seconds"]
  return {
      **{f"success_{name}": rate[0] for name, rate in rates.items()},
      "intervals": {f"success_{name}": list(rate[1:])
                    for name, rate in rates.items()},
      "level": config.environment.level,
      "max_turns": config.environment.max_turns,
      "actions_per_turn": config.environment.actions_per_turn,
      "eval_episodes": config.environment.eval_episodes,
      "demonstrations": config.demonstrations,
      "seed": config.seed,
      "num_parameters": rl["num_parameters"],
      "steps": rl["steps"],
      "warm_start_steps": warm["steps"],
      "supervised_only_steps": more["steps"],
      "rl_seconds": rl["train_seconds"],
      "supervised_only_seconds": more["train_seconds"],
      "tokens_per_second": rl["tokens_per_second"],
      "phase_seconds": {**phase_seconds, "rl_parts": rl["phase_seconds"]},
      "compilations": compiled[0],
      "compile_seconds": compiled[1],
      "machine": {
          "system": platform.platform(), "cpus": os.cpu_count(),
          "devices": [d.device_kind for d in jax.devices()],
          "jax": jax.__version__, "python": platform.python_version()},
  }


def _with_policy(config: TrainConfig, policy: pathlib.Path) -> TrainConfig:
  return dataclasses.replace(
      config, policy=dataclasses.replace(config.policy, path=str(policy)))


def _constant(optimizer: OptimizerConfig) -> OptimizerConfig:
  """The same without a schedule, for a run that the clock ends."""
  return dataclasses.replace(
      optimizer, lr_scheduler_type="constant", total_steps=None)


if __name__ == "__main__":
  common.run(main)
