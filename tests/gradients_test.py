"""Every schedule gives the gradient of whole sequences.

Each tensor is within 1e-5 of the norm of what one program over whole sequences
gives, and a program broken in one place is not. In bfloat16 see
`gradients_bfloat16_test.py`.
"""

import dataclasses
import itertools
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollplex_jax import programs
from rollplex_jax.models import decoder
from rollplex_jax.stages import response
from tests.helpers import tiny_steps

_TOLERANCE = 1e-5
# What is broken on purpose has to be off by far more.
_BROKEN = 1e-3
_FROZEN, _TRAINED = ("text",), ("text", "visual")
_UNSHARED = dict(share_prefix=False)
_SHARED = dict()
_ROLLOUT = dict(name="rollplex")
_APART = dict(name="disaggregated")
# Two units of a long prompt, which overlap.
_WINDOW = dict(name="rollplex", prefix_source="window", window_chunk=16)
_SAVES = ("layer_inputs", "offload", "nothing", "activations")
# By group size, samples per pass: part of a group (the last part is smaller,
# and filled up), one group, several.
_PASSES = {4: (3, 4, 8), 8: (5, 8, 16)}


def _combinations():
  """For every schedule, every pair of its other choices.

  Half of all combinations of group and pass, weights that learn, and what is
  saved: any two of these occur in all ways.
  """
  passes = [(group, micro) for group, micros in _PASSES.items()
            for micro in micros]
  for (i, (group, micro)), (j, trained) in itertools.product(
      enumerate(passes), enumerate((_FROZEN, _TRAINED))):
    yield dict(group=group, micro=micro, trained=trained, **_UNSHARED)
    for schedule, (k, save) in itertools.product(
        (_SHARED, _ROLLOUT, _WINDOW), enumerate(_SAVES)):
      if (i + j + k) % 2 == 0 and (schedule, save) != (_WINDOW, "activations"):
        yield dict(group=group, micro=micro, trained=trained, save=save,
                   **schedule)


class GradientsTest(parameterized.TestCase):

  def check(self, *, group, trained, **kwargs):
    work = tiny_steps.on_videos(group).step(trained=trained, **kwargs)
    completions = work.roll_out()
    np.testing.assert_array_equal(
        completions.token_ids, tiny_steps.completions(group).token_ids)
    for edges in (False, True):
      groups, value, grads = tiny_steps.case(group, trained, edges=edges)
      scored = work.score(dataclasses.replace(groups, ref_logprobs=None))
      np.testing.assert_allclose(
          scored.ref_logprobs, groups.ref_logprobs, atol=1e-5)
      got, metrics, logprobs = work.gradient(scored, first=True)
      np.testing.assert_allclose(
          metrics.finalize()["actor/loss"], value, rtol=1e-5)
      if not edges:
        np.testing.assert_allclose(logprobs, completions.logprobs, atol=1e-5)
      errors = tiny_steps.relative_errors(got, grads)
      self.assertLessEqual(max(errors.values()), _TOLERANCE, msg=errors)

  def test_prompts_and_responses_are_ragged(self):
    for group in _PASSES:
      batch = tiny_steps.on_videos(group).batch
      self.assertLen(set(batch.inputs.lengths), 4)
      self.assertEqual([len(p.grids) for p in batch.prompts], [1, 0, 3, 1])
      self.assertLen({int(t) for p in batch.prompts for t, _, _ in p.grids}, 4)
      # Windows of 16 patches, and some that the frame's edge cuts.
      windows = (batch.vision.window_index >= 0).sum(axis=1)
      self.assertEqual(set(windows) - {0}, {4, 8, 16})
      lengths = tiny_steps.completions(group).lengths
      self.assertGreater(len(np.unique(lengths)), 3)
      self.assertGreater(len(np.unique(lengths[3])), 1)

  @parameterized.parameters(
      dict(group=4, micro=16, trained=_TRAINED, **_UNSHARED),
      dict(group=8, micro=5, trained=_FROZEN, **_UNSHARED),
      dict(group=4, micro=8, trained=_FROZEN, **_SHARED),
      dict(group=8, micro=4, trained=_TRAINED, save="offload", **_SHARED),
      dict(group=4, micro=4, trained=_TRAINED, save="nothing", **_SHARED),
      dict(group=8, micro=4, trained=_FROZEN, save="activations", **_SHARED),
      dict(group=4, micro=4, trained=_TRAINED, **_APART),
      dict(group=8, micro=5, trained=_FROZEN, share_prefix=False, **_APART),
      dict(group=4, micro=4, trained=_TRAINED, **_ROLLOUT),
      dict(group=8, micro=4, trained=_FROZEN, save="offload", **_ROLLOUT),
      dict(group=4, micro=8, trained=_FROZEN, save="nothing", **_ROLLOUT),
      dict(group=8, micro=5, trained=_TRAINED, save="activations", **_ROLLOUT),
      dict(group=8, micro=4, trained=_TRAINED, **_WINDOW),
      dict(group=8, micro=5, trained=_FROZEN, save="offload", **_WINDOW),
      dict(group=4, micro=8, trained=_FROZEN, save="nothing", **_WINDOW))
  def test_equals_monolithic(self, **kwargs):
    self.check(**kwargs)

  @parameterized.parameters(
      dict(micro=5, **_UNSHARED), dict(**_SHARED), dict(micro=8, **_ROLLOUT),
      dict(micro=5, trained=_TRAINED, **_WINDOW))
  def test_same_tokens_are_sampled(self, **kwargs):
    steps, want = tiny_steps.on_videos(8), tiny_steps.completions(8)
    got = steps.step(**kwargs).roll_out()
    np.testing.assert_array_equal(got.token_ids, want.token_ids)
    np.testing.assert_array_equal(got.lengths, want.lengths)
    np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-5)

  @parameterized.parameters(*_combinations())
  @pytest.mark.slow
  def test_every_pair_of_choices_equals_monolithic(self, **kwargs):
    self.check(**kwargs)


