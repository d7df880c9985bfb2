"""Prompts against the reference processor's recorded outputs."""

import hashlib
import tempfile

from absl.testing import absltest, parameterized
import numpy as np

from rollplex_jax.data.processor import Processor
from rollplex_jax.data.row_schema import validate_row
from tests.goldens import inputs
from tests.helpers import tiny_tokenizer

CASES = inputs.cases()
# Of 255, in normalized units; PIL and torch round resized pixels differently.
_RESIZE_TOLERANCE = 2 / 255 / np.array(tiny_tokenizer.STD).min()


class ProcessorGoldenTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = tiny_tokenizer.write_checkpoint(
        cls.enterClassContext(tempfile.TemporaryDirectory()))
    cls.processor = Processor.from_checkpoint(folder)
    cls.goldens = np.load(inputs.PROCESSOR_GOLDENS)

  @parameterized.parameters(*CASES)
  def test_equals_reference(self, name):
    golden = {
        key.split("/")[1]: self.goldens[key]
        for key in self.goldens.files if key.split("/")[0] == name
    }
    prompt = self.processor.prompt(validate_row(CASES[name], name), name)
    for key in ("token_ids", "positions", "grids"):
      np.testing.assert_array_equal(
          getattr(prompt, key), golden[key], err_msg=key)
    np.testing.assert_array_equal(
        np.float32(prompt.seconds_per_grid), np.float32(
            golden["seconds_per_grid"]))
    np.testing.assert_array_equal(
        [modality == "video" for modality in prompt.modalities],
        golden["is_video"])
    np.testing.assert_array_equal(prompt.patches.shape,
                                  golden["patches_shape"])
    self.assertEqual(prompt.patches.dtype, np.float32)
    if name.endswith("_exact") or name.startswith("image"):
      # Images are the reference's own PIL processor, resized or not.
      self.assertEqual(
          hashlib.sha256(prompt.patches.tobytes()).hexdigest(),
          str(golden["patches_sha256"]))
    else:
      error = np.abs(inputs.sample(prompt.patches) - golden["patches_sample"])
      self.assertLess(error.max(), _RESIZE_TOLERANCE * (1 + 1e-5))
      # At most one value in twenty differs at all.
      self.assertLess((error > 1e-5).mean(), 0.05)

  def test_features_match_placeholders(self):
    for name, row in CASES.items():
      prompt = self.processor.prompt(validate_row(row, name), name)
      vision = prompt.feature_index[prompt.feature_index >= 0]
      np.testing.assert_array_equal(vision, np.arange(len(prompt.patches) // 4))
      self.assertEqual(prompt.grids.prod(1).sum(), len(prompt.patches))


if __name__ == "__main__":
  absltest.main()
