"""References that are checkpoints, compressed ones among them."""

import json
import pathlib
import tempfile

from absl.testing import absltest, parameterized
import jax
import numpy as np
import pytest

from legolm_jax.array import LegoArray
from legolm_jax.rules import Rules
from rollplex_jax.buffer_sizes import Sizes, Workload
from rollplex_jax.config import Algorithm, PolicyConfig, ReferenceConfig
from rollplex_jax.errors import InputError
from rollplex_jax.loop import Run
from rollplex_jax.models import hf
from rollplex_jax.placement.mesh import MeshConfig
from rollplex_jax.schedule import ScheduleConfig
from rollplex_jax.stages import window
from rollplex_jax.stages.objectives import ObjectiveConfig
from rollplex_jax.stages.update import OptimizerConfig
from rollplex_jax.trainer import Trainer
from tests.helpers import compressed, devices, tiny_checkpoint, tiny_task
from tests.helpers.tiny_task import VowelTask

devices.use_virtual_devices()

_OBJECTIVE = ObjectiveConfig(loss_type="dapo", beta=0.05)
_SCHEDULES = {
    "serial": dict(name="serial"),
    "unshared": dict(name="serial", share_prefix=False),
    "disaggregated": dict(name="disaggregated"),
    "rollplex": dict(name="rollplex")}


class ReferenceTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = pathlib.Path(
        cls.enterClassContext(tempfile.TemporaryDirectory()))
    cls.path = tiny_checkpoint.write(
        cls.folder / "model", eos=tiny_checkpoint.EOS)
    cls.small = compressed.compress(cls.path, cls.folder / "small")
    cls.plain = compressed.decompress(cls.small, cls.folder / "plain")

  def config(self, reference, **kwargs):
    return tiny_task.config(self.path, **{**dict(
        reference=ReferenceConfig(path=reference), objective=_OBJECTIVE,
        optimizer=OptimizerConfig(learning_rate=1e-3, adam_epsilon=1e-6)),
        **kwargs})

  def assert_same_steps(self, one, other):
    for a, b in zip(one, other, strict=True):
      for name in ("actor/loss", "actor/kl_loss", "actor/grad_norm"):
        np.testing.assert_allclose(a[name], b[name], rtol=1e-4, atol=1e-5,
                                   err_msg=name)

  @parameterized.parameters(*_SCHEDULES)
  @pytest.mark.slow
  def test_compressed_as_decompressed(self, schedule):
    schedule = ScheduleConfig(**_SCHEDULES[schedule])
    trainer, got = tiny_task.run_steps(
        self.config(self.small, schedule=schedule), 2)
    _, want = tiny_task.run_steps(
        self.config(self.plain, schedule=schedule), 2)
    gate = trainer.reference.params["text"]["layers"][0]["gate"]
    self.assertIsInstance(gate, LegoArray)
    self.assert_same_steps(got, want)
    # What compression adds, before the policy has moved.
    self.assertGreater(got[0]["actor/kl_loss"], 1e-4)

  @parameterized.parameters(
      (MeshConfig(data=4, training_tp=1, rollout_tp=2), True),
      (MeshConfig(data=2, fsdp=2, training_tp=2, rollout_tp=1), False))
  @pytest.mark.slow
  def test_on_a_mesh(self, mesh, freeze):
    path = self.with_two_key_heads()
    kwargs = dict(
        policy=PolicyConfig(path=path, freeze_vision_tower=freeze),
        schedule=ScheduleConfig(name="rollplex", prefix_source="window"),
        train_batch_size=8)
    small = compressed.compress(path, f"{path}_small")
    run = lambda **more: tiny_task.run_steps(
        self.config(small, **kwargs, **more), 1, VowelTask(count=8))
    trainer, got = run(mesh=mesh)
    # Every device runs the window on its own heads.
    self.assertTrue(window.can_shard(trainer.policy.places.rollout))
    self.assert_same_steps(got, run()[1])

  def with_two_key_heads(self):
    folder = tempfile.mkdtemp(dir=self.folder)
    tiny_checkpoint.write(folder, eos=tiny_checkpoint.EOS)
    file = pathlib.Path(folder, "config.json")
    file.write_text(json.dumps(
        json.loads(file.read_text()) | {"num_key_value_heads": 2}))
    config = hf.load_config(folder)
    hf.save_checkpoint(folder, config, tiny_checkpoint.random_params(config),
                       assets_from=folder)
    return folder

  def test_own_initial_weights_by_path(self):
    _, got = tiny_task.run_steps(self.config(self.path), 2)
    _, want = tiny_task.run_steps(self.config(""), 2)
    self.assert_same_steps(got, want)

  def test_summary(self):
    bytes_of = {}
    for path in ("", self.small):
      out = self.folder / f"run{len(bytes_of)}"
      trainer = Trainer(self.config(path, total_steps=1), task=VowelTask())
      Run(trainer, out, tensorboard=False, evaluate_ends=False).train()
      found = json.loads((out / "summary.json").read_text())["reference"]
      self.assertEqual((found["path"], found["compressed"]), (path, bool(path)))
      bytes_of[path] = found["bytes"]
      self.assertEqual(found["plain_bytes"], bytes_of[""])
      if path:
        self.assertGreater(found["first_kl"], 1e-4)
      else:
        self.assertLess(abs(found["first_kl"]), 1e-6)
      # As the residency plan had it.
      sizes = Sizes(trainer.residency._setup, Workload(
          num_prompts=0, prompt_length=0, num_generations=0,
          response_length=0), ("text",))
      self.assertAlmostEqual(
          sizes.reference("text"), found["bytes"], delta=64)
    text = trainer.policy.trained["text"]
    self.assertEqual(bytes_of[""], sum(a.nbytes for a in jax.tree.leaves(text)))
    self.assertLess(bytes_of[self.small], 0.7 * bytes_of[""])

  def test_refuses(self):
    other = tiny_checkpoint.write(self.folder / "other", seed=1)
    text = tiny_checkpoint.write(self.folder / "text", with_vision=False)
    tower = compressed.compress(
        self.path, self.folder / "tower",
        rules=Rules(protected_blocks=(), compress=("visual.*qkv.weight",)))
    for path, kwargs, message in (
        (other, {}, "its vision tower differs"),
        (tower, {}, "its vision tower differs"),
        (text, {}, "another model than .*text has rope_theta 10000"),
        (self.folder / "nothing", {}, "no such checkpoint folder"),
        (self.small, dict(objective=ObjectiveConfig(beta=0.0)),
         "objective.beta=0"),
        (self.small, dict(algorithm=Algorithm.SUPERVISED), "supervised"),
        ("", dict(policy=PolicyConfig(path=self.small)),
         "is compressed, and can't be trained")):
      with self.subTest(message):
        with self.assertRaisesRegex(InputError, message) as caught:
          Trainer(self.config(str(path), **kwargs), task=VowelTask())
        self.assertNotIn("\n", str(caught.exception))


if __name__ == "__main__":
  absltest.main()
