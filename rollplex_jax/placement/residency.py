"""Which buffers are in device memory in which phase, planned from lifetimes.

A step is a list of phases in the order in which they run. A `Buffer` says from
which phase to which it is needed, how many bytes it takes on each device and
what becomes of it in between. From that follow the live bytes of every phase
before anything is allocated: `plan` counts them, falls back to what keeps less
on the device where a budget asks for it, and refuses what can't fit.

`ledger.py` checks a run against its plan; `moves.py` moves what the plan sends
away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
import dataclasses
import itertools

import numpy as np

from rollplex_jax.errors import InputError
from rollplex_jax.placement.buffers import Buffer, Policy, occupancy


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResidencyConfig:
  """How much device memory a step's buffers may take.

  Attributes:
    budget_gb: GB (1e9 bytes) per device of all that the plan counts: weights,
      optimizer, gradients, keys and values, what prefixes save. What programs
      use inside comes on top, so leave room. To keep to it, optimizer state
      and the reference wait in host memory while nothing reads them, and then
      less is saved of prefixes. 0 for no limit.
    check: compare what is alive with the plan as each phase ends, and stop at
      the first buffer that should have gone. Each check waits for the device.
  """

  budget_gb: float = 0.0
  check: bool = False

  def __post_init__(self):
    if not self.budget_gb >= 0:
      raise InputError(f"budget_gb={self.budget_gb}: expected at least 0")

  @property
  def budget_bytes(self) -> int | None:
    return int(self.budget_gb * 1e9) or None


@dataclasses.dataclass(frozen=True)
class Suggestion:
  """Other settings, and the peak that they would have."""

  setting: str
  peak_bytes: int
  fits: bool


class BudgetError(InputError):
  """A budget that no choice meets. `report()` adds why, and what would fit.

  Attributes:
    plan: the one with every fallback taken.
    suggestions: other settings, those that fit first.
  """

  def __init__(self, message: str, plan: ResidencyPlan,
               suggestions: Sequence[Suggestion]):
    super().__init__(message)
    self.plan = plan
    self.suggestions = tuple(suggestions)

  def report(self) -> str:
    """The message, the table of phases, and other settings with their peaks."""
    lines = [str(self), self.plan.table()]
    lines += [f"{s.setting}: {gib(s.peak_bytes)}"
              f"{'' if s.fits else ', does not fit'}"
              for s in self.suggestions]
    return "\n".join(lines)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResidencyPlan:
  """Live bytes of every phase, on each device.

  Attributes:
    buffers: as they were chosen.
    phases: in order. "train/gradient[0]" belongs to the group "train".
    budget_bytes: per device; None for no limit.
    changed: settings that were chosen in place of those asked for.
  """

  buffers: tuple[Buffer, ...]
  phases: tuple[str, ...]
  budget_bytes: int | None = None
  changed: tuple[str, ...] = ()

  def __post_init__(self):
    index = {phase: i for i, phase in enumerate(self.phases)}
    if len(index) < len(self.phases):
      raise ValueError(f"phases: expected different names in {self.phases}")
    rows = [occupancy(b, index) for b in self.buffers]
    # [buffers, phases], computed once.
    tables = np.array([r[:2] for r in rows], np.int64).reshape(
        len(rows), 2, len(index))
    object.__setattr__(self, "_index", index)
    object.__setattr__(self, "_during", tables[:, 0])
    object.__setattr__(self, "_after", tables[:, 1])
    object.__setattr__(self, "_wanted", [r.wanted for r in rows])

  @property
  def live_bytes(self) -> dict[str, int]:
    """Bytes that each phase holds at its most."""
    return dict(zip(self.phases, self._during.sum(axis=0).tolist()))

  @property
  def peak_phase(self) -> str:
    return self.phases[int(self._during.sum(axis=0).argmax())]

  @property
  def peak_bytes(self) -> int:
    return int(self._during.sum(axis=0).max())

  @property
  def fits(self) -> bool:
    return self.budget_bytes is None or self.peak_bytes <= self.budget_bytes

  def during(self, phase: str) -> dict[str, int]:
    """Bytes of each buffer that is on the device in a phase."""
    return self._column(self._during, phase)

  def after(self, phase: str) -> dict[str, int]:
    """Bytes of each buffer that is on the device once a phase has ended.

    The last phase of a group may be named by the group.
    """
    return self._column(self._after, phase)

  def wanted(self, phase: str) -> set[str]:
    """Names of what has to come to the device in a phase, or in a group."""
    inside = [self._index[p] for p in self.phases_of(phase)]
    return {b.name for b, row in zip(self.buffers, self._wanted)
            if any(row[i] for i in inside)}

  def lives_after(self, phase: str) -> set[str]:
    """Names of what has been made and is read later, wherever it waits."""
    now = self._index[self.phases_of(phase)[-1]]
    return {b.name for b in self.buffers
            if (b.producer is None or self._index[b.producer] <= now)
            and (b.last_consumer is None or self._index[b.last_consumer] > now)}

  def find(self, name: str) -> list[Buffer]:
    """All buffers of a name, in the order of their lives."""
    return [b for b in self.buffers if b.name == name]

  def has(self, phase: str) -> bool:
    """Whether there is such a phase, or group of phases."""
    return phase in self._index or any(
        group_of(p) == phase for p in self.phases)

  def phases_of(self, phase: str) -> list[str]:
    """A phase itself, or the phases of a group.

    Raises:
      KeyError: if the plan has neither.
    """
    if phase in self._index:
      return [phase]
    inside = [p for p in self.phases if group_of(p) == phase]
    if not inside:
      raise KeyError(f"{phase}: not a phase of {', '.join(self.phases)}")
    return inside

  def table(self) -> str:
    """Phases by group, with their peak and what it is made of."""
    live = self.live_bytes
    out = [f"{'phase':<12} {'peak':>11}  largest buffers"]
    for group, inside in itertools.groupby(self.phases, group_of):
      top = max(inside, key=live.get)
      parts = sorted(self.during(top).items(), key=lambda item: -item[1])
      shown = [f"{name} {gib(size)}" for name, size in parts[:6]]
      if len(parts) > 6:
        shown.append(f"others {gib(sum(size for _, size in parts[6:]))}")
      mark = " <- peak" if top == self.peak_phase else ""
      out.append(f"{group:<12} {gib(live[top]):>11}  {', '.join(shown)}{mark}")
    return "\n".join(out)

  def _column(self, table: np.ndarray, phase: str) -> dict[str, int]:
    out: dict[str, int] = {}
    column = table[:, self._index[self.phases_of(phase)[-1]]].tolist()
    for buffer, size in zip(self.buffers, column):
      if size:
        out[buffer.name] = out.get(buffer.name, 0) + size
    return out


# Another setting: what a user would write, and its buffers and phases.
Alternative = tuple[
    str, Callable[[], tuple[Sequence[Buffer], Sequence[str]]]]


def plan(buffers: Sequence[Buffer], phases: Sequence[str],
         budget_bytes: int | None = None, *,
         alternatives: Iterable[Alternative] = ()) -> ResidencyPlan:
  """Chooses what is where, so that no phase exceeds a budget.

  Fallbacks are taken one at a time, in the order in which `buffers` are given
  and each lists its own, until the plan fits. Those that prove unnecessary are
  then taken back, the last first. What is offloaded moves beside other phases
  where there is room.

  Args:
    buffers: of a step.
    phases: of a step, in order.
    budget_bytes: of device memory, per device; None takes all as asked for.
    alternatives: settings to try, nearest first, where nothing fits. Of
      alternatives whose text is the same up to "=", only the first that fits
      is told.

  Raises:
    BudgetError: naming the phase, what it needs and the budget.
  """
  best = _choose(buffers, phases, budget_bytes)
  if best.fits:
    return best
  suggestions, told = [], set()
  for setting, make in alternatives:
    kind = setting.partition("=")[0]
    if kind not in told:
      other = _choose(*make(), budget_bytes)
      suggestions.append(Suggestion(setting, other.peak_bytes, other.fits))
      if other.fits:
        told.add(kind)
  fitting = [s for s in suggestions if s.fits]
  rest = sorted((s for s in suggestions if not s.fits),
                key=lambda s: s.peak_bytes)
  nearest = "no setting that was tried would fit"
  if fitting:
    nearest = "what would fit: " + ", ".join(
        f"{s.setting} ({gib(s.peak_bytes)})" for s in fitting)
  raise BudgetError(
      f"{best.peak_phase} needs {gib(best.peak_bytes)} per device, more than "
      f"the budget of {gib(budget_bytes)}"
      f"{' even with ' + ', '.join(best.changed) if best.changed else ''}; "
      f"{nearest}", best, fitting + rest)


def group_of(phase: str) -> str:
  """The group of a phase: what stands before a slash."""
  return phase.partition("/")[0]


def gib(count: float) -> str:
  """Bytes for people: GiB, or MiB where that is less than one."""
  return f"{count / 2**30:.2f} GiB" if count >= 2**30 else (
      f"{count / 2**20:.2f} MiB")


def _choose(buffers, phases, budget) -> ResidencyPlan:
  """The plan that fits or, if none does, the last of the fallbacks."""
  buffers = list(buffers)
  make = lambda chosen, changed=(): ResidencyPlan(
      buffers=tuple(chosen), phases=tuple(phases), budget_bytes=budget,
      changed=tuple(changed))
  best = make(buffers)
  depths: dict[str, int] = {}
  for b in buffers:
    depths[b.together] = max(depths.get(b.together, 0), len(b.fallbacks))
  level = dict.fromkeys(depths, 0)

  def at(level):
    chosen = [((b, *b.fallbacks)[min(level[b.together], len(b.fallbacks))])
              for b in buffers]
    changed = dict.fromkeys(
        c.setting for b, c in zip(buffers, chosen) if c is not b)
    return make(chosen, [setting for setting in changed if setting])

  for group in depths:
    while not best.fits and level[group] < depths[group]:
      level[group] += 1
      best = at(level)
  if not best.fits:
    return best
  for group in reversed(depths):
    while level[group]:
      back = at(level | {group: level[group] - 1})
      if not back.fits:
        break
      level[group] -= 1
      best = back
  for i, b in enumerate(best.buffers):
    if b.policy == Policy.OFFLOAD and not b.early:
      chosen = [*best.buffers]
      chosen[i] = dataclasses.replace(b, early=True)
      moved = make(chosen, best.changed)
      best = moved if moved.fits else best
  return best
