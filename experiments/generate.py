"""Completes rows: `python -m experiments.generate --model_path=... `.

Reads JSONL rows and writes one JSON object per row and sample: {"row",
"completion", "token_ids", "logprobs", "finish_reason"}.
"""

from __future__ import annotations

import json
import time

from absl import flags
import jax.numpy as jnp

from experiments import common
from rollplex_jax import inference
from rollplex_jax.data.processor import Processor
from rollplex_jax.data.rows import RowFile, select_rows
from rollplex_jax.models import hf
from rollplex_jax.stages.sampling import SamplingConfig

_MODEL = flags.DEFINE_string("model_path", None, "Checkpoint folder.")
_ROWS = flags.DEFINE_string("rows", None, "JSONL file of rows.")
_OUTPUT = flags.DEFINE_string("output", None, "JSONL file to write.")
_NUM = flags.DEFINE_integer(
    "num_generations", 1, "Completions per row.", lower_bound=1)
_LENGTH = flags.DEFINE_integer(
    "max_completion_length", 256, "Longest completion, in tokens.")
_TEMPERATURE = flags.DEFINE_float(
    "temperature", 1.0, "Sampling temperature; 0 for greedy.")
_TOP_K = flags.DEFINE_integer("top_k", 0, "Sample among the k best; 0: all.")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "Nucleus sampling; 1: all.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of sampling.")
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
  sampling = SamplingConfig(
      max_completion_length=_LENGTH.value, temperature=_TEMPERATURE.value,
      top_k=_TOP_K.value, top_p=_TOP_P.value,
      eos_token_ids=inference.eos_token_ids(processor.config, processor),
      banned_token_ids=processor.config.vision_token_ids)
  rows = select_rows(RowFile(path), processor.check, _SKIP.value,
                     common.progress("checking rows"))
  for line in rows.report():
    print(line)
  config, params = hf.load_checkpoint(model_path, jnp.dtype(_DTYPE.value))
  start, tokens = time.perf_counter(), 0
  with common.whole_file(output) as file:
    batches = -(-len(rows) // _BATCH.value)
    for example, completions in inference.complete(
        params, config, processor, rows, sampling,
        num_generations=_NUM.value, batch_size=_BATCH.value, seed=_SEED.value,
        progress=common.progress("generating", batches)):
      for c in completions:
        tokens += len(c.token_ids)
        file.write(json.dumps({
            "row": int(rows.indices[example.index]), "completion": c.text,
            "token_ids": c.token_ids, "logprobs": c.logprobs,
            "finish_reason": c.finish_reason}) + "\n")
  seconds = time.perf_counter() - start
  print(f"{len(rows)} rows, {tokens} tokens in {seconds:.1f} s -> {output}")
  return {"rows": len(rows), "skipped_rows": sum(rows.skipped.values()),
          "tokens": tokens, "seconds": seconds}


if __name__ == "__main__":
  common.run(main)
