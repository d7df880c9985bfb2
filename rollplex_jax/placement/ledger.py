"""Checks a run's live bytes against its residency plan, phase by phase.

  ledger = Ledger(plan)
  ledger.register("policy/weights", params)
  ...
  ledger.check("rollout")   # Once the phase has ended.

Every array of the process counts, registered or not, by the addresses that it
holds: views share bytes. Registering gives arrays a name, so that a violation
can say which of them should have gone. A check waits for all arrays, so
nothing overlaps across it: a ledger is for tests and for the first steps of a
run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
import dataclasses
from typing import Any
import weakref

import jax

from rollplex_jax.placement.buffers import Policy
from rollplex_jax.placement.live import covered, device_ranges
from rollplex_jax.placement.residency import ResidencyPlan, gib

_IN_PLACE = (Policy.DONATE, Policy.OFFLOAD)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unexpected:
  """An array that the plan does not have on the device.

  Attributes:
    name: under which it was registered, with its place in the tree, or "".
    shape, dtype: of the whole array.
    bytes_on_device: of its shard.
    reason: why it shouldn't be there.
  """

  name: str
  shape: tuple[int, ...]
  dtype: str
  bytes_on_device: int
  reason: str

  def __str__(self) -> str:
    return (f"{self.name or 'an array'} {self.dtype}{list(self.shape)} "
            f"{gib(self.bytes_on_device)} ({self.reason})")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Violation:
  """More is alive on a device than the plan has there.

  Attributes:
    phase: after which it was seen.
    device: where.
    expected: bytes that the plan has there, without slack.
    found: bytes alive.
    unexpected: the largest arrays to blame.
  """

  phase: str
  device: jax.Device
  expected: int
  found: int
  unexpected: tuple[Unexpected, ...]

  def __str__(self) -> str:
    blame = "; ".join(map(str, self.unexpected)) or "nothing by itself"
    return (f"after {self.phase}, {self.device}: expected {gib(self.expected)} "
            f"alive, found {gib(self.found)}; unexpected: {blame}")


class LedgerError(RuntimeError):
  """A run holds more than its plan. `violations` has one for each device."""

  def __init__(self, violations: Sequence[Violation]):
    super().__init__("; ".join(map(str, violations[:2])) + (
        f"; and {len(violations) - 2} more" if len(violations) > 2 else ""))
    self.violations = tuple(violations)


class Ledger:
  """Compares what lives with a plan.

  Attributes:
    plan: what is expected; a new step may have another.
    violations: all that were found.
    found: phase -> most bytes alive on any device after it, over all checks.
  """

  def __init__(self, plan: ResidencyPlan, *, slack_bytes: int = 1 << 20,
               slack_ratio: float = 0.01, raises: bool = True,
               devices: Iterable[jax.Device] | None = None,
               ignore: Iterable[jax.Array] = ()):
    """Nothing is registered yet.

    Args:
      plan: of a step.
      slack_bytes: tolerated beyond the plan on each device: inputs, keys,
        counters.
      slack_ratio: tolerated beyond it, as a share of the plan's bytes.
      raises: raise at a violation; otherwise only collect.
      devices: those that the plan speaks of; by default all.
      ignore: arrays that have nothing to do with the run. They don't count
        unless they are registered.
    """
    self.plan = plan
    self.violations: list[Violation] = []
    self.found: dict[str, int] = {}
    self._slack = slack_bytes, slack_ratio
    self._raises = raises
    self._devices = None if devices is None else frozenset(devices)
    self._ignored = [weakref.ref(a) for a in ignore]
    # name -> place in the tree -> reference.
    self._trees: dict[str, dict[str, Any]] = {}
    # Arrays that somebody is to rewrite in place. They are held: if all is
    # well they are deleted, if not they must not vanish before the check.
    self._to_donate: dict[str, list[tuple[str, jax.Array]]] = {}
    self._replaced: list[tuple[str, str, jax.Array]] = []
    self._fresh: set[str] = set()  # Registered since the last check.

  def register(self, name: str, tree: Any) -> None:
    """Names the arrays of a tree, in place of those that had the name.

    Where the plan has the buffer rewritten in place, the arrays that go must
    have been donated: the next check finds those that were not.
    """
    leaves = {
        name + jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if isinstance(leaf, jax.Array)}
    now = {id(leaf) for leaf in leaves.values()}
    for place, old in self._to_donate.pop(name, ()):
      if id(old) not in now and not old.is_deleted():
        self._replaced.append((name, place, old))
    self._fresh.add(name)
    self._trees[name] = {k: weakref.ref(a) for k, a in leaves.items()}
    if any(b.rewritten_in and b.policy in _IN_PLACE
           for b in self.plan.find(name)):
      self._to_donate[name] = list(leaves.items())

  def forget(self, name: str) -> None:
    """Takes a name away: the tree was handed to whoever will delete it."""
    self.register(name, ())
    self._trees.pop(name)

  def check(self, phase: str) -> list[Violation]:
    """Compares what is alive with what the plan has after a phase.

    Args:
      phase: that has ended, or a group of phases.

    Returns:
      A violation for each device that holds too much.

    Raises:
      LedgerError: if there is any, unless they are only collected.
      KeyError: for a phase that the plan does not have.
    """
    inside = self.plan.phases_of(phase)
    last = inside[-1]
    expected = self.plan.after(last)
    total = sum(expected.values())
    replaced, self._replaced = self._replaced, []
    for name in self._to_donate.keys() - self._fresh:
      if any(set(inside) & set(b.rewritten_in) for b in self.plan.find(name)):
        # Rewritten, yet nothing new was registered: the old must be gone.
        replaced += [(name, place, a) for place, a in self._to_donate[name]
                     if not a.is_deleted()]
    self._fresh.clear()
    arrays = self._counted()
    jax.block_until_ready(arrays)
    kept = {id(a): (name, place) for name, place, a in replaced}
    named = self._names(expected) | kept
    allowed = total * (1 + self._slack[1]) + self._slack[0]
    violations = []
    self.found.setdefault(last, 0)
    ranges = device_ranges(arrays)
    for device in sorted(ranges, key=lambda d: d.id):
      if self._devices is not None and device not in self._devices:
        continue
      found = covered(ranges[device])
      self.found[last] = max(self.found[last], found)
      if found > allowed:
        violations.append(Violation(
            phase=last, device=device, expected=total, found=found,
            unexpected=self._blame(arrays, device, expected, named, kept)))
    self._release(last)
    self.violations += violations
    if violations and self._raises:
      raise LedgerError(violations)
    return violations

  def _release(self, phase: str) -> None:
    """Holds no longer what nobody will rewrite after a phase."""
    ahead = set(self.plan.phases[self.plan.phases.index(phase) + 1:])
    for name in list(self._to_donate):
      if not any(b.last_consumer is None or ahead & set(b.rewritten_in)
                 for b in self.plan.find(name)):
        del self._to_donate[name]

  def _counted(self) -> list[jax.Array]:
    """All arrays alive but those that are ignored."""
    ignored = {id(a) for ref in self._ignored if (a := ref()) is not None}
    ours = {id(a) for tree in self._trees.values() for ref in tree.values()
            if (a := ref()) is not None}
    return [a for a in jax.live_arrays()
            if id(a) in ours or id(a) not in ignored]

  def _names(self, expected) -> dict[int, tuple[str, str]]:
    """id -> (name of the tree, place in it); of several the one expected."""
    return {id(a): (name, place)
            for name in sorted(self._trees, key=lambda n: n in expected)
            for place, ref in self._trees[name].items()
            if (a := ref()) is not None}

  def _blame(self, arrays, device, expected, named,
             kept) -> tuple[Unexpected, ...]:
    """The five largest arrays on a device that the plan doesn't have there."""
    on_device = lambda found: [
        r for a in found for r in device_ranges([a]).get(device, ())]
    name_of = lambda a: named.get(id(a), ("", ""))[0]
    planned = [a for a in arrays if id(a) not in kept and name_of(a) in expected]
    over = {name for name in {name_of(a) for a in planned}
            if covered(on_device(a for a in planned if name_of(a) == name))
            > expected[name] * (1 + self._slack[1])}
    counted = on_device(planned)
    blamed = []
    known = {id(a) for a in planned}
    # Whole arrays before their shards, which take nothing beside them.
    for a in sorted((a for a in arrays if id(a) not in known),
                    key=lambda a: -a.nbytes):
      before = covered(counted)
      counted += on_device([a])
      blamed.append((a, covered(counted) - before, (
          "should have been donated" if id(a) in kept else
          "not on the device in the plan" if name_of(a) else
          "not registered")))
    blamed.sort(key=lambda item: -item[1])
    blamed += sorted(
        ((a, covered(on_device([a])),
          f"{name_of(a)} is planned at {gib(expected[name_of(a)])}")
         for a in planned if name_of(a) in over), key=lambda item: -item[1])
    return tuple(Unexpected(
        name=named.get(id(a), ("", ""))[1], shape=a.shape, dtype=str(a.dtype),
        bytes_on_device=size, reason=reason)
                 for a, size, reason in blamed if size)[:5]
