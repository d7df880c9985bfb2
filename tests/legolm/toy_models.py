"""Models whose every number can be counted: bigrams over a few tokens."""

from __future__ import annotations

import itertools

import numpy as np

VOCAB = 128  # ASCII, a token per character.


def tables(count: int) -> list[np.ndarray]:
  """float32 [V, V] logits of the next token, by the last one."""
  rng = np.random.default_rng(0)
  return [2 * rng.normal(size=(VOCAB, VOCAB)).astype(np.float32)
          for _ in range(count)]


def bigram(table: np.ndarray):
  """The logits function of a table."""
  return lambda tokens: table[tokens]


def logprobs(table: np.ndarray) -> np.ndarray:
  """float64 [V, V]."""
  table = table.astype(np.float64)
  return table - np.log(np.exp(table).sum(axis=1, keepdims=True))


def encode(text: str) -> list[int]:
  return [ord(c) for c in text]


def decode(ids) -> str:
  return "".join(map(chr, ids))


def says(text: str) -> np.ndarray:
  """A table that continues every character as `text` does, last one first."""
  table = np.zeros((VOCAB, VOCAB), np.float32)
  for a, b in itertools.pairwise(text):
    table[ord(a), ord(b)] = 9
  return table
