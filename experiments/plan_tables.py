"""Tables of a capacity plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from rollplex_jax.capacity.memory import KINDS

WIDTH = 150
_SPEEDUPS = {
    "serial_shared": "serial, one prefix per prompt",
    "serial": "serial, a prefix per sample",
    "disaggregated_shared": "disaggregated, one prefix per prompt",
    "disaggregated": "disaggregated, a prefix per sample"}


def report(plan: Mapping[str, Any], schedule: str) -> Iterator[Any]:
  """A plan as what a console prints: one schedule's phases, and all four."""
  case, published = plan["case"], plan["published"]
  mesh = dict(case["mesh"])
  if mesh["rollout_tp"] <= mesh["training_tp"]:
    del mesh["storage"]  # There is no choice.
  mesh = ", ".join(f"{name} {n}" for name, n in mesh.items())
  yield (f"{case['parameters'] / 1e9:.1f}B parameters on {case['num_devices']} "
         f"{case['device']} ({mesh}); saved: {case['save']}; training prefix "
         f"from the {case['prefix_source']}; {case['samples_per_pass']} samples "
         "per pass.")
  away = plan["schedules"][schedule]["away"]
  yield (f"Memory: {plan['how']}. In host memory while nothing reads it: "
         f"{', '.join(away) or 'nothing'}.")
  yield phases(plan, schedule)
  yield summary(plan)
  rollplex = plan["schedules"]["rollplex"]
  if not rollplex["fits"]:
    near = [f"{n['setting']} ({_gib(n['peak_bytes'])} GiB)"
            for n in plan["nearest"]]
    yield (f"rollplex needs {_gib(rollplex['peak_bytes'])} GiB, more than the "
           f"budget of {_gib(plan['memory']['budget_bytes'])} GiB. By estimate "
           "would fit: " + (", or ".join(near) or "no setting that was tried")
           + ".")
  yield stages(plan)
  hides = plan["forecast"]["window_hides"]
  if hides is not None:
    yield (f"The window hides {hides:.0%} of the prefix work in it.")
  yield (f"Published for 32 H800: naive colocation {published['naive_gib']:.0f} "
         "GiB; speedup {:.2f}-{:.2f} over serial, {:.2f}-{:.2f} over "
         "disaggregation.".format(*published["speedup_over_serial"],
                                  *published["speedup_over_disaggregated"]))


def phases(plan: Mapping[str, Any], schedule: str) -> Table:
  """Bytes of each phase of a schedule."""
  out = Table(title=f"{schedule}: GiB per device in each phase")
  out.add_column("phase")
  for kind in (*KINDS, "peak"):
    out.add_column("temp." if kind == "temporaries" else kind, justify="right")
  for phase in plan["schedules"][schedule]["phases"]:
    out.add_row(phase["name"], *(
        _gib(phase["bytes"][kind]) for kind in KINDS),
        f"[bold]{_gib(phase['peak_bytes'])}")
  return out


def summary(plan: Mapping[str, Any]) -> Table:
  """Peak and forecast of each schedule."""
  budget = plan["memory"]["budget_bytes"]
  out = Table(title=f"Schedules (budget {_gib(budget)} GiB of "
                    f"{_gib(plan['memory']['device_bytes'])})")
  for name in ("schedule", "peak, GiB", "fits", "step, s (forecast)",
               "over rollplex"):
    out.add_column(name, justify="left" if name == "schedule" else "right")
  forecast = plan["forecast"]
  for name, entry in plan["schedules"].items():
    seconds = entry["step_seconds"]
    times = forecast["speedups"].get(name)
    out.add_row(
        name, "-" if entry["peak_bytes"] is None else _gib(entry["peak_bytes"]),
        "yes" if entry["fits"] else "no",
        "-" if seconds is None or name == "naive" else f"{seconds:.1f}",
        f"{times:.2f}x" if times else "")
  for name in ("serial_shared", "disaggregated_shared"):
    out.add_row(_SPEEDUPS[name], "", "", f"{forecast['step_seconds'][name]:.1f}",
                f"{forecast['speedups'][name]:.2f}x")
  return out


def stages(plan: Mapping[str, Any]) -> Table:
  """The forecast of each stage."""
  e = plan["forecast"]["efficiency"]
  out = Table(title=(
      f"Forecast, seconds of a step's stages (at {e['compute']:.0%} of peak "
      f"arithmetic, {e['hbm']:.0%} of memory bandwidth, {e['link']:.0%} of "
      "links)"))
  for name in ("stage", "compute", "memory", "collectives", "total"):
    out.add_column(name, justify="left" if name == "stage" else "right")
  for name, t in plan["forecast"]["stages"].items():
    if t["total"] > 0:
      out.add_row(name, *(f"{t[k]:.2f}" for k in (
          "compute", "memory", "collective", "total")))
  return out


def ranking(result: Mapping[str, Any]) -> Table:
  """What a search found, best first."""
  out = Table(title="Search: what fits, fastest first")
  for name in ("mesh", "storage", "save", "prefix", "peak, GiB", "step, s",
               "how"):
    out.add_column(name, justify="right" if "," in name else "left")
  for entry in result["ranked"]:
    mesh = entry["case"]["mesh"]
    out.add_row(
        " ".join(f"{k}={v}" for k, v in mesh.items() if k != "storage"),
        mesh["storage"], entry["case"]["save"], entry["case"]["prefix_source"],
        _gib(entry["peak_bytes"]), f"{entry['step_seconds']:.1f}", entry["how"])
  if not result["ranked"]:
    out.caption = f"nothing fits; the closest needs {_gib(result['closest'])} GiB"
  return out


def _gib(count: int) -> str:
  return f"{count / 2**30:.1f}" if count else "-"
