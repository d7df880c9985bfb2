"""Verifiable rewards, and the checks around any reward function.

A reward is a plain function `reward(completion, row)`: the policy's text and
the row it answers. It returns a number, or a dict of numbers with "overall";
the other entries are reported as metrics. A run calls it in worker processes:
see `reward_workers`.
"""

from collections.abc import Callable, Mapping, Sequence
import inspect
import math
import numbers
import re
from typing import Any
import unicodedata

import numpy as np

from rollplex_jax.data.functions import (
  NotFiniteError,
  WrongTypeError,
  describe,
)
from rollplex_jax.errors import InputError

Reward = Callable[[str, Mapping[str, Any]], float | Mapping[str, float]]

_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_FORMAT = re.compile(
  r"\s*<think>(.*?)</think>\s*<answer>(.*?)</answer>\s*", re.DOTALL
)
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_DECIMAL = r"\d+(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
  rf"(?P<sign>(?<![\w.)])[-+\u2212])?(?:"
  rf"\\[dt]?frac\{{(?P<top>-?\d+)\}}\{{(?P<bottom>\d+)\}}|"
  rf"(?<![\w.])(?P<value>{_DECIMAL})(?P<exponent>[eE][-+]?\d+)?"
  rf"(?:\s?/\s?(?P<over>{_DECIMAL}))?)"
)
_CHOICE_ALONE = re.compile(r"\(?([A-Za-z])\)?\s*(?:[.:,)].*)?", re.DOTALL)
_CHOICE_STATED = re.compile(
  r"(?i:answer|option|choice)(?:\s+is|\s*:)?\s*:?\s*\(?\**([A-Z])\b(?!')"
)
_CHOICE_BRACKETS = re.compile(r"\(([A-Z])\)")


def exact_match(completion: str, row: Mapping[str, Any]) -> float:
  """1.0 where the answer equals row["answer"] (a string or several), else 0.0.

  The answer is the last <answer> element, else the whole completion. Case,
  Unicode compatibility forms, surrounding punctuation and runs of white space
  don't count.
  """
  answers = _row_answer(row)
  if isinstance(answers, str) or not isinstance(answers, Sequence):
    answers = [answers]
  found = _normalize(_answer_text(completion))
  return float(any(found == _normalize(str(answer)) for answer in answers))


def multiple_choice(completion: str, row: Mapping[str, Any]) -> float:
  """1.0 where the chosen letter is row["answer"] ("B", "(B)" or "B. text").

  The choice is, of these, the first that is there: the letter in the last
  <answer> element or \\boxed{}; a completion that starts with a letter set
  apart ("B", "B. text", "(B) text"); the last "answer is B"; the last "(B)".
  """
  expected = _leading_choice(str(_row_answer(row)))
  if expected is None:
    raise InputError(
      f"answer: expected a choice such as 'B', found {row['answer']!r}"
    )
  return float(_choice(completion) == expected)


def number_match(
  completion: str, row: Mapping[str, Any], *, tolerance: float = 1e-6
) -> float:
  """1.0 where the final number equals row["answer"], else 0.0.

  The final number is the last one in the last \\boxed{}, else in the last
  <answer> element, else in the whole completion. Thousands commas, a / b,
  \\frac{a}{b} and 1e-3 are read. Equal means
  |found - answer| <= tolerance * max(1, |answer|).
  """
  answer = _row_answer(row)
  if isinstance(answer, numbers.Real):
    expected = float(answer)
  else:
    expected = _final_number(str(answer))
    if expected is None:
      raise InputError(f"answer: expected a number, found {answer!r}")
  found = _final_number(completion)
  if found is None:
    return 0.0
  return float(abs(found - expected) <= tolerance * max(1.0, abs(expected)))


def format_reward(completion: str, row: Mapping[str, Any]) -> float:
  """1.0 for exactly <think>...</think><answer>...</answer>, neither empty."""
  del row
  match = _FORMAT.fullmatch(completion)
  once = all(completion.count(tag) == 1 for tag in _TAGS)
  filled = match is not None and all(part.strip() for part in match.groups())
  return float(once and filled)


def check_reward(reward: Any, name: str) -> None:
  """Checks that `reward` can be called with (completion, row).

  Raises:
    InputError: it can't, with its signature.
  """
  if not callable(reward):
    raise InputError(
      f"reward {name}: expected a function, found {type(reward).__name__}"
    )
  if inspect.iscoroutinefunction(reward):
    raise InputError(f"reward {name}: expected a plain function, found async")
  try:
    signature = inspect.signature(reward)
  except (TypeError, ValueError):
    return  # Some builtins have none; the first call will tell.
  try:
    signature.bind("completion", {})
  except TypeError as error:
    raise InputError(
      f"reward {name}: expected a function of (completion, row), found "
      f"{signature}"
    ) from error


