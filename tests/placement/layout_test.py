"""What a plan says of each tensor, in bytes, before there is any."""

import json

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from rollplex_jax.models import vision, vlm
from rollplex_jax.models.config import ModelConfig
from rollplex_jax.placement.layout import How, plan_layout
from rollplex_jax.placement.sharding import (
    TENSOR_AXES,
    MeshShape,
    Placement,
    Rules,
    make_rules,
)
from tests.helpers import devices
from tests.models import cases
from tests.placement import layouts
from tests.placement.layouts import (
    BY_2,
    BY_4,
    DATA,
    FSDP,
    KEYS,
    MAJOR,
    NORMS,
    SPLIT,
)

devices.use_virtual_devices()


class PlanTest(parameterized.TestCase):

  @parameterized.product(
      shape=[BY_2, BY_4, DATA, FSDP], kv_heads=[2, 4, 8],
      dtype=["float32", "bfloat16"])
  def test_finer_rollout_rebuilds_nothing(self, shape, kv_heads, dtype):
    config = layouts.text_config(kv_heads, head_dim=32)
    got = layouts.plan(shape, MAJOR, TENSOR_AXES, config=config, dtype=dtype)
    self.assertEqual(layouts.names(got, How.REBUILD), set())
    # Where both stages split key heads alike they are the same arrays.
    keys = KEYS if kv_heads >= shape.ways(TENSOR_AXES) else set()
    self.assertEqual(layouts.names(got, How.VIEW), SPLIT | keys)
    self.assertEqual(layouts.names(got, How.ALIAS), NORMS | KEYS - keys)
    size = np.dtype(dtype).itemsize
    gate = next(t for t in got.tensors if t.name == "layers/1/gate")
    self.assertEqual(gate.storage_bytes,
                     192 * 256 * size // shape.tp_major // shape.fsdp)
    self.assertEqual(gate.rollout_bytes * shape.tp_minor, gate.storage_bytes)
    self.assertEqual(got.to_dict()["added_bytes"], 0)
    self.assertEqual(got.to_dict()["moved_bytes"], 0)

  @parameterized.product(shape=[BY_2, BY_4, DATA, FSDP], kv_heads=[2, 8])
  def test_coarser_rollout_rebuilds_what_is_split(self, shape, kv_heads):
    got = layouts.plan(shape, TENSOR_AXES, MAJOR, config=layouts.text_config(kv_heads))
    split = SPLIT | (KEYS if kv_heads == 8 else set())
    self.assertEqual(layouts.names(got, How.REBUILD), split)
    self.assertEqual(layouts.names(got, How.VIEW), set())
    for tensor in got.tensors:
      rebuilt = tensor.name in split
      self.assertEqual(
          tensor.moved_bytes,
          tensor.storage_bytes * (shape.tp_minor - 1) if rebuilt else 0)
      self.assertEqual(tensor.why, "a device lacks a part of its shard"
                       if rebuilt else None)
    total = got.to_dict()
    self.assertEqual(total["added_bytes"],
                     total["moved_bytes"] * shape.tp_minor
                     // (shape.tp_minor - 1))

  def test_finer_storage_is_the_rollouts_and_training_gathers(self):
    config = layouts.text_config()
    got = layouts.plan(BY_2, TENSOR_AXES, TENSOR_AXES,
               training=layouts.place(BY_2, MAJOR, config))
    self.assertLen(layouts.names(got, How.ALIAS), len(got.tensors))
    gathered = {t.name: t.gathered_bytes for t in got.tensors}
    self.assertEqual({n for n, size in gathered.items() if size}, SPLIT)
    # An eighth is here, and another comes from the neighbor.
    self.assertEqual(gathered["layers/0/gate"], 24 * 128 * 4)
    layer = sum(n for name, n in gathered.items()
                if name.startswith("layers/1/"))
    self.assertEqual(got.to_dict()["largest_gather_bytes"], layer)
    coarser = layouts.plan(BY_2, MAJOR, TENSOR_AXES)
    self.assertEqual(coarser.to_dict()["gathered_bytes"], 0)
    self.assertGreater(coarser.to_dict()["storage_bytes"],
                       got.to_dict()["storage_bytes"])

  def test_weights_gathered_over_fsdp_are_rebuilt(self):
    got = layouts.plan(FSDP, MAJOR, TENSOR_AXES, gathered=True)
    matrices = {t.name for t in got.tensors if len(t.shape) == 2}
    self.assertEqual(layouts.names(got, How.REBUILD), matrices | NORMS)
    # Biases have no model dimension.
    self.assertEqual(layouts.names(got, How.VIEW),
                     {"layers/0/q_bias", "layers/1/q_bias"})
    q = next(t for t in got.tensors if t.name == "layers/0/q")
    # [32, 64] of [64, 64] are here, the other half of the columns is not.
    self.assertEqual(q.moved_bytes, 32 * 64 * 4)

  def test_misaligned_parts_are_rebuilt(self):
    got = layouts.plan(BY_2, MAJOR, TENSOR_AXES, dtype=jnp.bfloat16)
    self.assertEqual(layouts.names(got, How.REBUILD),
                     {"layers/0/q_bias", "layers/1/q_bias"})
    bias = next(t for t in got.tensors if t.how is How.REBUILD)
    self.assertEqual(bias.why, "a shard would begin at byte 32, no multiple of "
                     "64")
    self.assertEqual(bias.moved_bytes, 0)
    self.assertEqual(bias.rollout_bytes, 32)

  def test_tower(self):
    config = ModelConfig.from_hf(cases.CONFIGS["published_like"]).vision
    mesh = MeshShape(tp_major=2, tp_minor=2)
    rules = lambda axes: make_rules(
        mesh, {"heads": config.num_heads, "mlp": config.intermediate_size,
               "embed": config.hidden_size}, axes, what="tower",
        split_all=False)
    at = mesh.make(jax.devices()[:4])
    got = plan_layout(
        vision.weights(config), Placement(at, Rules(), rules(MAJOR)),
        Placement(at, Rules(), rules(TENSOR_AXES)), jnp.float32, part="vision")
    # Two heads split by two in both; 44 columns of the MLP by two and four.
    self.assertEqual(
        {t.kind for t in got.tensors if t.how is How.VIEW},
        {"blocks/*/gate", "blocks/*/up", "blocks/*/down", "merger_in",
         "merger_out", "merger_in_bias"})
    self.assertEqual({t.kind for t in got.tensors if t.how is How.REBUILD},
                     {"blocks/*/gate_bias", "blocks/*/up_bias"})

  def test_whole_trees_and_other_meshes(self):
    config = ModelConfig.from_hf(cases.CONFIGS["ragged_windows"])
    at = Placement(BY_2.make(), Rules(), Rules())
    got = plan_layout(vlm.weights(config), at, at, jnp.float32)
    self.assertIn("visual/merger_in", layouts.names(got, How.ALIAS))
    with self.assertRaisesRegex(ValueError, "expected one mesh, found"):
      plan_layout(vlm.weights(config), at,
                  Placement(BY_4.make(), Rules(), Rules()), jnp.float32)

  def test_summary_and_table(self):
    got = layouts.plan(BY_2, TENSOR_AXES, MAJOR)
    total = json.loads(json.dumps(got.to_dict()))
    self.assertEqual(total["bytes"], {
        how.value: sum(t.rollout_bytes for t in got.tensors if t.how is how)
        for how in How})
    self.assertEqual(total["storage_bytes"], sum(
        t.storage_bytes for t in got.tensors))
    rows = {row["name"]: row for row in total["tensors"]}
    self.assertLen(rows, 15)
    self.assertEqual(rows["layers/*/gate"], {
        "name": "layers/*/gate", "count": 2, "shape": [192, 128],
        "how": "rebuild", "storage_bytes": 24576, "rollout_bytes": 49152,
        "moved_bytes": 24576, "gathered_bytes": 0,
        "why": "a device lacks a part of its shard"})
    line, = (line for line in str(got).splitlines() if "layers/*/gate" in line)
    self.assertEqual(line.replace("│", "").split()[:9], [
        "layers/*/gate", "2", "192x128", "rebuild", "24", "KiB", "48", "KiB",
        "24"])
    self.assertIn("stored: 204.1 KiB; rollout: 67 KiB alias, 0 B view, "
                  "274.2 KiB rebuild", " ".join(str(got).split()))


class TensorTest(absltest.TestCase):

  def test_names(self):
    named = {t.name: t for t in layouts.plan(BY_2, MAJOR, MAJOR).tensors}
    self.assertEqual(named["layers/1/q"].kind, "layers/*/q")
    self.assertEqual(named["layers/1/q"].layer, "layers/1")
    self.assertEqual(named["norm"].layer, "norm")


if __name__ == "__main__":
  absltest.main()
