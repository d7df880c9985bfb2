"""The decode window against decoding and prefix work done in sequence."""

import dataclasses

from absl.testing import absltest, parameterized
import jax
import numpy as np

from rollplex_jax.models import vlm
from rollplex_jax.placement.mesh import MeshConfig, make_places
from rollplex_jax.stages import prefix, prefix_units, rollout, window
from rollplex_jax.stages.prefix_units import UnitShape
from rollplex_jax.stages.sampling import SamplingConfig, sample_keys
from rollplex_jax.stages.window import WindowConfig
from tests.helpers import batches, devices, tiny_policy

_DEVICES = devices.use_virtual_devices()
_B, _R = 4, 6
# As many tokens as are in the vocabulary: any of them ends a completion.
_EVERYTHING = tuple(range(60))

_decode = jax.jit(rollout.decode, static_argnums=(1, 2))
_prefix = jax.jit(prefix.prefix_kv, static_argnums=1)
_features = jax.jit(vlm.vision_features, static_argnums=1)
_window = jax.jit(window.run_window, static_argnums=(2, 3, 4),
                  donate_argnames="artifacts")


class WindowTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.config = tiny_policy.config(num_hidden_layers=3)
    cls.policy = tiny_policy.params(cls.config, seed=0)
    cls.reference = tiny_policy.params(cls.config, seed=7)
    cls.prompts, vision = batches.prompt_inputs(
        cls.config, tiny_policy.prompts(cls.config))
    cls.length = cls.prompts.token_ids.shape[1]
    cls.features = _features(cls.policy, cls.config, vision)
    cls.reference_features = _features(cls.reference, cls.config, vision)
    cls.kv, cls.inputs = _prefix(
        cls.policy["text"], cls.config, cls.prompts, cls.features)
    cls.reference_kv, _ = _prefix(
        cls.reference["text"], cls.config, cls.prompts, cls.reference_features)

  def sampling(self, **kwargs):
    return SamplingConfig(**{
        "max_completion_length": _R, "eos_token_ids": (1, 2, 3, 4, 5),
        "banned_token_ids": self.config.vision_token_ids, **kwargs})

  def keys(self, group):
    return sample_keys(0, 0, self.prompts.row_ids, group)

  def buffers(self, policy=True, reference=True, layer_inputs=True):
    return window.allocate(
        self.config.text, _B, self.length, np.float32, policy=policy,
        layer_inputs=layer_inputs, reference=reference)

  def run_window(self, sampling, buffers, *, group=3, streams=False,
                 prompts=None, reference=None, **unit):
    return _window(
        self.policy["text"], reference or self.reference["text"], self.config,
        sampling, WindowConfig(unit=UnitShape(**unit), streams=streams),
        prompts or self.prompts, self.kv, self.features,
        self.reference_features, self.keys(group), buffers)

  def num_units(self, chunk, rows):
    """Counted by hand: chunks that the longest prefix of the rows needs."""
    lengths = np.asarray(self.prompts.lengths) - 1
    starts = [min(i, _B - rows) for i in range(0, _B, rows)]
    return sum(-(-max(lengths[i:i + rows]) // chunk) for i in starts)

  def assert_same_prefix(self, got, want, lengths=None):
    """Compares keys and values where a suffix reads them."""
    lengths = np.asarray(
        self.prompts.lengths if lengths is None else lengths)
    self.assertLen(got, len(want))
    for (k, v), (k2, v2) in zip(got, want):
      for b, n in enumerate(np.maximum(lengths - 1, 0)):
        np.testing.assert_allclose(k[b, ..., :n], k2[b, ..., :n], atol=1e-5)
        np.testing.assert_allclose(v[b, :, :n], v2[b, :, :n], atol=1e-5)

  def assert_same_inputs(self, got, want):
    self.assertLen(got, len(want))
    for x, y in zip(got, want):
      for b, n in enumerate(np.asarray(self.prompts.lengths) - 1):
        np.testing.assert_allclose(x[b, :n], y[b, :n], atol=1e-5)

  def assert_same_completions(self, got, want):
    np.testing.assert_array_equal(got.token_ids, want.token_ids)
    np.testing.assert_array_equal(got.lengths, want.lengths)
    np.testing.assert_array_equal(got.finished, want.finished)
    np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-5)

  def sequential(self, sampling, group):
    return _decode(self.policy, self.config, sampling, self.prompts, self.kv,
                   self.keys(group))

  @parameterized.parameters(
      (1, 1, 4), (1, 7, 1), (3, 4, 2), (3, 10, 3), (3, 99, 9))
  def test_equals_sequence(self, group, chunk, rows):
    # Chunks that divide the padded length and don't, one token and the whole;
    # micro-batches that divide the batch and don't.
    sampling = self.sampling()
    done, artifacts, turns = self.run_window(
        sampling, self.buffers(), group=group, chunk=chunk, rows=rows)
    want = self.sequential(sampling, group)
    self.assertGreater(len(np.unique(want.lengths)), 1)
    self.assert_same_completions(done, want)
    self.assert_same_prefix(artifacts.policy.kv, self.kv)
    self.assert_same_inputs(artifacts.policy.layer_inputs, self.inputs)
    self.assert_same_prefix(artifacts.reference.kv, self.reference_kv)
    self.assertIsNone(artifacts.reference.layer_inputs)
    units = self.num_units(min(chunk, self.length), min(rows, _B))
    self.assertEqual(turns.with_policy + turns.policy, units)
    self.assertEqual(turns.with_reference + turns.reference, units)
    self.assertEqual(turns.with_policy + turns.with_reference + turns.decode,
                     np.max(want.lengths))

  def test_shapes_cover_the_cases(self):
    longest = int(self.prompts.lengths.max()) - 1
    self.assertEqual(self.length % 4, 0)
    # The last chunk of 10 would pass the end, and is moved back.
    self.assertGreater(-(-longest // 10) * 10, self.length)
    # Some prompt is so much shorter than the rest that it has fewer units.
    self.assertLess(self.num_units(1, 1), _B * longest)

  @parameterized.named_parameters(
      # name, what is wanted, chunk, rows, ending tokens, turns of the loops
      ("policy_outlasts", (True, False), 2, 2, _EVERYTHING, (1, 0, -1, 0, 0)),
      ("reference_outlasts", (False, True), 2, 2, _EVERYTHING,
       (0, 1, 0, -1, 0)),
      ("decode_outlasts_policy", (True, False), 99, 2, (), (2, 0, 0, 0, 4)),
      ("decode_outlasts_reference", (False, True), 99, 2, (),
       (0, 2, 0, 0, 4)),
      ("decode_outlasts_both", (True, True), 99, 2, (), (2, 2, 0, 0, 2)),
      ("ends_in_policy", (True, True), 2, 2, _EVERYTHING, (1, 0, -1, -2, 0)),
      ("ends_in_reference", (True, True), 8, 4, (), None),
      ("nothing_to_do", (False, False), 8, 2, (), (0, 0, 0, 0, 6)),
  )
  def test_loops(self, wanted, chunk, rows, eos, expected):
    policy, reference = wanted
    sampling = self.sampling(eos_token_ids=eos)
    done, artifacts, turns = self.run_window(
        sampling, self.buffers(policy, reference), chunk=chunk, rows=rows)
    self.assert_same_completions(done, self.sequential(sampling, 3))
    self.assertEqual(artifacts.policy is not None, policy)
    self.assertEqual(artifacts.reference is not None, reference)
    if policy:
      self.assert_same_prefix(artifacts.policy.kv, self.kv)
      self.assert_same_inputs(artifacts.policy.layer_inputs, self.inputs)
    if reference:
      self.assert_same_prefix(artifacts.reference.kv, self.reference_kv)
    units = self.num_units(min(chunk, self.length), rows)
    if expected is None:  # Policy units fit in, reference units partly.
      self.assertLess(units, _R)
      self.assertGreater(2 * units, _R)
      expected = (units, _R - units, 0, 2 * units - _R, 0)
    # -1 stands for the units that are left, -2 for all of them.
    expected = [{-1: units - 1, -2: units}.get(n, n) for n in expected]
    self.assertEqual([int(n) for n in (
        turns.with_policy, turns.with_reference, turns.policy,
        turns.reference, turns.decode)], expected)

  @parameterized.parameters(True, False)
  def test_reference_beside_decode(self, streams):
    # Several chunks, one of them moved back, all while decoding goes on.
    sampling = self.sampling(eos_token_ids=())
    done, artifacts, turns = self.run_window(
        sampling, self.buffers(False, True), streams=streams, chunk=10, rows=2)
    self.assertGreater(turns.with_reference, 3)
    self.assertEqual(turns.reference, 0)
    self.assert_same_completions(done, self.sequential(sampling, 3))
    self.assert_same_prefix(artifacts.reference.kv, self.reference_kv)

  @parameterized.parameters(1, 2, 3)
  def test_key_extents_do_not_change_numbers(self, extents):
    sampling = self.sampling()
    done, artifacts, _ = self.run_window(
        sampling, self.buffers(), chunk=5, rows=2, key_extents=extents)
    self.assert_same_completions(done, self.sequential(sampling, 3))
    self.assert_same_prefix(artifacts.policy.kv, self.kv)
    self.assert_same_prefix(artifacts.reference.kv, self.reference_kv)

  def test_short_and_empty_prompts_need_no_units(self):
    lengths = np.array([9, 1, 0, 2], np.int32)
    prompts = dataclasses.replace(self.prompts, lengths=lengths)
    sampling = self.sampling(eos_token_ids=())
    done, artifacts, turns = self.run_window(
        sampling, self.buffers(), prompts=prompts, chunk=4, rows=1)
    np.testing.assert_array_equal(done.lengths, [[_R] * 3, [_R] * 3, [0] * 3,
                                                 [_R] * 3])
    self.assertEqual(turns.with_policy + turns.policy, 2 + 0 + 0 + 1)
    self.assert_same_prefix(artifacts.policy.kv, self.kv, lengths)
    self.assert_same_prefix(
        artifacts.reference.kv, self.reference_kv, lengths)

  def test_buffers_are_written_in_place(self):
    buffers = self.buffers()
    pointers = {a.unsafe_buffer_pointer() for a in jax.tree.leaves(buffers)}
    _, artifacts, _ = self.run_window(
        self.sampling(), buffers, chunk=4, rows=2)
    self.assertTrue(all(a.is_deleted() for a in jax.tree.leaves(buffers)))
    self.assertEqual(pointers, {
        a.unsafe_buffer_pointer() for a in jax.tree.leaves(artifacts)})

  def test_loops_copy_no_buffer(self):
    sampling = self.sampling()
    text = _window.lower(
        self.policy["text"], self.reference["text"], self.config, sampling,
        WindowConfig(unit=UnitShape(chunk=4, rows=2)), self.prompts, self.kv,
        self.features, self.reference_features, self.keys(3), self.buffers(),
    ).compile().as_text()
    t, p = self.config.text, self.length
    k, h = t.num_key_value_heads, t.head_dim
    sizes = [f"[{_B},{k},{h},{p}]", f"[{_B},{k},{p},{h}]",
             f"[{_B},{p},{t.hidden_size}]", f"[{3 * _B},{k},{h},{_R}]",
             f"[{3 * _B},{k},{_R},{h}]"]
    copies = [line for line in text.splitlines() if " copy(" in line and any(
        size in line.split(" copy(")[0] for size in sizes)]
    # What is copied is copied once, on the way in, never in a loop.
    self.assertEmpty([line for line in copies if "while/body" in line])

  def test_one_program_for_all_lengths(self):
    sampling = self.sampling(top_k=3)
    before = _window._cache_size()
    for lengths in ([3, 9, 1, 5], [self.length] * 4, [0, 0, 0, 2]):
      prompts = dataclasses.replace(
          self.prompts, lengths=np.array(lengths, np.int32))
      self.run_window(sampling, self.buffers(), prompts=prompts, chunk=4,
                      rows=2)
    self.assertEqual(_window._cache_size(), before + 1)

  def test_reference_does_no_dead_work(self):
    """The last layer's output projection and MLP are not even read."""
    text = self.reference["text"]
    *rest, last = text["layers"]
    broken = {k: v * np.nan if k in ("o", "gate", "up", "down", "mlp_norm")
              else v for k, v in last.items()}
    reference = {**text, "layers": [*rest, broken], "norm": None}
    reference.pop("head", None)
    for eos in ((), _EVERYTHING):
      _, artifacts, _ = self.run_window(
          self.sampling(eos_token_ids=eos), self.buffers(False, True),
          reference=reference, chunk=4, rows=2)
      self.assert_same_prefix(artifacts.reference.kv, self.reference_kv)

  @parameterized.parameters(True, False)
  def test_tensor_parallel(self, streams):
    places = make_places(
        MeshConfig(training_tp=2, rollout_tp=2), vlm.axis_sizes(self.config),
        _DEVICES[:2])
    sampling = self.sampling()
    run = jax.jit(window.shard_window(
        places.rollout, self.config, sampling, WindowConfig(
            unit=UnitShape(chunk=4, rows=2), streams=streams)))
    done, artifacts, turns = run(
        self.policy["text"], self.reference["text"], self.prompts, self.kv,
        self.features, self.reference_features, self.keys(3), self.buffers())
    self.assert_same_completions(done, self.sequential(sampling, 3))
    self.assert_same_prefix(artifacts.policy.kv, self.kv)
    self.assert_same_inputs(artifacts.policy.layer_inputs, self.inputs)
    self.assert_same_prefix(artifacts.reference.kv, self.reference_kv)
    self.assertGreater(int(turns.with_reference[0] + turns.with_policy[0]), 0)
    # Each device keeps its part of what is saved.
    saved = artifacts.policy.layer_inputs[0]
    self.assertEqual(saved.sharding.shard_shape(saved.shape),
                     (_B, self.length, self.config.text.hidden_size // 2))

  def test_refusals(self):
    with self.assertRaisesRegex(ValueError, "chunk must be at least 1"):
      UnitShape(chunk=0)
    with self.assertRaisesRegex(ValueError, "need the reference's"):
      window.run_window(
          self.policy["text"], None, self.config, self.sampling(),
          WindowConfig(unit=UnitShape(chunk=4)), self.prompts, self.kv,
          self.features, None, self.keys(1), self.buffers())


class UnitsTest(absltest.TestCase):

  def test_short_prompts_share_a_unit(self):
    for tokens, length, chunk, rows in (
        (256, 2048, 256, 1), (256, 256, 256, 1), (256, 200, 200, 1),
        (256, 32, 32, 8), (7, 32, 7, 1), (512, 2112, 432, 1)):
      self.assertEqual(UnitShape.of_tokens(tokens, length),
                       UnitShape(chunk=chunk, rows=rows))

  def test_places(self):
    # Three micro-batches of two prompts; the last holds prompts 3 and 4.
    prompts, _ = batches.prompt_inputs(
        tiny_policy.config(),
        [tiny_policy.prompt(tiny_policy.config(), text=10)] * 5)
    p = prompts.token_ids.shape[1]
    prompts = dataclasses.replace(
        prompts, lengths=np.array([4, p, 0, 1, 7], np.int32))
    shape = UnitShape(chunk=5, rows=2)
    units = prefix_units.plan_units(prompts, shape)
    places = [prefix_units.locate(units, i, shape, p)
              for i in range(int(units.total))]
    full = [min(5 * i, p - 5) for i in range(-(-(p - 1) // 5))]
    # Prompts 2 and 3 need none; 6 tokens of prompt 4 are two units.
    self.assertEqual([(int(a.row), int(a.offset)) for a in places],
                     [(0, o) for o in full] + [(3, 0), (3, 5)])


if __name__ == "__main__":
  absltest.main()
