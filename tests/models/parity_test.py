"""Logits and positions equal to transformers' on random small models."""

import functools
import tempfile

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollplex_jax.models import decoder, hf, inputs, vlm
from rollplex_jax.models.config import ModelConfig
from tests.models import cases, reference

pytestmark = pytest.mark.torch

# The promise is 1e-4; rounding takes up to 5e-6 of it (both implementations are
# some 3e-6 from float64).
TOLERANCE = 2e-5


@functools.cache
def model_pair(name: str):
  """A reference model, and its configuration and parameters read by us."""
  model = reference.build(cases.CONFIGS[name], seed=len(name))
  with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    return model, *hf.load_checkpoint(folder)


@functools.cache
def batch_result(name: str):
  """Our logits of all prompts, computed as one batch."""
  _, config, params = model_pair(name)
  prompts = cases.make_prompts(config)
  rows = cases.batch_logits(params, config, list(prompts.values()))
  return dict(zip(prompts, rows))


@absltest.skipIf(reference.torch is None, reference.MISSING)
class VisionLanguageTest(parameterized.TestCase):

  @parameterized.parameters(*cases.CONFIGS)
  def test_logits(self, name):
    model, config, _ = model_pair(name)
    for kind, prompt in cases.make_prompts(config).items():
      with self.subTest(kind):
        expected = reference.logits(model, prompt)
        self.assertGreater(np.abs(expected).max(), 1)
        np.testing.assert_allclose(
            batch_result(name)[kind], expected, rtol=0, atol=TOLERANCE)

  @parameterized.parameters(*cases.CONFIGS)
  def test_positions(self, name):
    model, config, _ = model_pair(name)
    for kind, prompt in cases.make_prompts(config).items():
      with self.subTest(kind):
        np.testing.assert_array_equal(
            prompt.positions(config), reference.positions(model, prompt))

  @parameterized.parameters(*cases.CONFIGS)
  def test_both_config_generations_read_alike(self, name):
    # What transformers saved is nested, what it was built from is flat.
    _, config, _ = model_pair(name)
    self.assertEqual(ModelConfig.from_hf(cases.CONFIGS[name]), config)

  def test_positions_at_uneven_rates(self):
    # Products that truncate one way in float32 and the other in float64.
    model, config, _ = model_pair("merge_1_all_full")
    rng = np.random.default_rng(0)
    for fps in (0.3, 1.1, 3.7, 7.3, 12.5, 23.976, 24.0, 29.97, 30.0):
      parts = [2, cases.Medium(1, 2, frames=75, fps=fps), 1]
      prompt = cases.make_prompt(parts, config, rng)
      np.testing.assert_array_equal(
          prompt.positions(config), reference.positions(model, prompt),
          err_msg=f"{fps} fps")

  def test_far_positions(self):
    # An ulp in a rotary frequency would show here and nowhere else.
    model, config, params = model_pair("published_like")
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 100, 40)
    places = np.sort(rng.integers(0, 32_000, (3, 1, 40)), axis=-1)
    run = jax.jit(lambda t, p: decoder.logits(
        params["text"], vlm.forward(params, config, t, p)))
    got = run(tokens[None].astype(np.int32), places.astype(np.int32))[0]
    np.testing.assert_allclose(
        got, reference.text_logits(model, tokens, places), rtol=0,
        atol=TOLERANCE)

  def test_a_row_alone_equals_its_batch(self):
    # No padding of tokens, patches or windows against the padded batch.
    _, config, params = model_pair("ragged_windows")
    prompts = cases.make_prompts(config)
    for kind in ("text", "images", "mixed"):
      alone = cases.batch_logits(
          params, config, [prompts[kind]], bucket=lambda n: n)[0]
      np.testing.assert_allclose(
          batch_result("ragged_windows")[kind], alone, rtol=0, atol=TOLERANCE)

  def test_one_video_at_two_rates(self):
    # The same frames at 1 and at 30 fps are two different inputs.
    model, config, params = model_pair("merge_1_all_full")
    slow, fast = (
        cases.make_prompt([2, cases.Medium(2, 2, frames=4, fps=fps), 3],
                          config, np.random.default_rng(0))
        for fps in (1.0, 30.0))
    np.testing.assert_array_equal(slow.patches, fast.patches)
    rows = cases.batch_logits(params, config, [slow, fast])
    self.assertGreater(np.abs(rows[0] - rows[1]).max(), 0.1)
    for prompt, row in zip((slow, fast), rows):
      np.testing.assert_allclose(
          row, reference.logits(model, prompt), rtol=0, atol=TOLERANCE)

  @parameterized.parameters("ragged_windows", "merge_3_no_full")
  def test_features(self, name):
    model, config, params = model_pair(name)
    prompt = cases.make_prompts(config)["images"]
    expected = reference.features(model, prompt)
    features = jax.jit(vlm.vision_features, static_argnums=1)
    for bucket in (lambda n: n, lambda n: -(-n // 100) * 100):
      plan = inputs.plan_vision(
          prompt.patches, prompt.grids, config.vision, bucket)
      got = features(params, config, plan)
      self.assertGreaterEqual(len(got), len(expected))
      np.testing.assert_allclose(
          got[:len(expected)], expected, rtol=0, atol=TOLERANCE)


@absltest.skipIf(reference.torch is None, reference.MISSING)
class TextTest(parameterized.TestCase):

  @parameterized.product(tied=[False, True], kv_heads=[1, 4])
  def test_qwen2(self, tied, kv_heads):
    raw = {
        "model_type": "qwen2", "vocab_size": 70, "hidden_size": 48,
        "intermediate_size": 80, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-5, "rope_theta": 2e4, "tie_word_embeddings": tied,
    }
    model = reference.build(raw)
    with tempfile.TemporaryDirectory() as folder:
      model.save_pretrained(folder)
      config, params = hf.load_checkpoint(folder)
    self.assertEqual(ModelConfig.from_hf(raw), config)
    self.assertEqual("head" in params["text"], not tied)
    tokens = np.random.default_rng(0).integers(0, 70, (3, 12), np.int32)
    places = jnp.broadcast_to(jnp.arange(12), (1, 3, 12))
    run = jax.jit(lambda p, t: decoder.logits(
        p["text"], vlm.forward(p, config, t, places)))
    got = run(params, tokens)
    for row, length in enumerate((12, 7, 1)):
      np.testing.assert_allclose(
          got[row, :length],
          reference.text_logits(model, tokens[row, :length]), rtol=0,
          atol=TOLERANCE)


if __name__ == "__main__":
  absltest.main()
