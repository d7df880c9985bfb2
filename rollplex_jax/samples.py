"""The prompts and samples of a step on the host, and how they are cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import dataclasses

import jax
import numpy as np

from rollplex_jax.config import TrainConfig
from rollplex_jax.data import batching
from rollplex_jax.data.processor import Prompt
from rollplex_jax.errors import InputError
from rollplex_jax.models import vlm
from rollplex_jax.models.config import ModelConfig
from rollplex_jax.models.inputs import PromptInputs, Suffixes, VisionInputs
from rollplex_jax.placement.host import to_host
from rollplex_jax.placement.processes import Spread
from rollplex_jax.stages.response import GroupResponses
from rollplex_jax.stages.rollout import Completions

# Responses are cut to buckets of at least this length: telling short ones
# apart would compile many programs and save little.
_SHORT_RESPONSE = 16
# The same of what a turn adds to an episode.
SHORT_TURN = 16


@dataclasses.dataclass(frozen=True)
class PromptBatch:
  """The prompts of a step, on the host and padded.

  Attributes:
    prompts: B prompts as processed.
    inputs: the same, padded.
    vision: their packed patches, or None without media.
    parts: into how many parts the batch is split over devices, row after row.
    spread: which of them are this process's, if there are several processes.
  """

  prompts: Sequence[Prompt]
  inputs: PromptInputs
  vision: VisionInputs | None
  parts: int = 1
  spread: Spread | None = None

  def cut(self, groups: Groups, size: int) -> list[MicroBatch]:
    """`micro_batches` of some of the batch's groups."""
    return micro_batches(groups, size, parts=self.parts,
                         num_rows=len(self.inputs.lengths))


def make_batch(config: ModelConfig, prompts: Sequence[Prompt],
               row_ids: Sequence[int], num_rows: int | None = None,
               length: int | None = None, parts: int = 1,
               spread: Spread | None = None) -> PromptBatch:
  """Pads prompts and packs their patches.

  Args:
    config: of the model.
    prompts: B prompts.
    row_ids: their identities, which key sampling.
    num_rows: rows of the batch; empty ones fill it up.
    length: padded length P; the bucket of the longest prompt if None.
    parts: into how many the batch is split over devices.
    spread: which of those are this process's; other parts' prompts need no
      patches.

  Raises:
    InputError: if the prompts do not divide by `parts`.
  """
  if parts > 1 and len(prompts) % parts:
    raise InputError(f"{len(prompts)} prompts do not divide by the {parts} "
                     "parts into which the mesh splits a batch")
  vision = batching.pack_vision(prompts, config.vision, parts, spread)
  part_features = 0
  if vision is not None and parts > 1:
    part_features = vlm.num_features(config, vision) // parts
  inputs = batching.stack_prompts(
      prompts, row_ids, num_rows, length, parts, part_features)
  return PromptBatch(prompts, inputs, vision, parts, spread)


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
    suffix: of episodes of several turns, `Suffixes` of [K, G, S] whose feature
      indices count through each sample's own media.
    media: the same of their observations, objects `Media` [K, G].
  """

  rows: np.ndarray
  token_ids: np.ndarray
  lengths: np.ndarray
  advantages: np.ndarray
  old_logprobs: np.ndarray | None = None
  ref_logprobs: np.ndarray | None = None
  suffix: Suffixes | None = None
  media: np.ndarray | None = None

  @classmethod
  def of(cls, rows: np.ndarray, completions: Completions,
         advantages: np.ndarray, suffix: Suffixes | None = None,
         media: np.ndarray | None = None) -> Groups:
    """Some rows of a step's batch with their completions."""
    return cls(
        rows=rows.astype(np.int32), token_ids=completions.token_ids[rows],
        lengths=completions.lengths[rows], advantages=advantages[rows],
        suffix=jax.tree.map(lambda a: a[rows], suffix),
        media=None if media is None else media[rows])

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
        field.name: jax.tree.map(
            lambda a: a[groups], getattr(self, field.name))
        for field in dataclasses.fields(self)})


@dataclasses.dataclass(frozen=True)
class MicroBatch:
  """The samples of one pass: g samples of each of b groups.

  A micro-batch smaller than a group splits it; a larger one holds whole groups.
  All of a mini-batch's have one shape: what is missing is filled up with
  repeated prompts and empty samples. Where the batch is split over devices, a
  micro-batch has as many groups of each part, part after part.

  Attributes:
    block: which groups: passes of one block share their prefixes.
    part: which of their samples.
    groups: int [<= b], numbers of the real groups.
    slots: int [<= b], where those stand in the micro-batch.
    samples: slice of the real samples.
    rows: int32 [b], rows of the step's batch.
    responses: numpy `GroupResponses` of [b, g, W].
    advantages: float32 [b, g].
    old_logprobs, ref_logprobs: float32 [b, g, W], or None.
    media: of episodes, objects `Media` [b, g]; None for filled-up samples.
  """

  block: int
  part: int
  groups: np.ndarray
  slots: np.ndarray
  samples: slice
  rows: np.ndarray
  responses: GroupResponses
  advantages: np.ndarray
  old_logprobs: np.ndarray | None
  ref_logprobs: np.ndarray | None
  media: np.ndarray | None = None

  def observed(self, config: ModelConfig, parts: int,
               ) -> tuple[GroupResponses, VisionInputs | None]:
    """The responses, their feature indices counting through the patches of all
    the micro-batch's observations, and those patches, packed.

    Args:
      config: of the model.
      parts: into how many the batch is split over devices.
    """
    if self.media is None:
      return self.responses, None
    suffix = self.responses.suffix
    index, vision = batching.pack_observations(
        self.media, suffix.feature_index, config.vision, parts)
    return self.responses.replace(
        suffix=suffix.replace(feature_index=index)), vision

  def place(self, out: np.ndarray, values: jax.Array) -> None:
    """Writes real samples' [b, g, W] values into the mini-batch's [K, G, R]."""
    values = to_host(values)
    count = self.samples.stop - self.samples.start
    width = values.shape[-1]
    out[self.groups, self.samples, :width] = values[self.slots, :count]


