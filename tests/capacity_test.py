"""The planner's bytes and operations against hand counts and compiled programs.
"""

import dataclasses

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollplex_jax import (
  capacity,
  capacity_costs,
  capacity_estimate,
  deviceless,
  programs,
)
from rollplex_jax.capacity_case import Case, Workload
from rollplex_jax.capacity_memory import (
  Away,
  Buffers,
  Need,
  naive_phases,
  phases_of,
)
from rollplex_jax.capacity_programs import Programs
from rollplex_jax.models import decoder, published, vlm
from rollplex_jax.models.config import ModelConfig, TextConfig
from rollplex_jax.models.inputs import PromptInputs
from rollplex_jax.models.weights import abstract_params, num_parameters
from rollplex_jax.placement.mesh import MeshConfig
from rollplex_jax.stages.prefix import SavePolicy
from rollplex_jax.stages.response import GroupResponses
from tests.helpers import devices, tiny_policy

devices.use_virtual_devices()

_NEED = Need(temp_bytes=0)


def _tiny(**changes) -> Case:
  defaults = dict(
      model=tiny_policy.config(), device="h100", num_devices=4,
      mesh=MeshConfig(data=2, training_tp=2, rollout_tp=2),
      workload=Workload(num_prompts=4, num_generations=4, prefix_length=64,
                        response_length=8, video=(2, 4, 4)))
  return Case(**{**defaults, **changes})


