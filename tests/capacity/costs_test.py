"""Counted operations against XLA's own count, on the CPU lowering."""

from absl.testing import absltest
import jax
import jax.numpy as jnp

from rollplex_jax import programs
from rollplex_jax.capacity import costs
from rollplex_jax.models import decoder, published
from rollplex_jax.models.config import ModelConfig, TextConfig
from rollplex_jax.models.inputs import PromptInputs
from rollplex_jax.models.weights import abstract_params
from rollplex_jax.stages.prefix import SavePolicy
from rollplex_jax.stages.response import GroupResponses


class CostsTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.config = ModelConfig(text=TextConfig(
        vocab_size=1024, hidden_size=128, intermediate_size=512,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        mrope_section=(4, 6, 6)))
    self.b, self.g, self.p, self.r = 2, 2, 512, 128
    i = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    self.prompts = PromptInputs(
        token_ids=i(self.b, self.p), lengths=i(self.b),
        positions=i(3, self.b, self.p), feature_index=i(self.b, self.p),
        next_position=i(self.b), row_ids=i(self.b))
    self.text = abstract_params(decoder.weights(self.config.text))
    self.responses = GroupResponses(
        i(self.b, self.g, self.r), i(self.b, self.g))
    self.sizes = costs.Sizes.of(self.config)

  def counted(self, lowered):
    return lowered.cost_analysis()["flops"]

  def test_prefix(self):
    found = self.counted(programs.prefix_forward.lower(
        self.text, self.config, self.prompts, None, SavePolicy.NOTHING))
    ours = costs.prefix_forward(
        self.sizes, self.b * self.p, self.b * costs.causal_pairs(self.p))
    self.assertBetween(found / ours, 1.0, 1.12)

  def test_suffix(self):
    kv = jax.eval_shape(
        lambda t, prompts: programs.prefix_forward(
            t, self.config, prompts, None, SavePolicy.NOTHING)[0],
        self.text, self.prompts)
    found = self.counted(programs.score_suffix.lower(
        {"text": self.text}, self.config, self.prompts, kv, None,
        self.responses, 1.0))
    n = self.b * self.g
    ours = costs.suffix_forward(
        self.sizes, n * self.r, n * self.r * (self.p + self.r))
    self.assertBetween(found / ours, 1.0, 1.12)

  def test_published_sizes(self):
    billions = {name: costs.parameter_count(
        published.config_of(name)) / 1e9 for name in published.names()}
    for name, size in {"3b": 3.75, "7b": 8.29, "32b": 33.5, "72b": 73.4}.items():
      self.assertAlmostEqual(billions[f"qwen2.5-vl-{name}"], size, delta=0.06)


if __name__ == "__main__":
  absltest.main()
