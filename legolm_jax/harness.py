"""Models for lm-evaluation-harness, from a function of their logits.

    import lm_eval
    model = harness.make_model(logits, encode, decode, max_length=4096,
                               end_token_id=0)
    lm_eval.simple_evaluate(model=model, tasks=["hellaswag"])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from legolm_jax import evaluate
from legolm_jax.errors import InputError
from legolm_jax.evaluate import Logits

# Where a task sets no limit, as the harness's own models have it.
_MAX_NEW_TOKENS = 256


class Requests:
  """Answers the harness's three kinds of requests, which have `args` each.

  Contexts that are too long lose their beginning, as the harness's own models
  do it. Completions are greedy and run the whole text for every token: for the
  short answers that tasks ask for.
  """

  def __init__(self, logits: Logits, encode: Callable[[str], list[int]],
               decode: Callable[[Sequence[int]], str], *, max_length: int,
               end_token_id: int, prefix: Sequence[int] = (),
               batch_size: int = 8):
    """Calls nothing yet.

    Args:
      logits: of the model.
      encode, decode: text to token ids, without special tokens, and back.
      max_length: most tokens of a sequence.
      end_token_id: ends a completion, and stands before a text where there is
        no `prefix`.
      prefix: tokens that stand before every text, such as a BOS.
      batch_size: sequences at a time.
    """
    super().__init__()
    self._logits, self._encode, self._decode = logits, encode, decode
    self._max_length, self._end = max_length, end_token_id
    self._prefix, self._batch_size = list(prefix), batch_size

  def loglikelihood(self, requests, disable_tqdm: bool = False
                    ) -> list[tuple[float, bool]]:
    """For args (context, continuation): log-prob, and whether it is greedy."""
    del disable_tqdm
    pairs = []
    for request in requests:
      context, continuation = evaluate.split_pair(self._encode, *request.args)
      pairs.append(self._fit(self._start(context), continuation))
    return [(s.logprob, s.is_greedy) for s in self._scores(pairs)]

  def loglikelihood_rolling(self, requests, disable_tqdm: bool = False
                            ) -> list[float]:
    """For args (text,): its log-prob, every token once, in pieces that fit."""
    del disable_tqdm
    pairs, owner = [], []
    for i, request in enumerate(requests):
      tokens = self._encode(request.args[0])
      ids = [*self._start([]), *tokens]
      done = len(ids) - len(tokens)
      while done < len(ids):
        # The first piece is as long as fits; a later one has all the context
        # that fits beside the tokens that are new.
        end = min(len(ids), max(done - 1, 0) + self._max_length)
        start = max(0, end - self._max_length)
        pairs.append((ids[start:done], ids[done:end]))
        owner.append(i)
        done = end
    out = [0.0] * len(requests)
    for i, score in zip(owner, self._scores(pairs), strict=True):
      out[i] += score.logprob
    return out

  def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
    """For args (context, {"until", "max_gen_toks", ...}): a greedy completion.
    """
    del disable_tqdm
    return [self._complete(*request.args) for request in requests]

  def _complete(self, context: str, options: dict[str, Any]) -> str:
    if options.get("do_sample") or options.get("temperature"):
      raise InputError("generate_until: expected a greedy task, found do_sample "
                       "or temperature")
    until = options.get("until") or []
    until = [until] if isinstance(until, str) else until
    limit = options.get("max_gen_toks", _MAX_NEW_TOKENS)
    ids = self._start(self._encode(context))
    drawn: list[int] = []
    while len(drawn) < limit:
      tokens = [*ids, *drawn][-self._max_length:]
      # One shape for many lengths; what is behind a token doesn't concern it.
      padded = np.zeros((1, min(-(-len(tokens) // 64) * 64, self._max_length)),
                        np.int32)
      padded[0, :len(tokens)] = tokens
      token = int(np.argmax(self._logits(padded)[0, len(tokens) - 1]))
      if token == self._end:
        break
      drawn.append(token)
      text = self._decode(drawn)
      if any(stop in text for stop in until):
        break
    text = self._decode(drawn)
    return text[:min([text.find(s) for s in until if s in text] or [len(text)])]

  def _start(self, context: Sequence[int]) -> list[int]:
    """A context with what stands before it, which is never nothing."""
    return [*self._prefix, *context] or [self._end]

  def _fit(self, context: list[int], continuation: list[int]
           ) -> tuple[list[int], list[int]]:
    room = self._max_length - len(continuation)
    if room < 1:
      raise InputError(f"loglikelihood: expected a continuation of fewer than "
                       f"{self._max_length} tokens, found {len(continuation)}")
    return context[-room:], continuation

  def _scores(self, pairs) -> list[evaluate.Score]:
    return evaluate.score_continuations(
        self._logits, pairs, batch_size=self._batch_size,
        max_length=self._max_length)


def make_model(*args: Any, **kwargs: Any) -> Any:
  """A model that `lm_eval.simple_evaluate` takes; arguments as of `Requests`.

  Raises:
    ImportError: if lm_eval isn't installed.
  """
  from lm_eval.api.model import LM

  return type("HarnessModel", (Requests, LM), {})(*args, **kwargs)
