"""Advantages, policy losses and KL estimators: pure functions in float32.

An objective is three independent choices, named as in TRL and verl:

- the advantage of a completion (`advantage_estimator`, `scale_rewards`),
- the importance ratio, of a token or of a sequence
  (`importance_sampling_level`),
- the weight of a token in the loss (`loss_type`).

GRPO, Dr. GRPO, DAPO, RLOO and GSPO are combinations of these; the settings left
at None take the value of the paper that `loss_type` or `advantage_estimator`
names.

The loss of a micro-batch is a sum over its tokens with weights that depend only
on the whole mini-batch (`Normalizers`), so the losses and gradients of the
micro-batches of a mini-batch *sum* to those of the mini-batch, however it is
cut: into uneven parts, through groups, or with padding rows.

Dimensions: B prompts, G completions per prompt, N = B * G samples (or the
samples of one micro-batch), R padded response length.
"""

import dataclasses
import enum
import math

import flax.struct
import jax
import jax.numpy as jnp

from rollplex_jax.errors import InputError

# exp(20) = 4.9e8: far beyond any useful ratio, far below float32's overflow
# even after a sum over a million tokens.
LOG_RATIO_BOUND = 20.0
# Added to the standard deviation of rewards, as TRL does.
_STD_EPSILON = 1e-4


class AdvantageEstimator(enum.StrEnum):
  GRPO = "grpo"
  RLOO = "rloo"


class ScaleRewards(enum.StrEnum):
  GROUP = "group"
  BATCH = "batch"
  NONE = "none"


class LossType(enum.StrEnum):
  GRPO = "grpo"
  BNPO = "bnpo"
  DR_GRPO = "dr_grpo"
  DAPO = "dapo"
  GSPO = "gspo"


class ImportanceSamplingLevel(enum.StrEnum):
  TOKEN = "token"
  SEQUENCE = "sequence"


class KLEstimator(enum.StrEnum):
  K1 = "k1"
  K2 = "k2"
  K3 = "k3"


