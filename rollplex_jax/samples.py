"""The prompts and samples of a step on the host, and how they are cut."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses

import jax
import numpy as np

from rollplex_jax.data import batching
from rollplex_jax.data.processor import Prompt
from rollplex_jax.models.config import ModelConfig
from rollplex_jax.models.inputs import PromptInputs, VisionInputs
from rollplex_jax.stages.response import GroupResponses

# Responses are cut to buckets of at least this length: telling short ones
# apart would compile many programs and save little.
_SHORT_RESPONSE = 16


@dataclasses.dataclass(frozen=True)
class PromptBatch:
  """The prompts of a step, on the host and padded.

  Attributes:
    prompts: B prompts as processed.
    inputs: the same, padded.
    vision: their packed patches, or None without media.
  """

  prompts: Sequence[Prompt]
  inputs: PromptInputs
  vision: VisionInputs | None


def make_batch(config: ModelConfig, prompts: Sequence[Prompt],
               row_ids: Sequence[int], num_rows: int | None = None,
               length: int | None = None) -> PromptBatch:
  """Pads prompts and packs their patches."""
  return PromptBatch(
      prompts,
      batching.stack_prompts(prompts, row_ids, num_rows, length),
      batching.pack_vision(prompts, config.vision))


@dataclasses.dataclass(frozen=True)
class Groups:
  """K groups of G samples, as numpy arrays.

  Attributes:
    rows: int32 [K], row of each group's prompt in the step's batch.
    token_ids: int32 [K, G, R].
    lengths: int32 [K, G].
    advantages: float32 [K, G].
    old_logprobs: float32 [K, G, R] under the policy that sampled, or None in
      the first update after a rollout.
    ref_logprobs: float32 [K, G, R] under the reference, or None.
  """

  rows: np.ndarray
  token_ids: np.ndarray
  lengths: np.ndarray
  advantages: np.ndarray
  old_logprobs: np.ndarray | None = None
  ref_logprobs: np.ndarray | None = None

  def __len__(self) -> int:
    return len(self.rows)

  @property
  def num_samples(self) -> int:
    return self.lengths.size

  @property
  def mask(self) -> np.ndarray:
    """bool [K, G, R], True where a response token stands."""
    r = self.token_ids.shape[-1]
    return np.arange(r) < self.lengths[..., None]

  def take(self, groups: np.ndarray) -> Groups:
    """Some of the groups."""
    return Groups(**{
        field.name: None if value is None else value[groups]
        for field in dataclasses.fields(self)
        for value in [getattr(self, field.name)]})


@dataclasses.dataclass(frozen=True)
class MicroBatch:
  """The samples of one pass: g samples of each of b groups.

  A micro-batch smaller than a group splits it; a larger one holds whole groups.
  All of a mini-batch's have one shape: the last is filled up with repeated
  prompts and empty samples.

  Attributes:
    block: which groups: passes of one block share their prefixes.
    part: which of their samples.
    groups: int [<= b], numbers of the real groups.
    samples: slice of the real samples.
    rows: int32 [b], rows of the step's batch.
    responses: numpy `GroupResponses` of [b, g, W].
    advantages: float32 [b, g].
    old_logprobs, ref_logprobs: float32 [b, g, W], or None.
  """

  block: int
  part: int
  groups: np.ndarray
  samples: slice
  rows: np.ndarray
  responses: GroupResponses
  advantages: np.ndarray
  old_logprobs: np.ndarray | None
  ref_logprobs: np.ndarray | None

  def place(self, out: np.ndarray, values: jax.Array) -> None:
    """Writes real samples' [b, g, W] values into the mini-batch's [K, G, R]."""
    values = np.asarray(values)
    count = self.samples.stop - self.samples.start
    width = values.shape[-1]
    out[self.groups, self.samples, :width] = values[:len(self.groups), :count]


def micro_batches(groups: Groups, size: int) -> list[MicroBatch]:
  """Cuts groups into passes of at most `size` samples; 0 for one pass.

  Responses are cut to the bucket of the longest among them, so the rollout's
  length limit costs nothing here.
  """
  k, g, r = groups.token_ids.shape
  size = size or _power_of_two(k) * g
  b = min(max(size // g, 1), _power_of_two(k))
  per_part = min(size, g)
  longest = int(groups.lengths.max(initial=1))
  width = min(batching.bucket(longest, _SHORT_RESPONSE), r)
  out = []
  for block, start in enumerate(range(0, k, b)):
    numbers = np.arange(start, min(start + b, k))
    rows = np.pad(groups.rows[numbers], (0, b - len(numbers)), mode="edge")
    for part, first in enumerate(range(0, g, per_part)):
      samples = slice(first, min(first + per_part, g))

      def cut(a, numbers=numbers, samples=samples):
        if a is None:
          return None
        a = a[numbers, samples]
        a = a[..., :width] if a.ndim == 3 else a
        fill = [(0, b - a.shape[0]), (0, per_part - a.shape[1])]
        return np.pad(a, fill + [(0, 0)] * (a.ndim - 2))

      out.append(MicroBatch(
          block=block, part=part, groups=numbers, samples=samples, rows=rows,
          responses=GroupResponses(cut(groups.token_ids), cut(groups.lengths)),
          advantages=cut(groups.advantages),
          old_logprobs=cut(groups.old_logprobs),
          ref_logprobs=cut(groups.ref_logprobs)))
  return out


def own_batch(config: ModelConfig, batch: PromptBatch,
              rows: np.ndarray) -> PromptBatch:
  """Some rows as a batch of their own, with just their patches.

  Feature indices then count through those patches' features.
  """
  if np.array_equal(rows, np.arange(len(batch.inputs.lengths))):
    return batch
  prompts = [batch.prompts[i] for i in rows]
  return make_batch(config, prompts, batch.inputs.row_ids[rows],
                    length=batch.inputs.token_ids.shape[1])


def _power_of_two(count: int) -> int:
  """The smallest power of two that is at least `count`."""
  return 1 << max(count - 1, 0).bit_length()
