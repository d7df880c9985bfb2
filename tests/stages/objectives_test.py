"""Objectives against loops over samples and tokens, in float64 numpy."""

import dataclasses
import functools
import itertools
import math

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from rollplex_jax.errors import InputError
from rollplex_jax.stages import objectives
from rollplex_jax.stages.objectives import KLEstimator, ObjectiveConfig

_LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "gspo")
_MAX_LENGTH = 11


def _config(**kwargs):
  return ObjectiveConfig(max_completion_length=_MAX_LENGTH, **kwargs)


def reference_advantages(rewards, estimator="grpo", scale="group"):
  """[B, G] floats, one group at a time."""
  result = np.zeros(rewards.shape)
  everything = [float(r) for group in rewards for r in group]
  for b, group in enumerate(rewards):
    group = [float(r) for r in group]
    if len(set(group)) == 1:
      continue
    for g, reward in enumerate(group):
      if estimator == "rloo":
        others = group[:g] + group[g + 1 :]
        result[b, g] = reward - sum(others) / len(others)
        continue
      result[b, g] = reward - sum(group) / len(group)
      if scale == "group":
        result[b, g] /= np.std(group, ddof=1) + 1e-4
      elif scale == "batch":
        result[b, g] /= np.std(everything, ddof=1) + 1e-4
  return result


def reference_loss(
  logp, old_logp, ref_logp, mask, advantages, config, num_sequences
):
  """The loss of a whole mini-batch, one token at a time.

  Returns:
    The loss, and the sums that the metrics are made of.
  """
  num_tokens = int(mask.sum())
  high = config.epsilon if config.epsilon_high is None else config.epsilon_high
  sums = {"pg": 0.0, "kl": 0.0, "low": 0, "high": 0, "old_kl": 0.0}
  ratios = []
  for i in range(logp.shape[0]):
    tokens = [t for t in range(logp.shape[1]) if mask[i, t]]
    for t in tokens:
      if config.loss_type == "gspo":
        log_ratios = [logp[i, s] - old_logp[i, s] for s in tokens]
        ratio = math.exp(sum(log_ratios) / len(tokens))
      else:
        ratio = math.exp(logp[i, t] - old_logp[i, t])
      clipped = min(max(ratio, 1 - config.epsilon), 1 + high)
      pg = -min(ratio * advantages[i], clipped * advantages[i])
      d = ref_logp[i, t] - logp[i, t]
      kl = {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}
      weight = {
        "grpo": 1 / len(tokens) / num_sequences,
        "gspo": 1 / len(tokens) / num_sequences,
        "dapo": 1 / num_tokens,
        "bnpo": 1 / num_tokens,
        "dr_grpo": 1 / num_sequences / _MAX_LENGTH,
      }[config.loss_type]
      sums["pg"] += weight * pg
      sums["kl"] += weight * kl[config.kl_estimator]
      sums["low"] += ratio < 1 - config.epsilon and advantages[i] < 0
      sums["high"] += ratio > 1 + high and advantages[i] > 0
      sums["old_kl"] += old_logp[i, t] - logp[i, t]
      ratios.append(ratio)
  sums["ratios"] = ratios
  return sums["pg"] + config.beta * sums["kl"], sums


def reference_gradient(loss, logp):
  """Central differences of a float64 loss; [N, R]."""
  gradient = np.zeros_like(logp)
  step = 1e-6
  for index in np.ndindex(*logp.shape):
    above, below = logp.copy(), logp.copy()
    above[index] += step
    below[index] -= step
    gradient[index] = (loss(above) - loss(below)) / (2 * step)
  return gradient


def _batch(seed=0, n=6, r=7):
  """Log-probs near each other, a ragged mask, one sample without tokens."""
  rng = np.random.default_rng(seed)
  logp = rng.uniform(-4, -0.1, (n, r))
  old_logp = logp + rng.normal(0, 0.25, (n, r))
  ref_logp = logp + rng.normal(0, 0.5, (n, r))
  lengths = rng.integers(1, r + 1, n)
  lengths[2] = 0
  mask = np.arange(r) < lengths[:, None]
  # A hole, as a tool's answer inside a response leaves one.
  mask[0, 1] = False
  mask[0, 2] = True
  advantages = rng.normal(0, 1, n)
  return logp, old_logp, ref_logp, mask, advantages


def _f32(*arrays):
  return tuple(np.asarray(a, np.float32) for a in arrays)


