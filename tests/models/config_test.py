"""Reading and writing config.json of both generations."""

import copy

from absl.testing import absltest, parameterized

from rollplex_jax.errors import InputError
from rollplex_jax.models import vlm, weights
from rollplex_jax.models.config import ModelConfig
from tests.models import cases, published

TEXT_ONLY = {
    "model_type": "qwen2", "vocab_size": 70, "hidden_size": 48,
    "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "tie_word_embeddings": True, "eos_token_id": 3,
}


def nested(flat):
  """The same configuration as transformers 5 writes it."""
  raw = copy.deepcopy(flat)
  outer = ("model_type", "architectures", "vision_config", "image_token_id",
           "video_token_id", "vision_start_token_id", "vision_end_token_id")
  text = {k: raw.pop(k) for k in list(raw) if k not in outer}
  scaling = text.pop("rope_scaling")
  text["rope_parameters"] = {
      "rope_type": "default", "rope_theta": text.pop("rope_theta"),
      "mrope_section": scaling["mrope_section"]}
  vision = raw["vision_config"]
  vision["in_channels"] = vision.pop("in_chans")
  vision["rope_parameters"] = {"rope_type": "axial", "rope_theta": 1e4}
  return raw | {"text_config": text | {"model_type": "qwen2_5_vl_text"},
                "tie_word_embeddings": text["tie_word_embeddings"],
                "eos_token_id": None}


class ConfigTest(parameterized.TestCase):

  @parameterized.parameters(*published.CONFIGS)
  def test_published_sizes(self, name):
    config = ModelConfig.from_hf(published.CONFIGS[name])
    tree = vlm.weights(config)
    count = published.PARAMETERS[name]
    self.assertEqual(weights.num_parameters(tree), count)
    self.assertEqual(
        weights.num_parameters(weights.abstract_params(tree)), count)
    self.assertEqual(config.text.mrope_section, (16, 24, 24))
    self.assertEqual(config.text.head_dim, 128)
    self.assertEqual(config.vision.window_units, 4)
    self.assertEqual(config.vision.patch_dim, 1176)
    self.assertEqual(config.vision.tokens_per_second, 2)
    self.assertEqual(config.eos_token_ids, (151645,))
    self.assertEqual(
        config.vision_token_ids, (151655, 151656, 151652, 151653))

  @parameterized.parameters(*published.CONFIGS)
  def test_generations_and_our_own_files_read_alike(self, name):
    flat = published.CONFIGS[name]
    config = ModelConfig.from_hf(flat)
    self.assertEqual(ModelConfig.from_hf(nested(flat)), config)
    self.assertEqual(ModelConfig.from_hf(config.to_hf()), config)

  def test_small_ones_survive_writing(self):
    for raw in [TEXT_ONLY, *cases.CONFIGS.values()]:
      config = ModelConfig.from_hf(raw)
      self.assertEqual(ModelConfig.from_hf(config.to_hf()), config)

  def test_several_eos_ids_survive_writing(self):
    config = ModelConfig.from_hf(TEXT_ONLY | {"eos_token_id": [3, 5]})
    self.assertEqual(config.eos_token_ids, (3, 5))
    self.assertEqual(ModelConfig.from_hf(config.to_hf()), config)

  def test_a_window_key_that_is_off_is_no_window(self):
    # As Qwen2.5's own files have it.
    ModelConfig.from_hf(TEXT_ONLY | {
        "use_sliding_window": False, "sliding_window": 32768,
        "max_window_layers": 1})
    # Layers slide from max_window_layers on: here, none does.
    ModelConfig.from_hf(TEXT_ONLY | {
        "use_sliding_window": True, "max_window_layers": 2})

  @parameterized.named_parameters(
      ("architecture", {"model_type": "qwen3_vl"}, "'qwen3_vl'"),
      ("no_architecture", {"model_type": None}, "unsupported architecture"),
      ("rope", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "'yarn'"),
      ("nested_rope", {"rope_parameters": {"rope_type": "linear"}}, "'linear'"),
      ("activation", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
      ("window", {"use_sliding_window": True, "max_window_layers": 1},
       "use_sliding_window"),
      ("heads", {"num_attention_heads": 5}, "num_attention_heads 5"),
      ("kv_heads", {"num_key_value_heads": 3}, "num_key_value_heads 3"),
      ("odd_heads", {"num_attention_heads": 16}, "found 3"),
      ("zero_layers", {"num_hidden_layers": 0}, "num_hidden_layers"),
      ("string", {"hidden_size": "48"}, "hidden_size .* found '48'"),
  )
  def test_refuses_text(self, changed, message):
    with self.assertRaisesRegex(InputError, message) as caught:
      ModelConfig.from_hf(TEXT_ONLY | changed, "folder/config.json")
    self.assertNotIn("\n", str(caught.exception))

  @parameterized.parameters(
      "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
      "num_attention_heads")
  def test_names_a_missing_key(self, key):
    raw = {k: v for k, v in TEXT_ONLY.items() if k != key}
    with self.assertRaisesRegex(InputError, f"folder/config.json: .*'{key}'"):
      ModelConfig.from_hf(raw, "folder/config.json")

  @parameterized.parameters(
      "depth", "hidden_size", "intermediate_size", "num_heads",
      "out_hidden_size")
  def test_names_a_missing_vision_key(self, key):
    raw = copy.deepcopy(cases.CONFIGS["published_like"])
    del raw["vision_config"][key]
    with self.assertRaisesRegex(InputError, f"vision_config: .*'{key}'"):
      ModelConfig.from_hf(raw)

  @parameterized.named_parameters(
      ("width", {"out_hidden_size": 32}, "out_hidden_size 32"),
      ("window", {"window_size": 7}, "window_size 7"),
      ("heads", {"num_heads": 3}, "num_heads 3"),
      ("head_size", {"num_heads": 16}, "vision head size"),
      ("activation", {"hidden_act": "quick_gelu"}, "'quick_gelu'"),
      ("rope", {"rope_parameters": {"rope_type": "yarn"}}, "'yarn'"),
  )
  def test_refuses_vision(self, changed, message):
    raw = copy.deepcopy(cases.CONFIGS["published_like"])
    raw["vision_config"] |= changed
    with self.assertRaisesRegex(InputError, message) as caught:
      ModelConfig.from_hf(raw)
    self.assertNotIn("\n", str(caught.exception))

  def test_refuses_a_vision_model_without_what_it_needs(self):
    raw = dict(cases.CONFIGS["published_like"])
    with self.assertRaisesRegex(InputError, "image_token_id .* found None"):
      ModelConfig.from_hf({k: v for k, v in raw.items()
                           if k != "image_token_id"})
    with self.assertRaisesRegex(InputError, "video_token_id .* found 120"):
      ModelConfig.from_hf(raw | {"video_token_id": 120})
    with self.assertRaisesRegex(InputError, "vision_config is missing"):
      ModelConfig.from_hf(raw | {"vision_config": None})
    with self.assertRaisesRegex(InputError, "mrope_section"):
      ModelConfig.from_hf(raw | {"rope_scaling": {
          "type": "mrope", "mrope_section": [16, 24, 24]}})


if __name__ == "__main__":
  absltest.main()
