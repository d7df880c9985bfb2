"""When each stage runs: the serial schedule.

Rollout, reference scoring and training follow one another, each over whole
batches, with the prompt and response of every sample processed in full in
scoring and training. This is what current runtimes do and what faster
schedules are measured against.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from rollplex_jax.data import batching
from rollplex_jax.data.processor import Prompt
from rollplex_jax.models import vlm
from rollplex_jax.models.config import ModelConfig
from rollplex_jax.models.inputs import PromptInputs, VisionInputs
from rollplex_jax.models.weights import Params
from rollplex_jax.stages import full_sequence, objectives, prefix, rollout
from rollplex_jax.stages.full_sequence import Responses
from rollplex_jax.stages.objectives import LossMetrics, Normalizers
from rollplex_jax.stages.rollout import Completions
from rollplex_jax.stages.sampling import SamplingConfig, sample_keys

# Tokens; up to here all responses are padded to one length.
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
class Samples:
  """The samples of a mini-batch, as numpy arrays.

  Attributes:
    prompt_index: int32 [N], row in the step's batch.
    token_ids: int32 [N, R].
    lengths: int32 [N].
    advantages: float32 [N].
    old_logprobs: float32 [N, R] under the policy that sampled, or None in the
      first update after a rollout.
    ref_logprobs: float32 [N, R] under the reference, or None.
  """

  prompt_index: np.ndarray
  token_ids: np.ndarray
  lengths: np.ndarray
  advantages: np.ndarray
  old_logprobs: np.ndarray | None = None
  ref_logprobs: np.ndarray | None = None

  def __len__(self) -> int:
    return len(self.lengths)

  def take(self, rows) -> Samples:
    """Some of the samples."""
    return Samples(*(None if a is None else a[rows] for a in (
        self.prompt_index, self.token_ids, self.lengths, self.advantages,
        self.old_logprobs, self.ref_logprobs)))

  def padded(self, size: int) -> Samples:
    """The samples followed by empty ones up to `size`."""
    def pad(a):
      if a is None:
        return None
      return np.pad(a, [(0, size - len(a))] + [(0, 0)] * (a.ndim - 1))
    return Samples(*map(pad, (
        self.prompt_index, self.token_ids, self.lengths, self.advantages,
        self.old_logprobs, self.ref_logprobs)))


def features_of(params: Params, config: ModelConfig,
                batch: PromptBatch) -> jax.Array | None:
  """Merged vision features of a batch, or None where it has no media."""
  if batch.vision is None:
    return None
  return vision_program(params, config, batch.vision)


def roll_out(params: Params, config: ModelConfig, sampling: SamplingConfig,
             batch: PromptBatch, features: jax.Array | None, *,
             num_generations: int, seed: int, step: int) -> Completions:
  """Prefill and decode: G completions of every prompt of a batch."""
  keys = sample_keys(seed, step, jnp.asarray(batch.inputs.row_ids),
                     num_generations)
  prompts = jax.device_put(batch.inputs)
  kv = prefix_program(params, config, prompts, features)
  return decode_program(params, config, sampling, prompts, kv, keys)


def score(params: Params, config: ModelConfig, batch: PromptBatch,
          features: jax.Array | None, samples: Samples, *,
          temperature: float, micro_batch_size: int) -> np.ndarray:
  """float32 [N, R] log-probs of the samples' tokens, zero past their ends."""
  out = np.zeros(samples.token_ids.shape, np.float32)
  for micro in _micro_batches(batch, samples, micro_batch_size):
    logprobs = score_program(
        params, config, batching.take_rows(batch.inputs, micro.used), features,
        micro.responses, temperature)
    micro.place(out, logprobs * micro.responses.mask)
  return out


