"""What a language model is worth, from nothing but a function of its logits.

A change of perplexity by 0.03 % is far below the noise of a text: what tells is
the difference on the same windows. So every comparison with a reference comes
with the standard error of paired differences, and beside it stands the KL
divergence, which sees what the loss of sampled text averages out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from legolm_jax.errors import InputError

# int32 [B, T] right-padded tokens -> float [B, T, V]: at each place the logits
# of the token after it.
Logits = Callable[[np.ndarray], jax.Array]
Progress = Callable[[Iterable], Iterable]

_LENGTHS = 64  # Sequences are padded to multiples, to bound compilations.


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
  """A mean with its standard error; None where one value gives none."""
  values = np.asarray(values, np.float64)
  error = None
  if values.size > 1:
    error = float(values.std(ddof=1) / math.sqrt(values.size))
  return float(values.mean()), error


def windows(documents: Iterable[Sequence[int]], length: int,
            prefix: Sequence[int] = ()) -> np.ndarray:
  """Cuts documents into windows that don't overlap; what is left over is not
  used.

  Args:
    documents: token ids of each; no window spans two of them.
    length: tokens of a window.
    prefix: tokens that every window begins with, such as a BOS; they count.

  Returns:
    int32 [N, length].

  Raises:
    InputError: if no document fills a window.
  """
  step = length - len(prefix)
  if step < 2 - bool(prefix):
    raise InputError(f"window_length={length}: expected at least "
                     f"{len(prefix) + 2 - bool(prefix)}")
  out, tokens = [], 0
  for document in documents:
    ids = np.asarray(document, np.int32)
    tokens += ids.size
    cut = ids[:ids.size // step * step].reshape(-1, step)
    before = np.broadcast_to(np.asarray(prefix, np.int32),
                             (len(cut), len(prefix)))
    out.append(np.concatenate([before, cut], axis=1))
  found = np.concatenate(out) if out else np.zeros((0, length), np.int32)
  if not len(found):
    raise InputError(f"window_length={length}: expected a document of {step} "
                     f"tokens, found {tokens} tokens in {len(out)} documents")
  return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
  """What windows say of a model, and of a reference on the same windows.

  Attributes:
    tokens: scored tokens of all windows.
    loss: float64 [N], mean negative log-prob of a token, natural logarithm.
    reference_loss: the same of the reference, or None.
    kl: float64 [N], mean KL(reference || model) of a token, or None.
    agreement: float64 [N], share of tokens at which both prefer the same one,
      or None.
  """

  tokens: int
  loss: np.ndarray
  reference_loss: np.ndarray | None = None
  kl: np.ndarray | None = None
  agreement: np.ndarray | None = None

  @property
  def perplexity(self) -> float:
    return math.exp(self.loss.mean())

  def summary(self) -> dict[str, Any]:
    """Plain data. Errors are standard errors over windows: of differences for
    the change, which is the percentage by which perplexity exceeds the
    reference's."""
    loss, error = mean_and_error(self.loss)
    out = {
        "perplexity": math.exp(loss),
        "perplexity_stderr": _times(math.exp(loss), error),
        "tokens": self.tokens, "windows": len(self.loss)}
    if self.reference_loss is None:
      return out
    change, change_error = mean_and_error(self.loss - self.reference_loss)
    kl, kl_error = mean_and_error(self.kl)
    agreement, agreement_error = mean_and_error(self.agreement)
    return out | {
        "reference_perplexity": math.exp(self.reference_loss.mean()),
        "change_percent": 100 * math.expm1(change),
        "change_percent_stderr": _times(100 * math.exp(change), change_error),
        "mean_kl": kl, "mean_kl_stderr": kl_error,
        "top1_agreement": agreement,
        "top1_agreement_stderr": agreement_error}


def compare(logits: Logits, tokens: np.ndarray, *,
            reference: Logits | None = None, num_prefix: int = 0,
            batch_size: int = 1, progress: Progress = iter) -> Comparison:
  """Runs windows through a model, and through a reference beside it.

  Args:
    logits: of the model.
    tokens: int32 [N, T], see `windows`.
    reference: of the uncompressed model, over the same vocabulary.
    num_prefix: leading tokens of a window that are not scored; the first one
      never is.
    batch_size: windows at a time.
    progress: wraps the iteration over batches.

  Raises:
    InputError: if logits are not finite.
  """
  first = max(num_prefix, 1)
  found = []
  for start in progress(range(0, len(tokens), batch_size)):
    part = tokens[start:start + batch_size]
    rows = len(part)
    part = np.pad(part, ((0, batch_size - rows), (0, 0)), mode="edge")
    ours = logits(part)
    theirs = None if reference is None else reference(part)
    if theirs is not None and ours.shape != theirs.shape:
      raise ValueError(f"logits {ours.shape} and the reference's "
                       f"{theirs.shape} differ in shape")
    values = [np.asarray(v, np.float64)[:rows]
              for v in window_statistics(ours, theirs, part, first)]
    found.append(values)
  return comparison(
      found, tokens=len(tokens) * (tokens.shape[1] - first))


