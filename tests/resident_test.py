"""Training under a residency plan: checked, within a budget, or refused."""

import functools
import gc
import json
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import numpy as np
import pytest

from rollplex_jax import resident
from rollplex_jax.config import Algorithm, PolicyConfig
from rollplex_jax.errors import InputError
from rollplex_jax.loop import Run
from rollplex_jax.models import hf
from rollplex_jax.placement.ledger import Ledger, LedgerError
from rollplex_jax.placement.mesh import MeshConfig
from rollplex_jax.placement.residency import BudgetError, ResidencyConfig
from rollplex_jax.schedule import ScheduleConfig
from rollplex_jax.stages.objectives import ObjectiveConfig
from rollplex_jax.stages.update import OptimizerConfig
from rollplex_jax.trainer import Trainer
from tests.helpers import devices, tiny_checkpoint, tiny_task

devices.use_virtual_devices()
# Scalars: metrics, counters, and prompts on their way to a program.
_SLACK = 4096
_WINDOW = dict(name="rollplex", prefix_source="window")


class ResidentTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = tempfile.TemporaryDirectory()
    cls.addClassCleanup(folder.cleanup)
    cls.path = tiny_checkpoint.write(folder.name, eos=tiny_checkpoint.EOS)

  def setUp(self):
    super().setUp()
    gc.collect()
    self.enter_context(mock.patch.object(
        resident, "Ledger", functools.partial(Ledger, slack_bytes=_SLACK)))

  def config(self, *, dtype="float32", freeze=True, check=True, **kwargs):
    return tiny_task.config(self.path, **{**dict(
        objective=ObjectiveConfig(loss_type="dapo", beta=0.05),
        optimizer=OptimizerConfig(learning_rate=1e-3, adam_epsilon=1e-6),
        policy=PolicyConfig(path=self.path, freeze_vision_tower=freeze,
                            compute_dtype=dtype),
        schedule=ScheduleConfig(name="rollplex"), train_batch_size=8,
        residency=ResidencyConfig(check=check)), **kwargs})

  def run_steps(self, config, steps=2):
    return tiny_task.run_steps(config, steps, tiny_task.VowelTask(count=8))

  @parameterized.parameters(
      dict(), dict(schedule=ScheduleConfig()), dict(dtype="bfloat16"),
      dict(schedule=ScheduleConfig(**_WINDOW), num_iterations=2, freeze=False),
      dict(schedule=ScheduleConfig(share_prefix=False), micro_batch_size=2),
      dict(mini_batch_size=2, micro_batch_size=8),
      dict(mesh=MeshConfig(data=4, training_tp=1, rollout_tp=2),
           schedule=ScheduleConfig(**_WINDOW), dtype="bfloat16"))
  @pytest.mark.slow
  def test_every_phase_holds_what_the_plan_has(self, **kwargs):
    self.check_phases(**kwargs)

  @parameterized.parameters(
      dict(mesh=MeshConfig(data=4, training_tp=1, rollout_tp=2,
                           storage="finer"),
           schedule=ScheduleConfig(**_WINDOW)),
      dict(mesh=MeshConfig(fsdp=4, training_tp=2, rollout_tp=2)),
      dict(mesh=MeshConfig(data=2, fsdp=2, training_tp=2, rollout_tp=1),
           schedule=ScheduleConfig(**_WINDOW), num_iterations=2))
  @pytest.mark.slow
  def test_every_phase_on_other_meshes(self, **kwargs):
    self.check_phases(**kwargs)

  def check_phases(self, **kwargs):
    trainer, _ = self.run_steps(self.config(**kwargs))
    self.assertEmpty(trainer.residency.ledger.violations)
    self.assertGreater(len(trainer.residency.ledger.found), 3)

  @pytest.mark.slow
  def test_a_budget_changes_places_and_no_number(self):
    self.check_budget()

  @pytest.mark.slow
  def test_a_budget_on_a_mesh(self):
    self.check_budget(mesh=MeshConfig(data=4, training_tp=1, rollout_tp=2),
                      schedule=ScheduleConfig(**_WINDOW), dtype="bfloat16")

  def check_budget(self, **kwargs):
    free, expected = self.run_steps(self.config(**kwargs))
    peak = free.residency.summary()["peak_bytes"]
    trainer, got = self.run_steps(self.config(
        **kwargs, residency=ResidencyConfig(
            budget_gb=0.8 * peak / 1e9, check=True)))
    summary = trainer.residency.summary()
    self.assertIn("optimizer state offloaded", summary["changed"])
    self.assertLessEqual(summary["peak_bytes"], summary["budget_bytes"])
    for found in summary["found_bytes"].values():
      self.assertLessEqual(found, summary["budget_bytes"])
    kinds = {a.sharding.memory_kind
             for a in jax.tree.leaves(trainer.state.opt_state) if a.ndim}
    self.assertEqual(kinds, {"pinned_host"})
    for a, b in zip(expected, got):
      for name in ("actor/loss", "actor/kl_loss", "actor/grad_norm"):
        np.testing.assert_allclose(a[name], b[name], rtol=1e-5, err_msg=name)
    for a, b in zip(jax.tree.leaves(free.params),
                    jax.tree.leaves(trainer.params)):
      np.testing.assert_allclose(np.float32(a), np.float32(b), atol=1e-6)

  def test_a_leak_is_found(self):
    leaks = []
    update = resident.Residency.update

    def leaky(self, policy, grads, loss):
      leaks.append(jax.tree.map(lambda a: a + 0, policy.trained))
      return update(self, policy, grads, loss)

    with mock.patch.object(resident.Residency, "update", leaky):
      with self.assertRaisesRegex(LedgerError, "after update.*not registered"):
        self.run_steps(self.config(dtype="bfloat16"))

  def test_too_small_a_budget_is_refused_before_anything_is_loaded(self):
    with mock.patch.object(hf, "load_checkpoint") as load:
      with self.assertRaises(BudgetError) as caught:
        self.run_steps(self.config(
            residency=ResidencyConfig(budget_gb=0.0003)), 0)
      load.assert_not_called()
    report = caught.exception.report()
    self.assertNotIn("\n", str(caught.exception))
    self.assertIn("budget of 0.29 MiB", str(caught.exception))
    self.assertRegex(report, "phase +peak +largest buffers")
    self.assertIn("train_batch_size=4", report)

  @parameterized.parameters(
      (dict(algorithm=Algorithm.SUPERVISED), "with algorithm=supervised"),
      (dict(schedule=ScheduleConfig(name="disaggregated")),
       "with schedule.name=disaggregated"))
  def test_refuses_where_no_step_is_planned(self, kwargs, message):
    with self.assertRaisesRegex(InputError, message):
      self.config(**kwargs)

  def test_summary_tells_of_layout_and_residency(self):
    config = self.config(
        mesh=MeshConfig(data=4, training_tp=1, rollout_tp=2),
        schedule=ScheduleConfig(**_WINDOW), total_steps=1)
    folder = self.enter_context(tempfile.TemporaryDirectory())
    Run(Trainer(config, task=tiny_task.VowelTask(count=8)), folder,
        tensorboard=False, evaluate_ends=False).train()
    summary = json.loads(pathlib.Path(folder, "summary.json").read_text())
    self.assertGreater(summary["layout"]["bytes"]["view"], 0)
    self.assertEqual(summary["layout"]["added_bytes"], 0)
    self.assertEqual(
        max(summary["residency"]["live_bytes"].values()),
        summary["residency"]["peak_bytes"])


if __name__ == "__main__":
  absltest.main()
