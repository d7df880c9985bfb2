"""What the policy computes, apart from parity: merging, padding, gradients."""

import dataclasses
import functools

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from rollplex_jax.models import decoder, inputs, vlm, weights
from rollplex_jax.models.config import ModelConfig
from tests.models import cases

CONFIG = ModelConfig.from_hf(cases.CONFIGS["published_like"])
TIED = ModelConfig.from_hf(cases.CONFIGS["merge_1_all_full"])


# One layer, a windowed and a full block: enough to differentiate.
SHALLOW = dataclasses.replace(
    CONFIG,
    text=dataclasses.replace(CONFIG.text, num_hidden_layers=1),
    vision=dataclasses.replace(CONFIG.vision, depth=2))


@functools.cache
def params_of(config):
  """Random parameters of which none is zero or one."""
  rng = np.random.default_rng(0)

  def draw(weight):
    mean = 1.0 if weight.init is weights.Init.ONES else 0.0
    return jnp.asarray(
        mean + rng.normal(size=weight.shape, scale=0.1), jnp.float32)

  return jax.tree.map(
      draw, vlm.weights(config), is_leaf=weights.is_weight)


class WeightsTest(parameterized.TestCase):

  @parameterized.parameters(*cases.CONFIGS)
  def test_random_and_abstract_trees_agree(self, name):
    config = ModelConfig.from_hf(cases.CONFIGS[name])
    tree = vlm.weights(config)
    for dtype in (jnp.float32, jnp.bfloat16):
      abstract = weights.abstract_params(tree, dtype)
      drawn = jax.eval_shape(
          lambda key, dtype=dtype: weights.init_params(tree, key, dtype),
          jax.random.key(0))
      self.assertEqual(jax.tree.structure(drawn), jax.tree.structure(abstract))
      for a, b in zip(jax.tree.leaves(drawn), jax.tree.leaves(abstract)):
        self.assertEqual((a.shape, a.dtype), (b.shape, b.dtype))
    self.assertEqual("head" in tree["text"],
                     not config.text.tie_word_embeddings)

  def test_initializers(self):
    params = jax.jit(lambda key: weights.init_params(
        decoder.weights(TIED.text), key))(jax.random.key(0))
    layer = params["layers"][0]
    np.testing.assert_array_equal(layer["attn_norm"], 1)
    np.testing.assert_array_equal(layer["q_bias"], 0)
    std = TIED.text.initializer_range
    self.assertBetween(float(np.std(layer["gate"])), 0.9 * std, 1.1 * std)
    self.assertGreater(np.abs(layer["gate"] - layer["up"]).min(), 0)

  @parameterized.parameters(
      dict(shape=(6, 4), transposed=True), dict(shape=(6, 4)),
      dict(shape=(6, 4), file_shape=(6, 2, 2)),
      dict(shape=(6, 4), part=(1, 3)), dict(shape=(6,), part=(2, 3)))
  def test_checkpoint_layout_inverts(self, **kwargs):
    axes = (None,) * len(kwargs["shape"])
    weight = weights.Weight(axes=axes, name="w", **kwargs)
    tensor = np.random.default_rng(0).normal(size=weight.checkpoint_shape)
    cut = weight.from_checkpoint(tensor)
    self.assertEqual(cut.shape, weight.shape)
    i, count = weight.part
    rows = len(tensor) // count
    np.testing.assert_array_equal(
        weight.to_checkpoint(cut), tensor[i * rows:(i + 1) * rows])


