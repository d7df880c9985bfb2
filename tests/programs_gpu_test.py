"""The programs of a training step compiled for one H100.

Layers have the size of Qwen2.5-VL-3B's.
"""

import functools
import math

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import pytest

from rollplex_jax import programs
from rollplex_jax.models import decoder
from rollplex_jax.models.config import ModelConfig, TextConfig
from rollplex_jax.models.inputs import PromptInputs
from rollplex_jax.models.weights import abstract_params
from rollplex_jax.stages.objectives import Normalizers, ObjectiveConfig
from rollplex_jax.stages.prefix import SavePolicy
from rollplex_jax.stages.response import GroupResponses
from tests.helpers import devices, gpu_program

devices.use_virtual_devices()

# Prompts of the batch and of a micro-batch, samples of each, padded lengths,
# rows of vision features; no array of activations has the size of a weight.
_B, _MICRO, _G, _P, _R, _FEATURES = 3, 2, 8, 768, 96, 1000
_CONFIG = ModelConfig(
    text=TextConfig(
        vocab_size=151936, hidden_size=2048, intermediate_size=11008,
        num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=2,
        mrope_section=(16, 24, 24), tie_word_embeddings=True),
    vision=None, image_token_id=151655, video_token_id=151656,
    vision_start_token_id=151652, vision_end_token_id=151653,
    eos_token_ids=(151645,))


@functools.cache
def _device() -> NamedSharding:
  return NamedSharding(gpu_program.h100_mesh((1,), ("x",)), PartitionSpec())


def _on_gpu(tree, dtype=None):
  """Shapes like those of a tree, on the GPU."""
  return jax.tree.map(
      lambda a: jax.ShapeDtypeStruct(a.shape, dtype or a.dtype,
                                     sharding=_device()), tree)


def _array(*shape, dtype=jnp.float32):
  return jax.ShapeDtypeStruct(shape, dtype, sharding=_device())


def _text():
  return _on_gpu(abstract_params(decoder.weights(_CONFIG.text), jnp.bfloat16))


def _prompts(b):
  ints = functools.partial(_array, dtype=jnp.int32)
  return PromptInputs(
      token_ids=ints(b, _P), lengths=ints(b), positions=ints(3, b, _P),
      feature_index=ints(b, _P), next_position=ints(b), row_ids=ints(b))


def _features():
  return _array(_FEATURES, _CONFIG.text.hidden_size, dtype=jnp.bfloat16)


def _forward(save):
  """(keys and values, what is saved) of the whole batch, as shapes."""
  return _on_gpu(programs.prefix_forward.eval_shape(
      _text(), _CONFIG, _prompts(_B), _features(), save))


def _count(tree):
  return [math.prod(a.shape) for a in jax.tree.leaves(tree)]


@pytest.mark.cuda_plugin
@absltest.skipUnless(gpu_program.has_plugin(), "needs jax's CUDA plugin")
class ProgramsOnGpuTest(parameterized.TestCase):

  def assert_donated(self, program, tree):
    """Every array of a donated float32 tree is written in place."""
    arrays = [("f32", a.shape) for a in jax.tree.leaves(tree)]
    self.assertCountEqual(program.donated, arrays)
    self.assertEmpty([line for line in program.entry if line.op == "copy"
                      and line.shapes[0] in arrays])

  @parameterized.parameters(
      SavePolicy.NOTHING, SavePolicy.LAYER_INPUTS, SavePolicy.ACTIVATIONS)
  def test_prefix_forward_saves_no_weight(self, save):
    program = gpu_program.compile_for_gpu(
        programs.prefix_forward, _text(), _CONFIG, _prompts(_B), _features(),
        save)
    kv, saved = _forward(save)
    weights = set(_count(_text()))
    outputs = [math.prod(dims) for _, dims in program.outputs]
    self.assertCountEqual(outputs, _count((kv, saved)))
    self.assertNoCommonElements(weights, outputs)

  @parameterized.parameters(
      SavePolicy.NOTHING, SavePolicy.LAYER_INPUTS, SavePolicy.ACTIVATIONS)
  def test_prefix_backward_adds_in_place(self, save):
    grads = _on_gpu(_text(), jnp.float32)
    kv, saved = _forward(save)
    feature_grads = _on_gpu(_features(), jnp.float32)
    program = gpu_program.compile_for_gpu(
        programs.prefix_backward, _text(), grads, feature_grads, _CONFIG,
        _prompts(_B), _features(), save, saved, _on_gpu(kv, jnp.float32), None)
    self.assert_donated(program, (grads, feature_grads))

  @parameterized.parameters(False, True)
  def test_gradient_suffix_adds_in_place(self, remat):
    kv, _ = _forward(SavePolicy.NOTHING)
    grads = {"text": _on_gpu(_text(), jnp.float32)}
    kv_grads = _on_gpu(kv, jnp.float32)
    rows = _array(_MICRO, dtype=jnp.int32)
    by_token = _array(_MICRO, _G, _R)
    program = gpu_program.compile_for_gpu(
        programs.gradient_suffix, {"text": _text()}, {}, grads, kv_grads, rows,
        _CONFIG, ObjectiveConfig(beta=0.1), _prompts(_MICRO), kv, rows,
        GroupResponses(
            token_ids=_array(_MICRO, _G, _R, dtype=jnp.int32),
            lengths=_array(_MICRO, _G, dtype=jnp.int32)),
        _array(_MICRO, _G), None, by_token,
        Normalizers(num_tokens=_array(), num_sequences=_array()), 1.0, remat,
        True)
    self.assert_donated(program, (grads, kv_grads))
    self.assertContainsSubset(
        {"shared_prefix_forward", "shared_prefix_grad_prefix"},
        program.kernels(program.entry))


if __name__ == "__main__":
  absltest.main()
