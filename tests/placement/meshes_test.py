"""A step on a mesh is the step on one device."""

from absl.testing import absltest, parameterized
import jax
import numpy as np

from rollplex_jax import samples
from rollplex_jax.artifacts import Model
from rollplex_jax.executor import Settings, Step
from rollplex_jax.models import vlm
from rollplex_jax.placement.layout import plan_layout
from rollplex_jax.placement.mesh import MeshConfig, make_places
from rollplex_jax.schedule import ScheduleConfig
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
      if places.differ:
        layout = plan_layout(declared["text"], places.training,
                             places.rollout, np.float32)
    work = Step(settings, batch, Model(params, 0), Model(reference, 0),
                num_generations=_G, seed=3, step=1, layout=layout)
    done = work.roll_out()
    advantages = np.random.default_rng(0).normal(size=(8, _G))
    groups = work.score(samples.Groups(
        rows=np.arange(8, dtype=np.int32), token_ids=done.token_ids,
        lengths=done.lengths, advantages=advantages.astype(np.float32)))
    grads, metrics, _ = work.gradient(groups, first=True)
    return done, grads, metrics.finalize(), groups

  @parameterized.parameters(*(
      (name, schedule) for name in _MESHES
      for schedule in ("serial", "rollplex")))
  def test_step(self, name, schedule):
    mesh = _MESHES[name]
    trained = ("text", "visual")
    if not self.expected:
      self.expected["one"] = self.run_step(None, trained)
    done, grads, metrics, groups = self.expected["one"]
    source = {}
    if schedule == "rollplex":
      differ = mesh.training_tp != mesh.rollout_tp
      source = dict(prefix_source="window" if differ else "rollout")
    got_done, got, got_metrics, got_groups = self.run_step(
        mesh, trained, micro=16, name=schedule, **source)
    np.testing.assert_array_equal(got_done.token_ids, done.token_ids)
    np.testing.assert_allclose(
        got_groups.ref_logprobs, groups.ref_logprobs, atol=2e-5)
    np.testing.assert_allclose(
        got_metrics["actor/loss"], metrics["actor/loss"], rtol=1e-5)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(grads),
                            jax.tree.leaves(got)):
      self.assertLessEqual(
          np.linalg.norm(a - b), 1e-5 * np.linalg.norm(a) + 1e-7,
          msg=jax.tree_util.keystr(path))


if __name__ == "__main__":
  absltest.main()
