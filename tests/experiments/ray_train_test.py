"""The launcher for Ray, with a stand-in for Ray: it is not installed."""

import contextlib
import io
import sys
import types
from unittest import mock

from absl.testing import absltest, parameterized

from experiments import train
from experiments.launch import ray_train

_TRAIN = ("--", "--config=experiments/configs/grpo.py", "--output_dir=run")


class RayTrainTest(parameterized.TestCase):

  def run_main(self, *args):
    """What the stand-in was given: (worker, its config, scaling)."""
    given = []

    class JaxTrainer:

      def __init__(self, worker, *, train_loop_config, scaling_config):
        given.extend((worker, train_loop_config, scaling_config))

      def fit(self):
        given.append("fit")

    modules = {name: types.ModuleType(name) for name in (
        "ray", "ray.train", "ray.train.v2", "ray.train.v2.jax")}
    modules["ray.train"].ScalingConfig = dict
    modules["ray.train.v2.jax"].JaxTrainer = JaxTrainer
    with mock.patch.dict(sys.modules, modules):
      ray_train.main(args)
    return given

  @parameterized.parameters(
      (("--gpus_per_worker=8",), dict(
          use_gpu=True, resources_per_worker={"GPU": 8},
          accelerator_type=None)),
      (("--tpu_topology=4x4", "--accelerator_type=TPU-V6E"), dict(
          use_tpu=True, topology="4x4", accelerator_type="TPU-V6E")))
  def test_workers_get_the_command(self, flags, scaling):
    worker, config, got, fit = self.run_main("--num_workers=4", *flags, *_TRAIN)
    self.assertEqual(got, dict(num_workers=4, **scaling))
    self.assertEqual(config, {"argv": list(_TRAIN[1:])})
    self.assertIs(worker, ray_train.train_worker)
    self.assertEqual(fit, "fit")

  def test_a_worker_runs_the_command(self):
    with (mock.patch.object(train, "main") as main,
          mock.patch.object(ray_train.flags, "FLAGS") as parse):
      ray_train.train_worker({"argv": ["--output_dir=run"]})
    parse.assert_called_once_with(["train", "--output_dir=run"])
    main.assert_called_once_with()

  @parameterized.parameters(
      (("--num_workers=1", "--gpus_per_worker=1"), "after --"),
      (("--num_workers=1", "--gpus_per_worker=1", *_TRAIN),
       r"pip install 'ray\[train\]'"))
  def test_refuses(self, args, message):
    err = io.StringIO()
    with contextlib.redirect_stderr(err), self.assertRaises(SystemExit):
      ray_train.main(args)
    self.assertRegex(err.getvalue(), message)


if __name__ == "__main__":
  absltest.main()