@functools.partial(jax.jit, static_argnames="config")
def _loss_and_gradient(
  logp, mask, advantages, config, normalizers, old_logp, ref_logp, entropy=None
):
  def loss(logp):
    return objectives.policy_loss(
      logp, mask, advantages, config, normalizers,
      old_logp=old_logp, ref_logp=ref_logp, entropy=entropy,
    )  # fmt: skip

  (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(logp)
  return value, metrics, gradient


class StrictTestCase(parameterized.TestCase):
  """Without implicit dtype or rank promotion."""

  def setUp(self):
    super().setUp()
    self.enter_context(jax.numpy_dtype_promotion("strict"))
    self.enter_context(jax.numpy_rank_promotion("raise"))


class AdvantagesTest(StrictTestCase):
  @parameterized.parameters(
    ({}, "grpo", "group"),
    ({"scale_rewards": "batch"}, "grpo", "batch"),
    ({"scale_rewards": "none"}, "grpo", "none"),
    ({"loss_type": "dr_grpo"}, "grpo", "none"),
    ({"loss_type": "dr_grpo", "scale_rewards": "group"}, "grpo", "group"),
    ({"loss_type": "gspo"}, "grpo", "group"),
    ({"advantage_estimator": "rloo"}, "rloo", "none"),
  )
  def test_equals_the_loops(self, settings, estimator, scale):
    rng = np.random.default_rng(1)
    rewards = rng.normal(0, 1, (5, 4))
    rewards[1] = [0, 0, 1, 0]
    rewards[3] = 0.1
    expected = reference_advantages(rewards, estimator, scale)
    found = objectives.group_advantages(
      jnp.asarray(rewards, jnp.float32), _config(**settings)
    )
    self.assertEqual(found.dtype, jnp.float32)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)

  @parameterized.parameters("group", "batch", "none")
  def test_equal_rewards_give_exactly_zero(self, scale):
    # The float32 mean of these is not 0.1, so r - mean alone would not be 0.
    rewards = jnp.full((2, 7), 0.1, jnp.float32).at[1, 0].set(1.0)
    self.assertNotEqual(float(rewards[0, 0] - rewards[0].mean()), 0.0)
    found = objectives.group_advantages(rewards, _config(scale_rewards=scale))
    np.testing.assert_array_equal(found[0], np.zeros(7))
    self.assertGreater(float(found[1, 0]), 0)

  @parameterized.parameters("group", "batch", "none")
  def test_group_of_one_is_zero(self, scale):
    config = _config(scale_rewards=scale)
    for shape in ((1, 1), (3, 1)):
      rewards = jnp.arange(shape[0], dtype=jnp.float32).reshape(shape)
      found = objectives.group_advantages(rewards, config)
      np.testing.assert_array_equal(found, np.zeros(shape))

  def test_rloo_refuses_a_group_of_one(self):
    config = _config(advantage_estimator="rloo")
    with self.assertRaisesRegex(
      InputError, "num_generations=1: advantage_estimator=rloo .* at least 2"
    ):
      objectives.group_advantages(jnp.zeros((3, 1)), config)

  def test_rewards_need_two_dimensions(self):
    with self.assertRaisesRegex(ValueError, r"\[B, G\], found \(3,\)"):
      objectives.group_advantages(jnp.zeros(3), _config())

  def test_mixed_groups(self):
    rewards = jnp.asarray([[0.1, 0.1, 0.1], [0, 1, 0], [1, 1, 1]], jnp.float32)
    found = objectives.mixed_groups(rewards)
    np.testing.assert_array_equal(found, [False, True, False])