_CHOICES = {
  "loss_type": LossType,
  "advantage_estimator": AdvantageEstimator,
  "scale_rewards": ScaleRewards,
  "importance_sampling_level": ImportanceSamplingLevel,
  "kl_estimator": KLEstimator,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
  """What is optimized. Strings are accepted where an enum is declared.

  Raises:
    InputError: a value out of range, or two settings that contradict.
  """

  # Weight of a token in the loss, see `token_weights`.
  loss_type: LossType = LossType.GRPO
  advantage_estimator: AdvantageEstimator = AdvantageEstimator.GRPO
  # None: "none" for Dr. GRPO and RLOO, whose point it is, else "group".
  scale_rewards: ScaleRewards | None = None
  # None: "sequence" for GSPO, else "token".
  importance_sampling_level: ImportanceSamplingLevel | None = None
  # Clip range of the ratio: [1 - epsilon, 1 + epsilon_high].
  epsilon: float = 0.2
  # None: epsilon. DAPO recommends 0.28.
  epsilon_high: float | None = None
  # Coefficient of the KL to the reference policy; 0 needs no reference.
  beta: float = 0.0
  kl_estimator: KLEstimator = KLEstimator.K3
  # The constant length of Dr. GRPO; no other loss type reads it.
  max_completion_length: int | None = None

  def __post_init__(self):
    for key, choices in _CHOICES.items():
      value = getattr(self, key)
      optional = key in ("scale_rewards", "importance_sampling_level")
      if value is None and optional:
        continue
      if value not in list(choices):
        names = ", ".join(choices)
        raise InputError(f"{key}={value!r}: expected one of {names}")
      object.__setattr__(self, key, choices(value))
    if not 0 < self.epsilon < 1:
      raise InputError(f"epsilon={self.epsilon}: expected between 0 and 1")
    if self.epsilon_high is not None and not 0 < self.epsilon_high < math.inf:
      raise InputError(
        f"epsilon_high={self.epsilon_high}: expected a positive number"
      )
    if not 0 <= self.beta < math.inf:
      raise InputError(f"beta={self.beta}: expected 0 or a positive number")
    length = self.max_completion_length
    if length is not None and length < 1:
      raise InputError(f"max_completion_length={length}: expected at least 1")
    if self.loss_type == LossType.DR_GRPO and length is None:
      raise InputError("loss_type=dr_grpo: max_completion_length is not set")
    if (
      self.loss_type == LossType.GSPO
      and self.importance_sampling_level == ImportanceSamplingLevel.TOKEN
    ):
      raise InputError(
        "importance_sampling_level=token: loss_type=gspo expects sequence"
      )
    if (
      self.advantage_estimator == AdvantageEstimator.RLOO
      and self.scale_rewards not in (None, ScaleRewards.NONE)
    ):
      raise InputError(
        f"scale_rewards={self.scale_rewards}: advantage_estimator=rloo expects"
        " none"
      )

  # Properties and not values filled in above: `dataclasses.replace` must not
  # carry the default of one loss type over to another.

  @property
  def reward_scale(self) -> ScaleRewards:
    """`scale_rewards` with its default resolved."""
    if self.scale_rewards is not None:
      return self.scale_rewards
    if (
      self.loss_type == LossType.DR_GRPO
      or self.advantage_estimator == AdvantageEstimator.RLOO
    ):
      return ScaleRewards.NONE
    return ScaleRewards.GROUP

  @property
  def ratio_level(self) -> ImportanceSamplingLevel:
    """`importance_sampling_level` with its default resolved."""
    if self.importance_sampling_level is not None:
      return self.importance_sampling_level
    if self.loss_type == LossType.GSPO:
      return ImportanceSamplingLevel.SEQUENCE
    return ImportanceSamplingLevel.TOKEN

  @property
  def clip_range(self) -> tuple[float, float]:
    """Lowest and highest unclipped ratio."""
    high = self.epsilon if self.epsilon_high is None else self.epsilon_high
    return 1 - self.epsilon, 1 + high


def mixed_groups(rewards: jax.Array) -> jax.Array:
  """Which groups teach something: those whose rewards are not all equal.

  DAPO's dynamic sampling (arXiv 2503.14476, section 3.2) trains on these only.

  Args:
    rewards: float [B, G].

  Returns:
    bool [B].
  """
  return rewards.max(axis=1) != rewards.min(axis=1)


def group_advantages(rewards: jax.Array, config: ObjectiveConfig) -> jax.Array:
  """Advantage of every completion relative to the others of its prompt.

  GRPO (arXiv 2402.03300): (r - mean) / (std + 1e-4) with mean and sample
  standard deviation (ddof = 1, as in TRL and verl) over the group, or, with
  `scale_rewards=batch`, the standard deviation over all B * G rewards.
  Dr. GRPO (arXiv 2503.20783): r - mean.
  RLOO (arXiv 2402.14740): r - mean of the *other* rewards of the group.

  A group of equal rewards gets exactly 0, whatever its mean rounds to; so does
  a group of one, which has nothing to be compared with.

  Args:
    rewards: [B, G], any float dtype.

  Returns:
    float32 [B, G].

  Raises:
    InputError: advantage_estimator=rloo with G < 2.
  """
  if rewards.ndim != 2:
    raise ValueError(f"rewards: expected shape [B, G], found {rewards.shape}")
  group_size = rewards.shape[1]
  rloo = config.advantage_estimator == AdvantageEstimator.RLOO
  if rloo and group_size < 2:
    raise InputError(
      f"num_generations={group_size}: advantage_estimator=rloo expects at"
      " least 2"
    )
  rewards = rewards.astype(jnp.float32)
  advantages = rewards - rewards.mean(axis=1, keepdims=True)
  if rloo:
    advantages *= group_size / (group_size - 1)
  if config.reward_scale == ScaleRewards.GROUP and group_size > 1:
    std = rewards.std(axis=1, ddof=1, keepdims=True)
    advantages /= std + _STD_EPSILON
  elif config.reward_scale == ScaleRewards.BATCH and rewards.size > 1:
    advantages /= rewards.std(ddof=1) + _STD_EPSILON
  return jnp.where(mixed_groups(rewards)[:, None], advantages, 0.0)


def kl_estimate(
  logp: jax.Array, ref_logp: jax.Array, estimator: KLEstimator
) -> jax.Array:
  """KL(policy || reference) at tokens sampled from the policy.

  With d = ref_logp - logp (Schulman, http://joschu.net/blog/kl-approx.html):
  k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d.

  In k3, d is bounded from above by `LOG_RATIO_BOUND` before exp: a token which
  the reference finds more than e^20 times as likely contributes a constant and
  no gradient, where the plain formula overflows. From below no bound is needed,
  and none is set, so that the pull back to the reference (a slope of 1) stays
  when the policy has moved far away.

  Args:
    logp, ref_logp: [N, R], any float dtype.

  Returns:
    float32 [N, R], finite wherever both inputs are.
  """
  log_ratio = ref_logp.astype(jnp.float32) - logp.astype(jnp.float32)
  if estimator == KLEstimator.K1:
    return -log_ratio
  if estimator == KLEstimator.K2:
    return 0.5 * jnp.square(log_ratio)
  bounded = jnp.minimum(log_ratio, LOG_RATIO_BOUND)
  # expm1: exp(d) - 1 loses every digit of a small d, and k3 is about d^2 / 2.
  return jnp.expm1(bounded) - bounded


@flax.struct.dataclass
class Normalizers:
  """Sizes of a whole mini-batch, the same for each of its micro-batches."""

  # Response tokens that count: float32 [].
  num_tokens: jax.Array
  # Samples, those with an empty response included and padding rows not:
  # float32 [].
  num_sequences: jax.Array


def mini_batch_normalizers(
  mask: jax.Array, num_sequences: int | None = None
) -> Normalizers:
  """Counts a whole mini-batch.

  Args:
    mask: [N, R] bool, or numbers that are 1 where a response token counts and
      0 elsewhere; all samples of the mini-batch.
    num_sequences: samples that are not padding rows; N if None.
  """
  if num_sequences is None:
    num_sequences = mask.shape[0]
  return Normalizers(
    num_tokens=jnp.sum(mask.astype(bool), dtype=jnp.float32),
    num_sequences=jnp.asarray(num_sequences, jnp.float32),
  )


def token_weights(
  mask: jax.Array, config: ObjectiveConfig, normalizers: Normalizers
) -> jax.Array:
  """Weight of every token's loss; the loss is the weighted sum.

  - grpo, gspo: mean over the tokens of a sequence, then over sequences
    (verl's seq-mean-token-mean).
  - dapo, bnpo: mean over all tokens of the mini-batch (token-mean). TRL's bnpo
    averages over the local micro-batch; here no result depends on the
    micro-batch, and the two are one.
  - dr_grpo: sum over tokens, over num_sequences * max_completion_length.

  Args:
    mask: [N, R], see `mini_batch_normalizers`.

  Returns:
    float32 [N, R], 0 where the mask is.
  """
  mask = mask.astype(jnp.float32)
  if config.loss_type in (LossType.DAPO, LossType.BNPO):
    return mask / jnp.maximum(normalizers.num_tokens, 1.0)
  num_sequences = jnp.maximum(normalizers.num_sequences, 1.0)
  if config.loss_type == LossType.DR_GRPO:
    return mask / (num_sequences * config.max_completion_length)
  lengths = mask.sum(axis=1, keepdims=True)
  return mask / jnp.maximum(lengths, 1.0) / num_sequences


@flax.struct.dataclass
class LossMetrics:
  """Sums over a micro-batch, float32 []; None for what was not measured."""

  # Weighted as the loss is: these three add up to the mini-batch's.
  loss: jax.Array
  pg_loss: jax.Array
  kl_loss: jax.Array | None
  # Plain sums over the tokens that count.
  num_tokens: jax.Array
  clipped_low: jax.Array
  clipped_high: jax.Array
  old_kl: jax.Array
  ratio: jax.Array
  entropy: jax.Array | None
  # Not a sum: the largest ratio; 0 without tokens.
  ratio_max: jax.Array

  def merge(self, other: "LossMetrics") -> "LossMetrics":
    """The metrics of two micro-batches together."""
    total = jax.tree.map(jnp.add, self, other)
    return total.replace(ratio_max=jnp.maximum(self.ratio_max, other.ratio_max))

  def finalize(self) -> dict[str, float]:
    """Host values under verl's names.

    `actor/pg_clipfrac_low` and `_high` are the tokens clipped at 1 - epsilon
    and 1 + epsilon_high; `actor/pg_clipfrac` is their sum. Losses are weighted
    as `loss_type` says, everything else is a mean over tokens.
    """
    sums = jax.device_get(self)
    tokens = max(float(sums.num_tokens), 1.0)
    low, high = float(sums.clipped_low), float(sums.clipped_high)
    result = {
      "actor/loss": float(sums.loss),
      "actor/pg_loss": float(sums.pg_loss),
      "actor/pg_clipfrac": (low + high) / tokens,
      "actor/pg_clipfrac_low": low / tokens,
      "actor/pg_clipfrac_high": high / tokens,
      "actor/ppo_kl": float(sums.old_kl) / tokens,
      "actor/ratio_mean": float(sums.ratio) / tokens,
      "actor/ratio_max": float(sums.ratio_max),
    }
    if sums.kl_loss is not None:
      result["actor/kl_loss"] = float(sums.kl_loss)
    if sums.entropy is not None:
      result["actor/entropy"] = float(sums.entropy) / tokens
    return result


def policy_loss(
  logp: jax.Array,
  mask: jax.Array,
  advantages: jax.Array,
  config: ObjectiveConfig,
  normalizers: Normalizers,
  *,
  old_logp: jax.Array | None = None,
  ref_logp: jax.Array | None = None,
  entropy: jax.Array | None = None,
) -> tuple[jax.Array, LossMetrics]:
  """Clipped policy loss of one micro-batch, with the KL to the reference.

      pg = -min(ratio * A, clip(ratio, 1 - epsilon, 1 + epsilon_high) * A)
      loss = sum over tokens of weight * (pg + beta * kl)

  (PPO, arXiv 1707.06347; DAPO's asymmetric range, arXiv 2503.14476; weights as
  in `token_weights`.) The ratio is exp(logp - old_logp), or of the sequence
  (GSPO, arXiv 2507.18071): s = exp(mean over tokens of logp - old_logp), in the
  token form stop_gradient(s) * exp(logp - stop_gradient(logp)), whose value is
  s and whose gradient reaches every token. Log ratios are bounded from above by
  `LOG_RATIO_BOUND` before exp; beyond it a token keeps its loss and has no
  gradient.

  What stands at masked positions, and the advantages of samples without tokens,
  reach neither loss nor gradient, be they NaN.

  Args:
    logp: [N, R] log-probs of the response tokens, differentiated.
    mask: [N, R], see `mini_batch_normalizers`.
    advantages: [N].
    config: the objective.
    normalizers: of the mini-batch this micro-batch belongs to.
    old_logp: [N, R] log-probs when the tokens were sampled. None in the first
      update after sampling: then the ratio is exp(logp - stop_gradient(logp)),
      1 in value.
    ref_logp: [N, R] log-probs under the reference. With `beta=0` it is only
      measured.
    entropy: [N, R] entropy of the policy at each token, only measured.

  Returns:
    The loss, float32 [], to be summed over micro-batches, and its metrics.

  Raises:
    ValueError: shapes that don't agree, or beta > 0 without ref_logp.
  """
  _check_shapes(logp, mask, advantages, old_logp, ref_logp, entropy)
  if config.beta > 0 and ref_logp is None:
    raise ValueError(f"beta={config.beta} needs ref_logp, found None")
  mask = mask.astype(bool)
  logp = _select(mask, logp)
  fixed_logp = jax.lax.stop_gradient(logp)
  old_logp = (
    fixed_logp
    if old_logp is None
    else jax.lax.stop_gradient(_select(mask, old_logp))
  )
  log_ratio = logp - old_logp
  old_kl = -jax.lax.stop_gradient(log_ratio)
  if config.ratio_level == ImportanceSamplingLevel.SEQUENCE:
    lengths = mask.sum(axis=1, keepdims=True, dtype=jnp.float32)
    sequence = log_ratio.sum(axis=1, keepdims=True) / jnp.maximum(lengths, 1.0)
    log_ratio = jax.lax.stop_gradient(sequence) + (logp - fixed_logp)
  ratio = jnp.exp(jnp.minimum(log_ratio, LOG_RATIO_BOUND))

  advantages = jax.lax.stop_gradient(_select(mask, advantages[:, None]))
  low, high = config.clip_range
  pg = -jnp.minimum(ratio * advantages, jnp.clip(ratio, low, high) * advantages)
  weights = token_weights(mask, config, normalizers)
  pg_loss = jnp.sum(weights * pg)
  loss, kl_loss = pg_loss, None
  if ref_logp is not None:
    ref_logp = jax.lax.stop_gradient(_select(mask, ref_logp))
    kl = kl_estimate(logp, ref_logp, config.kl_estimator)
    kl_loss = jnp.sum(weights * kl)
    if config.beta > 0:
      loss = pg_loss + config.beta * kl_loss

  def total(values):
    return jnp.sum(_select(mask, values))

  metrics = LossMetrics(
    loss=loss,
    pg_loss=pg_loss,
    kl_loss=kl_loss,
    num_tokens=total(mask),
    clipped_low=total((ratio < low) & (advantages < 0)),
    clipped_high=total((ratio > high) & (advantages > 0)),
    old_kl=total(old_kl),
    ratio=total(ratio),
    entropy=None if entropy is None else total(entropy),
    ratio_max=jnp.max(_select(mask, ratio)),
  )
  return loss, jax.lax.stop_gradient(metrics)


def _select(mask: jax.Array, values: jax.Array) -> jax.Array:
  """In float32, with 0 at masked positions in value and gradient."""
  return jnp.where(mask, values.astype(jnp.float32), 0.0)


def _check_shapes(logp, mask, advantages, old_logp, ref_logp, entropy):
  if logp.ndim != 2:
    raise ValueError(f"logp: expected shape [N, R], found {logp.shape}")
  arrays = {
    "mask": mask,
    "old_logp": old_logp,
    "ref_logp": ref_logp,
    "entropy": entropy,
  }
  for name, array in arrays.items():
    if array is not None and array.shape != logp.shape:
      raise ValueError(
        f"{name}: expected the shape of logp {logp.shape}, found {array.shape}"
      )
  if advantages.shape != logp.shape[:1]:
    raise ValueError(
      f"advantages: expected shape {logp.shape[:1]}, found {advantages.shape}"
    )