def _lengths_of_prefixes(change):
  """`response._attend` with `change`d lengths of prefixes int32 [B]."""
  attend = response._attend

  def broken(q, k, v, *, prefix_kv, lengths):
    return attend(q, k, v, prefix_kv=prefix_kv,
                  lengths=(change(lengths[0]), lengths[1]))

  return mock.patch.object(response, "_attend", broken)


def _one_token_short():
  return _lengths_of_prefixes(lambda lengths: lengths - 1)


def _one_token_twice():
  """The last prompt token, which is the suffix's, counts as prefix too."""
  return _lengths_of_prefixes(lambda lengths: lengths + 1)


def _member_lost():
  """Same values, but no gradient from a group's first sample to the prefix."""
  attend = response._attend

  def broken(q, k, v, *, prefix_kv, lengths):
    whole, _ = attend(q, k, v, prefix_kv=prefix_kv, lengths=lengths)
    cut, _ = attend(q, k, v, prefix_kv=jax.lax.stop_gradient(prefix_kv),
                    lengths=lengths)
    first = (jnp.arange(q.shape[1]) == 0)[:, None, None]
    return jnp.where(first, cut, whole), None

  return mock.patch.object(response, "_attend", broken)


def _part_lost():
  """What the first pass of a step gives to the prefix does not reach it."""
  gradient, passes = programs.gradient_suffix, itertools.count()

  def broken(*args, **kwargs):
    grads, kv_grads, *rest = gradient(*args, **kwargs)
    if next(passes) == 0:
      kv_grads = jax.tree.map(jnp.zeros_like, kv_grads)
    return grads, kv_grads, *rest

  return mock.patch.object(programs, "gradient_suffix", broken)


def _positions(change):
  """`decoder.rope` of `change`d positions int32 [3, B, T]."""
  rope = decoder.rope
  return mock.patch.object(
      decoder, "rope", lambda config, positions: rope(config, change(positions)))


def _temporal_only():
  return _positions(lambda positions: positions[:1])


def _suffix_positions(change):
  """`response.suffix_inputs` with `change`d positions."""
  inputs = response.suffix_inputs

  def broken(prompts, responses):
    token_ids, positions = inputs(prompts, responses)
    return token_ids, change(prompts, positions)

  return mock.patch.object(response, "suffix_inputs", broken)


def _suffix_counts_tokens():
  """As if a prompt's pictures took as many positions as they have tokens."""
  def change(prompts, positions):
    count = jnp.arange(positions.shape[-1]) + prompts.lengths[:, None] - 1
    return jnp.broadcast_to(count, positions.shape)
  return _suffix_positions(change)


def _suffix_off_by_one():
  return _suffix_positions(lambda _, positions: positions.at[..., 1:].add(1))


class BrokenProgramsTest(parameterized.TestCase):
  """The same comparison, of programs that are broken in one place."""

  @parameterized.parameters(
      (_one_token_short, _SHARED), (_one_token_twice, _SHARED),
      (_member_lost, _SHARED), (_temporal_only, _SHARED),
      (_suffix_counts_tokens, _SHARED), (_suffix_off_by_one, _SHARED),
      (_part_lost, dict(micro=4, **_ROLLOUT)))
  def test_is_found(self, broken, kwargs):
    steps = tiny_steps.on_videos(8)
    groups, _, grads = tiny_steps.case(8, _FROZEN, edges=False)
    work = steps.step(**{"micro": 16, **kwargs})
    work.roll_out()
    # Programs are kept by their settings: a new one makes new programs.
    work.settings = dataclasses.replace(
        work.settings, config=dataclasses.replace(
            steps.config, eos_token_ids=(broken.__name__,)))
    with broken():
      got, _, _ = work.gradient(groups, first=True)
    errors = tiny_steps.relative_errors(got, grads)
    self.assertGreater(max(errors.values()), _BROKEN)


if __name__ == "__main__":
  absltest.main()
