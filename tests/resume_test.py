"""A run that was stopped and goes on is the run that was not."""

import dataclasses
import gc
import json
import logging
import os
import pathlib
import resource
import shutil
import signal
import sys
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import numpy as np
import pytest

from rollplex_jax import metrics, resume, supervised
from rollplex_jax.config import CheckpointConfig
from rollplex_jax.data.settings import DataConfig, EnvironmentConfig
from rollplex_jax.errors import InputError
from rollplex_jax.full_passes import supervised_gradient
from rollplex_jax.interrupts import Interrupts, Stopped
from rollplex_jax.loop import Run
from rollplex_jax.placement.mesh import MeshConfig
from rollplex_jax.placement.residency import ResidencyConfig
from rollplex_jax.run_comparison import compare
from rollplex_jax.run_export import export
from rollplex_jax.saver import Saver
from rollplex_jax.schedule import ScheduleConfig
from rollplex_jax.stages.objectives import ObjectiveConfig
from rollplex_jax.stages.update import OptimizerConfig
from rollplex_jax.trainer import Trainer
from tests.helpers import devices, tiny_checkpoint, tiny_task

devices.use_virtual_devices()

_REFERENCE = dict(objective=ObjectiveConfig(loss_type="dapo", beta=0.05),
                  num_iterations=2)
_MESH = dict(mesh=MeshConfig(data=4, training_tp=1, rollout_tp=2),
             schedule=ScheduleConfig(name="rollplex", prefix_source="window"))


class _Case(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.root = pathlib.Path(
        cls.enterClassContext(tempfile.TemporaryDirectory()))
    cls.path = tiny_checkpoint.write(
        cls.root / "model", eos=tiny_checkpoint.EOS)

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(
        self.enterContext(tempfile.TemporaryDirectory()))

  def config(self, **kwargs):
    return tiny_task.config(self.path, **{**dict(
        total_steps=4, eval_every=2, checkpoint=CheckpointConfig(every=2),
        optimizer=OptimizerConfig(learning_rate=1e-2, weight_decay=0.1)),
        **kwargs})

  def run_of(self, name, config, *, stop=None,
             message="SIGTERM after step . of 4, which is saved", **kwargs):
    """A run, ended after a step if `stop` is one."""
    interrupts = Interrupts()

    def on_step(progress):
      if progress.step == stop:
        interrupts.stop = signal.SIGTERM

    trainer = Trainer(config, task=tiny_task.VowelTask(
        with_media=False, count=8))
    run = Run(trainer, self.folder / name, on_step=on_step, tensorboard=False,
              interrupts=interrupts, **kwargs)
    if stop is None:
      run.train()
    else:
      with self.assertRaisesRegex(Stopped, message):
        run.train()
    return run

  def assert_same(self, one="whole", other="resumed"):
    self.assertEqual(
        compare(self.folder / one, self.folder / other), [])


def _committed(run):
  trainer = run._trainer
  return [a.committed for a in jax.tree.leaves((trainer.state, trainer.params))]


class BitEqualTest(_Case):

  @parameterized.named_parameters(
      ("reference", _REFERENCE),
      ("dynamic_sampling", dict(train_batch_size=2, gen_batch_size=4)))
  @pytest.mark.slow
  def test_resumed_run(self, kwargs):
    self.check(self.config(**kwargs))

  def test_resumed_run_of_supervised_learning(self):
    self.check(self.config(algorithm="supervised"))

  @pytest.mark.slow
  def test_resumed_run_on_a_mesh(self):
    self.check(self.config(**_REFERENCE, **_MESH, train_batch_size=8))

  @pytest.mark.slow
  def test_resumed_run_with_offloaded_state(self):
    config = self.config(**_REFERENCE)
    probe = self.run_of("probe", dataclasses.replace(config, total_steps=1))
    peak = json.loads((probe.folder / "summary.json").read_text())[
        "residency"]["peak_bytes"]
    config = dataclasses.replace(
        config, residency=ResidencyConfig(budget_gb=0.8 * peak / 1e9))
    run = self.check(config)
    self.assertIn("pinned_host", {
        a.sharding.memory_kind
        for a in jax.tree.leaves(run._trainer.state.opt_state)})

  def check(self, config):
    """Stopped after odd and even steps, before and after an evaluation."""
    whole = self.run_of("whole", config)
    for step in (1, 2, 3):
      run = self.run_of("resumed", config, stop=step)
    run = self.run_of("resumed", config)
    self.assert_same()
    # Or every program is another one, and is compiled again.
    self.assertEqual(_committed(whole), _committed(run))
    return run

  def test_comparison_sees_differences(self):
    self.run_of("whole", self.config(total_steps=2))
    shutil.copytree(self.folder / "whole", self.folder / "resumed")
    self.assert_same()
    path = self.folder / "resumed" / "samples.jsonl"
    path.write_text(path.read_text().replace('"row": 1', '"row": 2'))
    path = self.folder / "resumed" / "metrics.jsonl"
    path.write_text(path.read_text().replace('"actor/loss": ', '"a": '))
    self.assertLen(
        compare(self.folder / "whole", self.folder / "resumed"), 1 + 2 * 2)


class OtherDevicesTest(_Case):

  @parameterized.parameters((dict(), _MESH), (_MESH, dict()))
  @pytest.mark.slow
  def test_restored_state_and_next_gradient(self, before, after):
    config = self.config(algorithm="supervised", train_batch_size=8)
    one, other = (dataclasses.replace(config, **{
        k: v for k, v in change.items() if k == "mesh"})
                  for change in (before, after))
    old = self.run_of("run", one, stop=2)._trainer
    trainer = Trainer(other, task=tiny_task.VowelTask(
        with_media=False, count=8))
    run = Run(trainer, self.folder / "run", tensorboard=False)
    run._started, run._compiled = 0.0, metrics.CompileCounter()
    self.addCleanup(run._compiled.close)
    run._begin()
    self.addCleanup(run._writer.close)
    self.assertEqual(run.record.step, 2)
    leaves = lambda t: jax.tree.leaves(jax.device_get(t))
    for a, b in zip(leaves(old.state), leaves(trainer.state), strict=True):
      np.testing.assert_array_equal(a, b)
    examples = next(run._batches)
    found = [self.gradient(t, examples) for t in (old, trainer)]
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-5)
    for g, d in zip(leaves(found[0][0]), leaves(found[1][0]), strict=True):
      error = np.linalg.norm(g - d) / max(np.linalg.norm(g), 1e-12)
      self.assertLess(error, 1e-5)

  def gradient(self, trainer, examples):
    batch, groups = supervised.collect(
        trainer.model_config, examples, trainer._parts, trainer._spread)
    grads, loss = supervised_gradient(
        trainer.policy.trained, trainer.policy.frozen, trainer.model_config,
        batch, groups, micro_batch_size=0, remat=False,
        place=trainer.settings.training)
    return grads, float(loss)


