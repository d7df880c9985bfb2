"""The decode window compiled for 8 H100s: what overlaps, and what is copied.

Layers have the size of Qwen2.5-VL-32B's, split 8 ways, so that each device has
5 query heads, 1 key/value head and 3456 of the MLP.
"""

import dataclasses
import math

from absl.testing import absltest
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import pytest

from rollplex_jax.models import decoder, vlm
from rollplex_jax.models.config import ModelConfig, TextConfig
from rollplex_jax.models.inputs import PromptInputs
from rollplex_jax.models.weights import is_weight
from rollplex_jax.placement import sharding
from rollplex_jax.placement.sharding import MeshShape, Placement
from rollplex_jax.stages import prefix_units, window
from rollplex_jax.stages.prefix_units import UnitShape
from rollplex_jax.stages.sampling import SamplingConfig
from tests.helpers import devices, gpu_program

devices.use_virtual_devices()

_TP, _LAYERS = 8, 3
# Prompts, samples of each, and padded lengths; chosen so that arrays of
# different meaning differ in size.
_B, _G, _P, _R, _CHUNK = 2, 8, 3072, 96, 512
_D, _H, _K, _HEAD, _F, _VOCAB = 5120, 40, 8, 128, 27648, 152064
_ROWS = _B * _G + _CHUNK


