"""LAMBADA and HellaSwag on local files in their public formats.

Questions are put as lm-evaluation-harness puts them, so that numbers can be
compared with published ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import json
import os
import pathlib
import re
from typing import Any

import numpy as np

from legolm_jax import evaluate
from legolm_jax.errors import InputError
from legolm_jax.evaluate import Logits, Score, mean_and_error


@dataclasses.dataclass(frozen=True)
class Question:
  """A context with possible continuations.

  Attributes:
    context: what stands before; may be empty.
    choices: continuations, each with its leading space.
    answer: index of the right one; None where the only choice is what the
      model should say by itself.
  """

  context: str
  choices: tuple[str, ...]
  answer: int | None = None


def read_objects(path: str | os.PathLike, limit: int = 0
                 ) -> list[tuple[str, dict[str, Any]]]:
  """The objects of a JSONL file, each with its place for errors.

  Raises:
    InputError: naming the file or line that is wrong.
  """
  out = []
  try:
    lines = pathlib.Path(path).read_text(encoding="utf-8").splitlines()
  except (OSError, UnicodeDecodeError) as e:
    reason = getattr(e, "strerror", None) or "not UTF-8"
    raise InputError(f"{path}: can't be read: {reason}") from e
  for number, line in enumerate(lines, start=1):
    if not line.strip():
      continue
    where = f"{path}:{number}"
    try:
      row = json.loads(line)
    except ValueError as e:
      raise InputError(f"{where}: not valid JSON ({e})") from e
    if not isinstance(row, dict):
      raise InputError(f"{where}: expected a JSON object, found {line[:40]}")
    out.append((where, row))
    if len(out) == limit:
      break
  if not out:
    raise InputError(f"{path}: expected JSON lines, found none")
  return out


def text_of(row: dict[str, Any], where: str, name: str = "text") -> str:
  """A field that must be a string. Raises InputError."""
  if not isinstance(row.get(name), str):
    raise InputError(f"{where}: {name}: expected a string, found "
                     f"{row.get(name)!r:.40}")
  return row[name]


def read_lambada(path: str | os.PathLike, limit: int = 0) -> list[Question]:
  """Reads lines {"text": ...}: the last word is to be guessed.

  Raises:
    InputError: naming the line that is wrong.
  """
  out = []
  for where, row in read_objects(path, limit):
    context, _, word = text_of(row, where).rpartition(" ")
    if not context.strip() or not word:
      raise InputError(f"{where}: text: expected several words, the last not "
                       "followed by a space")
    out.append(Question(context, (f" {word}",)))
  return out


def read_hellaswag(path: str | os.PathLike, limit: int = 0) -> list[Question]:
  """Reads lines with activity_label, ctx_a, ctx_b, endings and label.

  Raises:
    InputError: naming the line that is wrong.
  """
  out = []
  for where, row in read_objects(path, limit):
    label, a, b = (text_of(row, where, name)
                   for name in ("activity_label", "ctx_a", "ctx_b"))
    endings = row.get("endings")
    if (not isinstance(endings, list) or len(endings) < 2
        or not all(isinstance(e, str) and e.strip() for e in endings)):
      raise InputError(f"{where}: endings: expected two or more strings")
    try:
      answer = int(row.get("label"))
    except (TypeError, ValueError):
      answer = -1
    if not 0 <= answer < len(endings):
      raise InputError(f"{where}: label: expected 0 to {len(endings) - 1}, found "
                       f"{row.get('label')!r}")
    out.append(Question(
        _clean(f"{label}: {a} {b.capitalize()}"),
        tuple(f" {_clean(ending)}" for ending in endings), answer))
  return out


def _clean(text: str) -> str:
  """Without the marks of the pages that some items come from."""
  text = text.strip().replace(" [title]", ". ")
  return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def ask(logits: Logits, questions: Sequence[Question],
        encode: Callable[[str], list[int]], *, prefix: Sequence[int] = (),
        **kwargs: Any) -> list[list[Score]]:
  """The scores of every choice of every question.

  Args:
    logits: of the model.
    questions: with contexts that have tokens.
    encode: text to token ids.
    prefix: tokens before every context, such as a BOS.
    **kwargs: batch_size, max_length and progress of `score_continuations`.

  Raises:
    InputError: if a question is too long.
  """
  requests = []
  for question in questions:
    for choice in question.choices:
      context, continuation = evaluate.split_pair(
          encode, question.context, choice)
      requests.append(([*prefix, *context], continuation))
  try:
    scores = iter(evaluate.score_continuations(logits, requests, **kwargs))
  except InputError:
    raise
  except ValueError as e:
    raise InputError(str(e)) from e
  return [[next(scores) for _ in q.choices] for q in questions]


def lambada_outcomes(scores: Sequence[Sequence[Score]]
                     ) -> dict[str, np.ndarray]:
  """Per item: "accuracy" of the last word, and its "loss"."""
  return {
      "accuracy": np.array([s[0].is_greedy for s in scores], np.float64),
      "loss": np.array([-s[0].logprob for s in scores], np.float64)}


def hellaswag_outcomes(questions: Sequence[Question],
                       scores: Sequence[Sequence[Score]]
                       ) -> dict[str, np.ndarray]:
  """Per item: "acc" by log-prob, "acc_norm" by log-prob per character."""
  right = {"acc": [], "acc_norm": []}
  for question, choices in zip(questions, scores, strict=True):
    logprobs = np.array([s.logprob for s in choices])
    # Of the ending itself, without its leading space.
    lengths = np.array([len(c) - 1 for c in question.choices])
    right["acc"].append(np.argmax(logprobs) == question.answer)
    right["acc_norm"].append(
        np.argmax(logprobs / lengths) == question.answer)
  return {name: np.array(v, np.float64) for name, v in right.items()}


def summary(outcomes: dict[str, np.ndarray],
            reference: dict[str, np.ndarray] | None = None) -> dict[str, Any]:
  """Means with standard errors, and paired changes from a reference's."""
  out: dict[str, Any] = {"items": len(next(iter(outcomes.values())))}
  for name, values in outcomes.items():
    out[name], out[f"{name}_stderr"] = mean_and_error(values)
    if reference is not None:
      out[f"reference_{name}"] = float(reference[name].mean())
      out[f"{name}_change"], out[f"{name}_change_stderr"] = mean_and_error(
          values - reference[name])
  return out
