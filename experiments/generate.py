"""Completes rows: `python -m experiments.generate --model_path=... `.

Reads JSONL rows and writes one JSON object per row and sample: {"row",
"completion", "token_ids", "logprobs", "finish_reason"}.
"""

from __future__ import annotations

import json
import time

from absl import flags

from experiments import common
from experiments.row_inputs import RowInputs
from rollplex_jax import inference
from rollplex_jax.models import architectures
from rollplex_jax.stages.sampling import SamplingConfig

_NUM = flags.DEFINE_integer(
    "num_generations", 1, "Completions per row.", lower_bound=1)
_LENGTH = flags.DEFINE_integer(
    "max_completion_length", 256, "Longest completion, in tokens.")
_TEMPERATURE = flags.DEFINE_float(
    "temperature", 1.0, "Sampling temperature; 0 for greedy.")
_TOP_K = flags.DEFINE_integer("top_k", 0, "Sample among the k best; 0: all.")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "Nucleus sampling; 1: all.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of sampling.")


def main():
  """Runs the command."""
  inputs = RowInputs()
  processor = inputs.processor
  architectures.check_decodes(processor.config, "--model_path")
  sampling = SamplingConfig(
      max_completion_length=_LENGTH.value, temperature=_TEMPERATURE.value,
      top_k=_TOP_K.value, top_p=_TOP_P.value,
      eos_token_ids=inference.eos_token_ids(processor.config, processor),
      banned_token_ids=processor.config.vision_token_ids)
  rows = inputs.select()
  config, params = inputs.load(decodes=True)
  start, tokens = time.perf_counter(), 0
  with common.whole_file(inputs.output) as file:
    for example, completions in inference.complete(
        params, config, processor, rows, sampling,
        num_generations=_NUM.value, batch_size=inputs.batch_size,
        seed=_SEED.value, progress=common.progress(
            "generating", inputs.num_batches(rows))):
      for c in completions:
        tokens += len(c.token_ids)
        file.write(json.dumps({
            "row": int(rows.indices[example.index]), "completion": c.text,
            "token_ids": c.token_ids, "logprobs": c.logprobs,
            "finish_reason": c.finish_reason}) + "\n")
  seconds = time.perf_counter() - start
  print(f"{len(rows)} rows, {tokens} tokens in {seconds:.1f} s -> "
        f"{inputs.output}")
  return {"rows": len(rows), "skipped_rows": rows.skipped.total(),
          "tokens": tokens, "seconds": seconds}


if __name__ == "__main__":
  common.run(main)