def comparison(parts: Sequence[Sequence[np.ndarray]], tokens: int
               ) -> Comparison:
  """What the batches of `token_statistics` say together.

  Raises:
    InputError: if losses are not finite.
  """
  columns = [np.concatenate(c) for c in zip(*parts)]
  for column, name in zip(columns, ("the model", "the reference")):
    bad = np.flatnonzero(~np.isfinite(column))
    if bad.size:
      raise InputError(f"window {bad[0]}: the logits of {name} are not finite")
  return Comparison(
      tokens=tokens, loss=columns[0],
      **dict(zip(("reference_loss", "kl", "agreement"), columns[1:])))


@jax.jit(static_argnames="first")
def window_statistics(ours: jax.Array, theirs: jax.Array | None,
                      tokens: jax.Array, first: int
                      ) -> tuple[jax.Array, ...]:
  """`token_statistics` of windows int32 [B, T], of which the tokens from place
  `first` on are scored; logits are [B, T, V]."""
  targets = jnp.asarray(tokens)[:, first:]
  cut = lambda logits: None if logits is None else logits[:, first - 1:-1]
  return token_statistics(
      cut(ours), cut(theirs), targets, jnp.ones(targets.shape, jnp.float32))


@jax.jit
def token_statistics(ours: jax.Array, theirs: jax.Array | None,
                     targets: jax.Array, mask: jax.Array
                     ) -> tuple[jax.Array, ...]:
  """Means over the tokens of each sequence, the fields of a `Comparison`.

  Args:
    ours: [B, T, V] logits.
    theirs: the same of a reference, or None.
    targets: int32 [B, T].
    mask: float32 [B, T], 1 where a token counts; at least one of a sequence.

  Returns:
    float32 [B] loss, and with a reference its loss, KL and agreement.
  """
  logprobs = lambda a: jax.nn.log_softmax(a.astype(jnp.float32), axis=-1)
  mean = lambda a: jnp.sum(jnp.where(mask > 0, a, 0.0), axis=1) / mask.sum(axis=1)
  loss = lambda a: mean(
      -jnp.take_along_axis(a, targets[..., None], axis=-1)[..., 0])
  p = logprobs(ours)
  if theirs is None:
    return (loss(p),)
  q = logprobs(theirs)
  kl = jnp.sum(jnp.exp(q) * (q - p), axis=-1)
  same = jnp.argmax(p, axis=-1) == jnp.argmax(q, axis=-1)
  return loss(p), loss(q), mean(kl), mean(same.astype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class Score:
  """What a model thinks of a continuation.

  Attributes:
    logprob: of all its tokens together, natural logarithm.
    is_greedy: whether each is the most likely one.
  """

  logprob: float
  is_greedy: bool


def score_continuations(
    logits: Logits, requests: Sequence[tuple[Sequence[int], Sequence[int]]], *,
    batch_size: int = 8, max_length: int | None = None,
    progress: Progress = iter) -> list[Score]:
  """Scores continuations of contexts.

  Args:
    logits: of the model.
    requests: token ids of context, at least one, and continuation, at least
      one.
    batch_size: requests at a time. Those of like length run together.
    max_length: most tokens of both.
    progress: wraps the iteration over batches.

  Returns:
    A score for each request, in their order.

  Raises:
    ValueError: naming a request that is empty or too long.
  """
  for i, (context, continuation) in enumerate(requests):
    count = len(context) + len(continuation)
    if not context or not continuation:
      raise ValueError(f"request {i}: expected context and continuation, found "
                       f"{len(context)} and {len(continuation)} tokens")
    if max_length is not None and count > max_length:
      raise ValueError(f"request {i}: expected at most {max_length} tokens, "
                       f"found {count}")
  order = sorted(range(len(requests)),
                 key=lambda i: -sum(map(len, requests[i])))
  out: list[Score | None] = [None] * len(requests)
  for start in progress(range(0, len(order), batch_size)):
    batch = order[start:start + batch_size]
    longest = sum(map(len, requests[batch[0]]))
    length = -(-longest // _LENGTHS) * _LENGTHS
    if max_length is not None:
      length = min(length, max_length)
    tokens = np.zeros((batch_size, length), np.int32)
    for row, i in enumerate(batch):
      ids = [*requests[i][0], *requests[i][1]]
      tokens[row, :len(ids)] = ids
    logprobs, greedy = map(np.asarray, _of_tokens(logits(tokens), tokens))
    for row, i in enumerate(batch):
      context, continuation = requests[i]
      # Entry t tells of token t + 1.
      part = slice(len(context) - 1, len(context) + len(continuation) - 1)
      total = float(logprobs[row, part].astype(np.float64).sum())
      if not math.isfinite(total):
        raise InputError(f"request {i}: the logits are not finite")
      out[i] = Score(total, bool(greedy[row, part].all()))
  return out


@jax.jit
def _of_tokens(logits, tokens):
  """Log-prob [B, T - 1] of every token but the first, and if it is the best."""
  scores = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32), axis=-1)
  targets = jnp.asarray(tokens)[:, 1:]
  picked = jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
  return picked, jnp.argmax(scores, axis=-1) == targets


def split_pair(encode: Callable[[str], list[int]], context: str,
               continuation: str) -> tuple[list[int], list[int]]:
  """Token ids of a context, and of what a continuation adds to it.

  Spaces at the context's end belong to the word after them.
  """
  stripped = context.rstrip()
  continuation = context[len(stripped):] + continuation
  whole, start = encode(stripped + continuation), encode(stripped)
  return start, whole[len(start):]


def _times(factor: float, error: float | None) -> float | None:
  return None if error is None else factor * error
