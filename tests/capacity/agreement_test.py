"""Arguments of the planned programs take the bytes that the plan gives them.

The plan's bytes come from `buffer_sizes`, by which `train` plans its residency
too; the programs' arguments are laid out by a run's own placements.
"""

import dataclasses

from absl.testing import absltest, parameterized

from rollplex_jax.capacity.case import Case, Workload
from rollplex_jax.capacity.memory import buffers_of
from rollplex_jax.capacity.programs import Programs, tree_bytes
from rollplex_jax.models import published
from rollplex_jax.placement.mesh import MeshConfig
from tests.capacity.cases import tiny
from tests.helpers import devices

devices.use_virtual_devices()


def _published() -> Case:
  """A shallow 32B, whose sizes divide by much but not by all."""
  model = published.config_of("qwen2.5-vl-32b")
  return Case(
      model=dataclasses.replace(model, text=dataclasses.replace(
          model.text, num_hidden_layers=2)),
      device="h800", num_devices=32,
      mesh=MeshConfig(data=4, training_tp=8, rollout_tp=8), workload=Workload())


_MESHES = (
    dict(data=4, training_tp=8, rollout_tp=8),
    dict(fsdp=8, training_tp=4, rollout_tp=4),
    dict(data=2, fsdp=2, training_tp=4, rollout_tp=8),
    dict(data=2, fsdp=2, training_tp=4, rollout_tp=8, storage="finer"),
    dict(data=4, training_tp=8, rollout_tp=4),
    dict(data=4, fsdp=8),
)


class AgreementTest(parameterized.TestCase):

  @parameterized.parameters(*_MESHES)
  def test_32b(self, **mesh):
    self.check(dataclasses.replace(
        _published(), mesh=MeshConfig(**mesh), prefix_source="window"))

  @parameterized.parameters(
      dict(data=2, training_tp=2, rollout_tp=2), dict(fsdp=4),
      dict(training_tp=4, rollout_tp=2), dict(training_tp=1, rollout_tp=4),
      dict(data=2, fsdp=2))
  def test_two_kv_heads(self, **mesh):
    self.check(tiny(mesh=MeshConfig(**mesh), prefix_source="window"))

  def test_one_device(self):
    self.check(tiny(mesh=MeshConfig(), num_devices=1))

  def check(self, case):
    case.check()
    have, programs = buffers_of(case), Programs(case)
    sizes, b = have.sizes, case.workload.num_prompts
    training, rollout = programs.training, programs.rollout
    self.assertEqual(tree_bytes(programs.weights), have.weights)
    self.assertEqual(tree_bytes(programs.weights["text"]), have.text)
    self.assertEqual(tree_bytes(programs.rollout_weights), have.rollout_text)
    self.assertEqual(tree_bytes(programs.grads), have.gradients)
    # Counts of steps and the rate are a few scalars.
    self.assertBetween(tree_bytes(programs.state), have.optimizer,
                       have.optimizer + 64)
    for rows in (b, case.block[0]):
      self.assertEqual(tree_bytes(programs.kv(rows, training)), sizes.kv(rows))
      self.assertEqual(tree_bytes(programs.saved(rows, training)),
                       sizes.saved(rows, "layer_inputs"))
    self.assertEqual(tree_bytes(programs.kv(b, rollout)), have.kv)
    self.assertEqual(tree_bytes(programs.kv_grads()),
                     2 * sizes.kv(case.block[0]))
    self.assertEqual(tree_bytes(programs.features(rollout)), have.features)
    # Passes are cut as the step will cut them.
    blocks, rows = sizes.work.training_passes
    self.assertEqual(rows, case.block[0])
    self.assertLen(blocks, case.num_passes[0] * case.num_passes[1])


if __name__ == "__main__":
  absltest.main()