def micro_batches(groups: Groups, size: int, *, parts: int = 1,
                  num_rows: int = 0) -> list[MicroBatch]:
  """Cuts groups into passes of at most `size` samples; 0 for one pass.

  Responses are cut to the bucket of the longest among them, so the rollout's
  length limit costs nothing here.

  Args:
    groups: of a mini-batch.
    size: samples of a pass, on all devices together.
    parts: into how many the step's batch is split over devices.
    num_rows: prompts of the step's batch, where it is split.

  Raises:
    InputError: if a pass can't have samples of every part of the batch.
  """
  k, g, r = groups.token_ids.shape
  if size % parts:
    raise InputError(f"micro_batch_size={size}: expected a multiple of the "
                     f"{parts} parts into which the mesh splits a batch")
  by_part = [np.arange(k)]
  if parts > 1:
    rows_of_part = num_rows // parts
    by_part = [np.flatnonzero(groups.rows // rows_of_part == part)
               for part in range(parts)]
  most = _power_of_two(max(map(len, by_part)))
  size = size // parts or most * g  # Of one part, from here on.
  b = min(max(size // g, 1), most)
  per_part = min(size, g)
  longest = int(groups.lengths.max(initial=1))
  round_up = batching.bucket if groups.suffix is None else (
      batching.coarse_bucket)
  width = min(round_up(longest, _SHORT_RESPONSE), r)
  suffix_width = 0
  if groups.suffix is not None:
    suffix_width = min(groups.suffix.token_ids.shape[-1],
                       batching.coarse_bucket(
                           int(groups.suffix.lengths.max(initial=1)),
                           _SHORT_RESPONSE))
  out = []
  for block, start in enumerate(range(0, max(map(len, by_part)), b)):
    held = [numbers[start:start + b] for numbers in by_part]
    numbers = np.concatenate(held)
    slots = np.concatenate([
        part * b + np.arange(len(own)) for part, own in enumerate(held)])
    rows = np.concatenate([
        np.pad(groups.rows[own], (0, b - len(own)), mode="edge") if len(own)
        else np.full(b, part * rows_of_part, np.int32)
        for part, own in enumerate(held)]).astype(np.int32)
    for part, first in enumerate(range(0, g, per_part)):
      samples = slice(first, min(first + per_part, g))

      def cut(a, width=width, numbers=numbers, slots=slots, samples=samples):
        if a is None:
          return None
        a = a[numbers, samples]
        a = a[:, :, :width] if a.ndim > 2 else a
        filled = np.zeros((parts * b, per_part, *a.shape[2:]), a.dtype)
        if a.dtype == object:
          filled[:] = None
        filled[slots, :a.shape[1]] = a
        return filled

      suffix = groups.suffix and Suffixes(**{
          field.name: cut(getattr(groups.suffix, field.name), (
              width if field.name == "predicts" else suffix_width))
          for field in dataclasses.fields(Suffixes)})

      out.append(MicroBatch(
          block=block, part=part, groups=numbers, slots=slots, samples=samples,
          rows=rows,
          responses=GroupResponses(
              cut(groups.token_ids), cut(groups.lengths), suffix),
          advantages=cut(groups.advantages),
          old_logprobs=cut(groups.old_logprobs),
          ref_logprobs=cut(groups.ref_logprobs), media=cut(groups.media)))
  return out


def own_batch(config: ModelConfig, batch: PromptBatch,
              rows: np.ndarray) -> PromptBatch:
  """Some rows as a batch of their own, with just their patches.

  Feature indices then count through those patches' features. Of a batch that is
  split over devices, `rows` must be as many of each part, part after part.
  """
  if np.array_equal(rows, np.arange(len(batch.inputs.lengths))):
    return batch
  prompts = [batch.prompts[i] for i in rows]
  return make_batch(config, prompts, batch.inputs.row_ids[rows],
                    length=batch.inputs.token_ids.shape[1], parts=batch.parts,
                    spread=batch.spread)


def _power_of_two(count: int) -> int:
  """The smallest power of two that is at least `count`."""
  return 1 << max(count - 1, 0).bit_length()


def kept_groups(config: TrainConfig, rewards: np.ndarray) -> np.ndarray:
  """Rows of the groups that are trained on, of rewards [B, G]."""
  if not config.gen_batch_size:
    return np.arange(len(rewards))
  mixed = np.flatnonzero(rewards.max(axis=1) != rewards.min(axis=1))
  return mixed[:config.train_batch_size]


def mini_batches(config: TrainConfig, num_groups: int, step: int
                 ) -> Iterator[np.ndarray]:
  """Group numbers of each mini-batch, over all iterations.

  Groups stay whole, so a mini-batch has the same advantages alone as together.
  The first iteration keeps their order, later ones shuffle.
  """
  size = config.prompts_per_update
  for iteration in range(config.num_iterations):
    order = np.arange(num_groups)
    if iteration:
      np.random.default_rng((config.seed, step, iteration)).shuffle(order)
    for i in range(0, num_groups, size):
      yield order[i:i + size]
