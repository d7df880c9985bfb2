"""The stages through the attention kernels, as they run on a GPU.

The kernels are interpreted; what they must equal is the plain way, which every
other test of the stages takes.
"""

import contextlib
import dataclasses
import functools
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.shared_prefix_attention import api
from rollplex_jax.models import shared_prefix
from rollplex_jax.placement import sharding
from rollplex_jax.placement.sharding import MeshShape
from rollplex_jax.stages import prefix, response, rollout, window
from rollplex_jax.stages.prefix_units import UnitShape
from rollplex_jax.stages.response import GroupResponses
from rollplex_jax.stages.sampling import SamplingConfig, sample_keys
from tests.helpers import batches, devices, tiny_policy

_DEVICES = devices.use_virtual_devices()
_TOLERANCE = 1e-5
_G, _R = 2, 5


@contextlib.contextmanager
def _kernels():
  """The choice that a GPU makes, with interpreted kernels; counts choices."""
  chosen = mock.Mock(side_effect=lambda kernel, plain, *arrays: kernel(*arrays))
  with contextlib.ExitStack() as stack:
    for name in ("shared_prefix_attention", "shared_prefix_decode"):
      stack.enter_context(mock.patch.object(
          api, name, functools.partial(getattr(api, name), interpret=True)))
    stack.enter_context(
        mock.patch.object(shared_prefix, "_by_platform", chosen))
    yield chosen


def _both(function, *args, static=()):
  """What a function gives by parts, and through the kernels.

  It is wrapped anew each time, for jit knows nothing of the choice.
  """
  run = lambda: jax.jit(
      lambda *args: function(*args), static_argnums=static)(*args)
  plain = run()
  with _kernels() as chosen:
    kernel = run()
  return plain, kernel, chosen.call_count


class KernelsTest(parameterized.TestCase):

  def assert_near(self, got, want):
    """Each array of a tree differs by little, against its norm."""
    self.assertEqual(jax.tree.structure(got), jax.tree.structure(want))
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got),
                            jax.tree.leaves(want), strict=True):
      a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
      norm = max(np.linalg.norm(b), 1e-3)
      self.assertLess(np.linalg.norm(a - b) / norm, _TOLERANCE,
                      jax.tree_util.keystr(path))


class StagesTest(KernelsTest):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    # Heads of 16, the least that kernels take, and of 8, which they don't.
    cls.small = small = tiny_policy.config()
    cls.config = dataclasses.replace(
        small,
        text=dataclasses.replace(
            small.text, hidden_size=64, mrope_section=(2, 3, 3)),
        vision=dataclasses.replace(small.vision, out_hidden_size=64))
    cls.policy = tiny_policy.params(cls.config)
    cls.prompts, _ = batches.prompt_inputs(
        cls.config, tiny_policy.prompts(cls.config))
    # One prompt without a prefix, and a row of padding.
    cls.prompts = dataclasses.replace(
        cls.prompts,
        lengths=jnp.asarray([int(cls.prompts.lengths[0]), 1, 0, 9], jnp.int32))
    cls.kv = jax.jit(prefix.prefix_kv, static_argnums=1)(
        cls.policy["text"], cls.config, cls.prompts, None)[0]
    rng = np.random.default_rng(0)
    cls.responses = GroupResponses(
        token_ids=jnp.asarray(rng.integers(2, 50, (4, _G, _R)), jnp.int32),
        lengths=jnp.asarray([[_R, 3], [1, 4], [0, 0], [0, _R]], jnp.int32))
    cls.keys = sample_keys(0, 0, cls.prompts.row_ids, _G)

  def gradient(self, responses, remat=False):
    """A function of policy and prefixes: loss, log-probs and gradients."""
    weights = jnp.asarray(np.random.default_rng(1).normal(
        size=responses.token_ids.shape), jnp.float32)

    def loss_fn(logprobs, entropy):
      value = logprobs * weights + 0.1 * entropy
      return jnp.sum(value * responses.mask), logprobs * responses.mask

    def function(policy, kv):
      return response.loss_and_grad(
          policy, {}, self.config, self.prompts, kv, responses, loss_fn,
          remat=remat, with_entropy=True)

    return function

  @parameterized.parameters(False, True)
  def test_response(self, remat):
    plain, kernel, count = _both(
        self.gradient(self.responses, remat), self.policy, self.kv)
    self.assertGreater(count, 0)
    self.assert_near(kernel, plain)
    grads = jax.tree.leaves((kernel[1], kernel[2]))
    self.assertTrue(any(np.any(g) for g in grads))

  def test_rows_past_the_end_have_no_influence(self):
    """Whatever stands there, in tokens and in what attention gives."""
    past = jnp.arange(_R) >= self.responses.lengths[..., None]
    changed = self.responses.replace(
        token_ids=jnp.where(past, 7, self.responses.token_ids))
    attend = shared_prefix.attend_suffixes

    def filled(q, *args):
      return jnp.where(past[..., None, None], 3.0, attend(q, *args))

    run = lambda responses: jax.jit(self.gradient(responses))(
        self.policy, self.kv)
    want = run(self.responses)
    with mock.patch.object(shared_prefix, "attend_suffixes", filled):
      self.assert_near(run(changed), want)

  def sampling(self):
    return SamplingConfig(max_completion_length=_R, eos_token_ids=(1, 2, 3))

  def assert_same_completions(self, got, want):
    np.testing.assert_array_equal(got.token_ids, want.token_ids)
    np.testing.assert_array_equal(got.lengths, want.lengths)
    self.assert_near(got.logprobs, want.logprobs)

  def test_decode(self):
    plain, kernel, count = _both(
        rollout.decode, self.policy, self.config, self.sampling(),
        self.prompts, self.kv, self.keys, static=(1, 2))
    self.assertEqual(count, 2)
    self.assert_same_completions(kernel, plain)

  def test_window_writes_later(self):
    """Beside a reference a step doesn't write the entry that it attends to."""
    buffers = window.allocate(
        self.config.text, 4, self.prompts.token_ids.shape[1], np.float32,
        policy=False, layer_inputs=False, reference=True)
    plain, kernel, _ = _both(
        window.run_window, self.policy["text"], self.policy["text"],
        self.config, self.sampling(),
        window.WindowConfig(unit=UnitShape(chunk=8, rows=4, key_extents=1)),
        self.prompts, self.kv, None, None, self.keys, buffers,
        static=(2, 3, 4))
    self.assertGreater(int(plain[2].with_reference), 1)
    self.assert_same_completions(kernel[0], plain[0])
    self.assert_near(kernel[1:], plain[1:])

  @parameterized.parameters(0, 3)
  def test_step(self, index):
    """Writing an entry first gives the same as joining it."""
    rng = np.random.default_rng(2)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    q, k, v = draw(4, _G, 4, 16), draw(4, _G, 2, 16), draw(4, _G, 2, 16)
    suffix = draw(4 * _G, 2, 16, _R), draw(4 * _G, 2, _R, 16)
    outs = []
    for write in (True, False):
      plain, kernel, _ = _both(
          lambda index, write=write: rollout.attend_step(
              q, k, v, prefix=self.kv[0], suffix=suffix, index=index,
              prefix_lengths=self.prompts.lengths - 1, write=write),
          jnp.int32(index))
      self.assert_near(kernel, plain)
      outs.append(kernel[0])
    self.assert_near(*outs)

  def test_small_heads_are_left_to_parts(self):
    policy = tiny_policy.params(self.small)
    kv = jax.eval_shape(
        lambda: prefix.prefix_kv(
            policy["text"], self.small, self.prompts, None)[0])
    with _kernels() as chosen:
      jax.jit(response.response_logprobs, static_argnums=1).trace(
          policy, self.small, self.prompts, kv, self.responses)
    chosen.assert_not_called()

  def test_supports(self):
    for head_dim, dtype, wanted in (
        (8, jnp.float32, False), (16, jnp.float32, True),
        (80, jnp.bfloat16, True), (100, jnp.bfloat16, False),
        (128, jnp.bfloat16, True), (160, jnp.bfloat16, False),
        (64, jnp.float16, False)):
      self.assertEqual(api.supports(head_dim, dtype), wanted, head_dim)


