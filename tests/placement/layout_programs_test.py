"""What compiled programs move, and that decoding moves no weight."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from rollplex_jax.models import decoder, layers
from rollplex_jax.placement import sharding
from rollplex_jax.placement.layout import How
from rollplex_jax.placement.reshard import resharding
from rollplex_jax.placement.sharding import TENSOR_AXES
from tests.helpers import devices
from tests.helpers.collectives import axis_groups, collectives
from tests.helpers.gpu_program import Program
from tests.placement import layouts
from tests.placement.layouts import BY_2, BY_4, DATA, FSDP, MAJOR

devices.use_virtual_devices()


class ProgramsTest(parameterized.TestCase):

  @parameterized.product(shape=[BY_2, BY_4, DATA, FSDP], kv_heads=[2, 8])
  def test_rebuilding_gathers_the_axis_that_changed(self, shape, kv_heads):
    got = layouts.plan(shape, TENSOR_AXES, MAJOR, config=layouts.text_config(kv_heads))
    mesh = got.tensors[0].storage.mesh
    programs = got.rebuild_programs()
    # The head's program is the embedding's, and all layers have the same.
    self.assertEqual(list(programs), ["embed", "layers/0"])
    for layer, program in programs.items():
      found = collectives(program.lower().compile().as_text())
      for one in found:
        self.assertEqual(one.op, "all-gather")
        self.assertEqual(one.groups, axis_groups(mesh, "tp_minor"))
      self.assertEqual(
          sum(one.received_bytes for one in found),
          sum(t.moved_bytes for t in got.tensors if t.layer == layer))

  @parameterized.parameters(*[
      (storage, rollout) for storage in (MAJOR, TENSOR_AXES)
      for rollout in (MAJOR, TENSOR_AXES)])
  def test_fsdp_is_gathered_after_the_cut(self, storage, rollout):
    got = layouts.plan(FSDP, storage, rollout, gathered=True)
    mesh = got.tensors[0].storage.mesh
    ways = {axis_groups(mesh, "fsdp")}
    if storage == TENSOR_AXES and rollout == MAJOR:
      ways.add(axis_groups(mesh, "tp_minor"))
    for layer, program in got.rebuild_programs().items():
      found = collectives(program.lower().compile().as_text())
      self.assertEqual({one.op for one in found}, {"all-gather"})
      self.assertLessEqual({one.groups for one in found}, ways)
      self.assertEqual(
          sum(one.received_bytes for one in found),
          sum(t.moved_bytes for t in got.tensors if t.layer == layer))

  def test_without_the_cut_more_would_move(self):
    """The compiler's own way, which `resharding` is there to avoid."""
    got = layouts.plan(FSDP, MAJOR, TENSOR_AXES, gathered=True)
    q = next(t for t in got.tensors if t.name == "layers/0/q")
    plain = jax.jit(lambda x: x, out_shardings=q.rollout)
    text = plain.lower(jax.ShapeDtypeStruct(
        q.shape, got.dtype, sharding=q.storage)).compile().as_text()
    self.assertNotEqual({one.op for one in collectives(text)}, {"all-gather"})

  def test_restoring_moves_nothing(self):
    got = layouts.plan(BY_2, TENSOR_AXES, MAJOR)
    tensors = [t for t in got.tensors if t.layer == "layers/0"]
    program = resharding(tuple(
        (t.rollout, t.storage, len(t.shape)) for t in tensors))
    args = [jax.ShapeDtypeStruct(t.shape, got.dtype, sharding=t.rollout)
            for t in tensors]
    self.assertEqual(collectives(
        program.lower(args).compile().as_text()), [])

  @parameterized.product(shape=[BY_2, DATA], storage=[MAJOR, TENSOR_AXES])
  def test_decoding_reads_weights_where_they_are(self, shape, storage):
    config = layouts.text_config()
    got, at = layouts.plan(shape, storage, TENSOR_AXES), layouts.place(
        shape, TENSOR_AXES, config)
    weights = layouts.stored(got)
    rollout = got.rollout_weights(weights)
    # A row for each part of the batch; sizes unlike those of any weight.
    rows, length = 3 * shape.data, 7
    ids = jnp.arange(rows, dtype=jnp.int32)[:, None]
    positions = jnp.full((1, rows, 1), length, jnp.int32)
    keys = jax.random.normal(
        jax.random.key(1), (2, rows, length, 2, 16), jnp.float32)

    def decode(params, ids, keys, split):
      if split:
        with sharding.use(at.mesh, at.text):
          return decode(params, ids, keys, False)
      x = decoder.embed(params, ids)
      angles = decoder.rope(config, positions)
      for w, cached in zip(params["layers"], keys):
        def attend(q, k, v, cached=cached):
          # Or else the compiler may cut keys that are whole, and then their
          # weights.
          seen = lambda new: jnp.concatenate([cached, sharding.constrain(
              new, "batch", None, "kv_heads", None)], axis=1)
          return layers.attend(q, seen(k), seen(v), None), None
        x, _ = decoder.layer(w, config, x, angles, attend)
      x = layers.rms_norm(x, params["norm"], config.rms_norm_eps)
      return decoder.logits(params, x)

    program = jax.jit(decode, static_argnums=3).lower(
        rollout, ids, keys, True).compile()
    text = Program(program.as_text())
    local = lambda t: ("f32", t.rollout_bytes // 4)
    sizes = {local(t) for t in got.tensors if len(t.shape) == 2}
    arguments = [line for line in text.entry if line.op == "parameter"]
    self.assertLen([line for line in arguments if line.shapes[0][1] in {
        t.rollout.shard_shape(t.shape) for t in got.tensors
        if len(t.shape) == 2}], 2 + 2 * 7)
    for lines in text.computations.values():
      self.assertEqual(text.copies(lines, sizes), [])
    # Nor is a weight gathered to its stored shape.
    whole = {("f32", t.storage_bytes // 4) for t in got.tensors
             if t.how is How.VIEW}
    for lines in text.computations.values():
      self.assertEqual(text.copies(lines, whole), [])
    want = jax.jit(decode, static_argnums=3)(
        jax.device_put(weights, jax.devices()[0]), ids, keys, False)
    np.testing.assert_allclose(
        np.asarray(program(rollout, ids, keys)), np.asarray(want), rtol=1e-5,
        atol=1e-4)


if __name__ == "__main__":
  absltest.main()
