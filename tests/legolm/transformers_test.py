"""Decompressed checkpoints in transformers."""

import importlib.util
import json
import pathlib
import tempfile

from absl.testing import absltest, parameterized
import numpy as np
import pytest

from legolm_jax import checkpoint, checkpoint_writer
from legolm_jax.array import LegoArray
from legolm_jax.compress import CompressionConfig, Compressor, RowScale
from legolm_jax.rules import Rules
from legolm_jax.safetensors_files import CheckpointFolder

_SIZES = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=3,
              num_attention_heads=4, num_key_value_heads=2, vocab_size=80)


@pytest.mark.torch
@absltest.skipUnless(importlib.util.find_spec("torch"), "needs torch")
class TransformersTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(
        self.enter_context(tempfile.TemporaryDirectory()))

  def model(self, kind, tie):
    """A random model of transformers, saved to `source`."""
    import torch
    import transformers
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    if kind == "gpt2":
      config = transformers.GPT2Config(
          n_embd=64, n_layer=3, n_head=4, vocab_size=80, n_positions=32)
      model = transformers.GPT2LMHeadModel(config)
    else:
      config = transformers.LlamaConfig(**_SIZES, tie_word_embeddings=tie)
      model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(self.root / "source")
    return model.eval()

  @parameterized.parameters(
      ("llama", False, ()), ("llama", True, ()), ("gpt2", True, ()),
      ("llama", True, ("embed_tokens",)), ("gpt2", True, ("wte",)))
  def test_logits(self, kind, tie, compress):
    import torch
    import transformers
    model = self.model(kind, tie)
    compressor = Compressor(
        CheckpointFolder(self.root / "source"), CompressionConfig(
            num_centroids=16, percentile=95, row_scale=RowScale.RMS,
            rules=Rules(compress=compress)))
    compressor.fit()
    checkpoint_writer.save(self.root / "small", compressor)
    checkpoint_writer.decompress(self.root / "small", self.root / "plain")
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        self.root / "plain", output_loading_info=True)
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
      self.assertEmpty(info[key], key)
    # The same model with the compressed weights put into it one by one; what
    # else it holds, and which way a matrix lies, is transformers' own.
    opened = checkpoint.Checkpoint(self.root / "small")
    own = model.state_dict()
    replaced = 0
    for name in opened.names():
      tensor = opened.read(name)
      if isinstance(tensor, LegoArray):
        key = name if name in own else f"transformer.{name}"
        own[key].copy_(torch.tensor(np.asarray(tensor.dequantize())))
        replaced += 1
    self.assertGreaterEqual(replaced, 4)
    tokens = torch.arange(24).reshape(2, 12)
    with torch.inference_mode():
      torch.testing.assert_close(
          loaded.eval()(tokens).logits, model(tokens).logits, rtol=0, atol=0)
    head, table = (loaded.get_output_embeddings().weight,
                   loaded.get_input_embeddings().weight)
    self.assertEqual(head.data_ptr() == table.data_ptr(), tie)
    config = json.loads((self.root / "plain" / "config.json").read_text())
    self.assertNotIn("quantization_config", config)


if __name__ == "__main__":
  absltest.main()
