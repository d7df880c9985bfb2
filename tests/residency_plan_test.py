"""Buffers of a step: lifetimes from the schedule, bytes from the sharding."""

import dataclasses

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from rollplex_jax import residency_plan
from rollplex_jax.buffer_sizes import Setup, Sizes, StageRules, Workload
from rollplex_jax.models import decoder, vision, vlm
from rollplex_jax.models.config import ModelConfig, TextConfig
from rollplex_jax.models.weights import is_weight
from rollplex_jax.placement.buffers import Policy
from rollplex_jax.placement.residency import BudgetError
from rollplex_jax.placement.sharding import (
  MeshShape,
  fully_sharded,
  make_rules,
)
from rollplex_jax.schedule import Facts, Lane, ScheduleConfig, Stage
from rollplex_jax.stages.prefix import SavePolicy
from tests.helpers import devices, tiny_policy

DEVICES = devices.use_virtual_devices()
GIB = 2**30
CONFIG = tiny_policy.config()
FACTS = Facts(has_media=True, has_reference=True, trains_tower=False,
              scores_policy=False)
WORK = Workload(num_prompts=4, prompt_length=32, num_generations=2,
                response_length=8, num_features=16, micro_batch_size=4)


def rules(shape, config, axes, **kwargs):
  text, tower = config.text, config.vision
  heads = {"vocab": text.vocab_size, "heads": text.num_attention_heads,
           "kv_heads": text.num_key_value_heads,
           "mlp": text.intermediate_size, "embed": text.hidden_size}
  of_tower = {"heads": tower.num_heads, "mlp": tower.intermediate_size,
              "embed": tower.hidden_size}
  return StageRules(
      text=make_rules(shape, heads, axes, what="text"),
      vision=make_rules(shape, of_tower, axes, what="vision",
                        split_all=False))


class LifetimeTest(parameterized.TestCase):

  def plan(self, facts=FACTS, work=WORK, dtype="float32", pool=None,
           **schedule):
    config = ScheduleConfig(**{"name": "rollplex", **schedule})
    return residency_plan.plan(
        Setup(config=CONFIG, dtype=dtype), config, facts, work, pool=pool)[0]

  def artifacts(self, plan, group):
    always = {"optimizer", "policy/weights", "policy/frozen",
              "reference/weights"}
    return set(plan.after(group)) - always

  def test_rollplex(self):
    plan = self.plan()
    after = {g: self.artifacts(plan, g) for g in (
        "rollout", "score", "train/gradient[0][0]", "train/gradient[1][0]",
        "train", "update")}
    self.assertEqual({
        "rollout": {"rollout/kv", "policy/saved", "reference/kv",
                    "policy/features"},
        "score": {"rollout/kv", "policy/saved", "policy/features"},
        "train/gradient[0][0]": {
            "rollout/kv", "policy/saved", "policy/features", "grads",
            "kv_grads.0"},
        # The last gradient was the last to read keys and values.
        "train/gradient[1][0]": {
            "policy/saved", "policy/features", "grads", "kv_grads.1"},
        "train": {"grads"}, "update": set()}, after)
    self.assertIn("rollout/cache", plan.during("rollout/window"))
    self.assertIn("patches", plan.during("rollout/vision"))

  def test_serial_shared(self):
    plan = self.plan(name="serial")
    self.assertEqual({"policy/features"}, self.artifacts(plan, "rollout"))
    self.assertEqual({"policy/features", "policy/kv.1", "policy/saved.1",
                      "grads"}, self.artifacts(plan, "train/prefix[1]"))
    self.assertEqual({"policy/features", "grads"},
                     self.artifacts(plan, "train/prefix_backward[0]"))

  def test_later_updates_make_prefixes_anew(self):
    plan = self.plan(
        work=dataclasses.replace(WORK, prompts_per_update=2, updates=2),
        facts=dataclasses.replace(FACTS, scores_policy=True))
    self.assertEqual({"policy/features"}, self.artifacts(plan, "update"))
    self.assertIn("policy/kv.0", plan.after("train2/prefix[0]"))
    self.assertEqual({"policy/features", "grads"}, self.artifacts(
        plan, "train") | {"grads"})
    self.assertEqual(set(), self.artifacts(plan, "update2"))

  def test_a_trained_tower_is_the_references_own(self):
    frozen = self.plan()
    trained = self.plan(facts=dataclasses.replace(FACTS, trains_tower=True))
    tower = Sizes(Setup(config=CONFIG, dtype="float32"), WORK, ()).weights(
        "visual")
    self.assertEqual(tower, frozen.find("policy/frozen")[0].bytes_per_device)
    self.assertEmpty(trained.find("policy/frozen"))
    for name in ("policy/weights", "reference/weights"):
      self.assertEqual(tower, trained.find(name)[0].bytes_per_device
                       - frozen.find(name)[0].bytes_per_device)
    self.assertIn("reference/features", trained.during("rollout/window"))
    self.assertIn("feature_grads", trained.during("train/vision_backward"))

  def test_without_a_reference(self):
    plan = self.plan(facts=dataclasses.replace(FACTS, has_reference=False))
    self.assertEmpty([b for b in plan.buffers if "reference" in b.name])

  def test_pools_of_a_disaggregated_run(self):
    names = lambda pool: {
        b.name for b in self.plan(name="disaggregated", pool=pool).buffers}
    self.assertEqual(
        {"rollout/weights", "rollout/features", "rollout/kv", "rollout/cache",
         "completions", "patches"}, names(Lane.ROLLOUT))
    training = names(Lane.TRAINING)
    self.assertContainsSubset({"optimizer", "policy/features", "grads"},
                              training)
    self.assertEmpty([n for n in training if n.startswith("rollout/")])

  def test_rebuilt_weights_live_through_the_rollout_only(self):
    setup = Setup(config=CONFIG, rebuilt_bytes=1000)
    plan, _ = residency_plan.plan(
        setup, ScheduleConfig(name="rollplex"), FACTS, WORK)
    held = {p: plan.during(p).get("rollout/weights", 0) for p in plan.phases}
    self.assertEqual({"rebuild": 1000, "rollout/vision": 1000,
                      "rollout/prefix": 1000, "rollout/window": 1000},
                     {p: n for p, n in held.items() if n})
    self.assertNotIn("rollout/weights", plan.after("rollout"))

  def test_temporaries_of_programs(self):
    setup = Setup(config=CONFIG, temporaries={Stage.GRADIENT: 5 * GIB})
    plan, _ = residency_plan.plan(
        setup, ScheduleConfig(name="rollplex"), FACTS, WORK)
    self.assertEqual("train/gradient[0][0]", plan.peak_phase)
    self.assertGreater(plan.peak_bytes, 5 * GIB)


