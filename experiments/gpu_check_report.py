"""The result of gpu-check as a Markdown table, and its lines on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

_SIGNS = {True: "met", False: "missed"}


def markdown(result: dict[str, Any]) -> str:
  """The whole result, section by section."""
  lines = ["# gpu-check", "", *_table(
      ("what", "value"), [(key.replace("_", " "), _text(result.get(key)))
                          for key in ("device", "jax", "commit", "seed",
                                      "started", "seconds", "claim")])]
  lines += ["", "## Sections", "", *_table(
      ("section", "status", "seconds", "why"),
      [(name, s["status"], f"{s['seconds']:.1f}",
        s["reason"]) for name, s in result["sections"].items()])]
  writers = {"numerics": _numerics, "views": _views, "speed": _speed,
             "autotune": _autotune, "schedule": _schedule}
  for name, section in result["sections"].items():
    lines += ["", f"## {name}", ""]
    for title in ("failed", "skipped", "left_out"):
      lines += [f"- {title.replace('_', ' ')}: {line}"
                for line in section.get(title, ())]
    if section.get("finished"):
      lines += ["", *writers[name](section)]
  return "\n".join(lines) + "\n"


def _numerics(section) -> Iterator[str]:
  poison = section["poison"]
  yield ("Results were written to buffers that held NaN; a kernel with a gap was "
         f"{'found' if poison['gaps_seen'] else 'NOT found'}; "
         f"{poison['temp_bytes'] / 1e6:.1f} MB between kernels were NaN too.")
  yield ""
  worst: dict[tuple, dict[str, Any]] = {}
  count: dict[tuple, int] = {}
  for check in section["checks"]:
    key = (check["kernel"], check["implementation"], check["result"],
           check["dtype"])
    count[key] = count.get(key, 0) + 1
    if key not in worst or check["error"] > worst[key]["error"]:
      worst[key] = check
  yield from _table(
      ("kernel", "by", "result", "dtype", "cases", "largest error", "limit"),
      [(*key, str(count[key]), f"{c['error']:.1e}", f"{c['limit']:.0e}")
       for key, c in worst.items()])


def _views(section) -> Iterator[str]:
  yield from _table(("check", "holds"), [
      (name, "yes" if held else "NO")
      for name, held in section["checks"].items()])


def _speed(section) -> Iterator[str]:
  yield (f"A large copy moves {section['copy_bandwidth'] / 1e12:.2f} TB/s, read "
         f"and written. Times are of {section['method']}: {section['method_reason']}. "
         f"Goals: {section['goal_of_copy']:.0%} of the copy's bandwidth for "
         f"products of up to {section['few_rows']} rows and for decode, "
         f"{section['goal_over_dense']}x the dense bfloat16 product at 6 bits.")
  yield ""
  rows = []
  for row in section["rows"]:
    if "error" in row:
      rows.append((row["kernel"], row["implementation"], row["case"],
                   row["error"][:80], "", "", "", ""))
      continue
    goals = [f"{_SIGNS[row[key] >= goal]} {goal:g}"
             for key, goal in row["goals"].items() if key in row]
    if not section["is_measurement"]:
      goals = ["not a GPU"]
    rate = (f"{row['bytes_per_second'] / 1e12:.2f} TB/s"
            if "bytes_per_second" in row
            else f"{row['flops_per_second'] / 1e12:.0f} TFLOP/s")
    share = (f"{row['share_of_copy']:.0%}" if "share_of_copy" in row else "")
    rows.append((
        row["kernel"], row["implementation"], row["case"],
        f"{row['seconds'] * 1e6:,.1f}", rate, share,
        f"{row['over_peer']:.2f}x {row['peer']}" if "over_peer" in row
        else f"{row['peer']}: {row.get('peer_error', '')[:60]}",
        ", ".join(goals)))
  yield from _table(("kernel", "by", "case", "us", "reached", "of copy",
                     "times as fast as", "goals"), rows)


def _autotune(section) -> Iterator[str]:
  yield from _table(
      ("kernel", "case", "default, us", "best, us", "gain", "change",
       "tried", "refused", "left out"),
      [(r["kernel"], r["case"], f"{r['default_seconds'] * 1e6:,.1f}",
        f"{r['best_seconds'] * 1e6:,.1f}", f"{r['gain']:.2f}x",
        ", ".join(changes(r["default"], r["best"])) or "none",
        str(r["tried"]), str(r["refused"]), str(r["left_out"]))
       for r in section["rows"]])


def changes(default: dict[str, Any], best: dict[str, Any]) -> list[str]:
  """What differs between two tunings, as "key: 1 -> 2"."""
  found = []
  for key, value in best.items():
    if isinstance(value, dict):
      found += [f"{key}.{line}" for line in changes(default[key], value)]
    elif value != default[key]:
      found.append(f"{key}: {default[key]} -> {value}")
  return found


def _schedule(section) -> Iterator[str]:
  work = section["workload"]
  yield (f"{section['num_parameters'] / 1e9:.2f}B parameters, "
         f"{work['prompts']} prompts of {work['prefix']} prefix tokens, responses "
         f"of {work['response']}; goal: rollplex at group 1 at least "
         f"{section['goal']}x serial.")
  yield ""
  rows = []
  for group, found in section["groups"].items():
    for name, row in found.items():
      ratio = row.get("over_serial")
      goal = ("" if ratio is None or group != 1 or name != "rollplex"
              else _SIGNS[ratio >= section["goal"]])
      if not section["is_measurement"]:
        goal = "not a GPU"
      error = row.get("gradient_error")
      rows.append((
          str(group), name, f"{row['seconds'] * 1e3:,.0f}",
          "" if ratio is None else f"{ratio:.2f}x", goal,
          "" if error is None else f"{error:.1e}",
          ", ".join(f"{stage} {seconds * 1e3:.0f}" for stage, seconds
                    in row["stage_seconds"].items())))
  yield from _table(("group", "schedule", "step, ms", "over serial", "goal",
                     "gradient differs by", "stages, ms"), rows)


def _text(value) -> str:
  return f"{value:.0f}" if isinstance(value, float) else str(value)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]
           ) -> Iterator[str]:
  clean = lambda cell: " ".join(str(cell).replace("|", "/").split())
  yield f"| {' | '.join(head)} |"
  yield f"|{' --- |' * len(head)}"
  for row in rows:
    yield f"| {' | '.join(map(clean, row))} |"
