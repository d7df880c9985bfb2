"""Scores given responses: `python -m experiments.score --model_path=...`.

Reads JSONL rows with responses and writes, per row, {"token_ids", "logprobs"}
of the response: natural logarithm, temperature 1, full vocabulary.
"""

from __future__ import annotations

import json
import time

from absl import flags
import jax.numpy as jnp

from experiments import common
from rollplex_jax import inference
from rollplex_jax.data.processor import Processor
from rollplex_jax.data.row_schema import RowError
from rollplex_jax.data.rows import RowFile, select_rows
from rollplex_jax.models import hf

_MODEL = flags.DEFINE_string("model_path", None, "Checkpoint folder.")
_ROWS = flags.DEFINE_string("rows", None, "JSONL file of rows with responses.")
_OUTPUT = flags.DEFINE_string("output", None, "JSONL file to write.")
_BATCH = flags.DEFINE_integer(
    "batch_size", 8, "Rows at a time.", lower_bound=1)
_DTYPE = flags.DEFINE_enum(
    "dtype", "float32", ["float32", "bfloat16"], "Of the parameters.")
_LIMIT = flags.DEFINE_integer(
    "max_prompt_length", 0, "Longest prompt in tokens; 0: no limit.")
_SKIP = flags.DEFINE_bool(
    "skip_bad_rows", False, "Leave bad rows out, counted by reason.")


def main():
  """Runs the command."""
  model_path, path = common.required(_MODEL), common.required(_ROWS)
  output = common.required(_OUTPUT)
  processor = Processor.from_checkpoint(
      model_path, max_prompt_length=_LIMIT.value or None)

  def check(row, where):
    if "response" not in row and "response_token_ids" not in row:
      raise RowError(where, "response", "expected response or "
                     "response_token_ids, found neither")
    processor.check(row, where)

  rows = select_rows(RowFile(path), check, _SKIP.value,
                     common.progress("checking rows"))
  for line in rows.report():
    print(line)
  config, params = hf.load_checkpoint(model_path, jnp.dtype(_DTYPE.value))
  start, tokens, total = time.perf_counter(), 0, 0.0
  with common.whole_file(output) as file:
    batches = -(-len(rows) // _BATCH.value)
    for _, token_ids, logprobs in inference.score(
        params, config, processor, rows, batch_size=_BATCH.value,
        progress=common.progress("scoring", batches)):
      tokens += len(token_ids)
      total += sum(logprobs)
      file.write(json.dumps(
          {"token_ids": token_ids, "logprobs": logprobs}) + "\n")
  seconds = time.perf_counter() - start
  mean = total / max(tokens, 1)
  print(f"{len(rows)} rows, {tokens} response tokens, mean log-prob "
        f"{mean:.4f}, {seconds:.1f} s -> {output}")
  return {"rows": len(rows), "skipped_rows": sum(rows.skipped.values()),
          "tokens": tokens, "mean_logprob": mean, "seconds": seconds}


if __name__ == "__main__":
  common.run(main)
