"""gpu-check on the CPU: it runs through, and finds what is wrong."""

import dataclasses
import functools
import json
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest
import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import (
  gpu_autotune,
  gpu_check_numerics,
  gpu_check_report,
  gpu_check_views,
  gpu_poison,
  gpu_timing,
)
from pallas_kernels.codebook_matmul import kernel, reference
from pallas_kernels.shared_prefix_attention import tuning
from tests.experiments import commands
from tests.helpers import devices

devices.use_virtual_devices()

# A device's record as the profiler writes it: two runs of a program of two
# kernels, one of another, and a line that tells the same by module.
_PROFILE = """
planes { id: 1 name: "/device:GPU:0"
 lines { id: 1 name: "Stream #13(Compute)" timestamp_ns: 100
  events { metadata_id: 1 offset_ps: 3000000 duration_ps: 2000000
   stats { metadata_id: 1 str_value: "jit_a" } }
  events { metadata_id: 2 offset_ps: 6000000 duration_ps: 4000000
   stats { metadata_id: 1 str_value: "jit_a" } }
  events { metadata_id: 1 offset_ps: 0 duration_ps: 1000000
   stats { metadata_id: 1 str_value: "jit_a" } }
  events { metadata_id: 2 offset_ps: 2000000 duration_ps: 3000000
   stats { metadata_id: 1 str_value: "jit_a" } }
  events { metadata_id: 2 offset_ps: 99000000 duration_ps: 7000000
   stats { metadata_id: 1 str_value: "jit_b" } } }
 lines { id: 2 name: "XLA Modules" timestamp_ns: 100
  events { metadata_id: 1 offset_ps: 0 duration_ps: 9000000
   stats { metadata_id: 1 str_value: "jit_a" } } }
 event_metadata { key: 1 value { id: 1 name: "first" } }
 event_metadata { key: 2 value { id: 2 name: "second" } }
 stat_metadata { key: 1 value { id: 1 name: "hlo_module" } } }
planes { id: 2 name: "/host:CPU" lines { id: 1 name: "Stream of thoughts"
  events { metadata_id: 1 duration_ps: 1
   stats { metadata_id: 1 str_value: "jit_a" } } }
 event_metadata { key: 1 value { id: 1 name: "other" } }
 stat_metadata { key: 1 value { id: 1 name: "hlo_module" } } }
"""


class CommandTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(
        self.enter_context(tempfile.TemporaryDirectory()))

  def run_command(self, *args):
    done = commands.run(
        "gpu_check", f"--output_dir={self.folder}/out",
        f"--json={self.folder}/result.json", "--seed=3", *args)
    return done, json.loads((self.folder / "result.json").read_text())

  @pytest.mark.slow
  def test_all_sections(self):
    done, result = self.run_command("--minutes=20")
    self.assertEqual(done.status, 0, done.err)
    self.assertStartsWith(done.out, "no GPU: kernels are interpreted")
    self.assertEqual(
        {name: s["status"] for name, s in result["sections"].items()},
        dict.fromkeys(("numerics", "views", "speed", "autotune", "schedule"),
                      "passed"))
    self.assertStartsWith(result["claim"], "none")
    self.assertEqual(result["seed"], 3)
    numerics = result["sections"]["numerics"]
    self.assertEmpty(numerics["left_out"])
    self.assertEqual(
        {(c["kernel"], c["dtype"]) for c in numerics["checks"]},
        {(k, d) for d in ("float32", "bfloat16") for k in (
            "codebook_matmul", "codebook_matmul_transposed", "codebook_lookup",
            "shared_prefix_attention", "shared_prefix_decode")})
    self.assertLess(
        max(c["error"] / c["limit"] for c in numerics["checks"]), 1)
    self.assertIn("serial", result["sections"]["schedule"]["groups"]["1"])
    table = (self.folder / "out" / "gpu_check.md").read_text()
    self.assertIn("not a GPU", table)
    self.assertNotIn(" met ", table)
    self.assertIn(table.strip(), done.out)
    self.assertEqual(
        result, json.loads((self.folder / "out" / "gpu_check.json").read_text()))

  def run_lookups(self, lookup):
    """Numerics of the lookup alone, with a function in place of its kernel."""
    original = gpu_check_numerics._codebook_checks
    only = lambda *args: [
        c for c in original(*args) if c.kernel == "codebook_lookup"]
    with (mock.patch.object(kernel, "lookup", lookup),
          mock.patch.object(gpu_check_numerics, "_codebook_checks", only),
          mock.patch.object(gpu_check_numerics, "_attention_checks",
                            lambda *_: ())):
      return self.run_command("--sections=numerics")

  def test_a_wrong_kernel(self):
    right = kernel.lookup

    def wrong(w, *, dtype, **how):
      found = right(w, dtype=dtype, **how)
      return found.at[0, :8].set(found[0, :8] * 2)

    done, result = self.run_lookups(wrong)
    self.assertEqual(done.status, 1)
    self.assertRegex(done.err, r"^error: 2 wrong: codebook_lookup by pallas, "
                     r"float32, .*matrix: error \d.*, limit 1e-05\n$")
    section = result["sections"]["numerics"]
    self.assertEqual(section["status"], "failed")
    self.assertLen(section["failed"], 2)

  def test_a_kernel_that_leaves_elements_unwritten(self):
    def gappy(w, *, dtype, config, interpret):
      del config

      def body(dense_ref, out_ref):
        out_ref[1:] = dense_ref[1:]

      dense = reference.lookup(w).astype(dtype)
      return pl.pallas_call(
          body, out_shape=jax.ShapeDtypeStruct(dense.shape, dtype),
          interpret=interpret)(dense)

    done, result = self.run_lookups(gappy)
    self.assertEqual(done.status, 1)
    self.assertRegex(done.err, r"matrix: \d+ of \d+ elements unwritten")
    for check in result["sections"]["numerics"]["checks"]:
      self.assertGreater(check["unwritten"], 0)

  def test_what_raises_is_told_and_the_rest_runs(self):
    with mock.patch.object(gpu_check_views, "run",
                           side_effect=RuntimeError("no DLPack\nhere")):
      done, result = self.run_command("--sections=views,autotune",
                                      "--minutes=0.1")
    self.assertEqual(done.status, 0)
    sections = result["sections"]
    self.assertEqual(sections["views"]["status"], "failed")
    self.assertEqual(sections["views"]["failed"],
                     ["RuntimeError: no DLPack here"])
    # Nor had it time.
    self.assertIn(sections["autotune"]["status"], ("passed", "skipped"))
    self.assertIn("RuntimeError: no DLPack here", done.out)

  def test_bad_flags(self):
    done = commands.run("gpu_check", "--sections=speed,sped")
    self.assertEqual(done.status, 1)
    self.assertStartsWith(done.err, "error: --sections=sped: expected some of")


class PoisonTest(absltest.TestCase):

  def test_gaps_are_seen(self):
    self.assertEmpty(gpu_poison.sees_gaps(interpret=True))

  def test_a_whole_copy_is_no_canary(self):
    with mock.patch.object(gpu_poison, "canary",
                           lambda x, interpret: (x + 0, 2 * x)):
      self.assertLen(gpu_poison.sees_gaps(interpret=True), 2)

  def test_results_take_the_buffers(self):
    x = jnp.ones((64, 64))
    run = gpu_poison.Poisoned(
        lambda x: (x @ x, (x + 1).astype(jnp.bfloat16), x.sum()), x)
    outcome = run(x)
    self.assertTrue(outcome.in_poison)
    np.testing.assert_array_equal(outcome.results[2], 64 * 64)
    run._compiled = lambda _, x: (x @ x, x + 1, x.sum())
    self.assertFalse(run(x).in_poison)


