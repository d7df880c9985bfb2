"""Scores given responses: `python -m experiments.score --model_path=...`.

Reads JSONL rows with responses and writes, per row, {"token_ids", "logprobs"}
of the response: natural logarithm, temperature 1, full vocabulary.
"""

from __future__ import annotations

import json
import time

from experiments import common
from experiments.row_inputs import RowInputs
from rollplex_jax import inference


def main():
  """Runs the command."""
  inputs = RowInputs()
  rows = inputs.select(needs_response=True)
  config, params = inputs.load(decodes=False)
  start, tokens, total = time.perf_counter(), 0, 0.0
  with common.whole_file(inputs.output) as file:
    for _, token_ids, logprobs in inference.score(
        params, config, inputs.processor, rows, batch_size=inputs.batch_size,
        progress=common.progress("scoring", inputs.num_batches(rows))):
      tokens += len(token_ids)
      total += sum(logprobs)
      file.write(json.dumps(
          {"token_ids": token_ids, "logprobs": logprobs}) + "\n")
  seconds = time.perf_counter() - start
  mean = total / max(tokens, 1)
  print(f"{len(rows)} rows, {tokens} response tokens, mean log-prob "
        f"{mean:.4f}, {seconds:.1f} s -> {inputs.output}")
  return {"rows": len(rows), "skipped_rows": rows.skipped.total(),
          "tokens": tokens, "mean_logprob": mean, "seconds": seconds}


if __name__ == "__main__":
  common.run(main)
