"""Draws timelines: which lane did what, and how long a step took."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import os
import textwrap
import types
from typing import Any

from rollplex_jax.timeline import LANES, Event, Timeline, replace_file, rows

# Colors that the color-blind tell apart (Okabe and Ito's, and shades of them);
# backward passes are darker than forward ones, and work on whole sequences is
# darker than on responses alone. In the legend's order.
_COLORS = {
    "vision": "#F0E442",
    "vision_backward": "#882255",
    "prefix": "#E69F00",
    "prefix_backward": "#D55E00",
    "window": "#A9C4DC",
    "decode": "#0072B2",
    "reward": "#8C8C8C",
    "score_full": "#009E73",
    "score": "#66C9AE",
    "response": "#56B4E9",
    "gradient_full": "#CC79A7",
    "gradient": "#E9BFD6",
    "update": "#1F1F1F",
    "transfer": "#6B4F3A",
}
_OTHER = "#C4C4C4"
_IDLE, _SHADE, _INK = "#EFEFEF", "#D9E7F3", "#222222"
_HATCH = (1.0, 1.0, 1.0, 0.5)

_WIDTH, _DPI = 12.0, 100  # Inches; 1200 pixels.
_ROOM = 1.09  # Of the longest step: the axis goes on for the step time.
_ROW_INCHES = 0.46
_CAPTION = 0.6  # Height of the strip above the rows, in rows.
_HEIGHTS = {"host": 0.5}  # Of lanes, where not 1.
_BAR = 0.84  # Of a row's height.
_PAD, _GAP = 4, 3  # Pixels: beside a label; between bars of one run.


def plot(path: str | os.PathLike, timelines: Sequence[Timeline],
         title: str | None = None,
         notes: Mapping[str, str] = types.MappingProxyType({})) -> None:
  """Writes a PNG, 1200 pixels wide, with a panel per timeline.

  All panels share one time axis, so that the faster step is the shorter one.
  A row per lane holds a bar per event, hatched where its times are estimated;
  the decode window is shaded.

  Args:
    path: PNG to write, whole or not at all; its folder is made.
    timelines: of steps that did the same work.
    title: a line above the ratios of the step times.
    notes: a few words about a timeline, by its name.

  Raises:
    ValueError: there is no timeline, or one whose events take no time.
  """
  if not timelines:
    raise ValueError("timelines: expected at least one, found none")
  for timeline in timelines:
    if not timeline.seconds > 0:
      raise ValueError(
          f"timeline {timeline.name}: expected events that take time, found"
          f" {len(timeline.events)} events in 0 seconds")
  # The object interface, which keeps no global state. Slow to import.
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  lanes = [lane for lane in LANES
           if any(e.lane == lane for t in timelines for e in t.events)]
  height = _CAPTION + sum(_HEIGHTS.get(lane, 1) for lane in lanes)
  figure = Figure(
      figsize=(_WIDTH, 1.8 + len(timelines) * (0.5 + height * _ROW_INCHES)),
      dpi=_DPI, layout="constrained")
  FigureCanvasAgg(figure)
  figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
  figure.suptitle("\n".join(
      textwrap.fill(line, 110) for line in (title, _comparison(timelines))
      if line), fontsize=13, color=_INK)
  panels = figure.subplots(len(timelines), sharex=True, squeeze=False)[:, 0]
  panels[0].set_xlim(0, _ROOM * max(t.seconds for t in timelines))
  bars = [_draw(axes, timeline, lanes, height, notes.get(timeline.name, ""))
          for axes, timeline in zip(panels, timelines)]
  panels[-1].tick_params(axis="x", length=3)
  panels[-1].spines["bottom"].set_visible(True)
  panels[-1].set_xlabel("seconds", color=_INK)
  _add_legend(figure, timelines)
  # How large bars are is known when the layout is done.
  figure.draw_without_rendering()
  figure.set_layout_engine("none")
  for axes, timeline, found in zip(panels, timelines, bars):
    _add_caption(axes, timeline)
    _add_names(axes, found)
  replace_file(path, lambda work: figure.savefig(work, format="png"))


@dataclasses.dataclass(frozen=True)
class _Bar:
  """A drawn event.

  Attributes:
    event: what it stands for.
    patch: the rectangle.
    holds_others: whether other bars lie on it.
  """

  event: Event
  patch: Any
  holds_others: bool

  @property
  def left(self) -> float:
    return self.patch.get_x()

  @property
  def right(self) -> float:
    return self.left + self.patch.get_width()

  @property
  def middle(self) -> float:
    return self.patch.get_y() + self.patch.get_height() / 2


def _comparison(timelines: Sequence[Timeline]) -> str:
  """How many times as fast the fastest is as the others."""
  fastest = min(timelines, key=lambda t: t.seconds)
  others = [t for t in timelines if t is not fastest]
  if not others:
    return f"a step of {fastest.name}"
  ratios = [f"{t.seconds / fastest.seconds:.2f}× as fast as {t.name}"
            for t in others]
  return f"{fastest.name} is " + " and ".join(
      part for part in ("; ".join(ratios[:-1]), ratios[-1]) if part)


def _draw(axes, timeline: Timeline, lanes: Sequence[str], height: float,
          note: str) -> list[_Bar]:
  """Draws a panel `height` rows high; its bars have no names yet."""
  axes.set_ylim(height, 0)
  name = axes.set_title(
      f"{timeline.name}: {_time(timeline.seconds)} a step", loc="left",
      fontsize=12, fontweight="bold", color=_INK, pad=3)
  axes.annotate(note, (1, 0.5), (10, 0), xycoords=name, va="center",
                textcoords="offset points", fontsize=10, color=_INK)
  axes.spines[:].set_visible(False)
  axes.tick_params(length=0, labelsize=10, labelcolor=_INK)
  if timeline.window is not None:
    opens, closes = (t - timeline.start for t in timeline.window)
    axes.axvspan(opens, closes, color=_SHADE, linewidth=0, zorder=0)
  bars, middles, top = [], [], _CAPTION
  for lane in lanes:
    size = _HEIGHTS.get(lane, 1)
    middles.append(top + size / 2)
    _rectangle(axes, 0, timeline.seconds, middles[-1], size * _BAR,
               facecolor=_IDLE, alpha=0.75, zorder=1)
    dealt = rows(e for e in timeline.events if e.lane == lane)
    for i, row in enumerate(dealt):
      middle = top + size * (0.5 + _BAR * ((i + 0.5) / len(dealt) - 0.5))
      bars += _draw_row(
          axes, timeline, row, middle, size * _BAR / len(dealt))
    top += size
  axes.set_yticks(middles, lanes)
  axes.plot([timeline.seconds] * 2, [_CAPTION, height], color=_INK,
            linewidth=1.2, zorder=6)
  axes.annotate(_time(timeline.seconds),
                (timeline.seconds, (_CAPTION + height) / 2), (6, 0),
                textcoords="offset points", va="center", fontsize=12,
                fontweight="bold", color=_INK)
  return bars


def _draw_row(axes, timeline: Timeline, row: Sequence[tuple[Event, int]],
              middle: float, height: float) -> Iterator[_Bar]:
  """Draws bars, each lower than the one around it."""
  for i, (e, depth) in enumerate(row):
    # An edge parts neighbors, but would hide a bar of a pixel or two.
    wide = e.seconds > axes.get_xlim()[1] / 250
    patch = _rectangle(
        axes, e.start - timeline.start, e.seconds, middle,
        height * max(1 - 0.25 * depth, 0.5),
        facecolor=_COLORS.get(e.stage, _OTHER), zorder=2 + min(depth, 3),
        edgecolor=_HATCH if e.estimated else "white",
        linewidth=0.5 if wide else 0, hatch="////" if e.estimated else None)
    yield _Bar(e, patch, i + 1 < len(row) and row[i + 1][1] > depth)


def _rectangle(axes, left: float, width: float, middle: float, height: float,
               **style):
  from matplotlib.patches import Rectangle

  return axes.add_patch(Rectangle(
      (left, middle - height / 2), width, height, **style))


def _add_legend(figure, timelines: Sequence[Timeline]) -> None:
  """One entry per stage, below the panels."""
  from matplotlib.patches import Patch

  events = [e for t in timelines for e in t.events]
  stages = {e.stage for e in events}
  handles = [Patch(facecolor=color, label=_name(stage))
             for stage, color in _COLORS.items() if stage in stages]
  others = sorted(stages - _COLORS.keys())
  if others:
    handles.append(Patch(
        facecolor=_OTHER, label=", ".join(map(_name, others))))
  if any(e.estimated for e in events):
    handles.append(Patch(facecolor="#9A9A9A", edgecolor=_HATCH, linewidth=0,
                         hatch="////", label="times estimated"))
  handles.append(Patch(facecolor=_IDLE, label="idle"))
  lines = -(-len(handles) // 9)
  figure.legend(
      handles=handles, loc="outside lower center", frameon=False, fontsize=10,
      ncols=-(-len(handles) // lines), handlelength=1.2, handleheight=1.0,
      columnspacing=1.4, labelcolor=_INK)


def _add_caption(axes, timeline: Timeline) -> None:
  """Names the window in the strip above the rows."""
  if timeline.window is None:
    return
  opens, closes = (t - timeline.start for t in timeline.window)
  label = axes.text(
      (opens + closes) / 2, _CAPTION / 2,
      f"decode window {_time(closes - opens)}", ha="center",
      va="center_baseline", fontsize=10, style="italic", color="#2F4F6F")
  half = label.get_window_extent().width / _pixels(axes)[0] / 2
  label.set_x(min(max(label.get_position()[0], half),
                  axes.get_xlim()[1] - half))


def _add_names(axes, bars: Sequence[_Bar]) -> None:
  """Names bars where there is room, or else runs of bars of one stage.

  A bar that holds others isn't named: they are. Micro-batches have their
  numbers where there are several.
  """
  several = {bar.event.stage for bar in bars if bar.event.index}
  for run in _runs(bars, _GAP / _pixels(axes)[0]):
    stage = _name(run[0].event.stage)
    numbered = [f"{stage} {bar.event.index}"
                if run[0].event.stage in several and bar.event.index is not None
                else stage for bar in run]
    if all(_fits(axes, text, [bar]) for text, bar in zip(numbered, run)):
      for text, bar in zip(numbered, run):
        _write(axes, text, [bar])
      continue
    texts = [stage] if len(run) == 1 else [f"{stage} ×{len(run)}", stage]
    for text in texts:
      if _fits(axes, text, run):
        _write(axes, text, run)
        break


def _runs(bars: Sequence[_Bar], gap: float) -> Iterator[list[_Bar]]:
  """Neighbors of one stage in one row, at most `gap` seconds apart."""
  run: list[_Bar] = []
  for bar in bars:
    if bar.holds_others:
      continue
    if run and not (bar.event.stage == run[-1].event.stage
                    and bar.middle == run[-1].middle
                    and 0 <= bar.left - run[-1].right <= gap):
      yield run
      run = []
    run.append(bar)
  if run:
    yield run


def _write(axes, text: str, run: Sequence[_Bar]):
  """Centers text on a run of bars."""
  from matplotlib.patheffects import withStroke

  color = run[0].patch.get_facecolor()
  bright = 0.3 * color[0] + 0.59 * color[1] + 0.11 * color[2] > 0.5
  return axes.text(
      (run[0].left + run[-1].right) / 2, run[0].middle, text, ha="center",
      va="center_baseline", fontsize=9, zorder=7,
      color=_INK if bright else "white",
      path_effects=[withStroke(linewidth=2.5, foreground=color)])


def _fits(axes, text: str, run: Sequence[_Bar]) -> bool:
  """Whether a run of bars has room for text."""
  label = _write(axes, text, run)
  box = label.get_window_extent()
  label.remove()
  per_second, per_row = _pixels(axes)
  return (box.width + 2 * _PAD <= (run[-1].right - run[0].left) * per_second
          and box.height <= run[0].patch.get_height() * per_row)


def _pixels(axes) -> tuple[float, float]:
  """Pixels of a second and of a row."""
  (x0, y0), (x1, y1) = axes.transData.transform([(0, 0), (1, 1)])
  return x1 - x0, y0 - y1


def _name(stage: str) -> str:
  return stage.replace("_", " ")


def _time(seconds: float) -> str:
  """A length of time in three digits."""
  if seconds < 1:
    return f"{seconds * 1e3:.3g} ms"
  return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:.0f} s"
