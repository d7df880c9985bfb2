"""Phases of a step: what is there, what waits elsewhere, what is rebuilt."""

import dataclasses
import math

from absl.testing import absltest, parameterized
import jax

from rollplex_jax.capacity.memory import (
  Buffers,
  Need,
  naive_phases,
  phases_of,
  programs_of,
)
from rollplex_jax.capacity.plan import half_of
from rollplex_jax.models import vlm
from rollplex_jax.models.weights import is_weight, num_parameters
from rollplex_jax.placement.mesh import MeshConfig
from rollplex_jax.stages.prefix import SavePolicy
from tests.capacity.cases import nothing, tiny
from tests.helpers import devices, tiny_policy

devices.use_virtual_devices()


def phases(case, name="rollplex", need=nothing, budget=None):
  return {p.name: p for p in phases_of(case, name, need, budget).phases}


class MemoryTest(parameterized.TestCase):

  def test_by_hand(self):
    # 4 prompts of 64 tokens over 2 parts, 2 key/value heads over 2 devices of
    # tensor parallelism, 2 layers, heads of 8, model dimension 32.
    have = Buffers(tiny())
    self.assertEqual(have.kv, 2 * (2 * 4 * 64 * 2 * 8) * 2 // 4)
    self.assertEqual(have.inputs, 2 * (4 * 64 * 32) * 2 // 4)
    self.assertEqual(have.suffix_kv, have.kv * 4 * 8 // 64)
    # 8 features of 32 numbers a prompt, in 2 parts.
    self.assertEqual(have.features, 4 * 8 * 32 * 2 // 2)
    # Master weights and two moments of what divides by all 4 devices.
    text = num_parameters(vlm.weights(tiny_policy.config())["text"])
    self.assertAlmostEqual(have.optimizer, 3 * 4 * text / 4, delta=300)
    self.assertAlmostEqual(have.gradients, 4 * text / 4, delta=100)
    self.assertAlmostEqual(have.text, 2 * text / 2, delta=300)

  def test_rollplex(self):
    case, have = tiny(), Buffers(tiny())
    need = lambda name: Need(temp_bytes=1000 if name == "gradient" else 0)
    found = phases(case, need=need)
    window, gradient = found["rollout/window"], found["train/gradient"]
    self.assertEqual(window.bytes["reference"], have.reference)
    self.assertEqual(window.bytes["kv"], have.kv + have.suffix_kv)
    # The reference's prefixes and what the policy saved.
    self.assertEqual(window.bytes["prefix"], have.kv + have.inputs)
    self.assertEqual(window.bytes["gradients"], 0)
    # By then the reference's prefixes are gone.
    self.assertEqual(gradient.bytes["prefix"], have.inputs)
    # Those of keys and values are of half of the prompts, twice as wide.
    self.assertEqual(gradient.bytes["gradients"], have.gradients + have.kv)
    self.assertEqual(gradient.bytes["temporaries"], 1000)
    self.assertEqual(gradient.bytes["optimizer"], have.optimizer)
    update = found["update"]
    self.assertEqual(update.bytes["weights"], have.weights)
    self.assertEqual(update.bytes["kv"] + update.bytes["prefix"], 0)

  def test_temporaries(self):
    """What compiled programs hold counts once, wherever a buffer stands for it.
    """
    have = Buffers(tiny())
    completions = have.sizes.completions()
    need = lambda name: {
        # The loop's caches are among its temporaries.
        "window": Need(temp_bytes=have.suffix_kv + 7, added_bytes=completions),
        "prefill": Need(temp_bytes=5, input_bytes=20,
                        added_bytes=have.kv + have.inputs),
        # 100 bytes of results that no buffer stands for.
        "score": Need(temp_bytes=3, added_bytes=100),
        "update": Need(temp_bytes=11), "compute_copy": Need(temp_bytes=13),
    }.get(name, Need(temp_bytes=0))
    found = {name: p.bytes["temporaries"]
             for name, p in phases(tiny(), need=need).items()}
    self.assertEqual(
        (found["rollout/window"], found["rollout/prefix"],
         found["score/score:reference"], found["update"]), (7, 25, 103, 13))

  def test_compressed_reference(self):
    """Its blocks but the first and the last, by hand."""
    config = tiny().model
    deep = dataclasses.replace(config, text=dataclasses.replace(
        config.text, num_hidden_layers=5))
    plain, small = (tiny(model=deep, reference_bits=b) for b in (0.0, 4.0))
    layer = vlm.weights(deep)["text"]["layers"][1]
    block = sum(math.prod(w.shape) for w in jax.tree.leaves(
        layer, is_leaf=is_weight) if len(w.shape) == 2)
    have, found = Buffers(plain), Buffers(small)
    # 12 bits less of each weight of three blocks, over two devices.
    self.assertEqual(have.reference - found.reference, 3 * block * 12 // 8 // 2)
    self.assertEqual((found.text, have.reference), (have.text, have.text))
    window = phases(small)["rollout/window"]
    self.assertEqual(window.bytes["reference"], found.reference)

  def test_artefacts_in_both_layouts(self):
    case = tiny(mesh=MeshConfig(data=2, training_tp=1, rollout_tp=2),
                prefix_source="window")
    have = Buffers(case)
    made = 2 * have.kv + have.inputs  # Of policy and reference.
    need = lambda name: Need(
        temp_bytes=0, added_bytes=made if name == "reshard" else 0)
    self.assertIn("reshard", programs_of(case, "rollplex"))
    window = phases(case, need=need)["rollout/window"]
    # The new ones lie where the caches of decoding were, and beyond.
    self.assertEqual(window.bytes["temporaries"], made - have.suffix_kv)
    # Patches and features lie as the rollout has them, in fewer parts than
    # training's: 32 patches a prompt, of float32.
    vision = phases(case, need=need)["rollout/vision"]
    self.assertEqual(vision.bytes["inputs"], 4 * 32 * case.model.vision.patch_dim * 4 // 2)
    gradient = phases(case, need=need)["train/gradient"]
    self.assertEqual(gradient.bytes["features"], 4 * 8 * 32 * 2 // 2)

  def test_what_waits_elsewhere(self):
    case, have = tiny(), Buffers(tiny())
    all_there = phases_of(case, "rollplex", nothing)
    self.assertEqual(all_there.away, ())
    self.assertEqual(phases_of(
        case, "rollplex", nothing, all_there.peak_bytes).away, ())
    less = phases_of(case, "rollplex", nothing, all_there.peak_bytes - 1)
    self.assertEqual(less.away, ("optimizer",))
    self.assertLess(less.peak_bytes, all_there.peak_bytes)
    # What can't be met leaves as little as there can be.
    self.assertEqual(phases_of(case, "rollplex", nothing, 1).away,
                     ("optimizer", "reference/weights"))
    found = phases(case, budget=1)
    gradient = found["train/gradient"]
    self.assertEqual(gradient.bytes["optimizer"], 0)
    self.assertEqual(gradient.bytes["reference"], 0)
    self.assertEqual(found["rollout/window"].bytes["reference"], have.reference)
    self.assertEqual(found["update"].bytes["optimizer"], have.optimizer)
    # What is saved is for --save to say.
    self.assertEqual(found["score/score:reference"].bytes["prefix"],
                     have.kv + have.inputs)

  @parameterized.parameters(
      (SavePolicy.OFFLOAD, 0), (SavePolicy.NOTHING, 0),
      (SavePolicy.LAYER_INPUTS, 1))
  def test_saved(self, save, times):
    case = tiny(save=save)
    score, have = phases(case)["score/score:reference"], Buffers(case)
    self.assertEqual(score.bytes["prefix"], have.kv + times * have.inputs)

  def test_layouts(self):
    self.assertEqual(Buffers(tiny()).rebuilt, 0)
    # Pieces too small to lie aligned are copied, the rest is viewed.
    case = tiny(mesh=MeshConfig(data=2, training_tp=1, rollout_tp=2),
                prefix_source="window")
    finer = Buffers(case)
    self.assertLess(finer.rebuilt, 0.01 * finer.rollout_text)
    stored = Buffers(dataclasses.replace(
        case, mesh=dataclasses.replace(case.mesh, storage="finer")))
    self.assertLess(stored.text, 0.6 * finer.text)
    self.assertEqual(stored.text, stored.rollout_text)

  def test_rebuilt_for_the_rollout_only(self):
    """The policy's and the reference's, whose prefixes the window computes."""
    case = tiny(mesh=MeshConfig(data=2, training_tp=2, rollout_tp=1),
                prefix_source="window")
    have = Buffers(case)
    self.assertGreater(have.rebuilt, 0.9 * have.rollout_text)
    rebuilt = {name: p.bytes["rebuilt"] for name, p in phases(case).items()}
    self.assertEqual(rebuilt["rollout/prefix"], have.rebuilt)
    self.assertEqual(rebuilt["rollout/window"], 2 * have.rebuilt)
    self.assertFalse(any(size for name, size in rebuilt.items()
                         if name.startswith(("score", "train", "update"))))

  def test_naive_holds_everything(self):
    case, have = tiny(), Buffers(tiny())
    naive = naive_phases(case, nothing)
    all_of_it = (have.weights + have.rollout_text + have.reference
                 + have.optimizer + have.gradients + have.features
                 + 4 * (2 * have.kv + have.inputs) + have.suffix_kv)
    self.assertEqual(naive.peak_bytes, all_of_it)

  def test_pools(self):
    pool = half_of(tiny())
    have, found = Buffers(pool), phases(half_of(tiny()), "disaggregated")
    self.assertEqual(pool.num_devices, 2)
    decode = found["sampler, rollout/decode"]
    self.assertEqual(decode.bytes["weights"], have.weights)
    self.assertEqual(decode.bytes["optimizer"] + decode.bytes["gradients"], 0)
    gradient = found["trainer, train/gradient_full"]
    self.assertEqual(gradient.bytes["optimizer"], have.optimizer)
    self.assertEqual(gradient.bytes["reference"], have.reference)
    self.assertEqual(gradient.bytes["kv"], 0)
    # The sampler has weights as the rollout reads them, and no others.
    other = half_of(tiny(mesh=MeshConfig(
        data=2, training_tp=1, rollout_tp=2), prefix_source="window"))
    decode = phases(other, "disaggregated")["sampler, rollout/decode"]
    self.assertLess(decode.bytes["weights"], Buffers(other).weights)
    self.assertEqual(decode.bytes["rebuilt"], 0)
    self.assertIsNone(half_of(tiny(
        num_devices=2, mesh=MeshConfig(training_tp=2, rollout_tp=2))))


if __name__ == "__main__":
  absltest.main()
