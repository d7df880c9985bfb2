"""A step on a mesh is the step on one device."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rollplex_jax import samples
from rollplex_jax.artifacts import Model
from rollplex_jax.executor import Step
from rollplex_jax.models import vlm
from rollplex_jax.placement.mesh import MeshConfig, make_places
from rollplex_jax.schedule import ScheduleConfig
from rollplex_jax.settings import Settings
from rollplex_jax.stages import update
from rollplex_jax.stages.objectives import ObjectiveConfig
from rollplex_jax.stages.sampling import SamplingConfig
from tests.helpers import devices, tiny_policy

devices.use_virtual_devices()

_G, _R = 4, 6
_MESHES = dict(
    data=MeshConfig(data=8),
    fsdp=MeshConfig(fsdp=8),
    tp=MeshConfig(training_tp=2, rollout_tp=2),
    tp_more_than_kv_heads=MeshConfig(training_tp=4, rollout_tp=4),
    data_fsdp_tp=MeshConfig(data=2, fsdp=2, training_tp=2, rollout_tp=2),
    finer_rollout=MeshConfig(data=2, training_tp=2, rollout_tp=4),
    finer_stored=MeshConfig(
        data=2, training_tp=2, rollout_tp=4, storage="finer"),
    finer_rollout_fsdp=MeshConfig(fsdp=2, training_tp=1, rollout_tp=2),
    coarser_rollout=MeshConfig(data=2, training_tp=4, rollout_tp=2),
    coarser_rollout_fsdp=MeshConfig(
        data=2, fsdp=2, training_tp=2, rollout_tp=1),
)


class MeshesTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.config = tiny_policy.config()
    cls.params = tiny_policy.params(cls.config)
    cls.reference = {**tiny_policy.params(cls.config, seed=7),
                     "visual": cls.params["visual"]}
    prompts = tiny_policy.prompts(cls.config)
    cls.prompts = [*prompts, *prompts[::-1]]
    cls.expected = {}

  def run_step(self, mesh, trained=("text",), micro=0, **schedule):
    places = mesh and make_places(
        mesh, vlm.axis_sizes(self.config), jax.devices()[:mesh.shape.size])
    settings = Settings(
        config=self.config, schedule=ScheduleConfig(**schedule),
        sampling=SamplingConfig(
            max_completion_length=_R, eos_token_ids=tuple(range(1, 9)),
            banned_token_ids=self.config.vision_token_ids),
        objective=ObjectiveConfig(loss_type="dapo", beta=0.1),
        micro_batch_size=micro, trained=trained,
        training=places and places.training, rollout=places and places.rollout)
    batch = samples.make_batch(
        self.config, self.prompts, range(10, 18),
        parts=places.parts if places else 1)
    params, reference, layout = self.params, self.reference, None
    if places:
      declared = vlm.weights(self.config)
      params, reference = (
          jax.device_put(tree, places.compute_weights(declared))
          for tree in (params, reference))
      layout = places.plan_layout(declared["text"], np.float32)
    work = Step(settings, batch, Model(params, 0), Model(reference, 0),
                num_generations=_G, seed=3, step=1, layout=layout)
    done = work.roll_out()
    advantages = np.random.default_rng(0).normal(size=(8, _G))
    groups = work.score(samples.Groups(
        rows=np.arange(8, dtype=np.int32), token_ids=done.token_ids,
        lengths=done.lengths, advantages=advantages.astype(np.float32)))
    grads, metrics, _ = work.gradient(groups, first=True)
    return done, grads, metrics.finalize(), groups, self.updated(
        places, {part: params[part] for part in trained}, grads)

  def updated(self, places, params, grads):
    """The weights after a step of gradient descent."""
    masters = jax.tree.map(jnp.copy, params)
    if places:
      declared = vlm.weights(self.config)
      masters = jax.device_put(masters, {
          part: places.training.master(declared)[part] for part in params})
    grads = jax.tree.map(jnp.copy, grads)  # The update may delete them.
    sgd = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    state, _, _ = update.apply_gradients(
        update.create_state(masters, sgd), grads, sgd, jnp.float32)
    return state.params

  @parameterized.parameters(
      *((name, "rollplex") for name in _MESHES),
      # Of those whose weights move, one of each kind.
      *((name, "serial") for name in (
          "finer_rollout", "coarser_rollout_fsdp")))
  @pytest.mark.slow
  def test_every_mesh(self, name, schedule):
    self.check(name, schedule)

  def test_weights_split_by_fsdp_are_gathered_before_the_rollout(self):
    """A step of decoding must not gather them."""
    text = vlm.weights(self.config)["text"]
    for mesh, moves in ((MeshConfig(fsdp=4, training_tp=2, rollout_tp=2), True),
                        (MeshConfig(data=4, training_tp=2, rollout_tp=2), False)):
      places = make_places(mesh, vlm.axis_sizes(self.config))
      plan = places.plan_layout(text, np.float32)
      self.assertEqual(moves, plan is not None)
      if plan:
        self.assertFalse(any("fsdp" in str(t.rollout.spec) for t in plan.tensors))
        self.assertGreater(plan.to_dict()["bytes"]["rebuild"], 0)

  def check(self, name, schedule):
    mesh = _MESHES[name]
    trained = ("text", "visual")
    if not self.expected:
      self.expected["one"] = self.run_step(None, trained)
    done, grads, metrics, groups, weights = self.expected["one"]
    source = {}
    if schedule == "rollplex":
      differ = mesh.training_tp != mesh.rollout_tp
      source = dict(prefix_source="window" if differ else "rollout")
    got_done, got, got_metrics, got_groups, got_weights = self.run_step(
        mesh, trained, micro=16, name=schedule, **source)
    np.testing.assert_array_equal(got_done.token_ids, done.token_ids)
    np.testing.assert_allclose(
        got_groups.ref_logprobs, groups.ref_logprobs, atol=2e-5)
    np.testing.assert_allclose(
        got_metrics["actor/loss"], metrics["actor/loss"], rtol=1e-5)
    for a_tree, b_tree in ((grads, got), (weights, got_weights)):
      for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(a_tree),
                              jax.tree.leaves(b_tree)):
        self.assertLessEqual(
            np.linalg.norm(a - b), 1e-5 * np.linalg.norm(a) + 1e-7,
            msg=jax.tree_util.keystr(path))
    for a, b in zip(jax.tree.leaves(self.params["text"]),
                    jax.tree.leaves(weights["text"])):
      self.assertGreater(np.abs(np.asarray(a) - np.asarray(b)).max(), 0)


if __name__ == "__main__":
  absltest.main()
