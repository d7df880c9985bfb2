"""Checkpoints go to transformers and come back unchanged."""

import functools
import pathlib
import tempfile

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
import transformers

from rollplex_jax.models import hf, tensor_files, vlm, weights
from rollplex_jax.models.config import ModelConfig
from tests.models import cases, published, reference

pytestmark = pytest.mark.torch

TEXT_ONLY = {
    "model_type": "qwen2", "vocab_size": 50, "hidden_size": 24,
    "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
    "tie_word_embeddings": False, "eos_token_id": [3, 5],
}
RAW = cases.CONFIGS | {
    "text": TEXT_ONLY, "text_tied": TEXT_ONLY | {"tie_word_embeddings": True}}


@functools.cache
def built(name):
  return reference.build(RAW[name])


@absltest.skipIf(reference.torch is None, reference.MISSING)
class CheckpointParityTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(
        self.enter_context(tempfile.TemporaryDirectory()))

  def logits(self, model):
    if model.config.model_type == "qwen2":
      return reference.text_logits(model, np.arange(12))
    config = ModelConfig.from_hf(model.config.to_dict())
    return reference.logits(model, cases.make_prompts(config)["mixed"])

  @parameterized.product(name=list(RAW), shard_bytes=[1 << 20, 20_000])
  def test_there_and_back(self, name, shard_bytes):
    model = built(name)
    model.save_pretrained(self.root / "theirs")
    config, params = hf.load_checkpoint(self.root / "theirs")
    hf.save_checkpoint(
        self.root / "ours", config, params, shard_bytes=shard_bytes)
    self.assertEqual(
        len(list((self.root / "ours").glob("*.safetensors"))) > 1,
        shard_bytes < 1 << 20)

    back = reference.load(self.root / "ours")
    # The same weights in the same program: equal, not close.
    np.testing.assert_array_equal(self.logits(back), self.logits(model))
    self.assertEqual(config, ModelConfig.from_hf(back.config.to_dict()))
    for key, tensor in model.state_dict().items():
      np.testing.assert_array_equal(back.state_dict()[key], tensor, key)

    back.save_pretrained(self.root / "again")
    first, second = (load_file(self.root / folder / "model.safetensors")
                     for folder in ("theirs", "again"))
    self.assertEqual(first.keys(), second.keys())
    for key, tensor in first.items():
      np.testing.assert_array_equal(second[key], tensor, key)

  def test_bfloat16_export(self):
    torch = reference.torch
    model = built("published_like")
    model.save_pretrained(self.root / "theirs")
    config, params = hf.load_checkpoint(self.root / "theirs")
    hf.save_checkpoint(self.root / "ours", config, params, dtype=jnp.bfloat16)
    back = reference.load(self.root / "ours")
    self.assertEqual(back.dtype, torch.bfloat16)
    for key, tensor in model.state_dict().items():
      self.assertTrue(
          torch.equal(back.state_dict()[key], tensor.to(torch.bfloat16)), key)

  @parameterized.parameters(*published.CONFIGS)
  def test_published_sizes(self, name):
    raw = published.CONFIGS[name]
    with reference.on_meta():
      model = transformers.Qwen2_5_VLForConditionalGeneration(
          transformers.Qwen2_5_VLConfig.from_dict(dict(raw)))
    leaves = jax.tree.leaves(
        vlm.weights(ModelConfig.from_hf(raw)), is_leaf=weights.is_weight)
    ours = {w.name: w.checkpoint_shape for w in leaves}
    theirs = {tensor_files.published_name(name): tuple(p.shape)
              for name, p in model.named_parameters()}
    self.assertEqual(ours, theirs)
    self.assertEqual(sum(p.numel() for p in model.parameters()),
                     published.PARAMETERS[name])


if __name__ == "__main__":
  absltest.main()
