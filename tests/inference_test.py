"""Completing and scoring rows as a library; the commands' tests go further."""

import tempfile

from absl.testing import absltest, parameterized
import numpy as np

from rollplex_jax import evaluation, inference
from rollplex_jax.data.processor import Processor
from rollplex_jax.data.row_schema import RowError
from rollplex_jax.data.rows import RowList
from rollplex_jax.errors import InputError
from rollplex_jax.models import hf
from rollplex_jax.stages.sampling import SamplingConfig
from tests.helpers import devices, tiny_checkpoint


def setUpModule():
  devices.use_virtual_devices()


class InferenceTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    path = tiny_checkpoint.write(
        cls.enterClassContext(tempfile.TemporaryDirectory()),
        eos=tiny_checkpoint.EOS)
    cls.processor = Processor.from_checkpoint(path)
    cls.config, cls.params = hf.load_checkpoint(path)
    cls.rows = RowList([{"prompt": text, "response": " the ball"} for text in (
        "go", "to", "red", "up", "ball")])
    cls.sampling = SamplingConfig(
        max_completion_length=4, banned_token_ids=cls.config.vision_token_ids,
        eos_token_ids=inference.eos_token_ids(cls.config, cls.processor))

  def complete(self, rows=None, **kwargs):
    return list(inference.complete(
        self.params, self.config, self.processor, rows or self.rows,
        self.sampling, **{"batch_size": 2, **kwargs}))

  def test_rows_come_in_order_the_last_batch_included(self):
    batches = []

    def progress(items):
      for item in items:
        batches.append(len(item))
        yield item

    out = self.complete(num_generations=3, progress=progress)
    self.assertEqual([example.index for example, _ in out], [0, 1, 2, 3, 4])
    self.assertEqual([example.row["prompt"] for example, _ in out],
                     [row["prompt"] for row in self.rows])
    self.assertEqual([len(completions) for _, completions in out], [3] * 5)
    self.assertEqual(batches, [2, 2, 1])

  def test_completions_depend_on_row_number_and_seed(self):
    ids = lambda out: [[c.token_ids for c in cs] for _, cs in out]
    first = ids(self.complete(num_generations=3))
    self.assertEqual(ids(self.complete(num_generations=3)), first)
    self.assertNotEqual(ids(self.complete(num_generations=3, seed=1)), first)
    # One and the same prompt in two rows is two prompts.
    twice = ids(self.complete(RowList([self.rows[0]] * 2), num_generations=3))
    self.assertEqual(twice[0], first[0])
    self.assertNotEqual(twice[1], first[0])

  def test_score_divides_by_the_temperature(self):
    score = lambda **kwargs: [np.array(p) for _, _, p in inference.score(
        self.params, self.config, self.processor, self.rows, batch_size=2,
        **kwargs)]
    plain, cool = score(), score(temperature=0.6)
    self.assertLen(plain, 5)
    for a, b in zip(plain, cool):
      self.assertEqual(a.shape, b.shape)
      self.assertGreater(np.abs(a - b).max(), 0.01)

  def test_errors_of_rows_reach_the_caller(self):
    bad = RowList([{"prompt": "a"}, {"prompt": "<|image_pad|>"}])
    with self.assertRaisesRegex(RowError, "^rows:2: expected 0 image"):
      self.complete(bad)

  @parameterized.parameters(-1, 320, 900)
  def test_eos_outside_the_vocabulary(self, token):
    config = self.config.__class__(
        **{**vars(self.config), "eos_token_ids": (token,)})
    with self.assertRaisesRegex(
        InputError, f"eos_token_id: .*of 320, found {token}$"):
      inference.eos_token_ids(config, self.processor)

  def test_eos_is_the_models_and_the_tokenizers(self):
    config = self.config.__class__(
        **{**vars(self.config), "eos_token_ids": (9, 3)})
    eos = self.processor.tokenizer.eos_token_id
    self.assertEqual(
        inference.eos_token_ids(config, self.processor), (3, 9, eos))
    config = self.config.__class__(**{
        **vars(self.config), "eos_token_ids": (self.config.image_token_id,)})
    with self.assertRaisesRegex(InputError, "is a vision token"):
      inference.eos_token_ids(config, self.processor)

  def test_evaluation(self):
    seen = []

    def score(texts, rows, indices):
      seen.append((texts, [row["prompt"] for row in rows], indices))
      return [{"overall": i / 2, "success": float(i > 2)} for i in indices]

    result = evaluation.evaluate(
        self.params, self.config, self.processor, self.rows, score,
        self.sampling, batch_size=2)
    ((texts, prompts, indices),) = seen
    self.assertEqual(result.completions, texts)
    self.assertEqual(prompts, [row["prompt"] for row in self.rows])
    self.assertEqual(indices, [0, 1, 2, 3, 4])
    values = result.metrics()
    self.assertEqual(values["val/reward"], 1.0)
    self.assertEqual(values["val/success"], 0.4)
    self.assertEqual(values["val/rows"], 5)
    self.assertBetween(values["val/success_low"], 0.1, 0.2)
    self.assertBetween(values["val/success_high"], 0.7, 0.8)
    self.assertNotIn("val/success_rows", values)
    some = evaluation.Evaluation(["a", "b"], [
        {"overall": 1.0}, {"overall": 0.0, "success": 1.0}], 0.5)
    self.assertEqual(some.metrics()["val/success_rows"], 1)
    # Rewards may say other things about other rows, and call success a grade.
    mixed = evaluation.Evaluation(["a", "b", "c"], [
        {"overall": 1.0}, {"overall": 0.0, "success": 2.0},
        {"overall": 0.5, "success": 1.0, "format": 1.0}], 0.5)
    self.assertEqual(mixed.metrics(), {
        "val/reward": 0.5, "val/success": 1.5, "val/format": 1.0,
        "val/rows": 3, "timing_s/val": 0.5})
    plain = evaluation.Evaluation(["a"], [{"overall": 2.0}], 0.5)
    self.assertEqual(plain.metrics(), {
        "val/reward": 2.0, "val/rows": 1, "timing_s/val": 0.5})


if __name__ == "__main__":
  absltest.main()