def gradient(trained: Params, frozen: Params, config: ModelConfig,
             objective: objectives.ObjectiveConfig, batch: PromptBatch,
             features: jax.Array | None, samples: Samples, *,
             temperature: float, micro_batch_size: int, remat: bool,
             with_entropy: bool) -> tuple[Params, LossMetrics, np.ndarray]:
  """Gradient of a mini-batch, summed over micro-batches.

  Args:
    trained: the parts of the parameters that learn.
    frozen: the others.
    config: the model's configuration.
    objective: the loss.
    batch: the step's prompts.
    features: their merged features; not read where the tower is trained.
    samples: N samples of the mini-batch.
    temperature: of the rollout.
    micro_batch_size: samples per pass.
    remat: recompute layers in the backward pass.
    with_entropy: measure entropy.

  Returns:
    float32 gradients like `trained`, metrics of the whole mini-batch, and
    float32 [N, R] log-probs of the samples' tokens before the update.
  """
  normalizers = Normalizers(
      num_tokens=np.float32(samples.lengths.sum()),
      num_sequences=np.float32(len(samples)))
  grads, metrics = zeros_program(trained), None
  out = np.zeros(samples.token_ids.shape, np.float32)
  for micro in _micro_batches(batch, samples, micro_batch_size):
    prompts, vision = _prompts_of(micro, config, batch, trained)
    part = micro.samples
    grads, new, logprobs = gradient_program(
        trained, frozen, grads, config, objective, prompts, features, vision,
        micro.responses, part.advantages, part.old_logprobs,
        part.ref_logprobs, normalizers, temperature, remat, with_entropy)
    metrics = new if metrics is None else metrics.merge(new)
    micro.place(out, logprobs * micro.responses.mask)
  return grads, metrics, out


def supervised_gradient(
    trained: Params, frozen: Params, config: ModelConfig, batch: PromptBatch,
    features: jax.Array | None, samples: Samples, *, micro_batch_size: int,
    remat: bool) -> tuple[Params, jax.Array]:
  """Gradient and value of the mean negative log-prob of response tokens."""
  num_tokens = np.float32(max(samples.lengths.sum(), 1))
  grads, loss = zeros_program(trained), 0.0
  for micro in _micro_batches(batch, samples, micro_batch_size):
    prompts, vision = _prompts_of(micro, config, batch, trained)
    grads, new = supervised_program(
        trained, frozen, grads, config, prompts, features, vision,
        micro.responses, num_tokens, remat)
    loss += new
  return grads, loss


@dataclasses.dataclass(frozen=True)
class _MicroBatch:
  """Samples of one pass.

  Attributes:
    rows: numbers of the real samples in the mini-batch.
    used: rows of the step's batch whose prompts come along.
    samples: the samples, filled up with empty ones.
    responses: their responses; `prompt_index` counts through `used`.
  """

  rows: np.ndarray
  used: np.ndarray
  samples: Samples
  responses: Responses

  def place(self, out: np.ndarray, values: jax.Array) -> None:
    """Writes per-token values of the real samples into the mini-batch's."""
    out[self.rows, :values.shape[1]] = np.asarray(values)[:len(self.rows)]


def _micro_batches(batch: PromptBatch, samples: Samples,
                   size: int) -> Iterator[_MicroBatch]:
  """Cuts samples into micro-batches of one shape.

  Responses are trimmed to the bucket of the longest among them, so the
  rollout's length limit costs nothing here. The last micro-batch is filled up
  with empty samples, and the prompts with repeated ones. Shapes are rounded up
  (counts to powers of two, and short responses are not told apart), since the
  number of groups that are trained on differs from step to step and every
  shape is another program to compile.
  """
  longest = int(samples.lengths.max(initial=1))
  width = min(batching.bucket(longest, _SHORT_RESPONSE),
              samples.token_ids.shape[1])
  cut = lambda a: None if a is None else a[:, :width]
  samples = dataclasses.replace(
      samples, token_ids=cut(samples.token_ids),
      old_logprobs=cut(samples.old_logprobs),
      ref_logprobs=cut(samples.ref_logprobs))
  size = min(size or len(samples), _power_of_two(len(samples)))
  parts = [np.arange(i, min(i + size, len(samples)))
           for i in range(0, len(samples), size)]
  most = min(size, _power_of_two(max(
      len(np.unique(samples.prompt_index[rows])) for rows in parts)))
  for rows in parts:
    part = samples.take(rows).padded(size)
    used, local = np.unique(
        samples.prompt_index[rows], return_inverse=True)
    local = np.pad(local.astype(np.int32), (0, size - len(rows)))
    used = np.pad(used, (0, most - len(used)), mode="edge")
    yield _MicroBatch(rows, used, part,
                      Responses(local, part.token_ids, part.lengths))