class AccountingTest(parameterized.TestCase):

  def test_by_hand(self):
    # 4 prompts of 64 tokens over 2 parts, 2 key/value heads over 2 devices of
    # tensor parallelism, 2 layers, heads of 8, model dimension 32.
    have = Buffers(_tiny())
    self.assertEqual(have.kv, 2 * (2 * 4 * 64 * 2 * 8) * 2 // 4)
    self.assertEqual(have.saved, 2 * (4 * 64 * 32) * 2 // 4)
    self.assertEqual(have.suffix_kv, have.kv * 4 * 8 // 64)
    # One prompt of each part: as many bytes again as keys and values, twice
    # as wide, of half of the prompts.
    self.assertEqual(have.kv_grads, have.kv)
    # 8 features of 32 numbers a prompt, in 2 parts.
    self.assertEqual(have.features, 4 * 8 * 32 * 2 // 2)
    # Master weights and two moments of what divides by all 4 devices.
    text = num_parameters(vlm.weights(tiny_policy.config())["text"])
    self.assertAlmostEqual(have.optimizer, 3 * 4 * text / 4, delta=300)
    self.assertAlmostEqual(have.gradients, 4 * text / 4, delta=100)
    self.assertAlmostEqual(have.text, 2 * text / 2, delta=300)

  def test_phases_of_rollplex(self):
    case, have = _tiny(), Buffers(_tiny())
    need = lambda name: Need(temp_bytes=1000 if name == "gradient" else 0)
    found = {p.name: p for p in phases_of(case, "rollplex", need, Away())}
    window, gradient = found["rollout: window"], found["gradient: gradient"]
    self.assertEqual(window.bytes["reference"], have.reference)
    self.assertEqual(window.bytes["kv"], have.kv)
    # The reference's prefixes and what the policy saved.
    self.assertEqual(window.bytes["prefix"], have.kv + have.saved)
    self.assertEqual(window.bytes["gradients"], 0)
    # By then the reference's prefixes are gone.
    self.assertEqual(gradient.bytes["prefix"], have.saved)
    self.assertEqual(gradient.bytes["gradients"],
                     have.gradients + have.kv_grads)
    self.assertEqual(gradient.bytes["temporaries"], 1000)
    self.assertEqual(gradient.bytes["optimizer"], have.optimizer)
    update = found["update"]
    self.assertEqual(update.bytes["weights"], have.weights - have.text)
    self.assertEqual(update.bytes["kv"] + update.bytes["prefix"], 0)

  def test_what_waits_elsewhere(self):
    case, have = _tiny(), Buffers(_tiny())
    phases = {p.name: p for p in phases_of(
        case, "rollplex", lambda name: _NEED,
        Away(optimizer=True, reference=True))}
    gradient = phases["gradient: gradient"]
    self.assertEqual(gradient.bytes["optimizer"], 0)
    self.assertEqual(gradient.bytes["reference"], 0)
    self.assertEqual(phases["rollout: window"].bytes["reference"],
                     have.reference)
    self.assertEqual(phases["update"].bytes["optimizer"], have.optimizer)

  def test_least_is_sent_away(self):
    case = _tiny()
    need = lambda name: _NEED
    peaks = [capacity.peak_of(phases_of(case, "rollplex", need, away))
             for away in (Away(), Away(optimizer=True))]
    self.assertLess(peaks[1], peaks[0])
    choose = lambda budget: capacity.choose_away(case, need, budget)
    self.assertEqual(choose(peaks[0]), Away())
    self.assertEqual(choose(peaks[0] - 1), Away(optimizer=True))
    self.assertEqual(choose(0), Away(optimizer=True, reference=True))

  @parameterized.parameters(
      (SavePolicy.OFFLOAD, 0), (SavePolicy.NOTHING, 0),
      (SavePolicy.LAYER_INPUTS, 1))
  def test_saved(self, save, times):
    have = Buffers(_tiny(save=save))
    self.assertEqual(have.saved, times * have.inputs)

  def test_layouts(self):
    same = Buffers(_tiny()).rebuilt
    finer = Buffers(_tiny(mesh=MeshConfig(
        data=2, training_tp=1, rollout_tp=2), prefix_source="window"))
    coarser = Buffers(_tiny(mesh=MeshConfig(
        data=2, training_tp=2, rollout_tp=1), prefix_source="window"))
    self.assertEqual(same, 0)
    # Pieces too small to lie aligned are copied, the rest is viewed.
    self.assertLess(finer.rebuilt, 0.01 * finer.rollout_text)
    self.assertGreater(coarser.rebuilt, 0.9 * coarser.rollout_text)
    stored = Buffers(_tiny(
        mesh=MeshConfig(data=2, training_tp=1, rollout_tp=2),
        prefix_source="window", storage="finer"))
    self.assertLess(stored.text, 0.6 * finer.text)

  def test_naive_holds_everything(self):
    case, have = _tiny(), Buffers(_tiny())
    naive = naive_phases(case, lambda name: _NEED)
    all_of_it = (have.weights + have.rollout_text + have.reference
                 + have.optimizer + have.gradients + have.features
                 + 4 * (2 * have.kv + have.inputs) + have.suffix_kv)
    self.assertEqual(capacity.peak_of(naive), all_of_it)

  def test_published_sizes(self):
    billions = {name: capacity_costs.parameter_count(
        published.config_of(name)) / 1e9 for name in published.names()}
    for name, size in {"3b": 3.75, "7b": 8.29, "32b": 33.5, "72b": 73.4}.items():
      self.assertAlmostEqual(billions[f"qwen2.5-vl-{name}"], size, delta=0.06)

  def test_line_through_depths(self):
    at = lambda d: deviceless.Compiled(
        argument_bytes=0, output_bytes=0, temp_bytes=100 + 10 * d,
        alias_bytes=0, seconds=0.0, collectives=(deviceless.Collective(
            kind="all-reduce", bytes=5 * d, count=d, group=2, far=False),))
    found = capacity._at_depth(_tiny(), "score", {2: at(2), 4: at(4)}, 64)
    self.assertEqual(found.need.temp_bytes, 740)
    self.assertEqual((found.collectives[0].bytes, found.collectives[0].count),
                     (320, 64))


class CostsTest(absltest.TestCase):
  """Counted operations against XLA's own count, on the CPU lowering."""

  def setUp(self):
    super().setUp()
    self.config = ModelConfig(text=TextConfig(
        vocab_size=1024, hidden_size=128, intermediate_size=512,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        mrope_section=(4, 6, 6)))
    self.b, self.g, self.p, self.r = 2, 2, 512, 128
    i = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    self.prompts = PromptInputs(
        token_ids=i(self.b, self.p), lengths=i(self.b),
        positions=i(3, self.b, self.p), feature_index=i(self.b, self.p),
        next_position=i(self.b), row_ids=i(self.b))
    self.text = abstract_params(decoder.weights(self.config.text))
    self.responses = GroupResponses(
        i(self.b, self.g, self.r), i(self.b, self.g))
    self.sizes = capacity_costs.Sizes.of(self.config)

  def counted(self, lowered):
    return lowered.cost_analysis()["flops"]

  def test_prefix(self):
    found = self.counted(programs.prefix_forward.lower(
        self.text, self.config, self.prompts, None, SavePolicy.NOTHING))
    ours = capacity_costs.prefix_forward(
        self.sizes, self.b * self.p, self.b * capacity_costs.causal_pairs(self.p))
    self.assertBetween(found / ours, 1.0, 1.12)

  def test_suffix(self):
    kv = jax.eval_shape(
        lambda t, prompts: programs.prefix_forward(
            t, self.config, prompts, None, SavePolicy.NOTHING)[0],
        self.text, self.prompts)
    found = self.counted(programs.score_suffix.lower(
        {"text": self.text}, self.config, self.prompts, kv, None,
        self.responses, 1.0))
    n = self.b * self.g
    ours = capacity_costs.suffix_forward(
        self.sizes, n * self.r, n * self.r * (self.p + self.r))
    self.assertBetween(found / ours, 1.0, 1.12)


class CollectivesTest(absltest.TestCase):

  def test_read_from_a_program(self):
    text = """HloModule m
%body (p: f32[8]) -> f32[8] {
  %ag = f32[64]{0} all-gather(%p), replica_groups=[4,8]<=[32], dimensions={0}
}
%open (p: f32[8]) -> f32[8] {
  %ar = bf16[10]{0} all-reduce(%p), replica_groups={{0,8},{1,9}}, to_apply=%sum
}
ENTRY %main (p: f32[8]) -> f32[8] {
  %w = f32[8]{0} while(%p), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %v = f32[8]{0} while(%w), condition=%c, body=%open
  %rs = f32[4]{0} reduce-scatter(%v), replica_groups=[8,4]<=[4,8]T(1,0), to_apply=%sum
}
"""
    found = {c.kind: c for c in deviceless.collectives(text, 8)}
    make = deviceless.Collective
    self.assertEqual(found["all-gather"], make(
        kind="all-gather", bytes=3 * 256, count=3, group=8, far=False))
    self.assertEqual(found["all-reduce"], make(
        kind="all-reduce", bytes=20, count=1, group=2, far=True, loop=0))
    self.assertEqual(found["reduce-scatter"], make(
        kind="reduce-scatter", bytes=16, count=1, group=4, far=True))


@pytest.mark.cuda_plugin
@absltest.skipUnless(deviceless.has_plugin(), "needs jax's CUDA plugin")
class CompiledTest(parameterized.TestCase):
  """A model an eighth as wide as 32B's, in one host."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    model = published.config_of("qwen2.5-vl-32b")
    cls.case = Case(
        model=dataclasses.replace(model, vision=None, text=dataclasses.replace(
            model.text, hidden_size=1280, intermediate_size=3456,
            num_attention_heads=10, num_key_value_heads=2,
            num_hidden_layers=3, vocab_size=32000)),
        device="h100", num_devices=8,
        mesh=MeshConfig(data=4, training_tp=2, rollout_tp=2),
        workload=Workload(num_prompts=8, prefix_length=2048,
                          response_length=256, video=None))

  @parameterized.parameters(
      "plain_prefill", "decode", "score", "gradient", "prefix_backward",
      "update", "compute_copy")
  def test_arguments_and_temporaries(self, name):
    found = capacity.compile_one(self.case, name)
    _, args, kwargs = Programs(self.case).program(name)
    leaves = [a for a in jax.tree.leaves((args, kwargs))
              if isinstance(a, jax.ShapeDtypeStruct)]
    placed = [a for a in leaves if a.sharding is not None]
    from_host = sum(
        int(np.prod(a.shape)) * 8 for a in leaves if a.sharding is None)
    # Weights that a program does not read are no arguments of it.
    held = capacity.tree_bytes(placed)
    self.assertLessEqual(found.argument_bytes, held + from_host)
    if name in ("update", "compute_copy"):
      self.assertAlmostEqual(
          found.argument_bytes, held, delta=256 * len(placed))
    if name in ("gradient", "prefix_backward", "update"):
      self.assertGreater(found.alias_bytes, 0)
    estimate = capacity_estimate.need_of(self.case, name).temp_bytes
    # Estimates are within a half and a quarter of a GiB.
    self.assertLess(abs(estimate - found.temp_bytes),
                    0.5 * found.temp_bytes + 0.25 * 2**30)


if __name__ == "__main__":
  absltest.main()
