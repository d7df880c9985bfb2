"""Episodes of several turns of a tiny policy, without files or worlds."""

from __future__ import annotations

from collections.abc import Container, Sequence
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rollplex_jax import turns
from rollplex_jax.data import batching
from rollplex_jax.data.batching import Media
from rollplex_jax.data.processor import Prompt
from rollplex_jax.data.row_schema import RowError
from rollplex_jax.executor import Step
from rollplex_jax.models import decoder, vlm
from rollplex_jax.models.config import ModelConfig
from rollplex_jax.models.positions import rope_index
from rollplex_jax.models.weights import Params
from rollplex_jax.samples import Groups
from rollplex_jax.turns import Episodes
from tests.helpers import tiny_policy

# What an episode sees after its turns: media and text tokens of several sizes.
_SEEN = (([("video", (1, 4, 4))], 3), ([], 5), (
    [("image", (1, 2, 4)), ("video", (2, 4, 2))], 1))


class Processor:
  """Gives ready-made observations; their `message` says which.

  Attributes:
    asked: (message, where, after_end) of every observation.
  """

  tokenizer = types.SimpleNamespace(eos_token_id=1)

  def __init__(self, config: ModelConfig, refused: Container[int] = ()):
    """`refused` are messages that can't be made tokens of."""
    self._config = config
    self.refused = refused
    self.asked: list[tuple] = []

  def continuation(self, message: int, where: str, *,
                   after_end: bool) -> Prompt:
    self.asked.append((message, where, after_end))
    if message in self.refused:
      raise RowError(where, "template", "frames that nobody can read")
    media, text = _SEEN[message % len(_SEEN)]
    return tiny_policy.prompt(self._config, media, text, seed=100 + message)

  def decode(self, token_ids: Sequence[int]) -> str:
    return " ".join(map(str, token_ids))


class Player:
  """Episodes whose length is fixed; their observations depend on what the
  policy said.

  Attributes:
    heard: texts of every turn.
    failed: reasons by the number of an episode.
  """

  def __init__(self, num_turns: Sequence[int]):
    """`num_turns` of the episodes, over and over."""
    self._num_turns = num_turns
    self.heard: list[list[str | None]] = []

  def start(self, rows: Sequence[Any]) -> None:
    self.heard, self.failed = [], {}
    self._count = len(rows)

  def step(self, completions: Sequence[str | None]) -> list[int | None]:
    self.heard.append(list(completions))
    turn = len(self.heard)
    return [
        None if text is None
        or self._num_turns[n % len(self._num_turns)] <= turn
        else len(text) + 10 * turn + n for n, text in enumerate(completions)]

  def fail(self, index: int, reason: str) -> None:
    self.failed[index] = reason

  def scores(self) -> list[dict[str, float]]:
    return [{"overall": float(n % 3)} for n in range(self._count)]


def play(work: Step, player: Player | None = None,
         refused: Container[int] = (), **kwargs) -> tuple[Episodes, list[list[turns.Suffix]]]:
  """A step's episodes, and what they were made of."""
  made = []
  collect = turns.collect

  def keep(config, suffixes, scores=None):
    made.append(suffixes)
    return collect(config, suffixes, scores)

  rows = range(len(work.batch.prompts))
  with _replaced(turns, "collect", keep):
    episodes = turns.play(
        work, player or Player((3, 1, 4, 2)), Processor(
            work.settings.config, refused),
        [{}] * len(rows), [f"row {i}" for i in rows], **kwargs)
  return episodes, made[0]


class Monolithic:
  """All episodes as whole sequences, each by itself, in one program.

  It knows nothing of prefixes, groups or turns: positions are those of a prompt
  that holds the whole conversation, whose pictures are all there from the
  start.
  """

  def __init__(self, config: ModelConfig, prompts: Sequence[Prompt],
               suffixes: Sequence[Sequence[turns.Suffix]]):
    self._config = config
    ids, positions, index, media = [], [], [], []
    for prompt, group in zip(prompts, suffixes):
      for suffix in group:
        more, last = suffix.inputs()[0][1:], suffix.last[0]
        tokens = np.concatenate([prompt.token_ids, more, [last]])
        seen = suffix.media(config.vision.patch_dim)
        both = Media.join([prompt, seen], config.vision.patch_dim)
        kinds = np.isin(tokens, [tiny_policy.IMAGE, tiny_policy.VIDEO])
        names = [*prompt.modalities, *(
            kind for part in suffix._media for kind in part.modalities)]
        ids.append(tokens)
        positions.append(rope_index(
            tokens, both.grids, names,
            [0.0 if kind == "image" else 0.5 for kind in names], config))
        index.append(np.where(kinds, np.cumsum(kinds) - 1, -1))
        media.append(both)
    n, longest = len(ids), max(map(len, ids))
    self.token_ids = np.zeros((n, longest), np.int32)
    self.positions = np.zeros((3, n, longest), np.int32)
    self._index = np.full((n, longest), -1, np.int32)
    for i in range(n):
      t = len(ids[i])
      self.token_ids[i, :t] = ids[i]
      self.positions[:, i, :t] = positions[i]
      self._index[i, :t] = index[i]
    as_media = np.empty((n, 1), object)
    as_media[:, 0] = media
    shifted, self._vision = batching.pack_observations(
        as_media, self._index[:, None], config.vision)
    self._index = shifted[:, 0]

  def logprobs(self, params: Params, temperature: float) -> jax.Array:
    """float32 [N, T] of every token; 0 of the first."""
    features = vlm.vision_features(params, self._config, self._vision)
    hidden = vlm.forward(
        params, self._config, self.token_ids, self.positions, features,
        self._index)
    picked, _ = decoder.token_logprobs(
        params["text"], hidden[:, :-1], self.token_ids[:, 1:], temperature)
    return jnp.pad(picked, ((0, 0), (1, 0)))


def pick(logprobs: jax.Array, groups: Groups, prompts: Sequence[Prompt],
         ) -> jax.Array:
  """[N, R] log-probs of responses of those [N, T] of whole sequences."""
  g = groups.lengths.shape[1]
  first = np.array([len(prompts[i].token_ids) for i in groups.rows])
  at = np.repeat(first, g)[:, None] + groups.suffix.predicts.reshape(
      first.size * g, -1)
  return jnp.take_along_axis(
      logprobs, jnp.minimum(at, logprobs.shape[1] - 1), axis=1) * (
          groups.mask.reshape(at.shape).astype(np.float32))




def _replaced(module, name, value):
  from unittest import mock
  return mock.patch.object(module, name, value)
