"""Programs that read compressed weights, compiled for H100s."""

import math

from absl.testing import absltest, parameterized
import jax
import pytest

from legolm_jax import packing
from legolm_jax.array import Storage
from rollplex_jax import programs
from rollplex_jax.models.config import ModelConfig, TextConfig
from rollplex_jax.placement.sharding import MeshShape
from rollplex_jax.stages.sampling import SamplingConfig
from tests.helpers import devices, gpu_program
from tests.helpers.gpu_arguments import Arguments
from tests.kernels import matrices

devices.use_virtual_devices()

_B, _G, _P, _R = 2, 4, 192, 48
_LAYERS = 2
_CONFIG = ModelConfig(
    text=TextConfig(
        vocab_size=4096, hidden_size=1024, intermediate_size=2560,
        num_hidden_layers=_LAYERS, num_attention_heads=8,
        num_key_value_heads=2, tie_word_embeddings=True),
    vision=None, image_token_id=1, video_token_id=2, vision_start_token_id=3,
    vision_end_token_id=4, eos_token_ids=(5,))
_SIZES = {"q": (1024, "heads"), "k": (256, "kv_heads"), "v": (256, "kv_heads"),
          "o": (1024, "heads"), "gate": (2560, "mlp"), "up": (2560, "mlp"),
          "down": (2560, "mlp")}


def compressed_text(a: Arguments):
  """The decoder's weights, all matrices of its layers compressed."""
  text = a.text()
  for layer in text["layers"]:
    for name, (size, axis) in _SIZES.items():
      is_in_out = name in ("o", "down")
      out, inputs = (1024, size) if is_in_out else (size, 1024)
      array = matrices.abstract(
          out, inputs, 64,
          storage=Storage.IN_OUT if is_in_out else Storage.OUT_IN)
      # As many lists of outliers as devices that hold a part.
      ways = a.ways(axis)
      old = array.outliers
      array = array.replace(outliers=jax.ShapeDtypeStruct(
          (ways, 1, -(-old.shape[2] // ways)), old.dtype))
      layer[name] = a.compressed(array, axis, None)
  return text


@pytest.mark.cuda_plugin
@absltest.skipUnless(gpu_program.has_plugin(), "needs jax's CUDA plugin")
class CompressedOnGpuTest(parameterized.TestCase):

  def assert_none_is_dense(self, program, ways: int):
    """No computation makes a whole matrix, or a device's part of one."""
    sizes = {1024 * size // n for size, _ in _SIZES.values()
             for n in {1, ways}}
    kinds = ("bf16", "f32", "f16", "u8", "s32")
    dense = [
        line for lines in program.computations.values() for line in lines
        for kind, dims in line.shapes
        if kind in kinds and math.prod(dims) in sizes]
    self.assertEmpty(dense)

  @parameterized.parameters(
      MeshShape(), MeshShape(data=2, tp_major=2))
  def test_decode(self, shape):
    a = Arguments(_CONFIG, shape, _B, _P)
    program = gpu_program.compile_for_gpu(
        programs.decode, {"text": compressed_text(a)}, _CONFIG,
        SamplingConfig(max_completion_length=_R, eos_token_ids=(5,)),
        a.prompts(), a.kv(), a.keys(_B, _G), place=a.place)
    body, = program.loop_bodies()
    products = [name for name in program.kernels(body)
                if name.startswith("codebook_matmul")]
    self.assertLen(products, 7 * _LAYERS)
    self.assert_none_is_dense(program, a.ways("mlp"))
    # Codes are read where they lie.
    planes = {("u32", 1024 * size // a.ways(axis) // packing.WORD)
              for size, axis in _SIZES.values()}
    self.assertEmpty(program.copies(body, planes))

  @parameterized.parameters((96, "codebook_matmul"), (_P, "codebook_lookup"))
  def test_prefix(self, length, kernel):
    """By tensor cores; of very many rows, matrix after matrix is looked up."""
    a = Arguments(_CONFIG, MeshShape(), _B, length)
    program = gpu_program.compile_for_gpu(
        programs.prefix_forward, compressed_text(a), _CONFIG, a.prompts(), None)
    # The last layer only makes keys and values.
    self.assertLen([name for name in program.kernels(program.entry)
                    if name.startswith(kernel)], 7 + 2)
    if kernel == "codebook_matmul":
      self.assert_none_is_dense(program, 1)


if __name__ == "__main__":
  absltest.main()
