"""What a study measures on: windows of a text, or episodes of a world."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments import evaluate_reward
from legolm_jax import benchmarks, evaluate
from rollplex_jax import inference, programs
from rollplex_jax.data import batching
from rollplex_jax.data.processor import Processor
from rollplex_jax.evaluation import evaluate as evaluate_rows
from rollplex_jax.models.config import ModelConfig
from rollplex_jax.models.weights import Params
from rollplex_jax.samples import make_batch
from rollplex_jax.stages.response import GroupResponses
from rollplex_jax.stages.sampling import SamplingConfig
from rollplex_jax.tasks import make_task


class Texts:
  """Windows of texts, and questions of benchmarks.

  Of the reference only the head is held, and its hidden states of the windows:
  a point of the grid then costs one pass, and memory for one model.
  """

  def __init__(self, config: ModelConfig, processor: Processor,
               reference: Params, documents: Sequence[str], *,
               window_length: int, limit: int, batch_size: int,
               questions: dict[str, list[benchmarks.Question]]):
    """Cuts the windows and runs the reference. Raises InputError."""
    self._config, self._processor = config, processor
    prefix = processor.tokenizer("", verbose=False)["input_ids"]
    self._prefix, self._batch_size = list(prefix), batch_size
    windows = spread(evaluate.windows(
        map(processor.encode, documents), window_length, prefix), limit)
    self._first = max(len(self._prefix), 1)
    self.tokens = len(windows) * (window_length - self._first)
    self._windows = [windows[i:i + batch_size]
                     for i in range(0, len(windows), batch_size)]
    self._hidden = [np.asarray(programs.text_hidden(reference, config, w))
                    for w in self._windows]
    name = "head" if "head" in reference["text"] else "embed"
    self._head = {name: reference["text"][name]}
    self._questions = questions

  def compare(self, params: Params) -> evaluate.Comparison:
    """A model beside the reference."""
    found = []
    for windows, hidden in zip(self._windows, self._hidden):
      values = evaluate.window_statistics(
          programs.text_logits(params, self._config, windows),
          programs.head_logits(self._head, hidden), windows, self._first)
      found.append([np.asarray(v, np.float64) for v in values])
    return evaluate.comparison(found, self.tokens)

  def outcomes(self, params: Params) -> dict[str, dict[str, np.ndarray]]:
    """Item by item, by benchmark."""
    out = {}
    for name, questions in self._questions.items():
      scores = benchmarks.ask(
          lambda tokens: programs.text_logits(params, self._config, tokens),
          questions, self._processor.encode,
          prefix=self._prefix, batch_size=self._batch_size,
          max_length=self._config.text.max_length)
      out[name] = (benchmarks.lambada_outcomes(scores) if name == "lambada"
                   else benchmarks.hellaswag_outcomes(questions, scores))
    return out


def spread(windows: np.ndarray, limit: int) -> np.ndarray:
  """`limit` of the windows [N, T], evenly over them; 0: all."""
  if not limit or limit >= len(windows):
    return windows
  return windows[np.arange(limit) * len(windows) // limit]


class Episodes:
  """Held-out episodes of a world, with the model's own greedy plans.

  A plan's tokens are scored; every plan counts the same, however long.
  """

  def __init__(self, config: ModelConfig, processor: Processor,
               reference: Params, world: Sequence[str], *, limit: int,
               batch_size: int, max_completion_length: int):
    """Lets the reference play. Raises InputError."""
    self._config, self._processor = config, processor
    self._reference = reference
    self._task = make_task(
        evaluate_reward.settings(None, "", world, limit), processor,
        supervised=False)
    self._batch_size = batch_size
    self._sampling = SamplingConfig(
        max_completion_length=max_completion_length, temperature=0.0,
        eos_token_ids=inference.eos_token_ids(config, processor),
        banned_token_ids=config.vision_token_ids)
    self._batches, self.tokens, waiting = [], 0, []
    for example, (completion,) in inference.complete(
        reference, config, processor, self._task.eval_rows, self._sampling,
        batch_size=batch_size):
      waiting.append((example, completion.token_ids))
      if len(waiting) == batch_size:
        self._batches.append(self._batch(waiting))
        waiting = []
    if waiting:
      self._batches.append(self._batch(waiting))

  def _batch(self, items):
    examples, token_ids = zip(*items)
    self.tokens += sum(map(len, token_ids))
    batch = make_batch(
        self._config, [e.prompt for e in examples], [e.index for e in examples],
        num_rows=self._batch_size)
    ids, lengths = batching.stack_responses(
        token_ids, num_rows=self._batch_size)
    return batch, GroupResponses(ids[:, None], lengths[:, None]), len(items)

  def compare(self, params: Params) -> evaluate.Comparison:
    """A model beside the reference."""
    found = []
    for batch, responses, count in self._batches:
      ours, theirs = (programs.response_logits(
          p, self._config, batch.inputs, batch.vision, responses)[:count, 0]
                      for p in (params, self._reference))
      values = evaluate.token_statistics(
          ours, theirs, responses.token_ids[:count, 0],
          np.asarray(responses.mask)[:count, 0])
      found.append([np.asarray(v, np.float64) for v in values])
    return evaluate.comparison(found, self.tokens)

  def outcomes(self, params: Params) -> dict[str, dict[str, Any]]:
    """Episode by episode: whether a greedy plan succeeds."""
    found = evaluate_rows(
        params, self._config, self._processor, self._task.eval_rows,
        self._task.score, self._sampling, batch_size=self._batch_size)
    return {"world": {"success": np.array(
        [s.get("success", s["overall"]) for s in found.scores], np.float64)}}
