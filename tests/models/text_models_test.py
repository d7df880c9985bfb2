"""GPT-2, Llama and Mistral equal to transformers' on random small models."""

import json
import pathlib
import tempfile

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from legolm_jax.array import LegoArray
from rollplex_jax.errors import InputError
from rollplex_jax.models import architectures, decoder, gpt2, hf, llama, vlm
from tests.helpers import compressed
from tests.models import reference

TOLERANCE = 2e-5

_LLAMA = {
    "model_type": "llama", "vocab_size": 70, "hidden_size": 48,
    "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 2e4,
    "tie_word_embeddings": False, "max_position_embeddings": 4096}
_MISTRAL = _LLAMA | {"model_type": "mistral", "sliding_window": None}
_GPT2 = {"model_type": "gpt2", "vocab_size": 70, "n_embd": 48, "n_layer": 2,
         "n_head": 3, "n_positions": 64}
RAW = {
    "llama": _LLAMA,
    "llama_tied": _LLAMA | {"tie_word_embeddings": True,
                            "num_key_value_heads": 4},
    "llama3": _LLAMA | {"rope_theta": 5e5, "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 512}},
    "mistral": _MISTRAL,
    "mistral_window": _MISTRAL | {"sliding_window": 5, "head_dim": 16},
    "mistral_window_1": _MISTRAL | {"sliding_window": 1},
    "gpt2": _GPT2,
    "gpt2_other": _GPT2 | {"n_inner": 40, "activation_function": "gelu",
                           "layer_norm_epsilon": 1e-3,
                           "tie_word_embeddings": False},
}


def logits(params, config, tokens):
  """float32 [B, T, V] of int32 [B, T]."""
  places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), (3, *tokens.shape))
  run = jax.jit(lambda p, t: decoder.logits(
      p["text"], vlm.forward(p, config, t, places)))
  return np.asarray(run(params, tokens))


class TextModelsTestCase(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(
        self.enter_context(tempfile.TemporaryDirectory()))


@pytest.mark.torch
@absltest.skipIf(reference.torch is None, reference.MISSING)
class ParityTest(TextModelsTestCase):

  @parameterized.parameters(*RAW)
  def test_logits(self, name):
    model = reference.build(RAW[name], seed=len(name))
    model.save_pretrained(self.root / "model")
    config, params = hf.load_checkpoint(self.root / "model")
    # Flat and nested files are read alike.
    self.assertEqual(
        architectures.config_from_hf(RAW[name]).text, config.text)
    tokens = np.random.default_rng(0).integers(0, 70, (3, 40), np.int32)
    got = logits(params, config, tokens)
    for row, length in enumerate((40, 7, 1)):
      expected = reference.text_logits(model, tokens[row, :length])
      self.assertGreater(np.abs(expected).max(), 1)
      np.testing.assert_allclose(
          got[row, :length], expected, rtol=0, atol=TOLERANCE)

  def test_far_positions_and_blocks_of_queries(self):
    """Beyond the block of attention, where whole blocks of keys are left out."""
    for name in ("llama3", "mistral_window"):
      raw = RAW[name] | ({"sliding_window": 100} if "mistral" in name else {})
      model = reference.build(raw)
      model.save_pretrained(self.root / name)
      config, params = hf.load_checkpoint(self.root / name)
      tokens = np.random.default_rng(0).integers(0, 70, (1, 600), np.int32)
      np.testing.assert_allclose(
          logits(params, config, tokens)[0],
          reference.text_logits(model, tokens[0]), rtol=0, atol=5e-5)

  def test_published_names_of_gpt2(self):
    """Without the prefix that transformers adds, and with masks."""
    model = reference.build(RAW["gpt2"])
    model.save_pretrained(self.root / "theirs")
    file = self.root / "theirs" / "model.safetensors"
    tensors = {k.removeprefix("transformer."): v
               for k, v in load_file(file).items()}
    for i in range(2):
      tensors[f"h.{i}.attn.bias"] = np.tril(np.ones((1, 1, 64, 64), np.float32))
      tensors[f"h.{i}.attn.masked_bias"] = np.float32(-1e4)[None]
    save_file(tensors, file)
    config, params = hf.load_checkpoint(self.root / "theirs")
    tokens = np.arange(30, dtype=np.int32)[None]
    np.testing.assert_allclose(
        logits(params, config, tokens)[0],
        reference.text_logits(model, tokens[0]), rtol=0, atol=TOLERANCE)

  @pytest.mark.slow
  def test_compressed(self):
    """GPT-2's matrices are [in, out] in their file."""
    for name, count in (("gpt2", 8), ("mistral_window", 14)):
      reference.build(RAW[name]).save_pretrained(self.root / name)
      small = compressed.compress(self.root / name, self.root / f"{name}_small")
      plain = compressed.decompress(small, self.root / f"{name}_plain")
      config, params = hf.load_checkpoint(small)
      found = [a for a in jax.tree.leaves(
          params, is_leaf=lambda a: isinstance(a, LegoArray))
               if isinstance(a, LegoArray)]
      self.assertLen(found, count)
      tokens = np.arange(20, dtype=np.int32)[None]
      got = logits(params, config, tokens)
      # What transformers makes of the decompressed one, too.
      np.testing.assert_allclose(
          got[0], reference.text_logits(reference.load(plain), tokens[0]),
          rtol=0, atol=TOLERANCE)


class ConfigTest(TextModelsTestCase):

  def test_defaults(self):
    raw = {k: v for k, v in _MISTRAL.items()
           if k not in ("sliding_window", "num_key_value_heads")}
    with self.assertRaisesRegex(InputError, "num_key_value_heads 8"):
      architectures.config_from_hf(raw)
    text = architectures.config_from_hf(
        raw | {"num_attention_heads": 8}).text
    self.assertEqual((text.sliding_window, text.num_key_value_heads), (4096, 8))
    self.assertIsInstance(text, llama.LlamaConfig)
    self.assertIsInstance(architectures.config_from_hf(_GPT2).text,
                          gpt2.GPT2Config)

  @parameterized.parameters(
      (_LLAMA | {"attention_bias": True}, "attention_bias True"),
      (_LLAMA | {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
      (_LLAMA | {"rope_scaling": {"rope_type": "yarn"}}, "'yarn'"),
      (_LLAMA | {"rope_scaling": {"rope_type": "llama3"}}, "'factor' is missing"),
      (_MISTRAL | {"sliding_window": 0}, "sliding_window must be"),
      (_GPT2 | {"n_head": 5}, "num_attention_heads 5"),
      (_GPT2 | {"activation_function": "silu"}, "activation_function 'silu'"),
      (_GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx"),
      ({"model_type": "mamba"}, "'mamba'; supported are gpt2, llama, mistral, "
       "qwen2, qwen2_5_vl"))
  def test_refuses(self, raw, message):
    with self.assertRaisesRegex(InputError, message) as caught:
      architectures.config_from_hf(raw, "folder/config.json")
    self.assertNotIn("\n", str(caught.exception))

  def test_missing_tensor(self):
    (self.root / "config.json").write_text(json.dumps(_GPT2))
    save_file({"transformer.wte.weight": np.zeros((70, 48), np.float32)},
              self.root / "model.safetensors")
    with self.assertRaisesRegex(InputError, "27 tensors are missing, first h.0"):
      hf.load_checkpoint(self.root)


if __name__ == "__main__":
  absltest.main()
