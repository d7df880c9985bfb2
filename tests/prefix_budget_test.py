"""A window that can't hold what it saves keeps less, and says so."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp

from rollplex_jax import prefix_budget, programs
from rollplex_jax.errors import InputError
from rollplex_jax.models import vlm
from rollplex_jax.schedule import Facts, ScheduleConfig
from rollplex_jax.stages.prefix import SavePolicy
from tests.helpers import batches, tiny_policy


class PrefixBudgetTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.config = tiny_policy.config()
    self.facts = Facts(has_media=True, has_reference=True, trains_tower=False,
                       scores_policy=False)

  def within(self, **schedule):
    return prefix_budget.within_budget(
        self.config, ScheduleConfig(name="rollplex", **schedule), self.facts,
        (4, 32), 24, jnp.float32)

  def need(self, save, **schedule):
    return prefix_budget.artifact_bytes(
        self.config, ScheduleConfig(name="rollplex", **schedule), self.facts,
        (4, 32), 24, jnp.float32, save) / 1e9

  @parameterized.parameters(*SavePolicy)
  def test_bytes_are_those_of_the_arrays(self, save):
    params = tiny_policy.params(self.config)
    prompts, vision = batches.prompt_inputs(
        self.config, tiny_policy.prompts(self.config))
    features = vlm.vision_features(params, self.config, vision)
    kv, saved = programs.prefix_forward(
        params["text"], self.config, prompts, features, save)
    if save == SavePolicy.OFFLOAD:
      saved = None
    made = sum(a.nbytes for a in jax.tree.leaves((kv, kv, saved)))
    self.assertEqual(made, prefix_budget.artifact_bytes(
        self.config, ScheduleConfig(name="rollplex"), self.facts,
        prompts.token_ids.shape, features.shape[0], jnp.float32, save))

  def test_falls_back_step_by_step(self):
    order = [SavePolicy.ACTIVATIONS, SavePolicy.LAYER_INPUTS,
             SavePolicy.OFFLOAD]
    self.assertGreater(self.need(order[0]), self.need(order[1]))
    self.assertGreater(self.need(order[1]), self.need(order[2]))
    for save in order:
      fitted, line = self.within(
          save="activations", prefix_budget_gb=self.need(save))
      self.assertEqual(fitted.save, save)
      if save == "activations":
        self.assertIsNone(line)
      else:
        self.assertRegex(line, "save=activations needs .* GB for 4 prefixes of "
                         f"32 tokens.*prefix_budget_gb.*saving {save} instead")

  def test_no_budget_no_limit(self):
    self.assertEqual(
        self.within(save="activations")[0].save, SavePolicy.ACTIVATIONS)

  def test_a_window_source_holds_one_more_copy(self):
    self.assertAlmostEqual(
        self.need("nothing", prefix_source="window") / self.need("nothing"),
        3 / 2)

  def test_refused_when_keys_and_values_alone_exceed_it(self):
    need = self.need("nothing")
    with self.assertRaisesRegex(InputError, "prefix_budget_gb=.*4 prefixes of "
                                "32 tokens need .* GB; expected a larger"):
      self.within(prefix_budget_gb=need * 0.99)


if __name__ == "__main__":
  absltest.main()