class KLTest(StrictTestCase):
  @parameterized.parameters(*KLEstimator)
  def test_formula(self, estimator):
    logp, _, ref_logp, _, _ = _batch()
    d = ref_logp - logp
    expected = {"k1": -d, "k2": d**2 / 2, "k3": np.exp(d) - 1 - d}[estimator]
    found = objectives.kl_estimate(*_f32(logp, ref_logp), estimator)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-6)

  @parameterized.parameters("k1", "k3")
  def test_expectation_is_the_kl(self, estimator):
    rng = np.random.default_rng(3)
    p, q = rng.dirichlet(np.ones(9), 2)
    estimates = objectives.kl_estimate(
      *_f32(np.log(p)[None], np.log(q)[None]), KLEstimator(estimator)
    )
    np.testing.assert_allclose(
      np.sum(p * np.asarray(estimates[0])),
      np.sum(p * (np.log(p) - np.log(q))),
      rtol=1e-5,
    )

  def test_small_k3_keeps_its_digits(self):
    for d in (1e-3, -1e-3):
      found = objectives.kl_estimate(*_f32([[0.0]], [[d]]), KLEstimator.K3)
      np.testing.assert_allclose(found, [[math.expm1(d) - d]], rtol=1e-3)

  @parameterized.product(
    gap=(100.0, 20.5, -100.0, 1e4, -1e4), estimator=tuple(KLEstimator)
  )
  def test_far_policies_stay_finite(self, gap, estimator):
    logp, ref_logp, ones = _f32([[-101.0, -1.0]], [[gap - 101, -1]], [1.0])
    mask = jnp.ones((1, 2), bool)
    value, metrics, gradient = _loss_and_gradient(
      logp, mask, ones, _config(beta=0.04, kl_estimator=estimator),
      objectives.mini_batch_normalizers(mask), None, ref_logp,
    )  # fmt: skip
    self.assertEqual(value.dtype, jnp.float32)
    self.assertEqual(gradient.dtype, jnp.float32)
    for number in jax.tree.leaves((value, metrics, gradient)):
      self.assertTrue(np.isfinite(number).all(), number)

  def test_gradient_beyond_the_bound(self):
    kl = lambda logp, d: objectives.kl_estimate(
      logp, jax.lax.stop_gradient(logp) + d, KLEstimator.K3
    )
    gradient = jax.grad(lambda logp, d: kl(logp, d).sum())
    logp = jnp.zeros((1, 1))
    # None above it; below, where exp can't overflow, the full pull back.
    self.assertEqual(float(gradient(logp, 100.0)[0, 0]), 0.0)
    self.assertEqual(float(gradient(logp, -100.0)[0, 0]), 1.0)
    self.assertEqual(float(kl(logp, -100.0)[0, 0]), 99.0)