def score_completions(
  reward: Reward,
  completions: Sequence[str],
  rows: Sequence[Mapping[str, Any]],
  *,
  row_indices: Sequence[int] | None = None,
) -> list[dict[str, float]]:
  """Rewards of N completions, in this process and without any guard.

  `reward_workers.RewardWorkers` is what a run uses.

  Args:
    reward: the function.
    completions: N texts.
    rows: the N rows they answer; a group repeats its row.
    row_indices: N numbers that name the rows in errors; 0 to N-1 if None.

  Returns:
    N dicts of finite floats, each with "overall".

  Raises:
    InputError: the reward raises, or returns anything but a finite number or a
      dict of them with "overall". Names the function and the row.
  """
  if len(completions) != len(rows):
    raise ValueError(f"{len(completions)} completions but {len(rows)} rows")
  name = getattr(reward, "__qualname__", type(reward).__name__)
  scores = []
  for i, (completion, row) in enumerate(zip(completions, rows)):
    where = f"reward {name}, row {i if row_indices is None else row_indices[i]}"
    try:
      value = reward(completion, row)
    except InputError as error:
      raise InputError(f"{where}: {error}") from error
    except Exception as error:
      raise InputError(f"{where}: raised {describe(error)}") from error
    scores.append(normalize_score(value, where))
  return scores


def normalize_score(value: Any, where: str) -> dict[str, float]:
  """A reward's value as finite floats, with "overall".

  Args:
    value: a number, or a dict of numbers.
    where: names it in errors.

  Raises:
    WrongTypeError, NotFiniteError: it is something else.
  """
  if not isinstance(value, Mapping):
    return {"overall": _finite(value, where, "a number or a dict of numbers")}
  if "overall" not in value:
    keys = ", ".join(map(str, value)) or "no keys"
    raise WrongTypeError(
      f"{where}: expected a dict with 'overall', found {keys}"
    )
  return {
    str(key): _finite(part, where, f"a number as {key!r}")
    for key, part in value.items()
  }


def _finite(value: Any, where: str, expected: str) -> float:
  found = type(value).__name__
  if isinstance(value, numbers.Real):
    result = float(value)
  elif isinstance(value, (np.ndarray, np.generic)) or hasattr(
    value, "__array__"
  ):
    array = np.asarray(value)
    if array.ndim or array.dtype.kind not in "biuf":
      found = f"{found} of {array.dtype} {list(array.shape)}"
      raise WrongTypeError(
        f"{where}: expected {expected}, found {found}"
      )
    result = float(array)
  else:
    raise WrongTypeError(
      f"{where}: expected {expected}, found {found}"
    )
  if not math.isfinite(result):
    raise NotFiniteError(
      f"{where}: expected {expected}, found {result}"
    )
  return result


def _row_answer(row: Mapping[str, Any]) -> Any:
  if row.get("answer") is None:
    raise InputError("expected an 'answer' in the row, found none")
  return row["answer"]


def _answer_text(completion: str) -> str:
  found = _ANSWER_TAG.findall(completion)
  return found[-1] if found else completion


def _normalize(text: str) -> str:
  text = unicodedata.normalize("NFKC", text).casefold()
  return " ".join(text.split()).strip(" .,:;!?\"'")


def _boxed(text: str) -> str | None:
  """The inside of the last complete \\boxed{}, whose braces may nest."""
  opening = "\\boxed{"
  start = text.rfind(opening)
  while start >= 0:
    depth = 0
    for i in range(start + len(opening) - 1, len(text)):
      depth += {"{": 1, "}": -1}.get(text[i], 0)
      if depth == 0:
        return text[start + len(opening) : i]
    start = text.rfind(opening, 0, start)
  return None


def _final_number(text: str) -> float | None:
  boxed = _boxed(text)
  text = _answer_text(text) if boxed is None else boxed
  found = None
  for match in _NUMBER.finditer(text.replace("{,}", ",")):
    value = _number(match)
    found = found if value is None else value
  return found


def _number(match: re.Match[str]) -> float | None:
  """The value of one match of `_NUMBER`; None for a division by zero."""
  sign = -1.0 if match["sign"] in ("-", "\u2212") else 1.0
  if match["top"] is not None:
    top, bottom = float(match["top"]), float(match["bottom"])
  else:
    top = float(match["value"].replace(",", "") + (match["exponent"] or ""))
    bottom = float((match["over"] or "1").replace(",", ""))
  return sign * top / bottom if bottom else None


def _leading_choice(text: str) -> str | None:
  match = _CHOICE_ALONE.fullmatch(text.strip())
  if match is not None:
    return match[1].upper()
  match = re.match(r"\s*\(([A-Za-z])\)", text)
  return match[1].upper() if match else None


def _choice(completion: str) -> str | None:
  boxed = _boxed(completion)
  if boxed is not None:
    inside = re.sub(r"\\text\{(.*?)\}", r"\1", boxed)
    return _leading_choice(inside)
  text = _answer_text(completion)
  found = _leading_choice(text)
  for pattern in (_CHOICE_STATED, _CHOICE_BRACKETS):
    if found is None and (stated := pattern.findall(text)):
      found = stated[-1]
  return found
