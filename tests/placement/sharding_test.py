"""Which mesh axes split what, and what is refused."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from rollplex_jax.errors import InputError
from rollplex_jax.models import vlm
from rollplex_jax.models.config import ModelConfig
from rollplex_jax.models.weights import is_weight
from rollplex_jax.placement import sharding
from rollplex_jax.placement.sharding import (
    AXES,
    TENSOR_AXES,
    MeshShape,
    Placement,
    Rules,
    make_rules,
)
from tests.helpers import devices
from tests.models import cases

devices.use_virtual_devices()

P = PartitionSpec
SIZES = {"vocab": 120, "heads": 8, "kv_heads": 2, "mlp": 96, "embed": 64}


def rules(shape, axes=TENSOR_AXES, **sizes):
  return make_rules(shape, SIZES | sizes, axes, what="rollout, decoder")


class MeshShapeTest(absltest.TestCase):

  def test_neighbors_share_the_last_axis(self):
    mesh = MeshShape(data=2, tp_major=2, tp_minor=2).make()
    self.assertEqual(mesh.axis_names, AXES)
    self.assertEqual([d.id for d in mesh.devices[0, 0, 0]], [0, 1])
    self.assertEqual([d.id for d in mesh.devices[:, 0, 0, 0]], [0, 4])

  def test_ways(self):
    shape = MeshShape(data=3, fsdp=5, tp_major=2, tp_minor=4)
    self.assertEqual(shape.size, 120)
    self.assertEqual(shape.ways(TENSOR_AXES), 8)
    self.assertEqual(shape.ways(()), 1)

  def test_other_number_of_devices_is_refused(self):
    shape = MeshShape(data=3, tp_major=2)
    with self.assertRaisesRegex(
        InputError, r"data 3 x fsdp 1 x tp_major 2 x tp_minor 1 = 6 devices: "
        r"expected 8"):
      shape.make()
    self.assertEqual(shape.make(jax.devices()[:6]).size, 6)

  def test_empty_axis_is_refused(self):
    with self.assertRaisesRegex(InputError, r"mesh\.fsdp=0: .* at least 1"):
      MeshShape(fsdp=0)


class MakeRulesTest(parameterized.TestCase):

  def test_both_axes(self):
    got = rules(MeshShape(data=2, fsdp=2, tp_major=2, tp_minor=4), kv_heads=8)
    self.assertEqual(got, Rules(
        batch=("data", "fsdp"), embed=("fsdp",), saved=TENSOR_AXES,
        vocab=TENSOR_AXES, heads=TENSOR_AXES, kv_heads=TENSOR_AXES,
        mlp=TENSOR_AXES))

  def test_an_axis_without_tensor_parallelism_takes_prompts(self):
    got = rules(MeshShape(tp_major=2, tp_minor=4), ("tp_major",))
    self.assertEqual(got.batch, ("data", "fsdp", "tp_minor"))
    self.assertEqual(got.heads, ("tp_major",))
    got = rules(MeshShape(tp_major=2, tp_minor=4), ())
    self.assertEqual(got.batch, ("data", "fsdp", "tp_major", "tp_minor"))
    self.assertEqual((got.heads, got.vocab, got.saved), ((), (), ()))

  def test_wrong_order_is_refused(self):
    for axes in (("tp_minor",), ("tp_minor", "tp_major"), ("data",)):
      with self.assertRaisesRegex(InputError, "rollout, decoder: .* prefix"):
        rules(MeshShape(tp_major=2, tp_minor=2), axes)

  @parameterized.parameters(
      (2, 2, 2, ("tp_major",)),  # One key head on each pair of devices.
      (2, 4, 2, ()),  # Whole: more parts than heads.
      (2, 2, 4, ("tp_major",)),
      (6, 2, 2, ("tp_major",)),
      (8, 4, 2, TENSOR_AXES),
      (3, 2, 3, ()),  # Never by the second axis alone.
  )
  def test_key_heads(self, kv_heads, major, minor, want):
    shape = MeshShape(tp_major=major, tp_minor=minor)
    self.assertEqual(rules(shape, heads=48, kv_heads=kv_heads,
                           mlp=96).kv_heads, want)

  def test_key_heads_split_no_finer_than_query_heads(self):
    shape = MeshShape(tp_major=2, tp_minor=2)
    got = make_rules(shape, SIZES | {"heads": 6, "kv_heads": 4}, TENSOR_AXES,
                     what="", split_all=False)
    self.assertEqual(got.heads, ("tp_major",))
    self.assertEqual(got.kv_heads, ("tp_major",))

  def test_vocabulary_that_does_not_divide(self):
    shape = MeshShape(tp_major=4, tp_minor=2)
    self.assertEqual(rules(shape).vocab, TENSOR_AXES)
    self.assertEqual(rules(shape, vocab=124).vocab, ("tp_major",))
    self.assertEqual(rules(shape, vocab=77).vocab, ())

  @parameterized.parameters(
      ("heads", 6, "6 heads do not divide by tensor parallelism 4"),
      ("mlp", 90, "90 mlp do not divide by tensor parallelism 4"),
      ("embed", 63, r"model dimension 63 does not divide by mesh\.fsdp=2"),
  )
  def test_what_does_not_divide_is_refused(self, name, size, message):
    shape = MeshShape(fsdp=2, tp_major=2, tp_minor=2)
    with self.assertRaisesRegex(InputError, "^rollout, decoder: .*" + message):
      rules(shape, **{name: size})
    # A part that may stay whole, such as a vision tower, is split as it can be.
    got = make_rules(shape, SIZES | {name: size}, TENSOR_AXES, what="tower",
                     split_all=False)
    self.assertEqual(
        getattr(got, name), () if name == "embed" else ("tp_major",))

  def test_parts_without_a_vocabulary(self):
    got = make_rules(MeshShape(tp_major=2), {"embed": 8, "heads": 2, "mlp": 4},
                     TENSOR_AXES, what="tower")
    self.assertEqual((got.vocab, got.kv_heads), ((), ()))


class RulesTest(absltest.TestCase):

  def test_spec(self):
    got = Rules(batch=("data", "fsdp"), heads=("tp_major",))
    self.assertEqual(got.spec("batch", None, "heads", "mlp"),
                     P(("data", "fsdp"), None, "tp_major", None))
    self.assertEqual(got.axes("heads", None), (("tp_major",), ()))
    self.assertEqual(got.spec(), P())

  def test_collision_is_refused(self):
    got = Rules(batch=("data", "fsdp"), embed=("fsdp",))
    with self.assertRaisesRegex(ValueError, "mesh axis fsdp splits two"):
      got.spec("batch", "embed")


class FullyShardedTest(absltest.TestCase):

  def test_every_axis_is_used(self):
    shape = MeshShape(data=2, fsdp=2, tp_major=2, tp_minor=2)
    got = rules(shape, ("tp_major",))
    # 96/2 rows against 64/2 columns: data goes to the rows, 24 and 32 are left.
    spec = sharding.fully_sharded(shape, got, (96, 64), ("mlp", "embed"))
    self.assertEqual(spec, P(("tp_major", "data"), ("fsdp", "tp_minor")))
    self.assertEqual(sharding.fully_sharded(shape, got, (64,), ("embed",)),
                     P(("fsdp", "data", "tp_major", "tp_minor")))

  def test_what_does_not_divide_stays_out(self):
    shape = MeshShape(data=2, tp_major=2, tp_minor=2)
    got = rules(shape)
    self.assertEqual(sharding.fully_sharded(shape, got, (3, 5), (None, None)),
                     P(None, None))
    # 6 rows of a dimension that the rules split by 4: by the first axis only.
    self.assertEqual(sharding.fully_sharded(shape, got, (6, 5), ("mlp", None)),
                     P("tp_major", None))


class PlacementTest(parameterized.TestCase):

  @parameterized.product(
      name=sorted(cases.CONFIGS),
      mesh=[MeshShape(tp_major=2, tp_minor=4), MeshShape(fsdp=4, tp_minor=2),
            MeshShape(data=2, fsdp=2, tp_major=2)])
  def test_weights_of_every_model_can_be_placed(self, name, mesh):
    config = ModelConfig.from_hf(cases.CONFIGS[name])
    text, tower = config.text, config.vision
    part = lambda sizes: make_rules(
        mesh, sizes, TENSOR_AXES, what="", split_all=False)
    placement = Placement(
        mesh.make(),
        part({"vocab": text.vocab_size, "heads": text.num_attention_heads,
              "kv_heads": text.num_key_value_heads,
              "mlp": text.intermediate_size, "embed": text.hidden_size}),
        part({"heads": tower.num_heads, "mlp": tower.intermediate_size,
              "embed": tower.hidden_size}))
    self.assertIsInstance(hash(placement), int)
    declared = vlm.weights(config)
    for key, name in (("text", "text"), ("visual", "vision")):
      placed = placement.weights(declared[key], name)
      for weight, at in zip(
          jax.tree.leaves(declared[key], is_leaf=is_weight),
          jax.tree.leaves(placed)):
        at.shard_shape(weight.shape)  # Raises if it does not divide.
        spec = sharding.fully_sharded(
            mesh, getattr(placement, name), weight.shape, weight.axes)
        jax.sharding.NamedSharding(
            placement.mesh, spec).shard_shape(weight.shape)

  def test_batch_ways(self):
    shape = MeshShape(data=2, tp_major=2, tp_minor=2)
    whole = Rules()
    placement = Placement(shape.make(), rules(shape, ("tp_major",)), whole)
    self.assertEqual(placement.batch_ways, 4)
    self.assertEqual(placement.sharding("vocab", "embed").spec,
                     P("tp_major", "fsdp"))
    self.assertEqual(placement.sharding("vocab", "embed", part="vision").spec,
                     P(None, None))


class ConstrainTest(absltest.TestCase):

  def test_nothing_happens_outside_of_use(self):
    x = jnp.ones((4, 4))
    self.assertIs(sharding.constrain(x, "batch", "heads"), x)
    with sharding.use(None, None):
      self.assertIs(sharding.constrain(x, "no", "matter"), x)

  def test_without_rules_the_compiler_is_free(self):
    x = jnp.ones((4, 4))
    for count, free in ((8, True), (1, False)):
      mesh = MeshShape(data=count).make(jax.devices()[:count])
      with sharding.use(mesh):
        self.assertIs(sharding.constrain(x, "no", "matter"), x)
        self.assertIsNone(sharding.mesh())
        self.assertEqual(sharding.is_free(), free)
    self.assertFalse(sharding.is_free())

  def test_a_program_is_split(self):
    shape = MeshShape(data=2, tp_major=2, tp_minor=2)
    mesh, split = shape.make(), rules(shape, ("tp_major",))

    @jax.jit
    def double(x):
      with sharding.use(mesh, split):
        return sharding.constrain(2 * x, "batch", "heads")

    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    got = double(x)
    np.testing.assert_array_equal(got, 2 * x)
    self.assertEqual(got.sharding.spec, P(("data", "tp_minor"), "tp_major"))
    # Seven rows do not divide by four; the columns still do.
    self.assertEqual({s.data.shape for s in double(x[:7]).addressable_shards},
                     {(7, 2)})

  def test_use_ends(self):
    shape = MeshShape(data=8)
    with self.assertRaises(KeyError), sharding.use(shape.make(), Rules()):
      raise KeyError
    x = jnp.ones((4,))
    self.assertIs(sharding.constrain(x, "batch"), x)

  def test_other_rank_is_refused(self):
    shape = MeshShape(data=8)
    with sharding.use(shape.make(), Rules()), self.assertRaisesRegex(
        ValueError, r"\('batch',\) for an array of \(2, 2\)"):
      sharding.constrain(jnp.ones((2, 2)), "batch")


if __name__ == "__main__":
  absltest.main()