class RunFilesTest(_Case):

  def test_checkpoints_kept_and_export(self):
    config = self.config(
        eval_every=1, checkpoint=CheckpointConfig(every=1, keep=2))
    run = self.run_of("run", config)
    best = run.record.best_steps(1)
    steps = sorted({*best, 3, 4})
    self.assertEqual(run._saver.checkpoints.steps(), steps)
    self.assertEqual(export(self.folder / "run", self.folder / "out"), 4)
    for name in os.listdir(self.folder / "run" / "policy"):
      self.assertEqual((self.folder / "out" / name).read_bytes(),
                       (self.folder / "run" / "policy" / name).read_bytes())
    export(self.folder / "run", self.folder / "out", step=3)
    with self.assertRaisesRegex(InputError, "no checkpoint of step 9; there a"):
      export(self.folder / "run", self.folder / "out", step=9)
    with self.assertRaisesRegex(InputError, "holds no checkpoint of a run"):
      export(self.root, self.folder / "out")

  def test_summary_counts_all_sessions(self):
    config = self.config()
    whole = json.loads(
        (self.run_of("whole", config).folder / "summary.json").read_text())
    self.run_of("resumed", config, stop=3)
    summary = json.loads(
        (self.run_of("resumed", config).folder / "summary.json").read_text())
    for name in ("steps", "skipped_rows", "num_parameters"):
      self.assertEqual(summary[name], whole[name])
    plain = lambda s: [{k: v for k, v in e.items() if "seconds" not in k
                        and "timing" not in k} for e in s["evaluations"]]
    self.assertEqual(plain(summary), plain(whole))
    self.assertEqual(set(summary["phase_seconds"]), set(whole["phase_seconds"]))

  def test_a_longer_run_goes_on(self):
    config = self.config(eval_every=0)
    self.run_of("whole", config, evaluate_ends=False)
    self.run_of("resumed", dataclasses.replace(config, total_steps=3),
                evaluate_ends=False)
    found = resume.find(self.folder / "resumed", config)
    self.assertIsNone(resume.finished(self.folder / "resumed", found, config))
    self.run_of("resumed", config, evaluate_ends=False)
    self.assert_same()
    found = resume.find(self.folder / "resumed", config)
    self.assertEqual(resume.finished(
        self.folder / "resumed", found, config)["steps"], 4)

  def test_without_checkpoints(self):
    config = self.config(checkpoint=CheckpointConfig(every_minutes=0))
    self.run_of("run", config, stop=2,
                message="after step 2 of 4; there is no checkpoint yet")
    self.assertFalse((self.folder / "run" / "checkpoints").exists())
    with self.assertRaisesRegex(InputError, "holds a run already, and no chec"):
      self.run_of("run", config)

  def test_a_run_that_ended_before_its_first_checkpoint_begins_again(self):
    config = self.config(checkpoint=CheckpointConfig(every=3, keep_best=0))
    with mock.patch.object(
        Trainer, "step", side_effect=KeyboardInterrupt):
      with self.assertRaises(KeyboardInterrupt):
        self.run_of("resumed", config)
    self.run_of("resumed", config)
    self.run_of("whole", config)
    self.assert_same()
    # Under another configuration it is somebody else's folder.
    shutil.rmtree(self.folder / "resumed" / "checkpoints")
    (self.folder / "resumed" / "summary.json").unlink()
    with self.assertRaisesRegex(InputError, "holds a run already"):
      resume.find(self.folder / "resumed", dataclasses.replace(config, seed=9))


