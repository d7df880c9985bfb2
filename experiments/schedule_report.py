"""Schedules side by side: a picture, a trace for Perfetto and a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import os
import pathlib
from typing import Any

from rollplex_jax import timeline_plot
from rollplex_jax.timeline import Timeline, write_trace

# For each schedule: what to call it, and what it is in a few words.
_NAMES = {
    "serial_unshared": (
        "serial (unshared)", "every sample's prompt again in each phase"),
    "serial_shared": (
        "serial (shared)", "phases in order, one prefix per prompt in each"),
    "disaggregated_unshared": (
        "disaggregated (unshared)", "rollout and training on devices of their "
        "own, every sample's prompt again in each phase"),
    "disaggregated_shared": (
        "disaggregated (shared)", "rollout and training on devices of their "
        "own, one prefix per prompt in each phase"),
    "rollplex": (
        "rollplex", "one prefix per prompt for all, the reference's while the "
        "rollout decodes"),
}


def write(stem: str | os.PathLike, timelines: Sequence[Timeline],
          title: str) -> tuple[pathlib.Path, pathlib.Path]:
  """Writes recorded steps one below the other, on one time axis.

  Args:
    stem: path of both files without their suffix; its folder is made.
    timelines: of steps that did the same work, one for each schedule and named
      after it, such as "serial_unshared".
    title: what a step holds.

  Returns:
    The PNG and the JSON file, which https://ui.perfetto.dev opens.
  """
  stem = pathlib.Path(stem)
  picture, trace = (stem.with_name(stem.name + s) for s in (".png", ".json"))
  named = [Timeline(_name(t.name), events=t.events) for t in timelines]
  timeline_plot.plot(picture, named, title, dict(_NAMES.values()))
  write_trace(trace, named)
  return picture, trace


def with_bytes(timeline: Timeline, measured: Timeline) -> Timeline:
  """A timeline with the live bytes of another one of the very same work.

  Measuring bytes takes so long that it would show; so times come from a step
  that doesn't, and bytes from one that does.

  Raises:
    ValueError: the two hold different events.
  """
  work = [[(e.stage, e.lane, e.index) for e in t.events]
          for t in (timeline, measured)]
  if work[0] != work[1]:
    raise ValueError(f"{timeline.name}: expected the same events twice, found "
                     f"{len(work[0])} and {len(work[1])}")
  return Timeline(timeline.name, events=[
      dataclasses.replace(e, bytes_live=other.bytes_live)
      for e, other in zip(timeline.events, measured.events)])


def table(rows: Mapping[str, Mapping[str, Any]], baseline: str) -> str:
  """Step times, their ratio to one schedule's, and live bytes.

  Args:
    rows: for each schedule "seconds" and "peak_bytes_live".
    baseline: the one whose step time is 1.
  """
  unit = rows[baseline]["seconds"]
  width = max(len(_name(name)) for name in rows)
  lines = [f"  {'':{width}} {'a step':>9} {'ratio':>7} {'arrays':>8}"]
  for name, row in rows.items():
    lines.append(
        f"  {_name(name):{width}} {row['seconds'] * 1e3:6.0f} ms "
        f"{row['seconds'] / unit:6.2f}x {row['peak_bytes_live'] / 1e6:5.0f} MB")
  return "\n".join(lines)


def _name(schedule: str) -> str:
  return _NAMES.get(schedule, (schedule, ""))[0]
