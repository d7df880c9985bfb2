"""Episodes of several turns: every schedule gives what whole sequences give."""

import dataclasses
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import numpy as np
import pytest

from rollplex_jax import samples
from rollplex_jax.models import shared_prefix
from rollplex_jax.stages import objectives
from tests.helpers import tiny_episodes, tiny_steps

_TEMPERATURE = tiny_steps._TEMPERATURE
_FROZEN, _TRAINED = ("text",), ("text", "visual")
_WINDOW = dict(name="rollplex", prefix_source="window", window_chunk=16)


def _steps():
  return tiny_steps.on_videos(4)


def _work(**kwargs):
  """A step whose episodes have up to four turns."""
  work = _steps().step(**kwargs)
  work.settings = dataclasses.replace(work.settings, max_turns=4)
  work.facts = dataclasses.replace(work.facts, has_turns=True)
  return work


class TurnsTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    steps = _steps()
    cls.episodes, cls.suffixes = tiny_episodes.play(_work())
    rows = np.arange(len(steps.batch.prompts))
    advantages = np.random.default_rng(0).normal(
        size=cls.episodes.completions.lengths.shape).astype(np.float32)
    cls.groups = samples.Groups.of(
        rows, cls.episodes.completions, advantages, cls.episodes.suffix,
        cls.episodes.media)
    cls.whole = tiny_episodes.Monolithic(
        steps.config, steps.batch.prompts, cls.suffixes)
    cls.want = {}

  def monolithic(self, trained):
    """Loss, gradient and reference log-probs of whole sequences."""
    if trained not in self.want:
      steps, whole, groups = _steps(), self.whole, self.groups
      pick = lambda params: tiny_episodes.pick(
          whole.logprobs(params, _TEMPERATURE), groups, steps.batch.prompts)
      ref = jax.jit(pick)(steps.reference(trained))
      mask = groups.mask.reshape(ref.shape).astype(np.float32)

      def loss(params):
        return objectives.policy_loss(
            pick(params), mask, groups.advantages.reshape(-1),
            tiny_steps._OBJECTIVE, objectives.mini_batch_normalizers(mask),
            ref_logp=ref)[0]

      value, grads = jax.jit(jax.value_and_grad(loss))(steps.params)
      self.want[trained] = value, {
          part: grads[part] for part in trained}, np.asarray(ref).reshape(
              groups.token_ids.shape)
    return self.want[trained]

  def test_episodes_are_ragged(self):
    turns = [len(s.texts) for group in self.suffixes for s in group]
    self.assertEqual(turns[:4], [3, 1, 4, 2])
    lengths = self.groups.suffix.lengths
    self.assertGreater(len(np.unique(lengths)), 8)
    # Some responses end by themselves, others are cut.
    responses = self.groups.lengths.sum()
    self.assertLess(responses, sum(turns) * tiny_steps.MAX_LENGTH)
    seen = [len(m.grids) for m in self.groups.media.reshape(-1)]
    self.assertIn(0, seen)
    self.assertGreater(max(seen), 2)

  def test_positions_are_those_of_one_conversation(self):
    whole, suffix = self.whole, self.groups.suffix
    prompts = _steps().batch.prompts
    for i in range(len(whole.token_ids)):
      b, g = divmod(i, 4)
      n = suffix.lengths[b, g]
      first = len(prompts[b].token_ids) - 1
      np.testing.assert_array_equal(
          suffix.positions[b, g, :n].T, whole.positions[:, i, first:first + n])
      np.testing.assert_array_equal(
          suffix.token_ids[b, g, :n], whole.token_ids[i, first:first + n])

  def test_mask_selects_response_tokens(self):
    for b, group in enumerate(self.suffixes):
      for g, sample in enumerate(group):
        said = " ".join(sample.texts).split()
        n = self.groups.lengths[b, g]
        self.assertEqual(
            said, list(map(str, self.groups.token_ids[b, g, :n])))

  def test_recorded_logprobs_are_those_of_whole_sequences(self):
    steps = _steps()
    want = tiny_episodes.pick(
        self.whole.logprobs(steps.params, _TEMPERATURE), self.groups,
        steps.batch.prompts)
    got = self.episodes.completions.logprobs
    np.testing.assert_allclose(got.reshape(want.shape), want, atol=1e-5)

  def test_equals_whole_sequences(self):
    self.check(trained=_TRAINED, micro=3, name="rollplex")

  @parameterized.parameters(
      dict(trained=_TRAINED, micro=16, share_prefix=False),
      dict(trained=_FROZEN, micro=5, share_prefix=False),
      dict(trained=_FROZEN),
      dict(trained=_FROZEN, micro=8, save="nothing", name="rollplex"),
      dict(trained=_TRAINED, micro=4, **_WINDOW))
  @pytest.mark.slow
  def test_every_schedule_equals_whole_sequences(self, **kwargs):
    self.check(**kwargs)

  def check(self, trained, **kwargs):
    work = _work(trained=trained, **kwargs)
    episodes, _ = tiny_episodes.play(work)
    np.testing.assert_array_equal(
        episodes.completions.token_ids, self.groups.token_ids)
    value, grads, ref = self.monolithic(trained)
    scored = work.score(self.groups)
    np.testing.assert_allclose(scored.ref_logprobs, ref, atol=1e-5)
    got, metrics, logprobs = work.gradient(scored, first=True)
    np.testing.assert_allclose(
        metrics.finalize()["actor/loss"], value, rtol=1e-5)
    np.testing.assert_allclose(
        logprobs, episodes.completions.logprobs, atol=1e-5)
    errors = tiny_steps.relative_errors(got, grads)
    self.assertLessEqual(max(errors.values()), 1e-5, msg=errors)

  @parameterized.parameters(
      ("feature_index", lambda a: np.where(a > 0, a - 1, a)),
      ("positions", lambda a: a + (a > 20)),
      ("predicts", lambda a: np.maximum(a - 1, 0)))
  @pytest.mark.slow
  def test_a_broken_suffix_is_found(self, field, change):
    broken = dataclasses.replace(self.groups, suffix=self.groups.suffix.replace(
        **{field: change(getattr(self.groups.suffix, field))}))
    work = _work(name="rollplex", trained=_TRAINED)
    tiny_episodes.play(work)
    _, grads, ref = self.monolithic(_TRAINED)
    got, *_ = work.gradient(
        dataclasses.replace(broken, ref_logprobs=ref), first=True)
    errors = tiny_steps.relative_errors(got, grads)
    self.assertGreater(max(errors.values()), 1e-3)

  def test_an_observation_is_added_whole_or_not_at_all(self):
    limit = 24
    episodes, suffixes = tiny_episodes.play(_work(), max_length=limit)
    cut = 0
    for group, longer in zip(suffixes, self.suffixes):
      for short, long in zip(group, longer):
        self.assertLessEqual(len(short) - 1, limit)
        got, want = (s.inputs()[0] for s in (short, long))
        np.testing.assert_array_equal(got, want[:len(got)])
        if len(short.texts) < len(long.texts):
          cut += 1
          self.assertFalse(short.finished)
          # No token of an observation's without all of its features.
          self.assertEqual(
              int((short.inputs()[2] >= 0).sum()),
              sum(int((p.feature_index >= 0).sum()) for p in short._media))
    self.assertGreater(cut, 3)
    self.assertEqual(
        [len(m.grids) for m in episodes.media.reshape(-1)],
        [sum(len(p.grids) for p in s._media) for g in suffixes for s in g])

  def test_an_observation_that_fits_exactly_is_added(self):
    suffix = self.suffixes[0][2]
    before = [len(p.token_ids) for p in suffix._media]
    # As long as the longest episode, with room for an answer of full length.
    room = len(suffix) - 1 - len(suffix.texts[-1].split()) + (
        tiny_steps.MAX_LENGTH)
    for limit, seen in ((room, len(before)), (room - 1, len(before) - 1)):
      _, got = tiny_episodes.play(_work(), max_length=limit)
      self.assertLen(got[0][2]._media, seen)

  def test_an_observation_that_is_refused_ends_its_episode(self):
    player = tiny_episodes.Player((3, 1, 4, 2))
    every = range(1 << 20)
    _, got = tiny_episodes.play(_work(), player, refused=every)
    self.assertEqual({len(s.texts) for group in got for s in group}, {1})
    # Those with one turn had nothing to see.
    expected = [n for n in range(16) if (3, 1, 4, 2)[n % 4] > 1]
    self.assertEqual(sorted(player.failed), expected)
    self.assertIn("row 0, turn 1: frames that", player.failed[0])

  def test_attention_to_a_history_in_blocks(self):
    """A prompt at a time gives what all give at once."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    b, g, r, heads, kv, h, p, s = 3, 2, 4, 4, 2, 8, 5, 6
    args = (
        draw(b, g, r, heads, h), draw(b, g, r, kv, h), draw(b, g, r, kv, h),
        (draw(b, kv, h, p), draw(b, kv, p, h)), np.array([5, 0, 3], np.int32),
        np.full((b, g), r, np.int32),
        (draw(b * g, kv, h, s), draw(b * g, kv, s, h), rng.random(
            (b * g, s)) < 0.6))
    want = shared_prefix.attend_suffixes(*args)
    with mock.patch.object(shared_prefix, "MANY_SCORES", 0):
      got = shared_prefix.attend_suffixes(*args)
    np.testing.assert_allclose(got, want, atol=1e-6)

  @pytest.mark.slow
  def test_a_longer_history_makes_room(self):
    with mock.patch.object(
        tiny_episodes, "_SEEN", (([], 2), ([("video", (3, 4, 4))], 30))):
      work = _work()
      _, suffixes = tiny_episodes.play(work)
      whole = tiny_episodes.Monolithic(
          _steps().config, _steps().batch.prompts, suffixes)
    logprobs = whole.logprobs(_steps().params, _TEMPERATURE)
    for i, suffix in enumerate(s for group in suffixes for s in group):
      _, recorded, predicts = suffix.response()
      first = len(_steps().batch.prompts[i // 4].token_ids)
      np.testing.assert_allclose(
          recorded, logprobs[i, first + predicts], atol=1e-5)


if __name__ == "__main__":
  absltest.main()
