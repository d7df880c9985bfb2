"""What the quick start leaves to look at: a plot, an animation, a summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import itertools
import pathlib
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from experiments import quickstart_compression, quickstart_schedules
from rollplex_jax.data.babyai import MiniGridEnvironment
from rollplex_jax.data.environments import Episode, play
from rollplex_jax.data.settings import EnvironmentConfig

_VIEW = 288  # Pixels of a drawn room's side; whole tiles in most levels.
_STEP_MS, _HOLD_MS = 450, 1400
_INK, _PAPER = (32, 32, 32), (255, 255, 255)
_GOOD, _BAD = (24, 128, 56), (192, 40, 32)


def plot_learning(path: pathlib.Path, rl: Mapping[str, Any],
                  more: Mapping[str, Any], summary: Mapping[str, Any]) -> None:
  """Held-out success over training time: RL, and supervised learning instead.

  Args:
    path: PNG to write.
    rl: summary of the RL.
    more: summary of the further supervised learning from the same start.
    summary: of the whole run.
  """
  # The object interface: pyplot would look for a screen.
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  figure = Figure(figsize=(8, 4.8), dpi=120, layout="constrained")
  FigureCanvasAgg(figure)
  axes = figure.add_subplot()
  for run, label, color in ((rl, "RL", "tab:blue"),
                            (more, "supervised only", "tab:orange")):
    points = run["evaluations"]
    seconds = [p["train_seconds"] for p in points]
    axes.plot(seconds, [100 * p["val/success"] for p in points], "o-",
              color=color, label=label, markersize=4)
    axes.fill_between(
        seconds, [100 * p["val/success_low"] for p in points],
        [100 * p["val/success_high"] for p in points], color=color, alpha=0.15,
        linewidth=0)
  for name, label, style in (
      ("success_before", "after warm start", "--"),
      ("success_blind", "RL's policy, black frames", ":"),
      ("success_other_words", "RL's policy, another instruction", "-.")):
    axes.axhline(100 * summary[name], color="tab:gray", linestyle=style,
                 label=label, linewidth=1.2)
  axes.set(
      xlabel="training time after the warm start (s)",
      ylabel="success on held-out episodes (%)", ylim=(0, 100),
      title=f"{summary['level']}, {summary['num_parameters'] / 1e6:.1f} M "
      f"parameters, {summary['eval_episodes']} episodes, 95 % intervals")
  axes.set_xlim(left=0)
  axes.grid(alpha=0.3)
  figure.legend(loc="outside lower center", ncols=3, frameon=False)
  figure.savefig(path)


def draw_episodes(path: pathlib.Path, config: EnvironmentConfig,
                  seeds: Sequence[int],
                  plans: Mapping[str, Sequence[str]]) -> None:
  """Animates episodes, one view per policy side by side.

  Args:
    path: GIF to write.
    config: the world.
    seeds: of the episodes.
    plans: for each policy's title, its completions in the order of `seeds`.
  """
  world = MiniGridEnvironment(config.level, size=_VIEW)
  images, durations = [], []
  for i, seed in enumerate(seeds):
    shown = {title: _shown_episode(world, seed, texts[i], config)
             for title, texts in plans.items()}
    length = max(len(episode.observations) for episode, _ in shown.values())
    for t in range(length):
      images.append(_panel(f"{i + 1}/{len(seeds)}", shown, t))
      durations.append(_STEP_MS)
    durations[-length] = _STEP_MS * 2
    durations[-1] = _HOLD_MS
  images = [image.quantize(64, dither=Image.Dither.NONE) for image in images]
  images[0].save(path, save_all=True, append_images=images[1:],
                 duration=durations, loop=0, disposal=1)


def _shown_episode(world: MiniGridEnvironment, seed: int, text: str,
                   config: EnvironmentConfig) -> tuple[Episode, str]:
  """An episode as far as it is played, and how it ended.

  Of several turns `text` has a line for each; what came of each of them the
  policy saw before it wrote the next.
  """
  plan = text.split()
  known = set(world.actions).issuperset(plan)
  if config.max_turns == 1 and not (
      known and 1 <= len(plan) <= config.max_actions):
    return play(world, seed, ()), "no valid plan"
  if not known:
    known = itertools.takewhile(set(world.actions).__contains__, plan)
    return play(world, seed, known), "no valid action"
  episode = play(world, seed, plan)
  if not episode.reward:
    return episode, "not there"
  if config.must_stop and len(episode.actions) < len(plan):
    return episode, "went on after arriving"
  return episode, "success"


def _panel(number: str, shown: Mapping[str, tuple[Episode, str]],
           t: int) -> Image.Image:
  """One picture: instruction above, a view per policy, its action below."""
  side = next(iter(shown.values()))[0].frames.shape[1]
  gap, top, bottom = 16, 64, 36
  width = gap + (side + gap) * len(shown)
  image = Image.new("RGB", (width, top + side + bottom), _PAPER)
  draw = ImageDraw.Draw(image)
  font, small = ImageFont.load_default(18), ImageFont.load_default(14)
  instruction = next(iter(shown.values()))[0].observations[0].instruction
  draw.text((gap, 10), f"“{instruction}”", _INK, font)
  draw.text((width - gap, 12), number, _INK, small, anchor="ra")
  for k, (title, (episode, outcome)) in enumerate(shown.items()):
    x = gap + k * (side + gap)
    now = min(t, len(episode.actions))
    draw.text((x, top - 22), title, _INK, small)
    image.paste(Image.fromarray(episode.frames[now]), (x, top))
    y = top + side + 8
    if t >= len(episode.actions):
      color = _GOOD if outcome == "success" else _BAD
      draw.text((x, y), outcome, color, font)
    else:
      draw.text((x, y), f"{t + 1}. {episode.actions[t]}", _INK, font)
  return image


def describe(summary: Mapping[str, Any], output: pathlib.Path) -> str:
  """The run on one screen."""
  def rate(name):
    low, high = summary["intervals"][name]
    return f"{summary[name]:6.1%}  ({low:.0%} to {high:.0%})"

  rl = summary["rl_seconds"]
  parts = summary["phase_seconds"]["rl_parts"]
  gain = 100 * (summary["success_after"] - summary["success_before"])
  seconds = ", ".join(
      f"{name.replace('_', ' ')} {s:.0f} s"
      for name, s in summary["phase_seconds"].items() if name != "rl_parts")
  names = {"gen": "rollout", "reward": "reward", "ref": "reference",
           "old_log_prob": "old log-probs", "update_actor": "update"}
  share = ", ".join(
      f"{label} {parts[name] / max(rl, 1e-9):.0%}"
      for name, label in names.items() if name in parts)
  how = "whole plans from one look"
  if summary["max_turns"] > 1:
    count = summary["actions_per_turn"]
    how = f"in up to {summary['max_turns']} turns of " + (
        "an action" if count == 1 else f"{count} actions")
  labels = {
      f"after the warm start on {summary['demonstrations']:,} demonstrations":
          "success_before",
      f"after {summary['steps']} steps of RL": "success_after",
      "the same time on more supervised learning": "success_supervised_only",
      "RL's policy with black frames": "success_blind",
      "RL's policy with another instruction": "success_other_words"}
  width = max(map(len, labels))
  rates = "\n".join(
      f"  {label:<{width}}   {rate(name)}" for label, name in labels.items())
  # The other kind of agent, and a harder level for one of this kind.
  flag, other = " --step_by_step", "--output_dir=runs/plans"
  if summary["max_turns"] == 1:
    flag, other = "", "--step_by_step --output_dir=runs/steps"
  return f"""
A policy of {summary['num_parameters'] / 1e6:.1f} M parameters learned to act in a world
it sees: {summary['level']}, {how}.
Success on {summary['eval_episodes']} held-out episodes (95 % interval):

{rates}

RL: {gain:+.0f} points in {rl:.0f} s, {summary['tokens_per_second']:,.0f} tokens/s ({share});
compiling {summary['compilations']} programs took {summary['compile_seconds']:.0f} s of it.
{quickstart_schedules.describe(summary['schedules'])}

{quickstart_compression.describe(summary['compression'], summary['success_after'])}

Time: {seconds}; {summary['wall_seconds']:.0f} s in all.

In {output}:
  learning_curve.png  episode.gif       see what was learned
  timeline.png  timeline.json           see where the time of a step goes
  metrics.jsonl  samples.jsonl  tensorboard/  summary.json
  policy/                               a checkpoint that transformers loads
  compressed_policy/                    the same in fewer bytes
Next:
  tensorboard --logdir {output}
  python -m experiments.quickstart {other}
  python -m experiments.quickstart{flag} \\
    --config.environment.level=BabyAI-GoToLocalS6N3-v0 --output_dir=runs/harder
  python -m experiments.train --config=experiments/configs/grpo.py   your model and rows"""
