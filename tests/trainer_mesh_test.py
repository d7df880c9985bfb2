"""Training on a mesh: the same steps as on one device."""

import tempfile

from absl.testing import absltest, parameterized
import jax
import numpy as np
import pytest

from rollplex_jax.config import Algorithm, PolicyConfig
from rollplex_jax.errors import InputError
from rollplex_jax.placement.mesh import MeshConfig
from rollplex_jax.schedule import ScheduleConfig
from rollplex_jax.stages.objectives import ObjectiveConfig
from rollplex_jax.stages.update import OptimizerConfig
from tests.helpers import devices, tiny_checkpoint, tiny_task

devices.use_virtual_devices()

# The tiny checkpoint has two heads.
_FINER = MeshConfig(data=4, training_tp=1, rollout_tp=2)
_COARSER = MeshConfig(data=2, fsdp=2, training_tp=2, rollout_tp=1)
_EQUAL = MeshConfig(data=2, fsdp=2, training_tp=2, rollout_tp=2)
_WINDOW = dict(name="rollplex", prefix_source="window")


class TrainerMeshTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = tempfile.TemporaryDirectory()
    cls.addClassCleanup(folder.cleanup)
    cls.path = tiny_checkpoint.write(folder.name, eos=tiny_checkpoint.EOS)
    cls.one = {}  # Steps on one device, by their schedule.

  def config(self, **kwargs):
    return tiny_task.config(self.path, **{**dict(
        objective=ObjectiveConfig(loss_type="dapo", beta=0.05),
        optimizer=OptimizerConfig(learning_rate=1e-3, adam_epsilon=1e-6),
        policy=PolicyConfig(path=self.path, freeze_vision_tower=False),
        train_batch_size=8), **kwargs})

  def run_steps(self, config, steps):
    return tiny_task.run_steps(config, steps, tiny_task.VowelTask(count=8))

  @parameterized.parameters(
      (_FINER, dict(**_WINDOW)), (_COARSER, dict(**_WINDOW)), (_COARSER, dict()),
      (_EQUAL, dict(name="rollplex")))
  @pytest.mark.slow
  def test_same_steps(self, mesh, schedule):
    """Two steps of two updates each."""
    several = dict(num_iterations=2, schedule=ScheduleConfig(**schedule))
    key = str(schedule)
    if key not in self.one:
      self.one[key] = self.run_steps(self.config(**several), 2)
    one, expected = self.one[key]
    trainer, got = self.run_steps(self.config(**several, mesh=mesh), 2)
    for a, b in zip(expected, got):
      for name in ("actor/loss", "actor/kl_loss", "actor/grad_norm",
                   "critic/score/mean", "response_length/mean"):
        np.testing.assert_allclose(a[name], b[name], rtol=1e-4, atol=1e-5,
                                   err_msg=name)
      self.assertLess(b["training/rollout_logprobs_diff_max"], 1e-4)
    for a, b in zip(jax.tree.leaves(one.params), jax.tree.leaves(trainer.params)):
      np.testing.assert_allclose(a, b, atol=2e-5)

  def test_master_weights_are_spread_over_all_devices(self):
    trainer, _ = self.run_steps(
        self.config(mesh=_FINER, schedule=ScheduleConfig()), 0)
    weight = trainer.state.params["text"]["layers"][0]["gate"]
    shard = weight.addressable_shards[0].data
    self.assertEqual(shard.size * 8, weight.size)
    moments = [a for a in jax.tree.leaves(trainer.state.opt_state)
               if a.shape == weight.shape]
    self.assertNotEmpty(moments)
    for moment in moments:
      self.assertEqual(moment.sharding, weight.sharding)

  def test_supervised(self):
    config = dict(algorithm=Algorithm.SUPERVISED)
    _, expected = self.run_steps(self.config(**config), 2)
    _, got = self.run_steps(self.config(**config, mesh=_EQUAL), 2)
    for a, b in zip(expected, got):
      np.testing.assert_allclose(a["train/loss"], b["train/loss"], rtol=1e-5)

  @parameterized.parameters(
      (dict(mesh=_FINER, schedule=ScheduleConfig(name="rollplex")),
       "prefix_source=rollout with mesh.training_tp=1 and mesh.rollout_tp=2"),
      (dict(mesh=_EQUAL, train_batch_size=6),
       "train_batch_size=6: expected a multiple of the 4 parts"),
      (dict(mesh=_EQUAL, micro_batch_size=6),
       "micro_batch_size=6: expected a multiple of the 4 parts"),
      (dict(mesh=MeshConfig(data=3)), "= 3 devices: expected 8"),
      (dict(mesh=MeshConfig(training_tp=8, rollout_tp=8)),
       "heads do not divide by tensor parallelism 8"),
      (dict(mesh=_EQUAL, schedule=ScheduleConfig(name="disaggregated")),
       "disaggregated with a mesh of 8 devices"))
  def test_refuses(self, kwargs, message):
    with self.assertRaisesRegex(InputError, message) as caught:
      self.run_steps(self.config(**kwargs), 0)
    self.assertNotIn("\n", str(caught.exception))


if __name__ == "__main__":
  absltest.main()
