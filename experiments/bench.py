"""Measured comparisons: `python -m experiments.bench --suite=decode`.

Every suite runs both sides of its comparison in turn, in one process, and
prints a table.
"""

from __future__ import annotations

from absl import flags
import jax

from experiments import (
    bench_compress,
    bench_decode,
    bench_kernels,
    bench_schedule,
    common,
)

_SUITE = flags.DEFINE_enum(
    "suite", None, ["compress", "decode", "kernels", "schedule"],
    "What to compare: "
    "compress = seconds per billion parameters, and what of them is reading and "
    "writing; decode = tokens per second against `generate` of transformers; "
    "kernels = decoding and products with compressed weights against plain ones; "
    "schedule = step time of the schedules.")
_ROUNDS = flags.DEFINE_integer(
    "rounds", 5, "Measurements of each side.", lower_bound=1)
_TIMELINE = flags.DEFINE_string(
    "timeline", "", "For --suite=schedule: path, without suffix, for a picture "
    "and a trace of a step under each schedule.")


def main():
  """Runs the command."""
  suite = common.required(_SUITE)
  # A program read from disk would be reported as compiled in no time.
  jax.config.update("jax_enable_compilation_cache", False)
  if suite == "schedule":
    return bench_schedule.run(
        rounds=_ROUNDS.value, timeline_stem=_TIMELINE.value)
  if suite == "kernels":
    return bench_kernels.run(rounds=_ROUNDS.value)
  if suite == "compress":
    return bench_compress.run(rounds=_ROUNDS.value)
  return bench_decode.run(rounds=_ROUNDS.value)


if __name__ == "__main__":
  common.run(main)
