"""Decoding and training through the attention kernels, compiled for H100s."""

import math

from absl.testing import absltest, parameterized
import jax.numpy as jnp
import pytest

from rollplex_jax import programs
from rollplex_jax.models.config import ModelConfig, TextConfig
from rollplex_jax.placement.sharding import MeshShape
from rollplex_jax.stages.objectives import Normalizers, ObjectiveConfig
from rollplex_jax.stages.response import GroupResponses
from rollplex_jax.stages.sampling import SamplingConfig
from tests.helpers import devices, gpu_program
from tests.helpers.gpu_arguments import Arguments

devices.use_virtual_devices()

_LAYERS = 1
# No other array has a dimension of P beside one of R.
_B, _G, _P, _R = 2, 4, 1088, 96
_CONFIG = ModelConfig(
    text=TextConfig(
        vocab_size=4096, hidden_size=1024, intermediate_size=2560,
        num_hidden_layers=_LAYERS, num_attention_heads=8,
        num_key_value_heads=2, mrope_section=(16, 24, 24),
        tie_word_embeddings=True),
    vision=None, image_token_id=1, video_token_id=2, vision_start_token_id=3,
    vision_end_token_id=4, eos_token_ids=(5,))
_STEP = ["shared_prefix_decode", "shared_prefix_join"]
_BACKWARD = [f"shared_prefix_{name}"
             for name in ("grad_q", "grad_prefix", "grad_suffix")]
# On the last, two devices each share a head of keys and values.
_MESHES = (MeshShape(), MeshShape(data=2, tp_major=2),
           MeshShape(tp_major=2, tp_minor=2))


@pytest.mark.cuda_plugin
@absltest.skipUnless(gpu_program.has_plugin(), "needs jax's CUDA plugin")
class AttentionOnGpuTest(parameterized.TestCase):

  def assert_no_scores(self, program):
    """No array of any computation has the scores of tokens and a prefix."""
    arrays = [(kind, dims) for lines in program.computations.values()
              for line in lines for kind, dims in line.shapes]
    self.assertTrue(any(_P in dims for _, dims in arrays))
    for kind, dims in arrays:
      if _P in dims:
        rest = math.prod(dims) // _P
        self.assertNotEqual(rest % _R, 0, (kind, dims))

  @parameterized.product(shape=_MESHES)
  def test_decode(self, shape):
    a = Arguments(_CONFIG, shape, _B, _P)
    program = gpu_program.compile_for_gpu(
        programs.decode, {"text": a.text()}, _CONFIG,
        SamplingConfig(max_completion_length=_R, eos_token_ids=(5,)),
        a.prompts(), a.kv(), a.keys(_B, _G),
        place=a.place)
    body, = program.loop_bodies()
    self.assertEqual(program.kernels(body), _STEP * _LAYERS)
    # Keys and values are neither copied nor gathered, but for a step's entry.
    t, ways = _CONFIG.text, a.ways
    held = _B // ways("batch") * t.num_key_value_heads // ways("kv_heads")
    self.assertEmpty(program.copies(body, {
        ("bf16", held * t.head_dim * size) for size in (_P, _G * _R)}))

  @parameterized.parameters(
      (_MESHES[0], False), (_MESHES[1], True), (_MESHES[2], False))
  def test_gradient(self, shape, remat):
    a = Arguments(_CONFIG, shape, _B, _P)
    by_token = a.array(_B, _G, _R)
    program = gpu_program.compile_for_gpu(
        programs.gradient_suffix, {"text": a.text()}, {},
        {"text": a.text(jnp.float32)}, a.kv(jnp.float32), None, _CONFIG,
        ObjectiveConfig(beta=0.1), a.prompts(), a.kv(), None, GroupResponses(
            token_ids=a.array(_B, _G, _R, dtype=jnp.int32),
            lengths=a.array(_B, _G, dtype=jnp.int32)),
        a.array(_B, _G), None, by_token,
        Normalizers(num_tokens=a.array(), num_sequences=a.array()), 1.0, remat,
        True, place=a.place)
    forward = ["shared_prefix_forward"] * (2 if remat else 1)
    self.assertCountEqual(
        program.kernels(program.entry), (forward + _BACKWARD) * _LAYERS)
    self.assert_no_scores(program)


if __name__ == "__main__":
  absltest.main()