def _power_of_two(count: int) -> int:
  """The smallest power of two that is at least `count`."""
  return 1 << max(count - 1, 0).bit_length()


def _prompts_of(micro: _MicroBatch, config: ModelConfig, batch: PromptBatch,
                trained: Params):
  """A micro-batch's prompts, with patches of their own if the tower learns.

  A trained tower runs again in every micro-batch, on the patches of just those
  prompts; feature indices then count through these.
  """
  if "visual" not in trained:
    return batching.take_rows(batch.inputs, micro.used), None
  if np.array_equal(micro.used, np.arange(len(batch.inputs.lengths))):
    return batch.inputs, batch.vision
  prompts = [batch.prompts[i] for i in micro.used]
  inputs = batching.stack_prompts(
      prompts, batch.inputs.row_ids[micro.used],
      length=batch.inputs.token_ids.shape[1])
  return inputs, batching.pack_vision(prompts, config.vision)


@functools.partial(jax.jit, static_argnames="config")
def vision_program(params, config, vision) -> jax.Array:
  """Merged features of a batch's media."""
  return vlm.vision_features(params, config, vision)


@functools.partial(jax.jit, static_argnames="config")
def prefix_program(params, config, prompts, features):
  """`prefix.prefix_kv`, compiled."""
  return prefix.prefix_kv(params, config, prompts, features)


@functools.partial(jax.jit, static_argnames=("config", "sampling"))
def decode_program(params, config, sampling, prompts, kv, keys):
  """`rollout.decode`, compiled."""
  return rollout.decode(params, config, sampling, prompts, kv, keys)


@functools.partial(jax.jit, static_argnames=("config", "temperature"))
def score_program(params, config, prompts, features, responses, temperature):
  """`full_sequence.response_logprobs` without entropies, compiled."""
  return full_sequence.response_logprobs(
      params, config, prompts, features, responses,
      temperature=temperature)[0]


@jax.jit
def zeros_program(trained):
  """float32 zeros like the trained parameters."""
  return jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), trained)


@functools.partial(
    jax.jit, donate_argnames="grads",
    static_argnames=("config", "objective", "temperature", "remat",
                     "with_entropy"))
def gradient_program(
    trained, frozen, grads, config, objective, prompts, features, vision,
    responses, advantages, old_logprobs, ref_logprobs,
    normalizers: Normalizers, temperature, remat, with_entropy):
  """Adds one micro-batch to the gradient."""

  def loss_fn(logprobs, entropy):
    loss, metrics = objectives.policy_loss(
        logprobs, responses.mask, advantages, objective, normalizers,
        old_logp=old_logprobs, ref_logp=ref_logprobs, entropy=entropy)
    return loss, (metrics, logprobs)

  (_, (metrics, logprobs)), new = full_sequence.loss_and_grad(
      trained, frozen, config, prompts, features, vision, responses, loss_fn,
      temperature=temperature, remat=remat, with_entropy=with_entropy)
  return jax.tree.map(jnp.add, grads, new), metrics, logprobs


@functools.partial(
    jax.jit, donate_argnames="grads", static_argnames=("config", "remat"))
def supervised_program(trained, frozen, grads, config, prompts, features,
                       vision, responses, num_tokens, remat):
  """Adds one micro-batch of -log p(response) / num_tokens to the gradient."""

  def loss_fn(logprobs, _):
    loss = -jnp.sum(logprobs * responses.mask) / num_tokens
    return loss, None

  (loss, _), new = full_sequence.loss_and_grad(
      trained, frozen, config, prompts, features, vision, responses, loss_fn,
      remat=remat)
  return jax.tree.map(jnp.add, grads, new), loss
