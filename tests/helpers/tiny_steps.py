"""Steps of a tiny policy, and the gradient of one program over whole sequences.

The monolithic program sees every sample's prompt, pictures and response at
once and knows nothing of prefixes, groups or micro-batches: what it gives is
what every schedule must give.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from rollplex_jax import samples
from rollplex_jax.artifacts import Model
from rollplex_jax.data.processor import Prompt
from rollplex_jax.executor import Step
from rollplex_jax.models import vlm
from rollplex_jax.models.config import ModelConfig
from rollplex_jax.models.weights import Params
from rollplex_jax.placement.pools import Pools
from rollplex_jax.samples import Groups
from rollplex_jax.schedule import ScheduleConfig
from rollplex_jax.settings import Settings
from rollplex_jax.stages import full_sequence, objectives
from rollplex_jax.stages.objectives import ObjectiveConfig
from rollplex_jax.stages.rollout import Completions
from rollplex_jax.stages.sampling import SamplingConfig
from tests.helpers import tiny_checkpoint, tiny_policy

MAX_LENGTH = 6
_TEMPERATURE = 0.9
_OBJECTIVE = ObjectiveConfig(loss_type="dapo", beta=0.1)
_FIRST_ROW = 10
# Four groups of eight.
_SAMPLES = 32
# So many that most completions end before their limit.
_EOS = tuple(range(1, 16))


class TinySteps:
  """Steps over the same prompts, policy and reference.

  Attributes:
    config: the model's configuration.
    num_generations: G.
    batch: B prompts.
    params: the policy.
  """

  def __init__(self, config: ModelConfig, prompts: Sequence[Prompt],
               num_generations: int, dtype=jnp.float32):
    """`dtype` is that of all parameters."""
    self.config = config
    self.num_generations = num_generations
    rows = [_FIRST_ROW + i for i in range(len(prompts))]
    self.batch = samples.make_batch(config, prompts, rows)
    self._dtype = dtype
    self.params = self.random_params(0)
    self._reference = self.random_params(7)

  def random_params(self, seed: int) -> Params:
    """A model of the same shape."""
    return jax.tree.map(lambda a: jnp.asarray(a, self._dtype),
                        tiny_checkpoint.random_params(self.config, seed))

  def reference(self, trained: Sequence[str]) -> Params:
    """The reference model: beside a frozen tower it has the policy's own."""
    if "visual" in trained:
      return self._reference
    return {**self._reference, "visual": self.params["visual"]}

  def step(self, *, trained=("text",), micro=0, several=False,
           **schedule) -> Step:
    """A step.

    Args:
      trained: parts of the parameters that learn.
      micro: samples per pass; 0 for all.
      several: there will be several updates.
      **schedule: fields of `ScheduleConfig`.
    """
    settings = Settings(
        config=self.config, schedule=ScheduleConfig(**schedule),
        sampling=SamplingConfig(
            max_completion_length=MAX_LENGTH, temperature=_TEMPERATURE,
            eos_token_ids=_EOS,
            banned_token_ids=self.config.vision_token_ids),
        objective=_OBJECTIVE, micro_batch_size=micro, trained=trained)
    return Step(
        settings, self.batch, Model(self.params, 0),
        Model(self.reference(trained), 0), seed=3, step=1,
        num_generations=self.num_generations, several_updates=several,
        pools=Pools() if settings.schedule.name == "disaggregated" else None)

  def groups(self, completions: Completions, *, keep=None,
             lengths=None) -> Groups:
    """Sampled groups with advantages of some kind.

    Args:
      completions: of all prompts.
      keep: prompts whose groups are wanted; None for all.
      lengths: by prompt, the length of its responses in place of theirs.
    """
    count = len(self.batch.prompts)
    advantages = np.random.default_rng(0).normal(
        size=(count, self.num_generations)).astype(np.float32)
    sizes = completions.lengths.copy()
    for row, value in (lengths or {}).items():
      sizes[row] = value
    keep = np.arange(count) if keep is None else np.array(keep)
    return Groups(
        rows=keep.astype(np.int32), token_ids=completions.token_ids[keep],
        lengths=sizes[keep], advantages=advantages[keep])

  def ref_logprobs(self, groups: Groups, trained=("text",)) -> np.ndarray:
    """float32 [K, G, R] of whole sequences, zero past the ends."""
    responses = _responses(groups)
    logprobs = _logprobs(
        self.reference(trained), self.config, _device(self.batch.inputs),
        self.batch.vision, responses)
    logprobs = np.asarray(logprobs * responses.mask)
    return logprobs[:groups.num_samples].reshape(groups.token_ids.shape)

  def monolithic(self, groups: Groups, params: Params | None = None,
                 ) -> tuple[float, Params]:
    """Loss and float32 gradient of all parameters, in one program.

    Args:
      groups: with log-probs of the reference.
      params: in place of the policy.
    """
    value, grads = _gradient(
        self.params if params is None else params, self.config,
        _device(self.batch.inputs), self.batch.vision, _responses(groups),
        _all_samples(groups.advantages), _all_samples(groups.ref_logprobs))
    return float(value), jax.tree.map(np.asarray, grads)


