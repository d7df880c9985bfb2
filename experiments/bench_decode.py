"""Tokens per second of our rollout against `generate` of transformers.

Both sides hold the same random weights in float32, complete the same prompts
greedily (prefill included) and must write the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import functools
import pathlib
import statistics
import tempfile
import time
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from experiments import common
from rollplex_jax import programs
from rollplex_jax.errors import InputError
from rollplex_jax.models import hf, vlm
from rollplex_jax.models.config import ModelConfig, TextConfig
from rollplex_jax.models.inputs import PromptInputs
from rollplex_jax.models.weights import num_parameters
from rollplex_jax.stages.sampling import SamplingConfig, sample_keys

# Qwen2's proportions (heads of 64, three queries to a key, tied embeddings) at
# 18.9M and 100.7M parameters.
SIZES = {
    "20M": TextConfig(
        vocab_size=16384, hidden_size=384, intermediate_size=1024,
        num_hidden_layers=8, num_attention_heads=6, num_key_value_heads=2,
        tie_word_embeddings=True),
    "100M": TextConfig(
        vocab_size=32768, hidden_size=768, intermediate_size=2048,
        num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=4,
        tie_word_embeddings=True),
}
# Caches of transformers; the faster one is compared with.
_CACHES = {"dynamic": None, "static": "static"}
# Two tokens whose logits are this close may come out in either order.
_NEAR_TIE = 1e-3


@dataclasses.dataclass(frozen=True)
class Workload:
  """What is generated: `batch` prompts of equal length, to the full length."""

  batch: int = 8
  prompt_length: int = 128
  new_tokens: int = 128

  @property
  def tokens(self) -> int:
    return self.batch * self.new_tokens


def run(rounds: int = 5, sizes: Mapping[str, TextConfig] = SIZES,
        workload: Workload = Workload()) -> dict[str, Any]:
  """Compares both sides at every size and prints a table.

  Args:
    rounds: measurements of each side.
    sizes: decoder configurations by name.
    workload: what is generated.

  Returns:
    "ratios" by size (median over rounds of their seconds over ours), "sizes"
    with the numbers behind them, "workload" and "machine".

  Raises:
    InputError: without torch, or with JAX on an accelerator.
    ValueError: if the two sides write tokens that no near-tie explains.
  """
  if jax.default_backend() != "cpu":
    raise InputError(
        "--suite=decode compares on the CPU, found JAX on "
        f"{jax.default_backend()}: set JAX_PLATFORMS=cpu")
  versions = _torch_versions()
  machine = common.machine() | versions
  if machine["load"] > 0.5 * machine["cores"]:
    # Threads of OpenMP that spin for one another lose most, so the ratio would
    # flatter us.
    print(f"warning: the machine is busy (load {machine['load']:.1f} on "
          f"{machine['cores']} cores); OMP_WAIT_POLICY=PASSIVE is then fairer")
  results = {name: _compare(name, config, workload, rounds)
             for name, config in sizes.items()}
  result = {
      "ratios": {name: found["ratio"] for name, found in results.items()},
      "sizes": results, "rounds": rounds,
      "workload": dataclasses.asdict(workload), "machine": machine}
  _print(result)
  return result


def _compare(name: str, text: TextConfig, workload: Workload,
             rounds: int) -> dict[str, Any]:
  """Numbers of one size."""
  config = ModelConfig(text=text)
  params = vlm.init_params(config, jax.random.key(0))
  token_ids = np.random.default_rng(0).integers(
      0, text.vocab_size, (workload.batch, workload.prompt_length))
  decoder = our_side(config, params, token_ids, workload)
  ours = functools.partial(decoder.run, params)
  with tempfile.TemporaryDirectory() as folder:
    hf.save_checkpoint(pathlib.Path(folder) / "model", config, params)
    theirs, gap = _their_side(
        pathlib.Path(folder) / "model", token_ids, workload)
  # The first run of each side, which isn't measured, allocates its memory.
  written = ours()
  for cache, generate in theirs.items():
    _check_tokens(written, generate(), gap, f"{name}, {cache} cache")
  sides = {"ours": ours} | theirs
  seconds = {side: [] for side in sides}
  for _ in common.progress(name, rounds)(range(rounds)):
    for side, generate in sides.items():
      start = time.perf_counter()
      generate()
      seconds[side].append(time.perf_counter() - start)
  best = min(theirs, key=lambda side: statistics.median(seconds[side]))
  ratios = [a / b for a, b in zip(seconds[best], seconds["ours"])]
  return {
      "ratio": statistics.median(ratios),
      "ratio_range": [min(ratios), max(ratios)],
      "parameters": num_parameters(params),
      "tokens_per_second": {
          side: workload.tokens / statistics.median(values)
          for side, values in seconds.items()},
      "compile_seconds": decoder.compile_seconds,
      "torch_cache": best,
  }


@dataclasses.dataclass(frozen=True)
class Decoder:
  """Our side, compiled.

  Attributes:
    run: from parameters to tokens [B, R].
    compile_seconds: how long that took.
    program_bytes: of the loop's arguments, results and temporaries.
  """

  run: Callable[[Any], np.ndarray]
  compile_seconds: float
  program_bytes: int


def our_side(config: ModelConfig, params, token_ids: np.ndarray,
             workload: Workload) -> Decoder:
  """Compiles our side for parameters like these."""
  b, p = token_ids.shape
  prompts = PromptInputs(
      token_ids=token_ids.astype(np.int32),
      lengths=np.full(b, p, np.int32),
      positions=np.broadcast_to(np.arange(p, dtype=np.int32), (3, b, p)),
      feature_index=np.full((b, p), -1, np.int32),
      next_position=np.full(b, p, np.int32),
      row_ids=np.arange(b, dtype=np.int32))
  sampling = SamplingConfig(
      max_completion_length=workload.new_tokens, temperature=0.0)
  keys = sample_keys(0, 0, prompts.row_ids, 1)
  start = time.perf_counter()
  text = params["text"]
  lowered = programs.prefix_forward.lower(text, config, prompts, None)
  prefix = lowered.compile()
  decode = programs.decode.lower(
      params, config, sampling, prompts, lowered.out_info[0], keys).compile()
  compile_seconds = time.perf_counter() - start

  def run(params):
    inputs = jax.device_put(prompts)
    prefix_kv, _ = prefix(params["text"], inputs, None)
    done = decode(params, inputs, prefix_kv, keys)
    return np.asarray(done.token_ids)[:, 0]

  memory = decode.memory_analysis()
  return Decoder(run, compile_seconds, (
      memory.argument_size_in_bytes + memory.output_size_in_bytes
      + memory.temp_size_in_bytes))


def _their_side(folder: pathlib.Path, token_ids: np.ndarray,
                workload: Workload):
  """Per cache, a function that returns tokens [B, R]; and `gap(row, start,
  tokens)`, the difference of two tokens' logits after the row's `start`."""
  import torch
  import transformers

  transformers.utils.logging.disable_progress_bar()
  torch.set_num_threads(common.cores())
  model = transformers.AutoModelForCausalLM.from_pretrained(
      folder, dtype=torch.float32, attn_implementation="sdpa").eval()
  prompts = torch.from_numpy(token_ids.astype(np.int64))
  mask = torch.ones_like(prompts)

  def generator(cache):
    @torch.inference_mode()
    def generate():
      out = model.generate(
          prompts, attention_mask=mask, do_sample=False, use_cache=True,
          min_new_tokens=workload.new_tokens, pad_token_id=0,
          max_new_tokens=workload.new_tokens, cache_implementation=cache)
      return out[:, workload.prompt_length:].numpy()
    return generate

  @torch.inference_mode()
  def gap(row, start, tokens):
    ids = torch.from_numpy(np.concatenate([token_ids[row], start]))[None]
    scores = model(ids).logits[0, -1]
    return abs(float(scores[tokens[0]] - scores[tokens[1]]))

  return {name: generator(cache) for name, cache in _CACHES.items()}, gap


def _check_tokens(ours: np.ndarray, theirs: np.ndarray, gap, where: str):
  """Raises ValueError where rows part and it is no near-tie."""
  for row in np.flatnonzero((ours != theirs).any(axis=1)):
    at = int(np.argmax(ours[row] != theirs[row]))
    pair = int(ours[row, at]), int(theirs[row, at])
    found = gap(row, ours[row, :at].astype(np.int64), pair)
    print(f"{where}: row {row} parts at token {at}, logits {found:.1e} apart")
    if found > _NEAR_TIE:
      raise ValueError(
          f"{where}: row {row} differs at token {at}: {pair[0]} and {pair[1]}, "
          f"whose logits are {found:.1e} apart, expected {_NEAR_TIE:.0e}")


def _torch_versions() -> dict[str, str]:
  """Versions of the peer."""
  try:
    import torch
    import transformers
  except ImportError as error:
    raise InputError(
        "--suite=decode compares with torch: pip install -r "
        f"requirements-test.txt on Python 3.11 ({error})") from error
  return {"torch": torch.__version__,
          "transformers": transformers.__version__}


def _print(result: dict[str, Any]) -> None:
  machine, workload = result["machine"], result["workload"]
  table = Table(
      title="decode: tokens per second, float32, greedy",
      caption=f"batch {workload['batch']}, prompt {workload['prompt_length']}, "
      f"{workload['new_tokens']} new tokens; median of {result['rounds']} "
      f"rounds in turn; {machine['cpu']}, {machine['cores']} cores, load "
      f"{machine['load']:.1f}; jax {machine['jax']}, torch {machine['torch']}, "
      f"transformers {machine['transformers']}")
  table.add_column("size")
  for column in ("ours", *(f"torch, {c}" for c in _CACHES), "ratio", "range",
                 "compile s"):
    table.add_column(column, justify="right")
  for name, found in result["sizes"].items():
    speed = found["tokens_per_second"]
    low, high = found["ratio_range"]
    table.add_row(
        name, *(f"{speed[side]:,.0f}" for side in ("ours", *_CACHES)),
        f"{found['ratio']:.2f}", f"{low:.2f}-{high:.2f}",
        f"{found['compile_seconds']:.1f}")
  Console().print(table)
