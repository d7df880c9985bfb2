"""`plan`: its JSON, its tables, and what it refuses."""

import json
import os
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import pytest

from rollplex_jax.capacity import deviceless
from tests.experiments import commands
from tests.helpers import devices, tiny_policy


def setUpModule():
  devices.use_virtual_devices()


_DEFAULT = ("--model=qwen2.5-vl-32b", "--device=h800", "--num_devices=32")


class PlanTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.out = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

  def plan(self, *args):
    path = self.out / "plan.json"
    result = commands.run("plan", *args, f"--json={path}")
    self.assertEqual((result.status, result.err), (0, ""))
    return json.loads(path.read_text()), result.out

  def test_estimate(self):
    plan, out = self.plan(*_DEFAULT, "--estimate")
    self.assertEqual(set(plan["schedules"]),
                     {"rollplex", "serial", "disaggregated", "naive"})
    for entry in plan["schedules"].values():
      self.assertContainsSubset(
          ("peak_bytes", "fits", "phases", "step_seconds"), entry)
      self.assertEqual(entry["peak_bytes"], max(
          phase["peak_bytes"] for phase in entry["phases"]))
      for phase in entry["phases"]:
        self.assertEqual(phase["peak_bytes"], sum(phase["bytes"].values()))
    self.assertIn("estimate", plan["how"])
    self.assertIn("estimate", out)
    self.assertTrue(plan["schedules"]["rollplex"]["fits"])
    self.assertFalse(plan["schedules"]["naive"]["fits"])
    self.assertIn("165 GiB", out)

  def test_without_the_compiler(self):
    with mock.patch.object(deviceless, "has_plugin", lambda kind: False):
      plan, out = self.plan(*_DEFAULT)
    self.assertIn("estimate", plan["how"])
    self.assertIn("pip install '.[planner]'", out.splitlines()[0])

  def test_a_folder_and_one_device(self):
    config = tiny_policy.config().to_hf()
    (self.out / "config.json").write_text(json.dumps(config))
    plan, _ = self.plan(
        f"--model={self.out}", "--device=h100", "--num_devices=1",
        "--estimate", "--num_prompts=2", "--prefix_length=64",
        "--response_length=8", "--video=2x4x4")
    self.assertTrue(plan["schedules"]["rollplex"]["fits"])
    # Two pools of half a device each there can't be.
    self.assertIsNone(plan["schedules"]["disaggregated"]["peak_bytes"])

  @parameterized.parameters(
      (8192, [16, 40, 48]), (2048, [4, 40, 48]), (256, None))
  def test_the_default_video_fits_the_prefix(self, length, video):
    plan, _ = self.plan(
        "--model=qwen2.5-vl-3b", "--device=h100", "--num_devices=1",
        "--estimate", "--num_prompts=2", f"--prefix_length={length}")
    self.assertEqual(plan["case"]["workload"]["video"], video)

  def test_what_would_fit(self):
    """That something does not fit is an answer, with others beside it."""
    plan, out = self.plan(*_DEFAULT, "--estimate", "--budget_gb=40")
    self.assertFalse(plan["schedules"]["rollplex"]["fits"])
    self.assertEqual(plan["memory"]["budget_bytes"], 40e9)
    near = {n["setting"].partition("=")[0]: n for n in plan["nearest"]}
    self.assertContainsSubset(
        ("--save", "--num_prompts", "--num_devices"), near)
    self.assertIn("more than the budget of 37.3 GiB. By estimate would fit: "
                  "--save=offload", out)
    # Which it does.
    setting = near["--num_prompts"]["setting"]
    other, _ = self.plan(*_DEFAULT, "--estimate", "--budget_gb=40", setting)
    self.assertTrue(other["schedules"]["rollplex"]["fits"])
    self.assertEqual(other["schedules"]["rollplex"]["peak_bytes"],
                     near["--num_prompts"]["peak_bytes"])
    self.assertEmpty(other["nearest"])

  def test_search(self):
    result, out = self.plan(
        "--model=qwen2.5-vl-3b", "--device=h100", "--num_devices=4",
        "--num_prompts=16", "--estimate", "--search")
    self.assertNotEmpty(result["ranked"])
    seconds = [entry["step_seconds"] for entry in result["ranked"]]
    self.assertEqual(seconds, sorted(seconds))
    self.assertTrue(all(entry["fits"] for entry in result["ranked"]))
    self.assertIn("what fits", out)

  @pytest.mark.slow
  @pytest.mark.cuda_plugin
  @absltest.skipUnless(deviceless.has_plugin(), "needs jax's CUDA plugin")
  def test_compiled(self):
    config = tiny_policy.config().to_hf()
    (self.out / "config.json").write_text(json.dumps(config))
    # Programs for absent devices go to no cache, nor to the user's home.
    cache = self.out / "cache"
    for name in ("jax_compilation_cache_dir", "jax_compilation_cache_max_size",
                 "jax_persistent_cache_min_compile_time_secs"):
      self.addCleanup(jax.config.update, name, getattr(jax.config, name))
    jax.config.update("jax_compilation_cache_dir", None)
    self.enterContext(mock.patch.dict(os.environ, {"HOME": str(cache)}))
    plan, out = self.plan(
        f"--model={self.out}", f"--compilation_cache_dir={cache}",
        "--device=h800", "--num_devices=8",
        "--num_prompts=8", "--prefix_length=64", "--response_length=8",
        "--video=2x4x4", "--training_tp=2", "--workers=1",
        "--window_chunk=16")
    self.assertFalse(cache.exists())
    self.assertIn("compiled at all 2 layers", out)
    self.assertTrue(plan["schedules"]["rollplex"]["fits"])
    window = plan["programs"]["all/window"]
    self.assertTrue(window["compiled"])
    self.assertGreater(window["temp_bytes"], 0)
    self.assertTrue(any(c["kind"] == "all-reduce"
                        for c in window["collectives"]))

  @parameterized.parameters(
      (("--model=qwen2.5-vl-8b",), "qwen2.5-vl-8b: expected"),
      (("--device=b200",), "device=b200: expected one of a100-80g"),
      (("--num_devices=31",), "= 24 devices: expected num_devices=31",
       "--training_tp=8", "--data=3"),
      (("--training_tp=16",), "training_tp=16: 40 heads do not divide"),
      (("--data=5",), "= 40 devices: expected num_devices=32"),
      (("--num_prompts=6",), "num_prompts=6: expected a multiple of the 4"),
      (("--micro_batch_size=6",), "micro_batch_size=6: expected a multiple of"),
      (("--video=16x41x48",), "multiples of 2"),
      (("--video=big",), "expected three numbers"),
      (("--prefix_length=1000", "--video=16x40x48"),
       "at most prefix_length=1000"),
      (("--rollout_tp=4", "--training_tp=8", "--prefix_source=rollout"),
       "expected prefix_source=window"),
      (("--rollout_tp=6", "--training_tp=8"), "to divide the other"),
      (("--num_devices=0",), "num_devices=0: expected at least 1"),
  )
  def test_refuses(self, args, message, *more):
    result = commands.run("plan", *_DEFAULT, "--estimate", *args, *more)
    self.assertEqual(result.status, 1)
    self.assertStartsWith(result.err, "error: ")
    self.assertLen(result.err.splitlines(), 1)
    self.assertIn(message, result.err)


if __name__ == "__main__":
  absltest.main()