class RefusedTest(_Case):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.done = pathlib.Path(
        cls.enterClassContext(tempfile.TemporaryDirectory())) / "run"
    cls.settings = tiny_task.config(
        cls.path, total_steps=2, checkpoint=CheckpointConfig(every=1))
    Run(Trainer(cls.settings, task=tiny_task.VowelTask(with_media=False)),
        cls.done, tensorboard=False, evaluate_ends=False).train()

  def find(self, **kwargs):
    return resume.find(
        self.done, dataclasses.replace(self.settings, **kwargs))

  @parameterized.parameters(
      (dict(seed=5), "seed was 0, is 5"),
      (dict(train_batch_size=2), "train_batch_size was 4, is 2"),
      (dict(optimizer=OptimizerConfig(learning_rate=1.0)),
       "optimizer.learning_rate was 0.01, is 1.0"))
  def test_changed_configuration(self, change, message):
    with self.assertRaisesRegex(InputError, message):
      self.find(**change)
    found = resume.find(
        self.done, dataclasses.replace(self.settings, **change),
        allow_config_change=True)
    self.assertIn(message, found.changed)

  def test_what_may_change(self):
    found = self.find(
        total_steps=9, max_seconds=3.0, eval_every=1, micro_batch_size=2,
        timeline_every=1, mesh=MeshConfig(data=2),
        checkpoint=CheckpointConfig(every=7),
        data=DataConfig(
            reward_timeout=5.0, environment=EnvironmentConfig(num_workers=1)),
        optimizer=OptimizerConfig(learning_rate=1e-2, total_steps=5))
    self.assertEqual((found.step, found.changed), (2, ()))

  def test_keys_are_keys_of_the_configuration(self):
    known = dict(resume._flat(resume._plain(self.settings)))
    for key in resume.MAY_CHANGE:
      self.assertTrue(
          any(f"{k}.".startswith(f"{key}.") for k in known), key)

  def test_another_model(self):
    other = tiny_checkpoint.write(
        self.folder / "other", eos=tiny_checkpoint.EOS, seed=1)
    policy = dataclasses.replace(self.settings.policy, path=other)
    with self.assertRaisesRegex(
        InputError, f"policy.path={other}: is another model than .*: tensor "
        r"lm_head.weight is float32\[320, 32\] \w+, expected"):
      self.find(policy=policy)
    raw = json.loads((self.folder / "other/config.json").read_text())
    (self.folder / "other/config.json").write_text(
        json.dumps(raw | {"rms_norm_eps": 1e-3}))
    with self.assertRaisesRegex(
        InputError, "config.json: text.rms_norm_eps is 0.001, expected 1e-06"):
      self.find(policy=policy)
    # The same model elsewhere is the same model.
    shutil.copytree(self.path, self.folder / "copy")
    self.find(policy=dataclasses.replace(
        policy, path=str(self.folder / "copy")))

  def test_other_rows(self):
    trainer = Trainer(self.settings, task=tiny_task.VowelTask(
        with_media=False, count=5))
    with self.assertRaisesRegex(InputError, "began with 6 rows to train, foun"):
      Run(trainer, self.copy(), tensorboard=False).train()

  def copy(self):
    return pathlib.Path(shutil.copytree(self.done, self.folder / "run"))

  def test_newer_format(self):
    run = self.copy()
    path = run / "checkpoints/000002/run/metadata"
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    with self.assertRaisesRegex(InputError, "000002: is of format 2, expected"):
      resume.find(run, self.settings)

  @parameterized.parameters(
      ("run/metadata",), ("_CHECKPOINT_METADATA",), ("params/_METADATA",),
      ("params/manifest.ocdbt",), ("optimizer/d",), ("params/d",),
      ("files.json", lambda text: text[:100]), ("files.json", lambda _: "[1]"),
      # As long as before, or the sizes would tell.
      ("run/metadata", lambda text: text.replace('"step"', '"stop"')),
      ("run/metadata", lambda text: text.replace('"facts"', '"facto"')))
  def test_half_written(self, name, change=None):
    run = self.copy()
    path = run / "checkpoints/000002" / name
    if change is not None:
      path.write_text(change(path.read_text()))
    elif path.is_dir():
      shutil.rmtree(path)
    else:
      path.unlink()
    files = sorted(run.rglob("*"))
    # Read by whoever looks first, without a trace in the run.
    with self.assertRaisesRegex(
        InputError, "000002: is not a whole checkpoint .*; remove it to use "
        "that of step 1"):
      Run(Trainer(self.settings, task=tiny_task.VowelTask(with_media=False)),
          run, tensorboard=False).train()
    self.assertEqual(sorted(run.rglob("*")), files)
    shutil.rmtree(run / "checkpoints/000002")
    resumed = Run(
        Trainer(self.settings, task=tiny_task.VowelTask(with_media=False)),
        run, tensorboard=False, evaluate_ends=False)
    resumed.train()
    self.assertEqual(compare(self.done, run), [])

  def test_files_that_are_too_short(self):
    run = self.copy()
    os.truncate(run / "samples.jsonl", 10)
    with self.assertRaisesRegex(InputError, "samples.jsonl: has 10 bytes, exp"):
      Run(Trainer(self.settings, task=tiny_task.VowelTask(with_media=False)),
          run, tensorboard=False).train()