class BytesTest(parameterized.TestCase):
  """Against arrays that lie on eight devices."""

  def setUp(self):
    super().setUp()
    self.shape = MeshShape(fsdp=2, tp_major=2, tp_minor=2)
    self.mesh = self.shape.make(DEVICES)
    axes = ("tp_major",)
    self.setup = Setup(
        config=CONFIG, dtype="bfloat16", mesh=self.shape,
        training=rules(self.shape, CONFIG, axes),
        rollout=rules(self.shape, CONFIG, axes))
    self.sizes = Sizes(self.setup, WORK, ("text", "visual"))

  def real(self, shape, dtype, spec):
    """Bytes on each device of a real array."""
    a = jnp.zeros(shape, dtype, device=NamedSharding(self.mesh, spec))
    (size,) = {s.data.nbytes for s in a.addressable_shards}
    return size

  def test_weights(self):
    whole = full = 0
    parts = [(self.setup.training.text, decoder.weights(CONFIG.text)),
             (self.setup.training.vision, vision.weights(CONFIG.vision))]
    for rule, declared in parts:
      for w in jax.tree.leaves(declared, is_leaf=is_weight):
        whole += self.real(w.shape, jnp.bfloat16, rule.spec(*w.axes))
        full += self.real(w.shape, jnp.float32, fully_sharded(
            self.shape, rule, w.shape, w.axes))
    self.assertEqual(whole, self.sizes.weights("text", "visual"))
    self.assertEqual(full, self.sizes.gradients())
    self.assertEqual(3 * full, self.sizes.optimizer())

  def test_artifacts(self):
    text, layers = CONFIG.text, CONFIG.text.num_hidden_layers
    spec = self.setup.training.text.spec
    kv = self.real((4, text.num_key_value_heads, text.head_dim, 32),
                   jnp.bfloat16, spec("batch", "kv_heads", None, None))
    self.assertEqual(2 * layers * kv, self.sizes.kv(4))
    self.assertEqual(4 * layers * kv, self.sizes.kv(4, dtype=jnp.float32))
    saved = self.real((4, 32, text.hidden_size), jnp.bfloat16,
                      spec("batch", None, "saved"))
    self.assertEqual(4 * 32 * 32 * 2 // 8, saved)  # Over all devices.
    self.assertEqual(layers * saved,
                     self.sizes.saved(4, SavePolicy.LAYER_INPUTS))
    self.assertEqual(
        self.real((16, text.hidden_size), jnp.bfloat16, spec("batch", None)),
        self.sizes.features())
    # 3 rows do not divide by four ways: they stay whole.
    self.assertEqual(layers * 3 * 32 * 32 * 2 // 2,
                     self.sizes.saved(3, SavePolicy.LAYER_INPUTS))

  def test_float32_masters_are_the_compute_parameters(self):
    one = Sizes(Setup(config=CONFIG, dtype="float32"), WORK, ("text",))
    self.assertEqual(2 * one.gradients(), one.optimizer())
    self.assertEqual(one.gradients(), one.weights("text"))

  def test_32b_on_32_devices(self):
    """The numbers that the design names: 524,288 prefix tokens."""
    text = TextConfig(
        vocab_size=152064, hidden_size=5120, intermediate_size=27648,
        num_hidden_layers=64, num_attention_heads=40, num_key_value_heads=8,
        mrope_section=(16, 24, 24))
    config = ModelConfig(
        text=text, vision=dataclasses.replace(
            CONFIG.vision, out_hidden_size=5120, hidden_size=1280,
            intermediate_size=3456, num_heads=16), image_token_id=1,
        video_token_id=2)
    shape = MeshShape(fsdp=4, tp_major=4, tp_minor=2)
    training = rules(shape, config, ("tp_major", "tp_minor"))
    work = dataclasses.replace(WORK, num_prompts=64, prompt_length=8192)
    sizes = Sizes(Setup(config=config, mesh=shape, training=training), work,
                  ("text",))
    self.assertEqual(10 * GIB, sizes.saved(64, SavePolicy.LAYER_INPUTS))
    self.assertAlmostEqual(11.44, sizes.optimizer() / GIB, delta=0.05)
    self.assertEqual(vlm.weights(config).keys(), {"text", "visual"})
    self.assertEqual(PartitionSpec(("data", "fsdp"), None,
                                   ("tp_major", "tp_minor")),
                     training.text.spec("batch", None, "saved"))


class BudgetTest(parameterized.TestCase):

  def plan(self, megabytes=None, **schedule):
    return residency_plan.plan(
        Setup(config=CONFIG, dtype="bfloat16"),
        ScheduleConfig(**{"name": "rollplex", **schedule}), FACTS,
        dataclasses.replace(WORK, prompt_length=1024, num_prompts=16,
                            num_features=1024),
        None if megabytes is None else int(megabytes * 1e6))

  @parameterized.parameters(
      (None, "activations"), (7, "layer_inputs"), (5.5, "offload"),
      (4.5, "nothing"))
  def test_saves_less_where_the_rest_is_not_enough(self, megabytes, save):
    plan, chosen = self.plan(megabytes, save="activations")
    self.assertEqual(save, chosen.save)
    self.assertEqual(
        save != "activations", f"schedule.save={save}" in plan.changed)
    # Backward units are those of the schedule that will run.
    backward = [p for p in plan.phases if "prefix_backward" in p]
    self.assertLen(backward, 1 if save == "activations" else 8)
    self.assertTrue(plan.fits)

  def test_optimizer_goes_first(self):
    plan, chosen = self.plan(6.7)
    self.assertEqual(("optimizer state offloaded",), plan.changed)
    self.assertEqual(SavePolicy.LAYER_INPUTS, chosen.save)
    (optimizer,) = plan.find("optimizer")
    self.assertEqual(Policy.OFFLOAD, optimizer.policy)

  def test_refused_with_the_nearest_settings_that_fit(self):
    with self.assertRaisesRegex(
        BudgetError, "^rollout/window needs .* MiB per device, more than the "
        "budget of .* MiB even with .*schedule.save=nothing; what would fit: "
        r"schedule.name=serial \(.*\), train_batch_size=8 \(.*\), mesh.fsdp=2 \(.*\)$") as caught:
      self.plan(3)
    report = caught.exception.report()
    for group in ("rebuild", "rollout", "score", "train", "update"):
      self.assertRegex(report, rf"(?m)^{group} ")
    self.assertIn("micro_batch_size=2: ", report)
    self.assertNotIn("\n", str(caught.exception))


if __name__ == "__main__":
  absltest.main()
