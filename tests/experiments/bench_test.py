"""The bench's suites in miniature: they run, and return what they promise."""

import dataclasses
import importlib.util
import json

from absl.testing import absltest
import numpy as np
import pytest

from experiments import (
    bench_decode,
    bench_disaggregated,
    bench_kernels,
    bench_schedule,
)
from experiments.schedule_workload import CONFIG, Workload, make_models
from rollplex_jax.models.config import TextConfig

# The bench's model, but for most of its layers.
_SMALL = dataclasses.replace(
    CONFIG, text=dataclasses.replace(CONFIG.text, num_hidden_layers=2),
    vision=dataclasses.replace(
        CONFIG.vision, depth=2, fullatt_block_indexes=(1,)))
_TINY = TextConfig(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)


class BenchDecodeTest(absltest.TestCase):

  @pytest.mark.torch
  @absltest.skipUnless(importlib.util.find_spec("torch"), "needs torch")
  def test_result(self):
    result = bench_decode.run(
        rounds=1, sizes={"tiny": _TINY},
        workload=bench_decode.Workload(
            batch=3, prompt_length=6, new_tokens=5))
    json.dumps(result)
    self.assertEqual(list(result["ratios"]), ["tiny"])
    self.assertGreater(result["ratios"]["tiny"], 0)
    found = result["sizes"]["tiny"]
    self.assertCountEqual(
        found["tokens_per_second"], ["ours", "dynamic", "static"])
    self.assertGreater(min(found["tokens_per_second"].values()), 0)
    self.assertIn(found["torch_cache"], ("dynamic", "static"))
    self.assertGreater(found["compile_seconds"], 0)
    self.assertGreaterEqual(result["machine"]["cores"], 1)

  def test_sizes_are_what_they_are_called(self):
    for name, millions in (("20M", 18.9), ("100M", 100.7)):
      config = bench_decode.SIZES[name]
      d, f, v = (
          config.hidden_size, config.intermediate_size, config.vocab_size)
      kv = config.num_key_value_heads * config.head_dim
      layer = 2 * d * d + 2 * d * kv + 3 * d * f
      total = v * d + config.num_hidden_layers * layer
      self.assertAlmostEqual(total / 1e6, millions, delta=0.1)

  def test_tokens_must_agree_but_for_near_ties(self):
    ours = np.array([[1, 2, 3], [4, 5, 6]])
    theirs = np.array([[1, 2, 3], [4, 7, 8]])
    bench_decode._check_tokens(ours, theirs, lambda *_: 1e-5, "here")
    with self.assertRaisesRegex(ValueError, "row 1 differs at token 1: 5 and 7"):
      bench_decode._check_tokens(ours, theirs, lambda *_: 0.1, "here")


class BenchKernelsTest(absltest.TestCase):

  @pytest.mark.slow
  def test_result(self):
    size = dataclasses.replace(
        _TINY, hidden_size=64, intermediate_size=128, num_hidden_layers=4)
    result = bench_kernels.run(
        rounds=1, size=size, rows=(3,), workload=bench_decode.Workload(
            batch=2, prompt_length=6, new_tokens=4))
    json.dumps(result)
    plain, dense, packed = (
        result["decode"][side] for side in ("plain", "dense", "packed"))
    self.assertEqual(plain["ratio"], 1)
    self.assertEqual(dense["same_tokens"], 1)
    self.assertGreater(packed["ratio"], 0)
    self.assertEqual(plain["weight_bytes"], dense["weight_bytes"])
    self.assertLess(packed["weight_bytes"], plain["weight_bytes"])
    self.assertCountEqual(result["saved"], ["program_bytes", "peak_bytes"])
    self.assertLen(result["products"], 7)

  def test_peak(self):
    def use():
      return np.ones(4 << 20, np.float64).sum()

    self.assertBetween(bench_kernels._peak(use), 24 << 20, 64 << 20)


class BenchScheduleTest(absltest.TestCase):
  """At a tenth of its prompts: what it says, not how fast anything is."""

  @pytest.mark.slow
  def test_rows_of_each_schedule(self):
    workload = Workload(frames=1, group=3, text=10, response=4)
    rows, timelines = bench_schedule._compare(
        _SMALL, workload, make_models(_SMALL),
        ("serial_unshared", "serial_shared", "rollplex"), rounds=1)
    json.dumps(rows)
    self.assertEqual([t.name for t in timelines], list(rows))
    for name, row in rows.items():
      self.assertLess(row["gradient_error"], 1e-5, msg=name)
      self.assertGreater(row["seconds"], 0)
      self.assertGreater(row["stages"]["peak_bytes_live"], 0)
      self.assertEqual(row["tokens"]["decode"], 3 * 4)
    # Passes of two samples: three samples fill two passes, of padded prompts.
    padded = rows["serial_shared"]["tokens"]["prefix_backward"]
    self.assertGreaterEqual(padded, workload.prefix)
    self.assertEqual(
        {name: row["tokens"]["prefix"] / padded for name, row in rows.items()},
        {"serial_unshared": 1, "serial_shared": 3, "rollplex": 2})
    self.assertEqual(
        {name: row["tokens"]["score"] for name, row in rows.items()},
        {"serial_unshared": 4 * (padded + 4), "serial_shared": 4 * 4,
         "rollplex": 4 * 4})
    self.assertGreater(rows["serial_unshared"]["flops"],
                       rows["serial_shared"]["flops"])
    self.assertGreater(rows["serial_shared"]["flops"],
                       rows["rollplex"]["flops"])

  @pytest.mark.slow
  def test_two_processes(self):
    workload = Workload(prompts=2, frames=1, group=2, text=10, response=4)
    rows = bench_disaggregated.run(_SMALL, workload, rounds=1)
    self.assertLen(rows, 3)
    for name, row in rows.items():
      self.assertLess(row["gradient_error"], 1e-5, msg=name)
      self.assertLen(row["all_seconds"], 1)

  @pytest.mark.slow
  def test_a_process_that_fails_is_named(self):
    workload = Workload(prompts=2, frames=1, columns=3)  # Not a whole token.
    with self.assertRaisesRegex(RuntimeError, "process [01]: "):
      bench_disaggregated.run(_SMALL, workload, rounds=1)


if __name__ == "__main__":
  absltest.main()
