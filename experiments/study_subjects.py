"""What a study measures on: windows of a text, or episodes of a world."""

from __future__ import annotations

from collections.abc import Sequence
import itertools
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
from rollplex_jax.samples import Groups, make_batch, micro_batches
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
  """Held-out episodes of a world, with the model's own greedy responses.

  The tokens of a plan, or of all turns, are scored; every episode counts the
  same, however long.
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
    self._playing = evaluate_reward.playing(self._task)
    self._batches, self.tokens = [], 0
    play = self._episodes if self._playing else self._plans
    for batch, groups in play():
      # Rows that fill a batch up have neither prompt nor response.
      (item,) = micro_batches(groups, 0)
      self.tokens += int(groups.lengths.sum())
      rows = batching.take_rows(batch.inputs, item.rows)
      self._batches.append(
          (rows, batch.vision, *item.observed(config, 1), len(groups)))

  def _plans(self):
    """Batches of prompts, and the reference's responses as groups of one."""
    completed = inference.complete(
        self._reference, self._config, self._processor, self._task.eval_rows,
        self._sampling, batch_size=self._batch_size)
    while items := list(itertools.islice(completed, self._batch_size)):
      batch = make_batch(
          self._config, [e.prompt for e, _ in items],
          [e.index for e, _ in items])
      ids, lengths = batching.stack_responses(
          [completion.token_ids for _, (completion,) in items])
      yield batch, Groups(
          rows=np.arange(len(items), dtype=np.int32), token_ids=ids[:, None],
          lengths=lengths[:, None],
          advantages=np.zeros((len(items), 1), np.float32))

  def _episodes(self):
    """The same of episodes of several turns."""
    for examples, batch, episodes in inference.play(
        self._reference, self._config, self._processor, self._task.eval_rows,
        self._sampling, batch_size=self._batch_size, **self._playing):
      yield batch, Groups.of(
          np.arange(len(examples)), episodes.completions,
          np.zeros((len(examples), 1), np.float32), episodes.suffix,
          episodes.media)

  def compare(self, params: Params) -> evaluate.Comparison:
    """A model beside the reference."""
    found = []
    for prompts, vision, responses, observed, count in self._batches:
      ours, theirs = (programs.response_logits(
          p, self._config, prompts, vision, responses, observed)[:count, 0]
                      for p in (params, self._reference))
      values = evaluate.token_statistics(
          ours, theirs, responses.token_ids[:count, 0],
          np.asarray(responses.mask)[:count, 0])
      found.append([np.asarray(v, np.float64) for v in values])
    return evaluate.comparison(found, self.tokens)

  def outcomes(self, params: Params) -> dict[str, dict[str, Any]]:
    """Episode by episode: whether it succeeds, played greedily."""
    found = evaluate_rows(
        params, self._config, self._processor, self._task.eval_rows,
        self._task.score, self._sampling, batch_size=self._batch_size,
        **self._playing)
    return {"world": {"success": np.array(
        [s.get("success", s["overall"]) for s in found.scores], np.float64)}}
