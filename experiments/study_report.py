"""What `experiments.study` says: claims, a table in Markdown, plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import pathlib
from typing import Any

import matplotlib
from matplotlib.figure import Figure

Row = Mapping[str, Any]
_NOT_MEASURED = "not measured"
_COLUMNS = (
    ("method", "name", "{}"), ("bits per weight", "bits_per_compressed_weight",
                               "{:.2f}"),
    ("bits per parameter", "bits_per_parameter", "{:.2f}"),
    ("nominal ratio", "nominal_ratio", "{:.2f}"),
    ("true ratio", "true_ratio", "{:.2f}"),
    ("squared error", "relative_squared_error", "{:.2e}"),
    ("perplexity", "perplexity", "{:.4f}"),
    ("change, %", "change_percent", "{:+.3f}"),
    ("+-", "change_percent_stderr", "{:.3f}"), ("KL", "mean_kl", "{:.2e}"),
    ("top-1", "top1_agreement", "{:.3f}"))


def claims(rows: Sequence[Row], shares: Mapping[int, float]
           ) -> list[dict[str, str]]:
  """A row for each published claim.

  Args:
    rows: of the study.
    shares: weights beyond the outermost threshold of a full replacement, by K.

  Returns:
    "claim", "published" and "measured", the last with why, if it isn't.
  """
  def find(group, k=128, p=99.0, dim=1):
    for row in rows:
      if (row["group"], row["num_centroids"], row["percentile"],
          row["dim"]) == (group, k, p, dim) and "skipped" not in row:
        return row
    return None

  def change(row):
    if row is None:
      return f"{_NOT_MEASURED}: left out, or the checkpoint is too small"
    return _with_error(row, "change_percent", "{:+.3f} %")

  def benchmark(name, key):
    row = find("published", 64)
    if row is None or f"{key}_change" not in row:
      return f"{_NOT_MEASURED}: no file was given (--{name})"
    return _with_error(row, f"{key}_change", "{:+.4f}")

  def success():
    row = find("published", 64)
    if row is None or "world_success_change" not in row:
      return f"{_NOT_MEASURED}: no world was given (--world)"
    return (f"{row['world_reference_success']:.3f} before, "
            + _with_error(row, "world_success_change", "{:+.3f}"))

  def errors(group, points):
    found = [(label, find(group if dim > 1 else "published", k, 99.0, dim))
             for label, k, dim in points]
    return ", ".join(f"{label} {row['relative_squared_error']:.2e}"
                     for label, row in found if row)

  largest = max((r["num_centroids"] for r in rows
                 if r["group"] == "vector blocks" and "skipped" not in r),
                default=128)
  full, selected = find("full replacement", p=None), find("published")
  per_layer = find("k-means per layer")
  if per_layer and selected:
    gap = per_layer["change_percent"] - selected["change_percent"]
    per_layer_text = (f"{gap:+.3f} % from global ({change(per_layer)} beside "
                      f"{change(selected)})")
  else:
    per_layer_text = change(None)
  table = [
      ("perplexity at K=128, p=99", "+0.03 % (Mistral-7B)", change(selected)),
      ("perplexity at K=128, p=80", "-0.02 % (Mistral-7B)",
       change(find("other percentiles", p=80.0))),
      ("LAMBADA at K=64, p=99", "accuracy within noise",
       benchmark("lambada", "lambada_accuracy")),
      ("HellaSwag at K=64, p=99", "acc_norm within noise",
       benchmark("hellaswag", "hellaswag_acc_norm")),
      ("success in a world at K=64, p=99", "(not published)", success()),
      ("weights beyond the outermost threshold", "a fraction of about 1/K",
       ", ".join(f"K={k}: {share:.2e} ({share * k:.2f}/K)"
                 for k, share in shares.items())),
      ("blocks of d weights at the same K", "error grows linearly with d",
       errors("vector blocks", [(f"d={d}", 128, d) for d in (1, 2, 4)])
       or change(None)),
      ("blocks of d weights at larger K", "no K mends it",
       errors("vector blocks", [("d=1 K=128", 128, 1)] + [
           (f"d={d} K={largest}", largest, d) for d in (2, 4)])
       or change(None)),
      ("full replacement at K=128", "catastrophic", change(full)),
      ("full replacement and model size", "worse for larger models",
       f"{_NOT_MEASURED}: one checkpoint has one size"),
      ("selection at p=99 in place of it", "rescues it", change(selected)),
      ("k-means per layer with selection", "within 0.02 % of global",
       per_layer_text)]
  return [dict(zip(("claim", "published", "measured"), row)) for row in table]


def markdown(result: Mapping[str, Any]) -> str:
  """The study as a page."""
  lines = [
      f"# {result['model_path']}", "",
      f"Perplexity and KL on {result['tokens']:,} tokens of {result['data']}, "
      "against the checkpoint itself; +- is the standard error of paired "
      "differences over windows. Squared errors are relative to the weights' "
      "squares, over the matrices of all blocks but the first and last.", "",
      *_table([[c["claim"], c["published"], c["measured"]]
               for c in result["claims"]], ("claim", "published", "measured")),
      ""]
  cells = [[form.format(row[key]) if row.get(key) is not None else ""
            for _, key, form in _COLUMNS]
           for row in result["rows"] if "skipped" not in row]
  lines += _table(cells, [title for title, *_ in _COLUMNS])
  for row in result["rows"]:
    if "skipped" in row:
      lines.append(f"\n{row['group']} d={row['dim']} K={row['num_centroids']}: "
                   f"skipped, {row['skipped']}")
  return "\n".join(lines) + "\n"


def _table(rows: Sequence[Sequence[str]], titles: Sequence[str]) -> list[str]:
  line = lambda cells: "| " + " | ".join(cells) + " |"
  return [line(titles), line(["---"] * len(titles)), *map(line, rows)]


def _with_error(row: Row, name: str, form: str) -> str:
  text = form.format(row[name])
  error = row.get(f"{name}_stderr")
  return text if error is None else f"{text} +- {error:.2g}"


def plot(rows: Sequence[Row], folder: pathlib.Path) -> None:
  """Draws distortion.png (error against K) and quality.png (perplexity and KL
  against true bits)."""
  rows = [row for row in rows if "skipped" not in row]
  with matplotlib.rc_context({"font.size": 9}):
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for dim in (1, 2, 4):
      group = "published" if dim == 1 else "vector blocks"
      points = sorted(
          (row["num_centroids"], row["relative_squared_error"]) for row in rows
          if (row["group"], row["dim"], row["percentile"]) == (group, dim, 99.0))
      if points:
        axes.loglog(*zip(*points), marker="o", label=f"d = {dim}")
    axes.set(xlabel="centroids K", ylabel="relative squared error",
             title="Blocks of d weights, p = 99 %")
    if axes.get_legend_handles_labels()[0]:
      axes.legend()
    figure.savefig(folder / "distortion.png", dpi=120)

    figure = Figure(figsize=(9, 4), layout="constrained")
    for axes, (key, label) in zip(figure.subplots(1, 2), (
        ("change_percent", "perplexity change, %"), ("mean_kl", "mean KL"))):
      for group in dict.fromkeys(row["group"] for row in rows):
        points = [row for row in rows if row["group"] == group]
        axes.plot([row["bits_per_compressed_weight"] for row in points],
                  [row[key] for row in points], "o", markersize=4, label=group)
      axes.set(xlabel="true bits per compressed weight", ylabel=label)
      if key == "mean_kl":
        axes.set_yscale("log")
        axes.legend(fontsize=7)
      else:
        axes.set_yscale("symlog", linthresh=0.1)
    figure.savefig(folder / "quality.png", dpi=120)
