"""Programs compiled for GPUs that are not there, against plan and estimate."""

import dataclasses

from absl.testing import absltest, parameterized
import jax
import pytest

from rollplex_jax.capacity import deviceless, estimate, plan, roofline
from rollplex_jax.capacity.case import Case, Workload
from rollplex_jax.capacity.memory import buffers_of
from rollplex_jax.capacity.programs import Programs, tree_bytes
from rollplex_jax.models import published
from rollplex_jax.placement.mesh import MeshConfig
from tests.capacity.cases import tiny
from tests.helpers import devices

devices.use_virtual_devices()


@pytest.mark.cuda_plugin
@absltest.skipUnless(deviceless.has_plugin(), "needs jax's CUDA plugin")
class CompiledTest(parameterized.TestCase):
  """A model an eighth as wide as 32B's, in one host."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    model = published.config_of("qwen2.5-vl-32b")
    cls.case = Case(
        model=dataclasses.replace(model, vision=None, text=dataclasses.replace(
            model.text, hidden_size=1280, intermediate_size=3456,
            num_attention_heads=10, num_key_value_heads=2,
            num_hidden_layers=2, vocab_size=32000)),
        device="h100", num_devices=8,
        mesh=MeshConfig(data=4, training_tp=2, rollout_tp=2),
        workload=Workload(num_prompts=8, prefix_length=2048,
                          response_length=256, video=None))

  @parameterized.parameters("prefill", "gradient", "update", "compute_copy")
  def test_against_the_plan(self, name):
    self.check(name)

  @parameterized.parameters("window", "score", "prefix_backward")
  @pytest.mark.slow
  def test_others_against_the_plan(self, name):
    self.check(name)

  def check(self, name):
    found = plan.compile_one(self.case, name)
    programs, have = Programs(self.case), buffers_of(self.case)
    _, args, kwargs = programs.program(name)
    leaves = [a for a in jax.tree.leaves((args, kwargs))
              if isinstance(a, jax.ShapeDtypeStruct)]
    placed = tree_bytes([a for a in leaves if a.sharding is not None])
    # What a program does not read is no argument of it. Each is aligned.
    self.assertLessEqual(
        found.argument_bytes,
        placed + plan.input_bytes(self.case, name) + 256 * len(leaves))
    donated = {
        "window": tree_bytes(programs.artifacts(programs.rollout)),
        "gradient": have.gradients + tree_bytes(programs.kv_grads()),
        "prefix_backward": have.gradients, "update": have.optimizer}
    # What is donated is written in place, every byte of it.
    self.assertGreaterEqual(found.alias_bytes, donated.get(name, 0))
    made = {"prefill": have.kv + have.inputs, "compute_copy": have.text,
            "window": have.sizes.completions()}
    # Nothing is made that no buffer of the plan stands for.
    self.assertBetween(found.added_bytes, made.get(name, 0),
                       made.get(name, 0) + 2**20)
    if name == "window":  # Which the plan counts apart.
      self.assertGreaterEqual(found.temp_bytes, have.sizes.cache())
    guess = estimate.need_of(self.case, name).temp_bytes
    # Estimates are within a half and a quarter of a GiB.
    self.assertLess(abs(guess - found.temp_bytes),
                    0.5 * found.temp_bytes + 0.25 * 2**30)
    seconds = [roofline.collective_seconds(
        [dataclasses.replace(c, loop=None) for c in items], self.case.spec,
        roofline.Efficiency()) for items in (
            estimate.collectives_of(self.case, name), found.collectives)]
    # And those of collectives within a factor of two and 2 ms.
    self.assertBetween(seconds[0], seconds[1] / 2 - 2e-3, 2 * seconds[1] + 2e-3)

  def test_patches_are_split_like_the_rollouts_batch(self):
    case = tiny(mesh=MeshConfig(data=2, training_tp=1, rollout_tp=2),
                prefix_source="window", workload=Workload(
                    num_prompts=4, prefix_length=1024, response_length=8,
                    video=(16, 16, 16)))
    found = plan.compile_one(case, "vision")
    patches = buffers_of(case).sizes.patches(rollout=True)
    tower = tree_bytes(Programs(case).weights["visual"])
    # And the numbers of each patch's row, window and frame.
    self.assertBetween(found.argument_bytes, patches, 1.5 * patches + tower)


if __name__ == "__main__":
  absltest.main()
