"""Models with compressed weights against the same weights made dense."""

import pathlib
import tempfile

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from legolm_jax import sharding as lego_sharding
from legolm_jax.array import LegoArray, Storage
from legolm_jax.rules import Rules
from rollplex_jax.errors import InputError
from rollplex_jax.models import compressed as products
from rollplex_jax.models import hf, layers, vlm, weights
from rollplex_jax.models.config import ModelConfig
from rollplex_jax.placement import sharding
from rollplex_jax.placement.mesh import MeshConfig, make_places
from tests.helpers import compressed, devices
from tests.kernels import matrices
from tests.models import cases

devices.use_virtual_devices()

# Weights are equal, but products are of other programs.
TOLERANCE = 1e-5
# So wide that every matrix of its blocks can be compressed.
RAW = cases.flat_config(
    vocab=120, hidden=64, ffn=96, layers=2, heads=4, kv_heads=2,
    section=(2, 3, 3), depth=2, hidden_size=32, intermediate_size=48,
    num_heads=2, patch_size=4, spatial_merge_size=2, temporal_patch_size=2,
    window_size=16, fullatt_block_indexes=[1], tokens_per_second=2)
# The tower, the embedding and the head too.
EVERYTHING = Rules(protected_blocks=(), compress=(
    r"visual\.(blocks|merger).*(qkv|proj|mlp.\d)\.weight", "embed_tokens",
    "lm_head"))


def is_lego(leaf) -> bool:
  return isinstance(leaf, LegoArray)


class CompressedModelTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.root = pathlib.Path(
        cls.enterClassContext(tempfile.TemporaryDirectory()))
    cls.config = ModelConfig.from_hf(RAW)
    rng = np.random.default_rng(0)
    cls.params = jax.tree.map(
        lambda w: jnp.asarray(
            (len(w.shape) == 1) + rng.normal(size=w.shape) / 8, jnp.float32),
        vlm.weights(cls.config), is_leaf=weights.is_weight)
    for dtype in ("float32", "bfloat16"):
      path = cls.root / dtype
      hf.save_checkpoint(path, cls.config, cls.params, dtype=jnp.dtype(dtype))
      for name, rules in (("blocks", None), ("everything", EVERYTHING)):
        out = compressed.compress(path, cls.root / f"{dtype}_{name}",
                                  rules=rules)
        compressed.decompress(out, cls.root / f"{dtype}_{name}_dense")

  def logits(self, params):
    prompts = cases.make_prompts(self.config)
    return cases.batch_logits(
        params, self.config, [prompts["mixed"], prompts["text"]])

  @parameterized.parameters("blocks", "everything")
  def test_logits(self, name):
    config, params = hf.load_checkpoint(self.root / f"float32_{name}")
    _, dense = hf.load_checkpoint(self.root / f"float32_{name}_dense")
    self.assertEqual(config, self.config)
    found = [a for a in jax.tree.leaves(params, is_leaf=is_lego) if is_lego(a)]
    self.assertLen(found, 14 if name == "blocks" else 14 + 2 * 7 + 2 + 2)
    original = self.logits(self.params)
    for got, want, before in zip(
        self.logits(params), self.logits(dense), original):
      np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)
      # Compression does change something.
      self.assertGreater(np.abs(got - before).max(), 100 * TOLERANCE)

  @parameterized.product(name=["blocks", "everything"],
                         dtype=["float32", "bfloat16"])
  def test_weights(self, name, dtype):
    """Bit by bit, in the storage that the model has."""
    _, params = hf.load_checkpoint(self.root / f"{dtype}_{name}")
    _, dense = hf.load_checkpoint(self.root / f"{dtype}_{name}_dense")
    declared = vlm.weights(self.config)
    for weight, leaf, want in zip(*(
        jax.tree.leaves(tree, is_leaf=lambda a: (
            is_lego(a) or weights.is_weight(a)))
        for tree in (declared, params, dense))):
      self.assertEqual(leaf.shape, weight.shape)
      self.assertEqual(leaf.dtype, want.dtype)
      if is_lego(leaf):
        self.assertEqual(leaf.storage is Storage.IN_OUT, weight.transposed)
        leaf = leaf.dequantize()
      np.testing.assert_array_equal(leaf, want, weight.name)

  def test_dtype_of_choice(self):
    path = self.root / "bfloat16_blocks"
    _, kept = hf.load_checkpoint(path)
    _, wide = hf.load_checkpoint(path, jnp.float32)
    gate, wide = (p["text"]["layers"][0]["gate"] for p in (kept, wide))
    self.assertEqual((gate.dtype, wide.dtype), (jnp.bfloat16, jnp.float32))
    self.assertEqual(gate.nbytes, wide.nbytes)
    np.testing.assert_allclose(
        wide.dequantize(), gate.dequantize().astype(jnp.float32), rtol=4e-3)

  @parameterized.parameters((1, 2), (4, 1), (2, 1))
  @pytest.mark.slow
  def test_on_a_mesh(self, tp, fsdp):
    """Where every device holds its part, the same logits."""
    path = self.root / "float32_everything"
    mesh = MeshConfig(data=8 // tp // fsdp, fsdp=fsdp, training_tp=tp,
                      rollout_tp=tp)
    place = make_places(mesh, vlm.axis_sizes(self.config)).training
    _, params = hf.load_checkpoint(
        path, shardings=place.storage(vlm.weights(self.config)))
    gate = params["text"]["layers"][0]["gate"]
    shard = gate.planes[0].addressable_shards[0].data
    self.assertEqual(shard.size * tp * fsdp, gate.planes[0].size)
    _, alone = hf.load_checkpoint(path)
    np.testing.assert_array_equal(
        gate.dequantize(),
        alone["text"]["layers"][0]["gate"].dequantize())
    for got, want in zip(self.logits(params), self.logits(alone)):
      np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)
    if tp != 2:
      return
    _, decoded = hf.load_checkpoint(
        path, shardings=place.storage(vlm.weights(self.config)), decode=True)
    dense = decoded["text"]["layers"][0]["gate"]
    np.testing.assert_array_equal(dense, gate.dequantize())
    self.assertLess(dense.addressable_shards[0].data.size, dense.size)

  @parameterized.product(tp=(1, 2, 4), storage=tuple(Storage))
  def test_product_on_a_mesh(self, tp, storage):
    """Each device multiplies its parts; the gradient of x is summed."""
    mesh = MeshConfig(data=8 // tp // 2, fsdp=2, training_tp=tp, rollout_tp=tp)
    place = make_places(mesh, vlm.axis_sizes(self.config)).training
    w, _ = matrices.random(0, 96, 64, 16, storage=storage, scaled=True)
    over = 1 if storage is Storage.OUT_IN else 0
    spec = place.text.spec("mlp", "embed")
    placed = lego_sharding.device_put(w, place.mesh, spec)
    x = jnp.asarray(np.random.default_rng(0).normal(
        size=(8, 3, w.shape[over])), jnp.float32)

    def loss(x, w):
      return jnp.sum(jnp.sin(products.product(
          x, w, "mlp", over=over) / 8))

    def dense_loss(x, w):
      y = jnp.einsum("abk,nk->abn" if over else "abk,kn->abn", x, w)
      return jnp.sum(jnp.sin(y / 8))

    @jax.jit
    def on_mesh(x, w):
      with sharding.use(place.mesh, place.text):
        return jax.value_and_grad(loss)(x, w)

    want = jax.value_and_grad(dense_loss)(x, w.dequantize(jnp.float32))
    for a, b in zip(on_mesh(x, placed), want):
      self.assertLess(matrices.error(a, b), 1e-5)
    lowered = on_mesh.lower(x, placed)
    if tp > 1:  # No device decodes it all.
      self.assertNotRegex(lowered.as_text(), "tensor<(96x64|64x96)xf32>")

  def test_damage_is_an_error_of_this_package(self):
    out = self.root / "damaged"
    compressed.compress(self.root / "float32", out)
    file = out / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 0xFF
    file.write_bytes(bytes(raw))
    with self.assertRaisesRegex(InputError, "is damaged"):
      hf.load_checkpoint(out)


class DenseProductTest(parameterized.TestCase):
  """Products of arrays are what they were before there were LegoArrays."""

  @parameterized.parameters(1, 100)
  def test_same_operations(self, rows):
    x = jnp.ones((rows, 8), jnp.bfloat16)
    in_out = jnp.ones((8, 6), jnp.bfloat16)

    def product(x, w, axis, dtype=None):
      return jax.lax.dot_general(x, w, (((1,), (axis,)), ((), ())),
                                 preferred_element_type=dtype)

    self.assertEqual(
        str(jax.make_jaxpr(layers.dense_in_out)(x, in_out)),
        str(jax.make_jaxpr(lambda x, w: product(x, w, 0))(x, in_out)))
    if rows > 32:
      self.assertEqual(
          str(jax.make_jaxpr(lambda x, w: layers.dense_out_in(
              x, w, dtype=jnp.float32))(x, in_out.T)),
          str(jax.make_jaxpr(lambda x, w: product(
              x, w, 1, jnp.float32))(x, in_out.T)))
    else:
      self.assertIn("platform_index", str(jax.make_jaxpr(
          layers.dense_out_in)(x, in_out.T)))


if __name__ == "__main__":
  absltest.main()