class TimingTest(absltest.TestCase):

  def test_device_events(self):
    events = gpu_timing.device_events(
        jax.profiler.ProfileData.text_proto_to_serialized_xspace(_PROFILE))
    self.assertEqual({k: len(v) for k, v in events.items()},
                     {"jit_a": 4, "jit_b": 1})
    timing = gpu_timing.timing_of(events["jit_a"], calls=2)
    self.assertEqual(timing.kernels, ("first", "second"))
    self.assertAlmostEqual(timing.lowest, 4e-6)
    self.assertAlmostEqual(timing.highest, 6e-6)
    self.assertAlmostEqual(timing.seconds, 5e-6)
    mean = gpu_timing.timing_of(events["jit_a"], calls=3)
    self.assertAlmostEqual(mean.seconds, 10e-6 / 3)
    self.assertIsNone(gpu_timing.timing_of([], calls=3))

  def test_without_a_device_in_the_profile_a_host_clock_is_taken(self):
    with mock.patch.object(gpu_timing, "_COPY_BYTES", 1 << 20):
      timer = gpu_timing.Timer(is_gpu=True)
    self.assertEqual(timer.method, "host")
    self.assertIn("recorded no kernel", timer.reason)
    sets = [(jnp.ones((8, 8)),), (jnp.zeros((8, 8)),)]
    timing, = timer.measure([gpu_timing.Program(jnp.sin, sets)])
    self.assertGreater(timing.seconds, 0)

  def test_a_profile_of_the_device_is_believed(self):
    """Each call leaves an event of its program, as long as the host's."""
    calls, run, by_host = [], gpu_timing.Program.run, gpu_timing.Timer._by_host

    def counted(program, count):
      calls.extend([program.module] * count)
      return run(program, count)

    def forget(*args):
      calls.clear()
      return by_host(*args)

    def events(_):
      return {module: [(i, 1.0, "k") for i in range(calls.count(module))]
              for module in set(calls)}

    second = lambda *args: dataclasses.replace(forget(*args), seconds=1.0)
    with (mock.patch.multiple(
        gpu_timing, _COPY_BYTES=1 << 20, device_events=events),
          mock.patch.object(gpu_timing.Program, "run", counted),
          mock.patch.object(gpu_timing.Timer, "_by_host", second)):
      timer = gpu_timing.Timer(is_gpu=True)
    self.assertEqual(timer.method, "trace", timer.reason)

  def test_loops_do_all_the_work(self):
    sets = [(jnp.full((8, 8), i / 10),) for i in range(3)]
    program = gpu_timing.Program(lambda x: jnp.sin(x) + 1, sets)
    loop = program.loop(4)
    self.assertEqual(loop.as_text().count(" sine("), 3)
    np.testing.assert_allclose(loop(sets), program.run(3), rtol=1e-6)

  def test_sets_are_larger_than_a_cache(self):
    self.assertEqual(gpu_timing.num_sets(1 << 30), 1)
    self.assertEqual(gpu_timing.num_sets(50 << 20), 3)
    self.assertEqual(gpu_timing.num_sets(1), 16)

  def test_what_does_not_compile_is_handed_back(self):
    def fails():
      raise ValueError("no")

    one, two = gpu_timing.compile_all([fails, lambda: 7])
    self.assertIsInstance(one, ValueError)
    self.assertEqual(two, 7)


class AutotuneTest(absltest.TestCase):

  def test_candidates_differ_in_one_kernel(self):
    default = tuning.default(128, jnp.bfloat16)
    for name in ("forward", "grad_prefix", "decode"):
      found = list(tuning.candidates(name, 128, jnp.bfloat16))
      self.assertLen(set(found), len(found))
      self.assertGreater(len(found), 10)
      for other in found:
        self.assertNotEqual(getattr(other, name), getattr(default, name))
        rest = {n: getattr(other, n) for n in vars(default) if n != name}
        self.assertEqual(
            rest, {n: getattr(default, n) for n in rest})

  def test_wrong_and_refused_candidates(self):
    timer = gpu_timing.Timer(is_gpu=False)

    def make(config):
      if config.rows == 32:
        raise ValueError("too much shared memory")
      wrong = 1.5 if config.rows == 64 else 1.0
      return gpu_timing.Program(lambda x: x * wrong, [(jnp.ones(8),)])

    tile = functools.partial(tuning.Tile, keys=16, num_warps=1, num_stages=1)
    row = gpu_autotune._tune(gpu_autotune.Case(
        kernel="k", name="n", start=tile(rows=16),
        candidates=iter([tile(rows=32), tile(rows=64), tile(rows=128)]),
        prepare=lambda: make), timer, deadline=float("inf"), most=None)
    self.assertEqual((row["tried"], row["refused"], row["left_out"]), (3, 1, 0))
    self.assertLen(row["wrong"], 1)
    self.assertIn("rows=64", row["wrong"][0])
    self.assertNotEqual(row["best"]["rows"], 64)
    self.assertLessEqual(row["best_seconds"], row["default_seconds"])

  def test_changes(self):
    self.assertEqual(
        gpu_check_report.changes({"a": {"b": 1, "c": 2}, "d": 3},
                                 {"a": {"b": 1, "c": 4}, "d": 5}),
        ["a.c: 2 -> 4", "d: 3 -> 5"])


if __name__ == "__main__":
  absltest.main()
