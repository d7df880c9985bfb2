"""Supervised learning: updates on given responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import jax
import numpy as np

from rollplex_jax import turns
from rollplex_jax.data import batching
from rollplex_jax.data.pipeline import Example
from rollplex_jax.data.processor import Processor, Prompt
from rollplex_jax.full_passes import supervised_gradient
from rollplex_jax.models.config import ModelConfig
from rollplex_jax.models.weights import Params
from rollplex_jax.placement.host import to_host
from rollplex_jax.placement.processes import Spread
from rollplex_jax.policy import Policy
from rollplex_jax.samples import Groups, PromptBatch, make_batch
from rollplex_jax.settings import Settings
from rollplex_jax.timeline import Timeline
from rollplex_jax.turns import Suffix


def example(processor: Processor, row: dict[str, Any],
            where: str) -> tuple[Prompt, list[int] | Suffix]:
  """A row's prompt, and its response's ids with an EOS at the end.

  Of a demonstration of several turns ("turns": see `TurnTask.demonstration`),
  all that follows the prompt; responses that aren't to be trained are there for
  what comes after them.
  """
  prompt = processor.prompt(row, where)
  if "turns" not in row:
    return prompt, _ended(processor, processor.response(row, where))
  suffix = Suffix(prompt)
  for i, turn in enumerate(row["turns"]):
    ids = _ended(processor, processor.encode(turn["response"]))
    suffix.respond(np.array(ids, np.int32), learned=turn["train"])
    if turn["message"] is not None:
      suffix.observe(processor.continuation(
          turn["message"], f"{where}, turn {i + 1}", after_end=True))
  return prompt, suffix


def _ended(processor: Processor, response: list[int]) -> list[int]:
  eos = processor.tokenizer.eos_token_id
  if eos is not None and (not response or response[-1] != eos):
    response = [*response, eos]
  return response


def collect(config: ModelConfig, examples: Sequence[Example], parts: int,
            spread: Spread | None) -> tuple[PromptBatch, Groups]:
  """A step's prompts, and their responses as groups of one.

  Args:
    config: of the model.
    examples: of `example`, of this process's parts of the batch.
    parts: into how many the batch is split over devices.
    spread: which of them are this process's, if there are several processes.
  """
  found = [(*e.prompt, e.index) for e in examples]
  if spread is not None:
    found = spread.share(found, lambda item: (
        dataclasses.replace(item[0], patches=None), *item[1:]))
  prompts, responses, indices = zip(*found)
  batch = make_batch(config, prompts, indices, parts=parts, spread=spread)
  if isinstance(responses[0], Suffix):
    episodes = turns.collect(config, [[suffix] for suffix in responses])
    rows = np.arange(len(prompts))
    return batch, Groups.of(
        rows, episodes.completions, np.zeros((len(rows), 1), np.float32),
        episodes.suffix, episodes.media)
  token_ids, lengths = batching.stack_responses(responses)
  return batch, Groups(
      rows=np.arange(len(prompts), dtype=np.int32),
      token_ids=token_ids[:, None], lengths=lengths[:, None],
      advantages=np.zeros((len(prompts), 1), np.float32))


def update(policy: Policy, settings: Settings, batch: PromptBatch,
           groups: Groups, size: int, timeline: Timeline, *,
           after_update: Callable[[int, Groups, dict[str, float], float], bool],
           ) -> dict[str, float]:
  """Updates the policy on `size` rows at a time.

  Args:
    policy: that learns.
    settings: of the run.
    batch: the step's prompts.
    groups: their responses.
    size: rows of an update.
    timeline: of the step.
    after_update: told of each update's number from 1, its rows, metrics and
      loss; says whether to go on.

  Returns:
    Metrics of the last update, how many were skipped, and the mean loss of all.
  """
  values, losses, skipped = {}, [], 0.0
  for i in range(0, len(groups), size):
    part = groups.take(np.arange(i, min(i + size, len(groups))))
    with timeline.event("gradient_full", "training") as wait:
      grads, loss = wait(gradient(policy, settings, batch, part))
    with timeline.event("update", "training") as wait:
      new, loss = to_host((wait(policy.update(grads, loss)), loss))
    values |= {name: float(value) for name, value in new.items()}
    losses.append(float(loss))
    skipped += values["actor/update_skipped"]
    if not after_update(len(losses), part, values, losses[-1]):
      break
  return values | {"actor/update_skipped": skipped,
                   "train/loss": float(np.mean(losses))}


def gradient(policy: Policy, settings: Settings, batch: PromptBatch,
             groups: Groups) -> tuple[Params, jax.Array]:
  """`supervised_gradient` of some groups at the policy as it is."""
  return supervised_gradient(
      policy.trained, policy.frozen, settings.config, batch, groups,
      micro_batch_size=settings.micro_batch_size, remat=settings.remat,
      place=settings.training)