class FullDiskTest(_Case):
  """A limit on the size of files stands for the disk's."""

  def setUp(self):
    super().setUp()
    # The errors of all files but one reach nobody, or a loop that is closed.
    self.enterContext(mock.patch.object(sys, "unraisablehook"))
    logger = logging.getLogger("asyncio")
    self.addCleanup(logger.setLevel, logger.level)
    logger.setLevel(logging.CRITICAL)
    self.addCleanup(gc.collect)

  def limit(self, size):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    self.addCleanup(resource.setrlimit, resource.RLIMIT_FSIZE, (soft, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))

  def test_a_save_that_fails_costs_nothing_else(self):
    config = self.config(checkpoint=CheckpointConfig(every=1, keep=4))
    self.run_of("whole", config)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)

    def on_step(progress):
      if progress.step == 2:
        run._saver.checkpoints.finish()
        self.limit(40_000)
      elif progress.step == 4:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)

    run = Run(Trainer(config, task=tiny_task.VowelTask(
        with_media=False, count=8)), self.folder / "resumed",
              tensorboard=False, on_step=on_step)
    with self.assertLogs("absl", level="WARNING") as logs:
      run.train()
    self.assertIn("000002: can't be written: File too large; the run goes on",
                  "".join(logs.output))
    self.assertEqual(sorted(os.listdir(run.folder / "checkpoints")),
                     ["000001", "000004"])
    self.assert_same()

  def test_metrics_that_cannot_be_written_end_the_run(self):
    config = self.config(checkpoint=CheckpointConfig(every=1, keep=4))
    self.run_of("whole", config)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with mock.patch.object(Saver, "save_beside"):
      with self.assertRaises(OSError) as caught:
        Run(Trainer(config, task=tiny_task.VowelTask(
            with_media=False, count=8)), self.folder / "resumed",
            tensorboard=False, on_step=lambda p: p.step == 2 and self.limit(
                (self.folder / "resumed/metrics.jsonl").stat().st_size + 500),
            ).train()
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    self.assertEqual(caught.exception.strerror, "File too large")
    self.assertEqual(caught.exception.filename,
                     str(self.folder / "resumed/metrics.jsonl"))
    self.run_of("resumed", config)
    self.assert_same()


if __name__ == "__main__":
  absltest.main()
