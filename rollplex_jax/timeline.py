"""What a step did, and when: events, a summary, and a trace for Perfetto.

  timeline = Timeline("rollplex")
  with timeline.event("prefix", "reference", index=0) as wait:
    kv = wait(prefix_program(params, prompts))
  write_trace("step.json", [timeline])  # Open it at https://ui.perfetto.dev.

Programs run asynchronously: an event ends when the host leaves its block, so
the block must wait for what it started. `timeline_plot` draws timelines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import time
from typing import Any, TypeVar

import jax

from rollplex_jax.placement.live import covered, live_bytes

# In the order in which traces and plots show them.
LANES = ("rollout", "reference", "training", "host")
# Events of these stages make up the decode window.
WINDOW_STAGES = ("decode", "window")

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
  """A span of time in which one stage ran.

  Attributes:
    stage: its name, such as "prefix" or "decode".
    lane: whom it served, one of `LANES`.
    index: the micro-batch, or None where the stage took the whole batch.
    start: seconds since the timeline's origin.
    end: the same, at least `start`.
    bytes_live: `live_bytes()` at the end, or None if it wasn't measured.
    estimated: whether start and end are derived, not read from a clock: no
      clock can be read inside a program.
  """

  stage: str
  lane: str
  index: int | None = None
  start: float
  end: float
  bytes_live: int | None = None
  estimated: bool = False

  def __post_init__(self):
    if self.lane not in LANES:
      raise ValueError(
          f"event {self.stage}: expected a lane of {', '.join(LANES)}, found"
          f" {self.lane}")
    if not self.start <= self.end:
      raise ValueError(
          f"event {self.stage}: expected an end after its start,"
          f" {self.start}, found {self.end}")

  @property
  def seconds(self) -> float:
    """How long it took."""
    return self.end - self.start


class Timeline:
  """The events of one step."""

  def __init__(self, name: str, *, measure_bytes: bool = False,
               enabled: bool = True, origin: float | None = None,
               events: Iterable[Event] = ()):
    """Starts an empty timeline, or one that holds `events`.

    Args:
      name: of the schedule.
      measure_bytes: measure live bytes after each event. That walks all arrays
        and waits for them, which makes the step longer.
      enabled: False makes a timeline that records nothing and waits for
        nothing, so that callers need no condition.
      origin: the value of `time.perf_counter()` that counts as zero; by default
        the start of the first event. On Linux the clock is the same in all
        processes of a machine: timelines of one origin may be joined.
      events: recorded before.
    """
    self.name = name
    self.enabled = enabled
    self._measure_bytes = measure_bytes
    self._origin = origin
    self._events = list(events)

  @property
  def events(self) -> tuple[Event, ...]:
    """Events by start; of those that start together, the longest first."""
    return tuple(sorted(self._events, key=lambda e: (e.start, -e.end)))

  @property
  def start(self) -> float:
    """Seconds at which the first event starts; 0 without events."""
    return min((e.start for e in self._events), default=0.0)

  @property
  def end(self) -> float:
    """Seconds at which the last event ends; 0 without events."""
    return max((e.end for e in self._events), default=0.0)

  @property
  def seconds(self) -> float:
    """How long the step took, first start to last end."""
    return self.end - self.start

  @property
  def window(self) -> tuple[float, float] | None:
    """Start and end of the decode window, or None without decoding."""
    inside = [e for e in self._events if e.stage in WINDOW_STAGES]
    if not inside:
      return None
    return min(e.start for e in inside), max(e.end for e in inside)

  def now(self) -> float:
    """Seconds since the origin; the first call sets it where none was given."""
    read = time.perf_counter()
    if self._origin is None:
      self._origin = read
    return read - self._origin

  @contextlib.contextmanager
  def event(self, stage: str, lane: str,
            index: int | None = None) -> Iterator[Callable[[_T], _T]]:
    """Records an event from entering to leaving, by an exception too.

    Args:
      stage: what runs.
      lane: whom it serves, one of `LANES`.
      index: the micro-batch.

    Yields:
      A function that waits for the arrays of a tree and returns it; where the
      timeline isn't enabled it just returns it.
    """
    if not self.enabled:
      yield _unchanged
      return
    start = self.now()
    try:
      yield jax.block_until_ready
    finally:
      end = self.now()
      self.add(stage, lane, index, start, end,
               bytes_live=live_bytes() if self._measure_bytes else None)

  def add(self, stage: str, lane: str, index: int | None, start: float,
          end: float, *, bytes_live: int | None = None,
          estimated: bool = False) -> None:
    """Records an event whose times, as `now` gives them, are known.

    Raises:
      ValueError: the lane is unknown, or the event ends before it starts.
    """
    if self.enabled:
      self._events.append(Event(
          stage=stage, lane=lane, index=index, start=start, end=end,
          bytes_live=bytes_live, estimated=estimated))


def summary(timelines: Iterable[Timeline]) -> dict[str, dict[str, Any]]:
  """Numbers of each timeline, under its name.

  Returns:
    For each name: `step_seconds`; `window_seconds` (0 without decoding);
    `stage_seconds`, by stage, in which work of two lanes at a time counts
    twice; `lane_seconds`, by lane, in which at least one event ran;
    `peak_bytes_live`, or None if bytes weren't measured.

  Raises:
    ValueError: two timelines have one name.
  """
  out: dict[str, dict[str, Any]] = {}
  for timeline in timelines:
    if timeline.name in out:
      raise ValueError(
          f"timelines: expected different names, found {timeline.name} twice")
    spans: dict[tuple[str, str], list[tuple[float, float]]] = {}
    lanes: dict[str, list[tuple[float, float]]] = {}
    for e in timeline.events:
      spans.setdefault((e.lane, e.stage), []).append((e.start, e.end))
      lanes.setdefault(e.lane, []).append((e.start, e.end))
    stages: dict[str, float] = {}
    for (_, stage), found in spans.items():
      stages[stage] = stages.get(stage, 0.0) + covered(found)
    opens, closes = timeline.window or (0.0, 0.0)
    out[timeline.name] = {
        "step_seconds": timeline.seconds,
        "window_seconds": closes - opens,
        "stage_seconds": stages,
        "lane_seconds": {
            lane: covered(lanes[lane]) for lane in LANES if lane in lanes},
        "peak_bytes_live": max(
            (e.bytes_live for e in timeline.events
             if e.bytes_live is not None), default=None),
    }
  return out


def rows(events: Iterable[Event]) -> list[list[tuple[Event, int]]]:
  """Deals the events of a lane out to as few rows as show them all.

  Any two events of a row are apart or one lies within the other, as traces
  want it.

  Returns:
    For each row its events by start, each with the number of events around it.
  """
  dealt: list[list[tuple[Event, int]]] = []
  unfinished: list[list[Event]] = []  # Of each row, the outermost first.
  for e in sorted(events, key=lambda e: (e.start, -e.end)):
    for around in unfinished:
      while around and around[-1].end <= e.start:
        around.pop()
    fits = (i for i, around in enumerate(unfinished)
            if not around or e.end <= around[-1].end)
    i = next(fits, len(dealt))
    if i == len(dealt):
      dealt.append([])
      unfinished.append([])
    dealt[i].append((e, len(unfinished[i])))
    unfinished[i].append(e)
  return dealt


def write_trace(path: str | os.PathLike, timelines: Sequence[Timeline]) -> None:
  """Writes timelines as one Chrome trace, whole or not at all.

  https://ui.perfetto.dev opens it: a process per timeline, in it a thread per
  lane (several for events that overlap without one holding the other) and a
  counter of live bytes.

  Args:
    path: JSON file to write; its folder is made.
    timelines: to show one below the other, each starting at zero.
  """
  events = []
  for pid, timeline in enumerate(timelines, 1):
    events += _trace_of(timeline, pid)
  # Descriptions, which have no time of their own, go first.
  events.sort(key=lambda e: (e["ph"] != "M", e["ts"]))
  replace_file(path, lambda work: work.write_text(json.dumps(
      {"traceEvents": events, "displayTimeUnit": "ms"}, indent=1) + "\n"))


def replace_file(path: str | os.PathLike,
                 write: Callable[[pathlib.Path], Any]) -> None:
  """Makes a file by `write(temporary path)`, whole or not at all."""
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  work = path.with_name(f".{path.name}.{os.getpid()}")
  try:
    write(work)
    work.replace(path)
  finally:
    work.unlink(missing_ok=True)


def _trace_of(timeline: Timeline, pid: int) -> Iterator[dict[str, Any]]:
  """Trace events of one process."""

  # Whole microseconds: rounding keeps events within those around them.
  def clock(seconds):
    return round((seconds - timeline.start) * 1e6)

  def describe(kind, tid, **args):
    return {"ph": "M", "ts": 0, "pid": pid, "tid": tid, "name": kind,
            "args": args}

  yield describe("process_name", 0, name=timeline.name)
  yield describe("process_sort_index", 0, sort_index=pid)
  tids = itertools.count(1)
  for lane in LANES:
    found = [e for e in timeline.events if e.lane == lane]
    for number, row in enumerate(rows(found), 1):
      tid = next(tids)
      yield describe("thread_name", tid,
                     name=lane if number == 1 else f"{lane} {number}")
      yield describe("thread_sort_index", tid, sort_index=tid)
      for e, _ in row:
        args = {"index": e.index, "bytes_live": e.bytes_live,
                "estimated": e.estimated or None}
        yield {"ph": "X", "pid": pid, "tid": tid, "name": e.stage, "cat": lane,
               "ts": clock(e.start), "dur": clock(e.end) - clock(e.start),
               "args": {k: v for k, v in args.items() if v is not None}}
  for e in timeline.events:
    if e.bytes_live is not None:
      yield {"ph": "C", "pid": pid, "tid": 0, "name": "bytes live",
             "ts": clock(e.end), "args": {"bytes": e.bytes_live}}


def _unchanged(tree: _T) -> _T:
  """Waits for nothing."""
  return tree
