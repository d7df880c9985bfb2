"""The step that the schedules are compared on: a long video, short responses."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from rollplex_jax import samples
from rollplex_jax.artifacts import Model
from rollplex_jax.data.processor import Prompt
from rollplex_jax.executor import Step
from rollplex_jax.models import vlm
from rollplex_jax.models.config import ModelConfig, TextConfig, VisionConfig
from rollplex_jax.models.positions import rope_index
from rollplex_jax.models.weights import Params
from rollplex_jax.placement.pools import Pools
from rollplex_jax.schedule import ScheduleConfig
from rollplex_jax.settings import Settings
from rollplex_jax.stages.objectives import Normalizers, ObjectiveConfig
from rollplex_jax.stages.prefix import SavePolicy
from rollplex_jax.stages.sampling import SamplingConfig
from rollplex_jax.timeline import Timeline

_VIDEO, _START, _END = 8189, 8190, 8191
# Of every model that runs a `Workload`, whose prompts hold them.
TOKENS = dict(image_token_id=8188, video_token_id=_VIDEO,
              vision_start_token_id=_START, vision_end_token_id=_END)
CONFIG = ModelConfig(
    text=TextConfig(
        vocab_size=8192, hidden_size=384, intermediate_size=1152,
        num_hidden_layers=8, num_attention_heads=6, num_key_value_heads=2,
        mrope_section=(8, 12, 12), tie_word_embeddings=True),
    vision=VisionConfig(
        depth=4, hidden_size=192, intermediate_size=576, num_heads=4,
        out_hidden_size=384, patch_size=14, window_size=112,
        fullatt_block_indexes=(3,)), **TOKENS)

# Saved activations: on a CPU memory is there, and running a layer again is not
# free. The same in every schedule.
_SAVE = SavePolicy.ACTIVATIONS
SCHEDULES = {
    "serial_unshared": ScheduleConfig(share_prefix=False),
    "serial_shared": ScheduleConfig(save=_SAVE),
    "disaggregated_unshared": ScheduleConfig(
        name="disaggregated", share_prefix=False),
    "disaggregated_shared": ScheduleConfig(name="disaggregated", save=_SAVE),
    "rollplex": ScheduleConfig(name="rollplex", save=_SAVE, window_chunk=272),
}
_ROUND = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
  """What a step holds: prompts of one video and a question.

  Attributes:
    prompts: B.
    group: G.
    frames, rows, columns: the video's grid in patches; a quarter of their
      product is its tokens.
    text: further prompt tokens.
    response: R; every completion has the full length.
    micro_batch_size: samples per pass.
  """

  prompts: int = 1
  group: int = 8
  frames: int = 20
  rows: int = 20
  columns: int = 20
  text: int = 46
  response: int = 64
  micro_batch_size: int = 2

  @property
  def prefix(self) -> int:
    return self.frames * self.rows * self.columns // 4 + 2 + self.text


def make_prompt(config: ModelConfig, workload: Workload, seed: int) -> Prompt:
  """A prompt of one random video and random text."""
  rng = np.random.default_rng(seed)
  grid = (workload.frames, workload.rows, workload.columns)
  tokens = int(np.prod(grid)) // 4
  ids = np.array([_START, *[_VIDEO] * tokens, _END,
                  *rng.integers(0, 8000, workload.text + 1)], np.int32)
  seen = ids == _VIDEO
  grids = np.array([grid], np.int64)
  return Prompt(
      token_ids=ids,
      positions=rope_index(ids, grids, ("video",), (0.5,), config),
      feature_index=np.where(seen, np.cumsum(seen) - 1, -1).astype(np.int32),
      patches=rng.normal(size=(4 * tokens, config.vision.patch_dim)).astype(
          np.float32),
      grids=grids, modalities=("video",), seconds_per_grid=(0.5,))


def make_models(config: ModelConfig) -> tuple[Params, Params]:
  """A random policy, and a random reference with the policy's tower."""
  policy = vlm.init_params(config, jax.random.key(0))
  reference = vlm.init_params(config, jax.random.key(1))
  return policy, {**reference, "visual": policy["visual"]}


class Steps:
  """Runs whole steps of one workload, or of some of its prompts.

  A step is the rollout, the reference's scores and the gradient; rewards and
  the optimizer's update are the same in every schedule and left out.
  """

  def __init__(self, config: ModelConfig, workload: Workload, policy: Params,
               reference: Params, rows: slice = slice(None)):
    """Makes the prompts. `rows` picks those of this process."""
    self.config, self.workload = config, workload
    self.policy, self.reference = policy, reference
    numbers = np.arange(workload.prompts)[rows]
    # Padded to no more than a round number: units of a window leave padding
    # out, whole programs can't.
    self.batch = samples.make_batch(
        config, [make_prompt(config, workload, i) for i in numbers],
        numbers.tolist(), length=-(-(workload.prefix + 1) // _ROUND) * _ROUND)
    self.sampling = SamplingConfig(max_completion_length=workload.response)
    self.advantages = np.random.default_rng(0).normal(
        size=(workload.prompts, workload.group)).astype(np.float32)[rows]
    count = workload.prompts * workload.group
    # No token ends a completion: all have the same length.
    self.normalizers = Normalizers(
        num_tokens=np.float32(count * workload.response),
        num_sequences=np.float32(count))

  def run(self, schedule: ScheduleConfig, *, version: int = 0,
          pools: Pools | None = None, timeline: Timeline | None = None):
    """One step.

    Args:
      schedule: to run it under.
      version: of the policy; a new one is sent to the rollout's pool again.
      pools: of a disaggregated schedule.
      timeline: records units if given.

    Returns:
      The completions, and the gradients in a process that trains or None.
    """
    w = self.workload
    settings = Settings(
        config=self.config, schedule=schedule, sampling=self.sampling,
        objective=ObjectiveConfig(loss_type="dapo", beta=0.05),
        micro_batch_size=w.micro_batch_size, with_entropy=False)
    work = Step(settings, self.batch, Model(self.policy, version),
                Model(self.reference, 0), num_generations=w.group, seed=0,
                step=0, pools=pools, timeline=timeline)
    done = work.roll_out()
    if pools is not None and not pools.trains_here():
      return done, None
    groups = work.score(samples.Groups(
        rows=np.arange(len(self.advantages), dtype=np.int32),
        token_ids=done.token_ids, lengths=done.lengths,
        advantages=self.advantages))
    grads, _, _ = work.gradient(
        groups, first=True, normalizers=self.normalizers)
    return done, jax.block_until_ready(grads)


def gradient_errors(exact: Params, got: Params) -> dict[str, float]:
  """Largest relative error of a tensor, ||got - exact|| / ||exact||.

  Key biases are told apart. What a bias adds to all scores of a query alike
  softmax takes out again, so their gradient is what is left of terms that
  cancel (ten thousand times smaller than others), and rounding shows: the
  monolithic program differs from itself by 7e-6 there when its blocks of
  queries have another size.

  Returns:
    "gradient_error" of all other tensors, and "key_bias_error".
  """
  out = {"gradient_error": 0.0, "key_bias_error": 0.0}
  for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(exact),
                          jax.tree.leaves(got), strict=True):
    norm = float(jnp.linalg.norm(a))
    if norm > 0:
      key = jax.tree_util.keystr(path[-1:], simple=True)
      name = "key_bias_error" if key == "k_bias" else "gradient_error"
      out[name] = max(out[name], float(jnp.linalg.norm(a - b)) / norm)
  return out