class PolicyLossTest(StrictTestCase):
  def _check(self, config, first_update, seed=0):
    logp, old_logp, ref_logp, mask, advantages = _batch(seed)
    if first_update:
      old_logp = logp.copy()
    arguments = (old_logp, ref_logp, mask, advantages, config, len(logp))
    expected, sums = reference_loss(logp, *arguments)
    expected_gradient = reference_gradient(
      lambda x: reference_loss(x, *arguments)[0], logp
    )
    logp, old_logp, ref_logp, advantages = _f32(
      logp, old_logp, ref_logp, advantages
    )
    value, metrics, gradient = _loss_and_gradient(
      logp, mask, advantages, config,
      objectives.mini_batch_normalizers(mask),
      None if first_update else old_logp, ref_logp, -logp,
    )  # fmt: skip
    np.testing.assert_allclose(value, expected, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(gradient, expected_gradient, atol=2e-6)
    tokens = len(sums["ratios"])
    expected_metrics = {
      "actor/loss": expected,
      "actor/pg_loss": sums["pg"],
      "actor/kl_loss": sums["kl"],
      "actor/pg_clipfrac": (sums["low"] + sums["high"]) / tokens,
      "actor/pg_clipfrac_low": sums["low"] / tokens,
      "actor/pg_clipfrac_high": sums["high"] / tokens,
      "actor/ppo_kl": sums["old_kl"] / tokens,
      "actor/ratio_mean": np.mean(sums["ratios"]),
      "actor/ratio_max": np.max(sums["ratios"]),
      "actor/entropy": -logp[mask].mean(),
    }
    found = metrics.finalize()
    self.assertEqual(set(found), set(expected_metrics))
    for name, number in expected_metrics.items():
      self.assertIsInstance(found[name], float)
      np.testing.assert_allclose(
        found[name], number, rtol=2e-5, atol=1e-6, err_msg=name
      )
    return found

  @parameterized.product(loss_type=_LOSS_TYPES, first_update=(True, False))
  def test_equals_the_loops(self, loss_type, first_update):
    config = _config(
      loss_type=loss_type, epsilon=0.1, epsilon_high=0.15, beta=0.1
    )
    found = self._check(config, first_update, seed=1)
    # The inputs do exercise both ends of the clip range.
    if first_update:
      self.assertEqual(found["actor/ratio_max"], 1.0)
      self.assertEqual(found["actor/pg_clipfrac"], 0.0)
    else:
      self.assertGreater(found["actor/pg_clipfrac_low"], 0.0)
      self.assertGreater(found["actor/pg_clipfrac_high"], 0.0)

  @parameterized.parameters(*KLEstimator)
  def test_kl_estimators(self, estimator):
    self._check(_config(beta=0.5, kl_estimator=estimator), False, seed=5)

  def test_symmetric_clipping_and_measured_kl(self):
    self._check(_config(loss_type="dapo"), False, seed=6)

  def test_gspo_is_grpo_with_sequence_ratios(self):
    logp, old_logp, _, mask, advantages = _batch()
    logp, old_logp, advantages = _f32(logp, old_logp, advantages)
    results = [
      _loss_and_gradient(
        logp, mask, advantages, config,
        objectives.mini_batch_normalizers(mask), old_logp, None,
      )
      for config in (
        ObjectiveConfig(loss_type="gspo"),
        ObjectiveConfig(importance_sampling_level="sequence"),
      )
    ]  # fmt: skip
    jax.tree.map(np.testing.assert_array_equal, *results)

  @parameterized.parameters(*_LOSS_TYPES)
  def test_micro_batches_sum_to_the_mini_batch(self, loss_type):
    # Uneven, and through groups of 4 (samples 0-3 and 4-6).
    sizes = (1, 4, 2)
    config = _config(loss_type=loss_type, beta=0.1, epsilon=0.1)
    *arrays, mask, advantages = _batch(seed=7, n=7)
    logp, old_logp, ref_logp, advantages = _f32(*arrays, advantages)
    normalizers = objectives.mini_batch_normalizers(mask)

    def run(rows):
      return _loss_and_gradient(
        logp[rows], mask[rows], advantages[rows], config, normalizers,
        old_logp[rows], ref_logp[rows], -logp[rows],
      )  # fmt: skip

    value, metrics, gradient = run(slice(None))
    ends = list(itertools.accumulate(sizes, initial=0))
    parts = [run(slice(*ends[i : i + 2])) for i in range(len(sizes))]
    np.testing.assert_allclose(sum(p[0] for p in parts), value, atol=1e-6)
    np.testing.assert_allclose(
      np.concatenate([p[2] for p in parts]), gradient, atol=1e-6
    )
    merged = functools.reduce(lambda a, b: a.merge(b), [p[1] for p in parts])
    whole = metrics.finalize()
    for name, number in merged.finalize().items():
      np.testing.assert_allclose(
        number, whole[name], rtol=1e-6, atol=1e-6, err_msg=name
      )

  @parameterized.parameters(*_LOSS_TYPES)
  def test_padding_changes_nothing(self, loss_type):
    config = _config(loss_type=loss_type, beta=0.1)
    *arrays, mask, advantages = _batch(n=4)
    normalizers = objectives.mini_batch_normalizers(mask)
    value, _, gradient = _loss_and_gradient(
      *_f32(arrays[0], mask, advantages), config, normalizers,
      *_f32(*arrays[1:]),
    )  # fmt: skip
    # Two padding rows, three padding columns, NaN wherever nothing counts.
    widen = lambda x: np.pad(x, ((0, 2), (0, 3)))
    mask = widen(mask)
    arrays = [np.where(mask, widen(a), np.nan) for a in arrays]
    advantages = np.append(advantages, [np.nan, np.nan])
    padded_normalizers = objectives.mini_batch_normalizers(
      jnp.asarray(mask), num_sequences=4
    )
    jax.tree.map(np.testing.assert_array_equal, normalizers, padded_normalizers)
    padded_value, _, padded_gradient = _loss_and_gradient(
      *_f32(arrays[0], mask, advantages), config, padded_normalizers,
      *_f32(*arrays[1:]),
    )  # fmt: skip
    np.testing.assert_allclose(padded_value, value, rtol=1e-6)
    np.testing.assert_allclose(padded_gradient[:4, :7], gradient, rtol=1e-6)
    outside = np.asarray(padded_gradient)[~mask]
    np.testing.assert_array_equal(outside, np.zeros_like(outside))

  @parameterized.parameters(*_LOSS_TYPES)
  def test_no_tokens_at_all(self, loss_type):
    mask = jnp.zeros((2, 3))
    value, metrics, gradient = _loss_and_gradient(
      mask, mask, jnp.ones(2), _config(loss_type=loss_type),
      objectives.mini_batch_normalizers(mask), None, None,
    )  # fmt: skip
    self.assertEqual(float(value), 0.0)
    np.testing.assert_array_equal(gradient, np.zeros((2, 3)))
    self.assertEqual(set(metrics.finalize().values()), {0.0})

  @parameterized.parameters("grpo", "gspo")
  def test_far_old_policy_stays_finite(self, loss_type):
    logp, old_logp, advantages = _f32(
      [[-1.0, -2.0], [-1.0, -2.0]], [[-101.0, -99.0]] * 2, [1.0, -1.0]
    )
    mask = jnp.ones((2, 2))
    value, metrics, gradient = _loss_and_gradient(
      logp, mask, advantages, _config(loss_type=loss_type),
      objectives.mini_batch_normalizers(mask), old_logp, None,
    )  # fmt: skip
    for number in jax.tree.leaves((value, metrics, gradient)):
      self.assertTrue(np.isfinite(number).all(), number)
    np.testing.assert_array_equal(gradient, np.zeros((2, 2)))

  def test_bfloat16_log_probs_are_widened_first(self):
    *arrays, mask, advantages = _batch()
    rounded = [jnp.asarray(a, jnp.bfloat16) for a in (*arrays, advantages)]
    config = _config(beta=0.1)
    normalizers = objectives.mini_batch_normalizers(mask)

    def run(logp, old_logp, ref_logp, advantages):
      return _loss_and_gradient(
        logp, mask, advantages, config, normalizers, old_logp, ref_logp
      )[0]

    narrow, wide = run(*rounded), run(*_f32(*rounded))
    self.assertEqual(narrow.dtype, jnp.float32)
    np.testing.assert_array_equal(narrow, wide)

  def test_inputs_that_disagree(self):
    logp = jnp.zeros((2, 3))
    normalizers = objectives.mini_batch_normalizers(jnp.ones((2, 3)))

    def run(mask_shape=(2, 3), advantages_shape=(2,), beta=0.0, **kwargs):
      objectives.policy_loss(
        logp, jnp.ones(mask_shape), jnp.ones(advantages_shape),
        _config(beta=beta), normalizers, **kwargs,
      )  # fmt: skip

    with self.assertRaisesRegex(ValueError, r"mask: .*\(2, 3\).*\(2, 4\)"):
      run(mask_shape=(2, 4))
    with self.assertRaisesRegex(ValueError, r"advantages: .*\(2,\).*\(2, 1\)"):
      run(advantages_shape=(2, 1))
    with self.assertRaisesRegex(ValueError, r"old_logp: .*\(2, 3\).*\(3,\)"):
      run(old_logp=jnp.ones(3))
    with self.assertRaisesRegex(ValueError, "beta=0.1 needs ref_logp"):
      run(beta=0.1)


class ConfigTest(parameterized.TestCase):
  @parameterized.parameters(
    ({"loss_type": "ppo"}, "loss_type='ppo': expected one of grpo, bnpo"),
    ({"loss_type": None}, "loss_type=None: expected one of grpo"),
    ({"kl_estimator": "k4"}, "kl_estimator='k4': expected one of k1, k2, k3"),
    ({"scale_rewards": "std"}, "scale_rewards='std': expected one of group"),
    ({"advantage_estimator": "gae"}, "advantage_estimator='gae'"),
    ({"importance_sampling_level": "word"}, "importance_sampling_level='word'"),
    ({"epsilon": 0.0}, "epsilon=0.0: expected between 0 and 1"),
    ({"epsilon": math.nan}, "epsilon=nan: expected between 0 and 1"),
    ({"epsilon_high": -0.1}, "epsilon_high=-0.1: expected a positive"),
    ({"beta": -1.0}, "beta=-1.0: expected 0 or a positive"),
    ({"max_completion_length": 0}, "max_completion_length=0: expected at"),
    (
      {"loss_type": "dr_grpo"},
      "loss_type=dr_grpo: max_completion_length is not set",
    ),
    (
      {"loss_type": "gspo", "importance_sampling_level": "token"},
      "importance_sampling_level=token: loss_type=gspo expects sequence",
    ),
    (
      {"advantage_estimator": "rloo", "scale_rewards": "group"},
      "scale_rewards=group: advantage_estimator=rloo expects none",
    ),
  )
  def test_bad_values_are_named(self, settings, message):
    with self.assertRaises(InputError) as caught:
      ObjectiveConfig(**settings)
    self.assertStartsWith(str(caught.exception), message)
    self.assertNotIn("\n", str(caught.exception))

  def test_defaults_follow_the_loss_type(self):
    config = ObjectiveConfig(max_completion_length=8, epsilon=0.1)
    gspo = dataclasses.replace(config, loss_type="gspo")
    dr_grpo = dataclasses.replace(gspo, loss_type="dr_grpo")
    self.assertEqual(config.reward_scale, "group")
    self.assertEqual(config.ratio_level, "token")
    self.assertEqual(gspo.ratio_level, "sequence")
    self.assertEqual(gspo.reward_scale, "group")
    self.assertEqual(dr_grpo.ratio_level, "token")
    self.assertEqual(dr_grpo.reward_scale, "none")
    self.assertEqual(config.clip_range, (0.9, 1.1))
    wide = dataclasses.replace(config, epsilon_high=0.28)
    self.assertEqual(wide.clip_range, (0.9, 1.28))


if __name__ == "__main__":
  absltest.main()