class MeshTest(KernelsTest):

  @parameterized.named_parameters(
      ("coarser_kv", MeshShape(data=2, tp_major=2, tp_minor=2), 2, 8, 2, True),
      # A device's queries need one head of two; prompts don't divide.
      ("whole_kv", MeshShape(data=2, tp_major=4), 3, 8, 2, True),
      ("some_of_whole_kv", MeshShape(data=2, tp_major=4), 2, 12, 3, False),
  )
  def test_split(self, shape, b, num_heads, num_kv, split):
    rules = sharding.make_rules(
        shape, dict(embed=16 * num_heads, vocab=64, heads=num_heads,
                    kv_heads=num_kv, mlp=64), sharding.TENSOR_AXES, what="test")
    mesh = shape.make(_DEVICES[:shape.size])
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    kv = draw(b, num_kv, 16, 11), draw(b, num_kv, 11, 16)
    lengths = jnp.asarray(rng.integers(0, 12, b), jnp.int32)
    q, k, v, grad = (draw(b, _G, _R, n, 16)
                     for n in (num_heads, num_kv, num_kv, num_heads))
    one, *own = (draw(b, _G, n, 16) for n in (num_heads, num_kv, num_kv))
    suffix = draw(b * _G, num_kv, 16, _R), draw(b * _G, num_kv, _R, 16)
    everything = jnp.full((b, _G), _R, jnp.int32)

    def suffixes(q, k, v, kv, grad):
      out, pull = jax.vjp(
          lambda *floats: shared_prefix.attend_suffixes(
              *floats, lengths, everything), q, k, v, kv)
      return out, pull(grad)

    def step(one, kv, suffix, own):
      return shared_prefix.attend_one(
          one, kv, suffix, lengths, jnp.int32(3), own)

    def under(function, rules):
      def run(*args):
        with sharding.use(mesh, rules):
          return function(*args)
      return run

    for function, args in ((suffixes, (q, k, v, kv, grad)),
                           (step, (one, kv, suffix, own))):
      plain = jax.jit(function)(*args)
      _, kernel, count = _both(under(function, rules), *args)
      self.assertEqual(count, split)
      self.assert_near(kernel, plain)
      # Without rules nobody knows how the compiler splits.
      with _kernels() as chosen:
        jax.jit(under(function, None)).trace(*args)
      chosen.assert_not_called()


if __name__ == "__main__":
  absltest.main()