def _compile() -> gpu_program.Program:
  """A window with policy and reference units on two streams."""
  config = ModelConfig(
      text=TextConfig(
          vocab_size=_VOCAB, hidden_size=_D, intermediate_size=_F,
          num_hidden_layers=_LAYERS, num_attention_heads=_H,
          num_key_value_heads=_K, mrope_section=(16, 24, 24), rope_theta=1e6),
      vision=None, image_token_id=1, video_token_id=2,
      vision_start_token_id=3, vision_end_token_id=4, eos_token_ids=(5,))
  shape = MeshShape(tp_major=_TP)
  mesh = gpu_program.h100_mesh((1, 1, _TP, 1), sharding.AXES)
  rules = dataclasses.replace(
      sharding.make_rules(
          shape, vlm.axis_sizes(config)["text"], sharding.TENSOR_AXES,
          what="window"), embed=())
  place = Placement(mesh, rules, rules)
  tp = rules.heads

  def spec(shape, dtype, *axes):
    return jax.ShapeDtypeStruct(
        shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

  weights = jax.tree.map(
      lambda w: spec(w.shape, jnp.bfloat16, *rules.spec(*w.axes)),
      decoder.weights(config.text), is_leaf=is_weight)
  prompts = PromptInputs(
      token_ids=spec((_B, _P), jnp.int32), lengths=spec((_B,), jnp.int32),
      positions=spec((3, _B, _P), jnp.int32),
      feature_index=spec((_B, _P), jnp.int32),
      next_position=spec((_B,), jnp.int32), row_ids=spec((_B,), jnp.int32))
  kv = [(spec((_B, _K, _HEAD, _P), jnp.bfloat16, None, tp),
         spec((_B, _K, _P, _HEAD), jnp.bfloat16, None, tp))] * _LAYERS
  inputs = [spec((_B, _P, _D), jnp.bfloat16, None, None, tp)] * _LAYERS
  features = spec((2048, _D), jnp.bfloat16)
  keys = spec((_B, _G), jax.eval_shape(lambda: jax.random.key(0)).dtype)
  run = window.shard_window(
      place, config,
      SamplingConfig(max_completion_length=_R, eos_token_ids=(5,)),
      window.WindowConfig(
          unit=UnitShape(chunk=_CHUNK, rows=1, key_extents=1), streams=True))
  return gpu_program.compile_for_gpu(
      jax.jit(run, donate_argnums=7), weights, weights, prompts, kv, features,
      features, keys, window.Artifacts(
          policy=prefix_units.Buffers(kv, inputs),
          reference=prefix_units.Buffers(kv)))


@pytest.mark.cuda_plugin
@absltest.skipUnless(gpu_program.has_plugin(), "needs jax's CUDA plugin")
class WindowOnGpuTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.program = _compile()
    cls.bodies = cls.program.loop_bodies()

  def reductions(self, body):
    """Rows and D of each all-reduce over activations, in order."""
    return [dims for line in body if line.op.startswith("all-reduce")
            and not line.op.endswith("done")
            for _, dims in line.shapes[:1] if dims[-1] == _D]

  def body(self, kind):
    """The loop body that runs a decode step with a unit, or one alone."""
    paired = [b for b in self.bodies if any(i.op == "call-start" for i in b)]
    joined = [b for b in self.bodies
              if (_ROWS, _D) in [d[-2:] for d in self.reductions(b)]
              and b not in paired]
    found = {"reference": paired, "policy": joined}[kind]
    self.assertLen(found, 1)
    return found[0]

  def test_five_loops(self):
    # Two with decode and a unit, two with a unit alone, one with decode alone.
    self.assertLen(self.bodies, 5)

  def test_policy_rows_share_products(self):
    body = self.body("policy")
    shapes = {(_F // _TP, _D): 3, (_H // _TP * _HEAD, _D): 2,
              (_K // _TP * _HEAD, _D): 2}
    # Weights enter a body as elements of its parameter.
    for shape, per_layer in shapes.items():
      weights = [i for i in body if i.op == "get-tuple-element"
                 and i.shapes == [("bf16", shape)]]
      readers = [gpu_program.users(body, w.name) for w in weights]
      readers = [r for r in readers if r]
      self.assertLen(readers, per_layer * _LAYERS, shape)
      rows = []
      for reader in readers:
        # Read by one product only, ...
        self.assertLen(reader, 1, shape)
        dims = reader[0].shapes[0][1]
        self.assertTrue(_ROWS in dims or _B * _G in dims, dims)
        rows.append(_ROWS in dims)
      # ... of all rows but where the last layer has nothing to do for chunks:
      # of its seven, only keys and values are made for them.
      alone = {_F // _TP: 3, _H // _TP * _HEAD: 2}.get(shape[0], 0)
      self.assertEqual(rows.count(False), alone, shape)

  def test_policy_rows_share_collectives(self):
    sums = self.reductions(self.body("policy"))
    rows = [dims[:-1] for dims in sums]
    self.assertEqual(rows.count((1, _ROWS)) + rows.count((_ROWS,)),
                     2 * (_LAYERS - 1), sums)
    # And two of decode rows in the last layer; embeddings are another.
    self.assertLessEqual(len(sums), 2 * _LAYERS + 2, sums)

  def test_reference_calls_run_in_pairs(self):
    body = self.body("reference")
    calls = self.program.stream_calls(body)
    # Both halves of each layer, but for the last's MLP: decode's alone.
    self.assertLen(calls, 4 * (2 * _LAYERS - 1))
    for i in range(0, len(calls), 4):
      pair = calls[i:i + 4]
      self.assertEqual([c.op for c in pair], ["call-start"] * 2
                       + ["call-done"] * 2)
      self.assertCountEqual(
          [c.attribute("_xla_stream_annotation") for c in pair[:2]],
          ["1", "2"])
      self.assertCountEqual([c.operands[0] for c in pair[2:]],
                            [c.name for c in pair[:2]])
    for call in calls:
      if call.op == "call-start":
        inside = self.program.computations[call.attribute("to_apply")]
        self.assertFalse(any("all-reduce" in i.op for i in inside))

  def test_reference_rows_share_collectives(self):
    sums = self.reductions(self.body("reference"))
    self.assertEqual(sums.count((_ROWS, _D)), 2 * (_LAYERS - 1), sums)
    self.assertLessEqual(len(sums), 2 * _LAYERS + 2, sums)

  def test_steps_attend_by_kernels(self):
    """In each loop with a decode step; in the reference's, inside of calls."""
    step = ["shared_prefix_decode", "shared_prefix_join"] * _LAYERS
    self.assertCountEqual([self.program.kernels(b) for b in self.bodies],
                          [step] * 3 + [[]] * 2)
    self.assertEqual(self.program.kernels(self.body("reference")), step)

  def test_no_cache_and_no_weight_is_copied(self):
    k, n = _K // _TP * _HEAD, _B * _G
    counts = {_B * k * _P, _B * _P * _D // _TP, _F // _TP * _D,
              _H // _TP * _HEAD * _D, k * _D, _VOCAB // _TP * _D}
    sizes = {("bf16", count) for count in counts}
    # Nor cast; partial sums of a chunk's values are as large as key weights.
    sizes |= {("f32", count) for count in counts - {k * _D}}
    self.assertEmpty(self.program.copies(self.program.entry, sizes))
    # Only the suffix caches are made, once.
    sizes.add(("bf16", n * k * _R))
    for body in self.bodies:
      self.assertEmpty(self.program.copies(body, sizes))

  def test_units_cut_out_what_they_attend_to(self):
    # Of all prompts' keys and values those of its own, and nothing else does.
    size = ("bf16", _K // _TP * _HEAD * _P)
    counts = [
        sum((kind, math.prod(dims)) == size
            for line in self.program.copies(body, {size})
            for kind, dims in line.shapes) for body in self.bodies]
    self.assertCountEqual(counts, [2 * (_LAYERS - 1)] * 4 + [0])


if __name__ == "__main__":
  absltest.main()