@functools.cache
def on_videos(group: int, dtype=jnp.float32) -> TinySteps:
  """Steps over `tiny_policy.video_prompts` with groups of a size."""
  config = tiny_policy.config()
  return TinySteps(config, tiny_policy.video_prompts(config), group, dtype)


@functools.cache
def completions(group: int) -> Completions:
  """What those steps sample."""
  return on_videos(group).step(share_prefix=False).roll_out()


@functools.cache
def case(group: int, trained: Sequence[str], *,
         edges: bool) -> tuple[Groups, float, Params]:
  """Groups of those steps, and the loss and gradient that they must have.

  Args:
    group: their size.
    trained: parts of the parameters that learn.
    edges: of the text-only prompt every response is empty, and of the last one
      the length limit cuts them all.
  """
  steps = on_videos(group)
  groups = steps.groups(
      completions(group), lengths={1: 0, 3: MAX_LENGTH} if edges else None)
  groups = dataclasses.replace(
      groups, ref_logprobs=steps.ref_logprobs(groups, trained))
  value, grads = steps.monolithic(groups)
  return groups, value, {part: grads[part] for part in trained}


def relative_errors(got: Params, want: Params) -> dict[str, float]:
  """||got - want|| / ||want|| of every tensor, by its name.

  Raises:
    ValueError: if the trees differ, or a gradient is nothing but rounding
      errors: a quotient of those would say nothing.
  """
  if jax.tree.structure(got) != jax.tree.structure(want):
    raise ValueError("the trees differ")
  out = {}
  for (path, b), a in zip(jax.tree_util.tree_leaves_with_path(want),
                          jax.tree.leaves(got)):
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    name, norm = jax.tree_util.keystr(path), np.linalg.norm(b)
    if not norm > 1e-4:
      raise ValueError(f"{name}: a gradient of norm {norm}")
    out[name] = float(np.linalg.norm(a - b) / norm)
  return out


def _device(tree):
  return jax.tree.map(jnp.asarray, tree)


def _all_samples(a: np.ndarray) -> np.ndarray:
  """[K, G, ...] as [N, ...], filled up so that one program serves all."""
  a = a.reshape(-1, *a.shape[2:])
  return np.pad(a, [(0, _SAMPLES - len(a))] + [(0, 0)] * (a.ndim - 1))


def _responses(groups: Groups) -> full_sequence.Responses:
  rows = np.repeat(groups.rows[:, None], groups.lengths.shape[1], axis=1)
  return full_sequence.Responses(*(
      jnp.asarray(_all_samples(a))
      for a in (rows, groups.token_ids, groups.lengths)))


@functools.partial(jax.jit, static_argnames="config")
def _logprobs(params, config, inputs, vision, responses):
  features = vlm.vision_features(params, config, vision)
  return full_sequence.response_logprobs(
      params, config, inputs, features, responses,
      temperature=_TEMPERATURE)[0]


@functools.partial(jax.jit, static_argnames="config")
def _gradient(params, config, inputs, vision, responses, advantages, ref):

  def loss(params):
    return objectives.policy_loss(
        _logprobs(params, config, inputs, vision, responses), responses.mask,
        advantages, _OBJECTIVE,
        objectives.mini_batch_normalizers(responses.mask), ref_logp=ref)[0]

  value, grads = jax.value_and_grad(loss)(params)
  return value, jax.tree.map(lambda g: g.astype(jnp.float32), grads)
