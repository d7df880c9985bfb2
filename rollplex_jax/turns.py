"""Episodes of several turns: what they are, and how a rollout plays them.

An episode is a prompt and, in turns, a response and the observation that
answers it. Everything stays token ids: those that the policy drew are never
decoded and encoded again, and an observation's are added once, with its frames
or not at all.

The shared prefix of a group ends before its first response. What follows it,
later observations and their vision features included, is each sample's suffix.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import numpy as np

from rollplex_jax.data import batching
from rollplex_jax.data.batching import Media
from rollplex_jax.data.episodes import EpisodePlayer
from rollplex_jax.data.processor import Processor, Prompt
from rollplex_jax.data.row_schema import RowError
from rollplex_jax.executor import Step
from rollplex_jax.models.config import ModelConfig
from rollplex_jax.models.inputs import Suffixes
from rollplex_jax.models.positions import next_position
from rollplex_jax.samples import SHORT_TURN
from rollplex_jax.stages.extend import Chunk
from rollplex_jax.stages.rollout import Completions, Turn
from rollplex_jax.units import HostTurn


class Suffix:
  """What follows the prefix of one sample, as it grows.

  Attributes:
    next_position: of the next token.
    texts: of the responses so far.
    over: nothing is added any more.
    finished: the last response ended by itself, and so did the episode.
  """

  def __init__(self, prompt: Prompt):
    self._ids = [prompt.token_ids[-1:]]
    self._positions = [prompt.positions[:, -1:]]
    self._features = [np.full(1, -1, np.int32)]
    self._predicts: list[np.ndarray] = []
    self._responses: list[np.ndarray] = []
    self._logprobs: list[np.ndarray] = []
    self._media: list[Prompt] = []
    self._num_features = 0
    self._length = 1
    self._fed = self._features_fed = self._media_fed = 0
    self.next_position = next_position(prompt.positions)
    self.texts: list[str] = []
    self.over = False
    self.finished = False

  def __len__(self) -> int:
    """Tokens, the last of the prompt included."""
    return self._length

  def respond(self, token_ids: np.ndarray, logprobs: np.ndarray | None = None,
              *, learned: bool = True) -> None:
    """Adds a response.

    Args:
      token_ids: int32 [r].
      logprobs: float32 [r], as recorded, if they were drawn.
      learned: the policy is trained on it.
    """
    count = len(token_ids)
    if learned:
      self._predicts.append(self._length - 1 + np.arange(count))
      self._responses.append(token_ids)
      if logprobs is not None:
        self._logprobs.append(logprobs)
    self._add(token_ids, self.next_position + np.arange(count)[None].repeat(
        3, axis=0), np.full(count, -1, np.int32))
    self.next_position += count

  def observe(self, seen: Prompt) -> None:
    """Adds an observation, of `Processor.continuation`."""
    index = np.where(seen.feature_index >= 0,
                     seen.feature_index + self._num_features, -1)
    self._add(seen.token_ids, seen.positions + self.next_position, index)
    self.next_position += next_position(seen.positions)
    self._num_features += int((seen.feature_index >= 0).sum())
    self._media.append(seen)

  def _add(self, token_ids, positions, index):
    self._ids.append(np.asarray(token_ids, np.int32))
    self._positions.append(positions.astype(np.int32))
    self._features.append(index.astype(np.int32))
    self._length += len(token_ids)

  def inputs(self):
    """Token ids [n], positions [3, n] and feature indices [n] of all tokens but
    the last."""
    cut = lambda parts: np.concatenate(parts, axis=-1)[..., :-1]
    return cut(self._ids), cut(self._positions), cut(self._features)

  def feed(self):
    """Those of `inputs` that were not given before, feature indices counting
    from 0 on, and the media that these are of."""
    ids, positions, index = (a[..., self._fed:] for a in self.inputs())
    index = np.where(index >= 0, index - self._features_fed, -1)
    new = self._media[self._media_fed:]
    self._fed, self._features_fed = self._length - 1, self._num_features
    self._media_fed = len(self._media)
    return ids, positions, index, new

  @property
  def last(self) -> tuple[int, np.ndarray]:
    """The last token and its positions [3]."""
    return int(self._ids[-1][-1]), self._positions[-1][:, -1]

  def response(self):
    """Token ids [R], log-probs [R] and what predicts them [R], of all turns."""
    join = lambda parts, dtype: np.concatenate(
        [np.zeros(0, dtype), *parts]).astype(dtype)
    ids = join(self._responses, np.int32)
    logprobs = (join(self._logprobs, np.float32) if self._logprobs
                else np.zeros(len(ids), np.float32))
    return ids, logprobs, join(self._predicts, np.int32)

  def media(self, patch_dim: int) -> Media:
    """Those of all observations."""
    return Media.join(self._media, patch_dim)


@dataclasses.dataclass(frozen=True)
class Episodes:
  """What a rollout gives: groups of episodes as arrays of [B, G].

  Attributes:
    completions: responses of all turns, one after the other.
    suffix: of several turns, where they stand.
    media: the same of observations, objects `Media`.
    texts: of all episodes in order, a line for each response.
    scores: of all episodes in order, each with "overall".
  """

  completions: Completions
  suffix: Suffixes | None = None
  media: np.ndarray | None = None
  texts: list[str] | None = None
  scores: list[dict[str, float]] | None = None


def collect(config: ModelConfig, suffixes: Sequence[Sequence[Suffix]],
            scores: list[dict[str, float]] | None = None) -> Episodes:
  """Pads B groups of G suffixes."""
  flat = [suffix for group in suffixes for suffix in group]
  b, g = len(suffixes), len(suffixes[0])
  responses = [suffix.response() for suffix in flat]
  r = batching.coarse_bucket(max(len(ids) for ids, *_ in responses), SHORT_TURN)
  s = batching.coarse_bucket(max(map(len, flat)) - 1, SHORT_TURN)
  patch_dim = config.vision.patch_dim if config.vision else 0

  def stack(values, width, fill=0):
    values = [np.asarray(a) for a in values]
    out = np.full((len(values), width, *values[0].shape[1:]), fill,
                  values[0].dtype)
    for row, a in zip(out, values):
      row[:len(a)] = a
    return out.reshape(b, g, *out.shape[1:])

  ids, logprobs, predicts = zip(*responses)
  tokens, positions, features = zip(*(suffix.inputs() for suffix in flat))
  media = np.empty(b * g, object)
  media[:] = [suffix.media(patch_dim) for suffix in flat]
  return Episodes(
      Completions(
          token_ids=stack(ids, r), logprobs=stack(logprobs, r),
          lengths=np.array(list(map(len, ids)), np.int32).reshape(b, g),
          finished=np.array([s.finished for s in flat]).reshape(b, g)),
      Suffixes(
          token_ids=stack(tokens, s),
          lengths=np.array(list(map(len, tokens)), np.int32).reshape(b, g),
          positions=stack([p.T for p in positions], s),
          feature_index=stack(features, s, -1), predicts=stack(predicts, r)),
      media.reshape(b, g), ["\n".join(suffix.texts) for suffix in flat],
      scores)


def play(work: Step, player: EpisodePlayer, processor: Processor,
         rows: Sequence[dict[str, Any]], names: Sequence[str], *,
         max_length: int | None = None) -> Episodes:
  """Rolls out the episodes of a step's prompts.

  Args:
    work: the step; nothing of it has run yet.
    player: of the episodes.
    processor: makes tokens of what is seen.
    rows: of the prompts; what the batch has beyond them fills it up.
    names: of the rows, in errors.
    max_length: most tokens of an episode after its prompt; an observation that
      leaves no room for an answer is not added, and the episode is over.
  """
  prompts = work.batch.prompts[:len(rows)]
  g = work.num_generations
  groups = [[Suffix(prompt) for _ in range(g)] for prompt in prompts]
  flat = [suffix for group in groups for suffix in group]
  player.start([row for row in rows for _ in range(g)])
  limit = math.inf if max_length is None else max_length
  limit -= work.settings.sampling.max_completion_length
  history = _History(work)
  done = work.roll_out()
  for turn in range(work.settings.max_turns):
    texts, ended = _take_responses(flat, done, processor)
    for n, message in enumerate(player.step(texts)):
      suffix = flat[n]
      if suffix.over:
        continue
      if message is None:
        suffix.over = True
        continue
      try:
        seen = processor.continuation(
            message, f"{names[n // g]}, turn {turn + 1}", after_end=ended[n])
      except RowError as error:  # The world's fault: it costs this episode.
        player.fail(n, str(error))
        seen = None
      if seen is None or len(suffix) - 1 + len(seen.token_ids) > limit:
        suffix.over, suffix.finished = True, False
      else:
        suffix.observe(seen)
    if all(suffix.over for suffix in flat):
      break
    done = work.roll_out_turn(history.next_turn(groups, turn + 1))
  work.end_turns()
  return collect(work.settings.config, groups, player.scores())


def _take_responses(flat: list[Suffix], done: Completions,
                    processor: Processor) -> tuple[list, list[bool]]:
  """Adds a turn's responses; their texts, None of those that are over, and
  which of them ended with the token that ends a turn."""
  g = done.lengths.shape[1]
  texts, ended = [], []
  for n, suffix in enumerate(flat):
    at = divmod(n, g)
    if suffix.over:
      texts.append(None)
      ended.append(False)
      continue
    ids = done.token_ids[at][:done.lengths[at]]
    suffix.respond(ids, done.logprobs[at][:len(ids)])
    suffix.finished = bool(done.finished[at])
    suffix.texts.append(processor.decode(ids))
    texts.append(suffix.texts[-1])
    ended.append(len(ids) > 0
                 and int(ids[-1]) == processor.tokenizer.eos_token_id)
  return texts, ended


class _History:
  """Lays out the turns of a step's episodes in their history."""

  def __init__(self, work: Step):
    self._work = work
    self._end = self._width = self._length = 0

  def next_turn(self, groups: list[list[Suffix]], turn: int) -> HostTurn:
    """The turn with number `turn`, from 0, in which samples stand now."""
    work, config = self._work, self._work.settings.config
    b, g = len(work.batch.inputs.lengths), work.num_generations
    fresh = {(i, j): suffix.feed() for i, group in enumerate(groups)
             for j, suffix in enumerate(group) if not suffix.over}
    # One width for all turns, if that will do: fewer programs.
    self._width = max(self._width, batching.bucket(
        max(len(ids) for ids, *_ in fresh.values()), SHORT_TURN))
    start, self._end = self._end, self._end + self._width
    if self._end > self._length:
      left = work.settings.max_turns - turn
      self._length = start + left * self._width
    shape = b, g, self._width
    chunk = Chunk(
        token_ids=np.zeros(shape, np.int32), lengths=np.zeros((b, g), np.int32),
        positions=np.zeros((*shape, 3), np.int32),
        feature_index=np.full(shape, -1, np.int32))
    position = Turn(
        last=np.zeros((b, g), np.int32),
        last_position=np.zeros((b, g, 3), np.int32),
        next_position=np.zeros((b, g), np.int32), over=np.ones((b, g), bool),
        first_draw=np.int32(
            turn * work.settings.sampling.max_completion_length))
    media = np.empty((b, g), object)
    patch_dim = config.vision.patch_dim if config.vision else 0
    for at, (ids, positions, index, seen) in fresh.items():
      n = len(ids)
      chunk.token_ids[at][:n] = ids
      chunk.positions[at][:n] = positions.T
      chunk.feature_index[at][:n] = index
      chunk.lengths[at] = n
      position.last[at], position.last_position[at] = groups[at[0]][at[1]].last
      position.next_position[at] = groups[at[0]][at[1]].next_position
      position.over[at] = False
      media[at] = Media.join(seen, patch_dim)
    index, vision = batching.pack_observations(
        media, chunk.feature_index, config.vision, work.batch.parts)
    return HostTurn(
        chunk=chunk.replace(feature_index=index), vision=vision,
        position=position, start=start, history_length=self._length)
