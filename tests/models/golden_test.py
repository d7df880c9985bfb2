"""Parity where torch is missing: recorded logits of two tiny checkpoints.

`make goldens` records them anew (tests/goldens/make_model_goldens.py).
"""

import pathlib

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np

from rollplex_jax.models import decoder, hf, vlm
from tests.models import cases

GOLDENS = pathlib.Path(__file__).parent.parent / "goldens" / "models"
# As in parity_test.py: the promise is 1e-4, rounding takes 5e-6 of it.
TOLERANCE = 2e-5


class GoldenTest(absltest.TestCase):

  def test_vision_language(self):
    folder = GOLDENS / "vision_language"
    config, params = hf.load_checkpoint(folder)
    with np.load(folder / "expected.npz") as file:
      arrays = dict(file)
    kinds = list(dict.fromkeys(key.split("/")[0] for key in arrays))
    self.assertEqual(kinds, list(cases.PROMPTS))
    prompts = {
        kind: cases.Prompt(**{
            key: arrays[f"{kind}/{key}"] for key in (
                "token_ids", "feature_index", "patches", "grids",
                "modalities", "seconds")})
        for kind in kinds}
    rows = cases.batch_logits(params, config, list(prompts.values()))
    for (kind, prompt), row in zip(prompts.items(), rows, strict=True):
      with self.subTest(kind):
        np.testing.assert_array_equal(
            prompt.positions(config), arrays[f"{kind}/positions"])
        np.testing.assert_allclose(
            row, arrays[f"{kind}/logits"], rtol=0, atol=TOLERANCE)

  def test_text(self):
    config, params = hf.load_checkpoint(GOLDENS / "text")
    self.assertIsNone(config.vision)
    self.assertEqual(config.eos_token_ids, (3, 4))
    with np.load(GOLDENS / "text" / "expected.npz") as file:
      tokens, expected = file["token_ids"], file["logits"]
    places = jnp.arange(len(tokens)).reshape(1, 1, -1)
    got = jax.jit(lambda p, t: decoder.logits(
        p["text"], vlm.forward(p, config, t, places)))(params, tokens[None])
    np.testing.assert_allclose(got[0], expected, rtol=0, atol=TOLERANCE)

  def test_they_stay_small(self):
    size = sum(p.stat().st_size for p in GOLDENS.rglob("*") if p.is_file())
    self.assertLess(size, 400_000)


if __name__ == "__main__":
  absltest.main()