class MergingTest(absltest.TestCase):

  def test_features_stand_at_prompt_placeholders_only(self):
    params = params_of(CONFIG)
    table = np.asarray(params["text"]["embed"])
    features = jnp.asarray(np.random.default_rng(0).normal(
        size=(5, CONFIG.text.hidden_size)), jnp.float32)
    image, video = CONFIG.image_token_id, CONFIG.video_token_id
    # The last two were sampled into a response: they are tokens like others.
    tokens = jnp.array([[7, image, image, 8, image, video],
                        [video, 9, video, 7, 7, 7]])
    index = jnp.array([[-1, 0, 1, -1, -1, -1], [3, -1, 2, -1, -1, -1]])
    x = np.asarray(decoder.embed(params["text"], tokens, features, index))
    np.testing.assert_array_equal(x[0, 1:3], features[0:2])
    np.testing.assert_array_equal(x[1, [0, 2]], features[jnp.array([3, 2])])
    np.testing.assert_array_equal(x[0, 4], table[image])
    np.testing.assert_array_equal(x[0, 5], table[video])
    np.testing.assert_array_equal(x[0, [0, 3]], table[[7, 8]])

  def test_without_features_placeholders_are_tokens(self):
    params = params_of(CONFIG)
    tokens = jnp.array([[CONFIG.image_token_id, 3]])
    np.testing.assert_array_equal(
        decoder.embed(params["text"], tokens),
        params["text"]["embed"][tokens])


class VisionPlanTest(parameterized.TestCase):

  @parameterized.parameters(*cases.CONFIGS)
  def test_every_patch_has_one_slot(self, name):
    config = ModelConfig.from_hf(cases.CONFIGS[name]).vision
    m = config.spatial_merge_size
    grids = [(1, 3 * m, 5 * m), (3, 2 * m, m), (2, 7 * m, 4 * m)]
    count = sum(t * h * w for t, h, w in grids)
    patches = np.zeros((count, config.patch_dim), np.float32)
    plan = inputs.plan_vision(patches, grids, config, cases.round_up)
    size = len(plan.patches)
    self.assertEqual(size % (m * m), 0)
    self.assertGreaterEqual(size, cases.round_up(count))
    for index, slot in ((plan.window_index, plan.window_slot),
                        (plan.frame_index, plan.frame_slot)):
      self.assertEqual(sorted(index[index >= 0]), list(range(count)))
      np.testing.assert_array_equal(
          index.reshape(-1)[slot[:count]], np.arange(count))
      self.assertEqual(slot.shape, (size,))
    # A window holds whole merged patches of one frame.
    frame = np.repeat(np.arange(6), [h * w for t, h, w in grids
                                     for _ in range(t)])
    for window in plan.window_index:
      window = window[window >= 0]
      if len(window):
        self.assertLen(set(frame[window]), 1)
        self.assertLessEqual(len(window), (config.window_units * m) ** 2)
        self.assertEqual(len(window) % (m * m), 0)

  def test_coordinates(self):
    config = CONFIG.vision
    patches = np.zeros((16, config.patch_dim), np.float32)
    plan = inputs.plan_vision(patches, [(2, 2, 4)], config)
    block = [(0, 0), (0, 1), (1, 0), (1, 1)]
    expected = block + [(r, c + 2) for r, c in block]
    np.testing.assert_array_equal(plan.rows_columns, expected * 2)

  def test_grids_that_disagree(self):
    config = CONFIG.vision
    patches = np.zeros((16, config.patch_dim), np.float32)
    with self.assertRaisesRegex(ValueError, "hold 8 patches, found 16"):
      inputs.plan_vision(patches, [(1, 2, 4)], config)
    with self.assertRaisesRegex(ValueError, "1x1x16 .* merge size 2"):
      inputs.plan_vision(patches, [(1, 1, 16)], config)


class LogprobsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.params = params_of(TIED)["text"]
    rng = np.random.default_rng(1)
    self.hidden = jnp.asarray(
        rng.normal(size=(2, 7, TIED.text.hidden_size)), jnp.float32) * 10
    self.targets = jnp.asarray(
        rng.integers(0, TIED.text.vocab_size, (2, 7)), jnp.int32)

  def plain(self, params, hidden, temperature):
    scores = jax.nn.log_softmax(
        hidden @ params["embed"].T / temperature, axis=-1)
    picked = jnp.take_along_axis(scores, self.targets[..., None], -1)[..., 0]
    return picked, -jnp.sum(jnp.exp(scores) * scores, axis=-1)

  @parameterized.parameters((3, 1.0), (14, 0.6), (1024, 0.6))
  def test_equals_the_plain_formula(self, chunk, temperature):
    got, entropy = decoder.token_logprobs(
        self.params, self.hidden, self.targets, temperature, chunk=chunk,
        with_entropy=True)
    expected = self.plain(self.params, self.hidden, temperature)
    self.assertGreater(float(jnp.ptp(expected[1])), 0.1)
    np.testing.assert_allclose(got, expected[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(entropy, expected[1], rtol=1e-5, atol=1e-5)
    alone, none = decoder.token_logprobs(
        self.params, self.hidden, self.targets, temperature, chunk=chunk)
    np.testing.assert_array_equal(alone, got)
    self.assertIsNone(none)

  def test_uniform_entropy(self):
    _, entropy = decoder.token_logprobs(
        self.params, jnp.zeros_like(self.hidden), self.targets,
        with_entropy=True)
    np.testing.assert_allclose(
        entropy, np.log(TIED.text.vocab_size), rtol=1e-6)

  def test_gradient_is_the_plain_formula_s_for_every_chunk(self):
    mix = jnp.asarray(np.random.default_rng(2).normal(size=(2, 2, 7)),
                      jnp.float32)

    def loss(f):
      def run(params, hidden):
        a, b = f(params, hidden)
        return jnp.sum(mix[0] * a + mix[1] * b)
      return jax.jit(jax.grad(run, (0, 1)))(
          {"embed": self.params["embed"]}, self.hidden)

    expected = loss(lambda p, h: self.plain(p, h, 0.7))
    for chunk in (1, 5, 14):
      got = loss(lambda p, h, chunk=chunk: decoder.token_logprobs(
          p, h, self.targets, 0.7, chunk=chunk, with_entropy=True))
      for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected)):
        np.testing.assert_allclose(
            a, b, rtol=0, atol=1e-5 * float(jnp.abs(b).max()))


@functools.cache
def gradient(*, remat=False, bucket=1, pad=0):
  """Gradient of a prompt's log-likelihood, with padding of either kind."""
  prompt = cases.make_prompts(SHALLOW)["image"]
  length = len(prompt.token_ids)
  plan = inputs.plan_vision(
      prompt.patches, prompt.grids, SHALLOW.vision,
      lambda n: -(-n // bucket) * bucket)
  row = lambda a, fill: np.pad(
      a, [(0, 0)] * (a.ndim - 1) + [(0, pad)], constant_values=fill)[None]
  tokens, index = row(prompt.token_ids, 0), row(prompt.feature_index, -1)
  places = row(prompt.positions(SHALLOW), 0)[0][:, None]

  def loss(params):
    features = vlm.vision_features(params, SHALLOW, plan)
    hidden = vlm.forward(
        params, SHALLOW, tokens, places, features, index, remat=remat)
    picked, _ = decoder.token_logprobs(
        params["text"], hidden[:, :length - 1], tokens[:, 1:length])
    return -jnp.sum(picked)

  return jax.jit(jax.grad(loss))(params_of(SHALLOW))


class GradientTest(absltest.TestCase):

  def assert_near(self, got, expected):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got),
                            jax.tree.leaves(expected), strict=True):
      np.testing.assert_allclose(
          a, b, rtol=0, atol=1e-5 * float(jnp.abs(b).max()),
          err_msg=jax.tree_util.keystr(path))

  def test_it_reaches_every_weight(self):
    for path, a in jax.tree_util.tree_leaves_with_path(gradient()):
      size = float(jnp.abs(a).max())
      self.assertTrue(np.isfinite(size), jax.tree_util.keystr(path))
      self.assertGreater(size, 1e-5, jax.tree_util.keystr(path))

  def test_remat_keeps_it(self):
    self.assert_near(gradient(remat=True), gradient())

  def test_padding_carries_none(self):
    # Patches that no token takes, and tokens past a row's end.
    self.assert_near(gradient(bucket=50, pad=6), gradient())


if __name__ == "__main__":
  absltest.main()
