"""Completing rows and scoring given responses, outside of training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import dataclasses
from typing import Any

import numpy as np

from rollplex_jax import turns
from rollplex_jax.artifacts import Model
from rollplex_jax.data import batching
from rollplex_jax.data.episodes import EpisodePlayer
from rollplex_jax.data.pipeline import Example, input_pipeline
from rollplex_jax.data.processor import Processor
from rollplex_jax.data.row_schema import RowError
from rollplex_jax.errors import InputError
from rollplex_jax.executor import Step
from rollplex_jax.full_passes import score_groups
from rollplex_jax.models import architectures
from rollplex_jax.models.config import ModelConfig
from rollplex_jax.models.weights import Params
from rollplex_jax.samples import Groups, PromptBatch, make_batch
from rollplex_jax.schedule import ScheduleConfig
from rollplex_jax.settings import Settings
from rollplex_jax.stages.objectives import ObjectiveConfig
from rollplex_jax.stages.sampling import SamplingConfig
from rollplex_jax.turns import Episodes

TOO_LONG = "longer than the model's positions"


@dataclasses.dataclass(frozen=True)
class Completion:
  """One completion of a row.

  Attributes:
    text: decoded, without special tokens.
    token_ids: as drawn, the EOS included.
    logprobs: of each token, natural logarithm, at the sampling temperature.
    finish_reason: "stop" where an EOS ended it, "length" where the limit did.
  """

  text: str
  token_ids: list[int]
  logprobs: list[float]
  finish_reason: str


def eos_token_ids(config: ModelConfig, processor: Processor) -> tuple[int, ...]:
  """Tokens that end a completion: the model's and the tokenizer's.

  Raises:
    InputError: if one of them could never be drawn.
  """
  ids = set(config.eos_token_ids)
  if processor.tokenizer.eos_token_id is not None:
    ids.add(processor.tokenizer.eos_token_id)
  for token in sorted(ids):
    if not 0 <= token < config.text.vocab_size:
      raise InputError(
          f"checkpoint: eos_token_id: expected a token of the vocabulary of "
          f"{config.text.vocab_size}, found {token}")
    if token in config.vision_token_ids:
      raise InputError(
          f"checkpoint: eos_token_id: {token} is a vision token, which is "
          "never drawn")
  return tuple(sorted(ids))


def complete(params: Params, config: ModelConfig, processor: Processor,
             rows: Sequence, sampling: SamplingConfig, *,
             num_generations: int = 1, batch_size: int = 8, seed: int = 0,
             progress: Callable = iter,
             ) -> Iterator[tuple[Example, list[Completion]]]:
  """Completes rows in their order.

  A completion depends on its row's content and index, on its number and on
  `seed`, not on the batch it is drawn in.

  Args:
    params: {"text": ..., "visual": ...}.
    config: the model's configuration.
    processor: tokenizer and preprocessors.
    rows: random-access rows with `where`.
    sampling: how to draw; temperature 0 for greedy.
    num_generations: completions per row.
    batch_size: rows at a time; the last batch is filled up with empty rows.
    seed: of sampling.
    progress: wraps the iteration over batches.

  Yields:
    Each row's example and its completions.
  """
  architectures.check_decodes(config, "checkpoint")
  batch_size = min(batch_size, len(rows))
  settings = Settings(
      config=config, schedule=ScheduleConfig(), sampling=sampling,
      objective=ObjectiveConfig())
  for examples in progress(_batches(rows, processor.prompt, batch_size)):
    batch = make_batch(
        config, [e.prompt for e in examples], [e.index for e in examples],
        num_rows=batch_size)
    out = Step(settings, batch, Model(params, 0), None,
               num_generations=num_generations, seed=seed, step=0).roll_out()
    for b, example in enumerate(examples):
      completions = []
      for g in range(num_generations):
        n = int(out.lengths[b, g])
        ids = out.token_ids[b, g, :n].tolist()
        completions.append(Completion(
            processor.decode(ids), ids, out.logprobs[b, g, :n].tolist(),
            "stop" if out.finished[b, g] else "length"))
      yield example, completions


def play(params: Params, config: ModelConfig, processor: Processor,
         rows: Sequence, sampling: SamplingConfig, player: EpisodePlayer, *,
         max_turns: int, max_length: int | None = None, batch_size: int = 8,
         seed: int = 0, progress: Callable = iter,
         ) -> Iterator[tuple[list[Example], PromptBatch, Episodes]]:
  """Plays one episode of each row, in their order.

  Args:
    params: {"text": ..., "visual": ...}.
    config: the model's configuration.
    processor: tokenizer and preprocessors.
    rows: random-access rows with `where`, of the player's task.
    sampling: how to draw; temperature 0 for greedy.
    player: of the episodes.
    max_turns: responses of an episode.
    max_length: see `turns.play`.
    batch_size: episodes at a time; the last batch is filled up.
    seed: of sampling.
    progress: wraps the iteration over batches.

  Yields:
    Of some rows at a time their examples, prompts and episodes, groups of one.
  """
  architectures.check_decodes(config, "checkpoint")
  batch_size = min(batch_size, len(rows))
  settings = Settings(
      config=config, schedule=ScheduleConfig(), sampling=sampling,
      objective=ObjectiveConfig(), max_turns=max_turns)
  for examples in progress(_batches(rows, processor.prompt, batch_size)):
    batch = make_batch(
        config, [e.prompt for e in examples], [e.index for e in examples],
        num_rows=batch_size)
    work = Step(settings, batch, Model(params, 0), None, num_generations=1,
                seed=seed, step=0)
    episodes = turns.play(
        work, player, processor, [e.row for e in examples],
        [rows.where(e.index) for e in examples], max_length=max_length)
    yield examples, batch, episodes


def score(params: Params, config: ModelConfig, processor: Processor,
          rows: Sequence, *, batch_size: int = 8, temperature: float = 1.0,
          progress: Callable = iter,
          ) -> Iterator[tuple[Example, list[int], list[float]]]:
  """Log-probs of the rows' responses, token by token, in the rows' order.

  Args:
    params: {"text": ..., "visual": ...}.
    config: the model's configuration.
    processor: tokenizer and preprocessors.
    rows: random-access rows with `where` and with responses.
    batch_size: rows at a time.
    temperature: divides the logits.
    progress: wraps the iteration over batches.

  Yields:
    Each row's example, its response's token ids and their log-probs.
  """
  batch_size = min(batch_size, len(rows))

  def process(row, where):
    prompt = processor.prompt(row, where)
    response = processor.response(row, where)
    count, limit = len(prompt.token_ids) + len(response), config.text.max_length
    if limit is not None and count > limit:
      raise RowError(where, TOO_LONG, f"expected at most the model's {limit} "
                     f"tokens, found {count}")
    return prompt, response

  for examples in progress(_batches(rows, process, batch_size)):
    prompts, responses = zip(*(e.prompt for e in examples))
    batch = make_batch(
        config, prompts, [e.index for e in examples], num_rows=batch_size)
    token_ids, lengths = batching.stack_responses(
        responses, num_rows=batch_size)
    groups = Groups(
        rows=np.arange(batch_size, dtype=np.int32),
        token_ids=token_ids[:, None], lengths=lengths[:, None],
        advantages=np.zeros((batch_size, 1), np.float32))
    logprobs = score_groups(
        params, config, batch, groups, temperature=temperature)[:, 0]
    for example, response, values in zip(examples, responses, logprobs):
      yield example, list(response), values[:len(response)].tolist()


def _batches(rows: Sequence, process: Callable[[dict, str], Any],
             batch_size: int):
  return input_pipeline(rows, process, batch_size=batch_size, num_epochs=1,
                        drop_remainder=False)
