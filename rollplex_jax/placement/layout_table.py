"""A layout plan, as a run's summary holds it, for people to read."""

from __future__ import annotations

from collections.abc import Mapping
import io
import math
from typing import Any

from rich.console import Console
from rich.table import Table

_BYTES = ("storage", "rollout", "moved", "gathered")


def table(plan: Mapping[str, Any]) -> Table:
  """A row for each kind of tensor of `LayoutPlan.to_dict()`."""
  totals = ", ".join(
      f"{size(count)} {how}" for how, count in plan["bytes"].items())
  out = Table(
      title=f"Weights in the rollout, per device ({plan['dtype']})",
      caption=f"stored: {size(plan['storage_bytes'])}; rollout: {totals}; "
              f"training gathers up to "
              f"{size(plan['largest_gather_bytes'])} at once")
  for name in ("tensor", "count", "shape", "how", *_BYTES):
    right = name in ("count", *_BYTES)
    out.add_column(name, justify="right" if right else "left", no_wrap=right)
  out.add_column("why")
  for kind in plan["tensors"]:
    out.add_row(
        kind["name"], str(kind["count"]), "x".join(map(str, kind["shape"])),
        kind["how"], *(size(kind[f"{name}_bytes"]) for name in _BYTES),
        kind["why"] or "")
  return out


def text(plan: Mapping[str, Any]) -> str:
  """The table as plain text."""
  console = Console(file=io.StringIO(), width=140)
  console.print(table(plan))
  return console.file.getvalue()


def size(count: int) -> str:
  """Bytes with a unit, in powers of 1024."""
  power = min(int(math.log(count or 1, 1024)), 3)
  return f"{count / 1024 ** power:.4g} {('B', 'KiB', 'MiB', 'GiB')[power]}"
