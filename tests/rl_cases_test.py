"""Ways in which VLM post-training goes wrong for its users, one test for each.

Each was reported against another system. The tests go through the data layer,
the model and the schedule together; where a part is tested in detail, the
test's comment names the file.
"""

import dataclasses
import json
import math
import os
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from rollplex_jax import (
  full_passes,
  inference,
  programs,
  residency_plan,
  turns,
)
from rollplex_jax.artifacts import Model
from rollplex_jax.buffer_sizes import Setup, Workload
from rollplex_jax.config import RolloutConfig, TrainConfig
from rollplex_jax.data import processor as processor_lib
from rollplex_jax.data.processor import Processor
from rollplex_jax.data.row_schema import RowError
from rollplex_jax.data.rows import RowFile, RowList, select_rows
from rollplex_jax.errors import InputError
from rollplex_jax.executor import Step
from rollplex_jax.models import decoder, hf, vlm
from rollplex_jax.placement.residency import BudgetError
from rollplex_jax.samples import Groups, make_batch
from rollplex_jax.schedule import Facts, ScheduleConfig
from rollplex_jax.settings import Settings
from rollplex_jax.stages import full_sequence, update
from rollplex_jax.stages.objectives import ObjectiveConfig
from rollplex_jax.stages.response import GroupResponses
from rollplex_jax.stages.rollout import Completions
from rollplex_jax.stages.sampling import SamplingConfig
from tests.helpers import devices, tiny_checkpoint

_START, _END = "<|vision_start|>", "<|vision_end|>"
_R = 8  # Longest response.


def setUpModule():
  devices.use_virtual_devices()


def _pixels(*shape, seed=0):
  return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


def _image(seed=0):
  """4 merged features."""
  return {"type": "image", "image": _pixels(56, 56, 3, seed=seed)}


def _video(fps, seed=0):
  """2 temporal patches of 4 merged features."""
  return {"type": "video", "video": _pixels(4, 56, 56, 3, seed=seed),
          "fps": fps}


class RLCasesTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = pathlib.Path(
        cls.enterClassContext(tempfile.TemporaryDirectory()))
    cls.path = tiny_checkpoint.write(cls.folder / "model")
    cls.processor = Processor.from_checkpoint(cls.path)
    cls.config, cls.params = hf.load_checkpoint(cls.path)
    message = tiny_checkpoint.message
    # Ragged in text and media: one picture, three pictures, a video.
    cls.rows = RowList([
        {"prompt": message(_image(1), "What does it show?")},
        {"prompt": message(_image(2), "and", _image(3), _image(4), "?")},
        {"prompt": message(_video(2.0, 5), "Where does the ball go?")}])
    cls.prompts = [cls.processor.prompt(row) for row in cls.rows]
    cls.batch = make_batch(cls.config, cls.prompts, [0, 1, 2])
    cls.features = full_passes.features_of(cls.params, cls.config, cls.batch)

  def step(self, *, batch=None, params=None, num_generations=2,
           trained=("text",), size=0, share=True, temperature=1.0,
           objective=None, **sampling):
    """A step under the serial schedule; nothing has run yet."""
    sampling = SamplingConfig(**{
        "max_completion_length": _R, "eos_token_ids": tiny_checkpoint.EOS,
        "banned_token_ids": self.config.vision_token_ids,
        "temperature": temperature, **sampling})
    settings = Settings(
        config=self.config, schedule=ScheduleConfig(share_prefix=share),
        sampling=sampling, objective=objective or ObjectiveConfig(),
        micro_batch_size=size, with_entropy=False, trained=trained)
    return Step(settings, batch or self.batch, Model(params or self.params, 0),
                None, num_generations=num_generations, seed=0, step=0)

  def roll_out(self, **kwargs):
    """The completions of a batch, on the host."""
    return self.step(**kwargs).roll_out()

  def samples(self, completions, **kwargs):
    """Completions as the groups of a mini-batch, with advantages of +-1."""
    b, g, _ = completions.token_ids.shape
    return Groups(**{
        "rows": np.arange(b, dtype=np.int32),
        "token_ids": completions.token_ids, "lengths": completions.lengths,
        "advantages": np.tile(np.array([1, -1], np.float32), (b, g // 2)),
        **kwargs})

  def score(self, samples, *, batch=None, temperature=1.0, size=6):
    return full_passes.score_groups(
        self.params, self.config, batch or self.batch, samples,
        temperature=temperature, micro_batch_size=size)

  def gradient(self, samples, *, size=6, freeze=True, temperature=1.0,
               share=True, **objective):
    work = self.step(
        trained=("text",) if freeze else ("text", "visual"), size=size,
        share=share, temperature=temperature,
        objective=ObjectiveConfig(**objective))
    work.roll_out()
    return work.gradient(samples, first=True)

  def score_rows(self, rows, params=None):
    """Log-probs of each row's response, by `inference.score`."""
    return [np.array(logprobs) for _, _, logprobs in inference.score(
        params or self.params, self.config, self.processor, RowList(rows),
        batch_size=2)]

  def test_case_1_vision_tokens_are_not_sampled(self):
    # A head of zeros makes every token as likely: of these 384 draws some five
    # would be vision tokens. See also stages/rollout_test.py.
    text = self.params["text"]
    flat = {**self.params,
            "text": {**text, "head": np.zeros_like(text["head"])}}
    out = self.roll_out(params=flat, num_generations=16, eos_token_ids=())
    self.assertTrue((out.lengths == _R).all())
    self.assertFalse(np.isin(out.token_ids, self.config.vision_token_ids).any())
    # They are not drawn, but what is recorded is over the whole vocabulary.
    np.testing.assert_allclose(
        out.logprobs, -math.log(self.config.text.vocab_size), rtol=1e-5)

  def test_case_1_features_merge_at_prompt_placeholders_only(self):
    # A placeholder in a response is a token with an embedding of its own; in
    # the prompt that embedding is nowhere to be seen.
    image = self.config.image_token_id
    text = self.params["text"]
    other = {**self.params, "text": {
        **text, "embed": text["embed"].at[image].add(1.0)}}
    rows = [self.rows[0] | {"response_token_ids": [5, 6, 7]},
            self.rows[0] | {"response_token_ids": [5, image, 7]}]
    plain, with_image = self.score_rows(rows)
    plain_other, with_image_other = self.score_rows(rows, other)
    np.testing.assert_array_equal(plain, plain_other)
    np.testing.assert_allclose(with_image[0], plain[0], atol=1e-5)
    np.testing.assert_array_equal(with_image[:2], with_image_other[:2])
    self.assertGreater(abs(with_image[2] - with_image_other[2]), 1e-3)

  def test_case_2_a_run_of_placeholders_is_never_cut(self):
    # See also data/processor_test.py.
    limit = len(self.prompts[0].token_ids)
    self.assertLess(limit, len(self.prompts[1].token_ids))
    limited = Processor.from_checkpoint(self.path, max_prompt_length=limit)
    with self.assertRaisesRegex(
        RowError, f"rows:2: expected a prompt of at most {limit} tokens, found "
        f"{len(self.prompts[1].token_ids)}$"):
      select_rows(self.rows, limited.check)
    kept = select_rows(self.rows, limited.check, skip_bad_rows=True)
    self.assertEqual(kept.skipped[processor_lib.OVER_LIMIT], 3 - len(kept))
    prompt = limited.prompt(kept[0])
    np.testing.assert_array_equal(
        prompt.token_ids, self.prompts[0].token_ids)
    self.assertEqual((prompt.token_ids == self.config.image_token_id).sum(), 4)

  def test_case_3_expanded_placeholders_are_expanded_once(self):
    pixels = [_pixels(56, 56, 3, seed=1), _pixels(56, 56, 3, seed=2)]
    write = lambda n: {
        "images": pixels, "response": " the red ball",
        "prompt": f"go {_START}{'<|image_pad|>' * n}{_END} to "
                  f"{_START}{'<|image_pad|>' * n}{_END}"}
    once, expanded = (self.processor.prompt(write(n)) for n in (1, 4))
    self.assertLen(expanded.token_ids, len(once.token_ids))
    batches = [make_batch(self.config, [p], [0])
               for p in (once, expanded)]
    jax.tree.map(np.testing.assert_array_equal, *[
        (b.inputs, b.vision) for b in batches])
    # Rollout, reference scoring and training read one and the same length.
    inputs = batches[0].inputs
    responses = full_sequence.Responses(
        np.zeros(1, np.int32), np.full((1, 4), 5, np.int32),
        np.full(1, 4, np.int32))
    token_ids, _, index = full_sequence.join(inputs, responses)
    t = int(inputs.lengths[0])
    self.assertEqual(t, len(once.token_ids))
    np.testing.assert_array_equal(token_ids[0, :t], once.token_ids)
    np.testing.assert_array_equal(token_ids[0, t:t + 4], [5, 5, 5, 5])
    self.assertEqual(int((index >= 0).sum()), 8)
    first, second = self.score_rows([write(1), write(4)])
    np.testing.assert_array_equal(first, second)

  @parameterized.parameters((True, False), (False, True))
  def test_case_4_pictures_stay_with_their_rows(self, freeze, share):
    # Rows of one picture, of three and of a video in micro-batches. See also
    # executor_test.py.
    samples = self.samples(self.roll_out())
    whole, _, logprobs = self.gradient(samples, freeze=freeze, share=False)
    # In another order: the first micro-batch holds three pictures and one.
    order = np.array([1, 0, 2])
    for size in (4, 2):
      grads, _, found = self.gradient(
          samples.take(order), size=size, freeze=freeze, share=share)
      np.testing.assert_allclose(found, logprobs[order], atol=1e-5)
      for (path, g), d in zip(
          jax.tree.leaves_with_path(whole), jax.tree.leaves(grads)):
        self.assertLess(np.linalg.norm(d - g), 1e-5 * np.linalg.norm(g),
                        jax.tree_util.keystr(path))

  def _episode(self, limit=None):
    """A step of one row whose episodes go on twice, with a picture each time.

    Its samples draw tokens that do not come back when their text is tokenized:
    letters of their own where the tokenizer would join them.
    """
    drawn = [self.processor.encode(c)[0] for c in "ball"]
    self.assertNotEqual(
        self.processor.encode(self.processor.decode(drawn)), drawn)
    work = self.step(batch=make_batch(self.config, self.prompts[:1], [0]))
    work.settings = dataclasses.replace(work.settings, max_turns=3)

    heard = []

    class Player:

      def start(self, rows):
        del rows

      def step(self, completions):
        heard.append(completions)
        last = len(heard) == 3
        message = tiny_checkpoint.message(_image(9), "and now?")[0]
        return [None if text is None or last else message
                for text in completions]

      def scores(self):
        return [{"overall": 1.0}] * 2

    def draw(*_):
      ids = np.zeros((1, 2, _R), np.int32)
      ids[..., :len(drawn)] = drawn
      return Completions(
          token_ids=ids, logprobs=np.zeros(ids.shape, np.float32),
          lengths=np.full((1, 2), len(drawn), np.int32),
          finished=np.zeros((1, 2), bool))

    kept = []
    collect = turns.collect
    with (mock.patch.object(Step, "roll_out", draw),
          mock.patch.object(Step, "roll_out_turn", draw),
          mock.patch.object(Step, "end_turns"),
          mock.patch.object(turns, "collect", lambda *args: (
              kept.append(args[1]), collect(*args))[1])):
      turns.play(work, Player(), self.processor, [{}], ["row 0"],
                 max_length=limit)
    return drawn, kept[0][0][0], heard

  def test_case_5_a_turn_is_added_with_its_picture_or_not_at_all(self):
    _, whole, _ = self._episode()
    ids, _, index = whole.inputs()
    self.assertEqual((index >= 0).sum(), 2 * 4)
    # Room for all but a few tokens of the second observation.
    _, cut, heard = self._episode(limit=len(ids) - 2)
    self.assertLen(heard, 2)
    short, _, index = cut.inputs()
    np.testing.assert_array_equal(short, ids[:len(short)])
    self.assertEqual((index >= 0).sum(), 4)
    self.assertLen(cut.media(self.config.vision.patch_dim).grids, 1)
    pads = [self.config.image_token_id, self.config.video_token_id]
    self.assertEqual(np.isin(short, pads).sum(), 4)

  def test_case_15_token_ids_in_and_token_ids_out(self):
    drawn, suffix, heard = self._episode()
    self.assertEqual(heard[0], ["ball", "ball"])
    seen = self.processor.continuation(
        tiny_checkpoint.message(_image(9), "and now?")[0], after_end=False)
    ids, _, _ = suffix.inputs()
    turn = [*drawn, *seen.token_ids]
    self.assertEqual(
        ids.tolist(), [self.prompts[0].token_ids[-1], *turn, *turn, *drawn][:-1])
    responses, _, predicts = suffix.response()
    self.assertEqual(responses.tolist(), drawn * 3)
    # Each is predicted from the input before it.
    after = [*ids.tolist(), drawn[-1]]
    self.assertEqual([after[i + 1] for i in predicts], drawn * 3)

  def test_case_6_positions_have_one_layout(self):
    # See also models/positions_test.py.
    inputs = self.batch.inputs
    self.assertEqual(inputs.positions.shape, (3, *inputs.token_ids.shape))
    responses = self.samples(self.roll_out())
    responses = GroupResponses(responses.token_ids, responses.lengths)
    for rows in (2, 4):
      bad = inputs.replace(
          positions=np.zeros((rows, *inputs.token_ids.shape), np.int32))
      with self.assertRaisesRegex(
          ValueError, rf"positions must be \[3, B, T\].*found \({rows}, "):
        programs.prefix_forward(
            self.params["text"], self.config, bad, self.features)
      with self.assertRaises(ValueError):
        programs.score_full(self.params, self.config, bad, self.features,
                            responses, 1.0)

  def test_case_7_the_rate_decides_positions_everywhere(self):
    slow, fast = (self.processor.prompt({"prompt": tiny_checkpoint.message(
        _video(fps, 5), "Where does the ball go?")}) for fps in (1.0, 30.0))
    np.testing.assert_array_equal(slow.patches, fast.patches)
    np.testing.assert_array_equal(slow.token_ids, fast.token_ids)
    self.assertGreater(np.abs(slow.positions[0] - fast.positions[0]).max(), 0)
    batch = make_batch(self.config, [slow, fast, fast], [0, 1, 2])
    out = self.roll_out(batch=batch)
    samples = self.samples(out)
    # Rollout and training see the same positions: their log-probs agree.
    logprobs = self.score(samples, batch=batch)
    np.testing.assert_allclose(logprobs, out.logprobs, atol=1e-4)
    # The rate matters: swapped, the log-probs are others.
    swapped = dataclasses.replace(
        samples, rows=np.array([1, 0, 0], np.int32))
    self.assertGreater(
        np.abs(self.score(swapped, batch=batch) - logprobs).max(), 1e-3)

  def test_case_8_decoding_equals_a_full_forward(self):
    # See also stages/rollout_test.py.
    out = self.roll_out(temperature=0.0)
    b, g, _ = out.token_ids.shape
    responses = full_sequence.Responses(
        np.repeat(np.arange(b, dtype=np.int32), g),
        out.token_ids.reshape(-1, _R), out.lengths.reshape(-1))
    token_ids, positions, index = full_sequence.join(
        self.batch.inputs, responses)
    hidden = vlm.forward(
        self.params, self.config, token_ids, positions, self.features, index)
    logits = np.array(decoder.logits(self.params["text"], hidden))
    logprobs = np.asarray(jax.nn.log_softmax(logits))
    logits[..., list(self.config.vision_token_ids)] = -np.inf
    checked = 0
    for n, row in enumerate(responses.prompt_index):
      for i in range(responses.lengths[n]):
        at = self.batch.inputs.lengths[row] - 1 + i
        token = responses.token_ids[n, i]
        self.assertEqual(logits[n, at].argmax(), token)
        self.assertAlmostEqual(
            logprobs[n, at, token], out.logprobs.reshape(-1, _R)[n, i], delta=1e-4)
        checked += 1
    self.assertGreater(checked, 12)

  def test_case_9_two_copies_and_a_cache_are_planned_before(self):
    # How a run keeps to its plan: resident_test.py.
    facts = Facts(has_media=True, has_reference=True, trains_tower=False,
                  scores_policy=False, moves_weights=True)
    work = Workload(
        num_prompts=4, prompt_length=64, num_generations=4, response_length=64)
    schedule = ScheduleConfig(name="rollplex", prefix_source="window")
    setup = Setup(config=self.config, rebuilt_bytes=200_000)
    plan, _ = residency_plan.plan(setup, schedule, facts, work)
    self.assertEqual(plan.peak_phase, "rollout/window:rollout")
    held = plan.during("rollout/window:rollout")
    self.assertGreater(held["rollout/weights"], 0)
    self.assertGreater(held["rollout/cache"], 0)
    self.assertNotIn("rollout/weights", plan.during("update"))
    before = len(jax.live_arrays())
    with self.assertRaisesRegex(
        BudgetError, "rollout/window.* needs .* per device, more than the budget"
    ) as caught:
      residency_plan.plan(setup, schedule, facts, work, plan.peak_bytes // 4)
    self.assertLen(jax.live_arrays(), before)
    self.assertRegex(caught.exception.report(), r"rollout +.* MiB .*<- peak")

  def test_case_10_checkpoint_names_are_checked_both_ways(self):
    # See also models/checkpoint_test.py.
    path = tiny_checkpoint.write(
        self.enterContext(tempfile.TemporaryDirectory()))
    file = os.path.join(path, "model.safetensors")
    tensors = load_file(file)
    _, expected = hf.load_checkpoint(path)

    def write(rename=lambda name: name, drop="", extra=()):
      save_file({rename(n): t for n, t in tensors.items() if n != drop}
                | dict(extra), file)

    text = lambda name: name.startswith(("model.layers", "model.norm",
                                         "model.embed"))
    for prefix in ("model.language_model.", "language_model.model."):
      write(lambda n, p=prefix: n.replace("model.", p, 1) if text(n) else n)
      jax.tree.map(np.testing.assert_array_equal,
                   hf.load_checkpoint(path)[1], expected)
    gone = "model.layers.1.mlp.up_proj.weight"
    for kwargs, message in (
        (dict(drop=gone), f"1 tensors are missing, first {gone}"),
        (dict(extra={"model.layers.2.x": np.zeros(1, np.float32)}),
         "1 tensors are unexpected for this config, first model.layers.2.x"),
        (dict(extra={gone: np.zeros((3, 32), np.float32)}),
         rf"tensor {gone} has shape \[3, 32\], the config expects \[48, 32\]")):
      write(**kwargs)
      with self.assertRaisesRegex(InputError, message):
        hf.load_checkpoint(path)

  def test_case_11_temperature_is_on_both_sides(self):
    # Through the whole loop: trainer_test.py.
    out = self.roll_out(temperature=0.6)
    samples, recorded = self.samples(out), out.logprobs
    ratio = np.exp(self.score(samples, temperature=0.6) - recorded)
    np.testing.assert_allclose(ratio, 1.0, atol=1e-4)
    # Left out on one side, the ratio is far from one.
    wrong = np.exp(self.score(samples, temperature=1.0) - recorded)
    self.assertGreater(np.abs(wrong - 1.0).max(), 0.5)

  def test_case_12_ratio_is_one_before_any_update(self):
    # Old log-probs by the scoring program on features made before, new ones by
    # the training program, which runs the tower, in other micro-batches.
    samples = self.samples(self.roll_out())
    old = self.score(samples, size=6)
    _, metrics, new = self.gradient(
        dataclasses.replace(samples, old_logprobs=old), size=4, freeze=False)
    np.testing.assert_allclose(np.exp(new - old), 1.0, atol=1e-5)
    values = metrics.finalize()
    self.assertAlmostEqual(values["actor/ratio_mean"], 1.0, delta=1e-5)
    self.assertAlmostEqual(values["actor/ratio_max"], 1.0, delta=1e-5)
    self.assertEqual(values["actor/pg_clipfrac"], 0.0)

  def test_case_13_a_far_reference_gives_finite_numbers(self):
    # See also stages/objectives_test.py.
    samples = self.samples(self.roll_out())
    far = self.score(samples) + 100.0
    grads, metrics, _ = self.gradient(
        dataclasses.replace(samples, ref_logprobs=far), beta=0.1)
    self.assertTrue(math.isfinite(metrics.finalize()["actor/loss"]))
    self.assertTrue(math.isfinite(metrics.finalize()["actor/kl_loss"]))
    for g in jax.tree.leaves(grads):
      self.assertTrue(np.isfinite(g).all())
    optimizer = update.make_optimizer(update.OptimizerConfig())
    state = update.create_state(
        jax.tree.map(np.array, {"text": self.params["text"]}), optimizer)
    _, _, values = update.apply_gradients(state, grads, optimizer, "float32")
    self.assertEqual(int(values["actor/update_skipped"]), 0)

  def test_case_14_a_micro_batch_fits_its_mini_batch(self):
    settings = dict(train_batch_size=8, mini_batch_size=2,
                    rollout=RolloutConfig(num_generations=4))
    with self.assertRaisesRegex(
        InputError, "micro_batch_size=16: expected at most the 8 samples"):
      TrainConfig(**settings, micro_batch_size=16)
    # One that fits but doesn't divide is filled up, and changes nothing.
    TrainConfig(**settings, micro_batch_size=3)
    samples = self.samples(self.roll_out())
    whole, metrics, _ = self.gradient(samples)
    uneven, other, _ = self.gradient(samples, size=4)
    self.assertAlmostEqual(metrics.finalize()["actor/loss"],
                           other.finalize()["actor/loss"], places=5)
    for g, d in zip(jax.tree.leaves(whole), jax.tree.leaves(uneven)):
      self.assertLess(np.linalg.norm(d - g), 1e-5 * np.linalg.norm(g))

  def test_case_16_a_placeholder_too_many_is_named(self):
    # See also data/placeholders_test.py.
    tiny_checkpoint.write_image(self.folder / "a.png", 56, 56)
    run = f"{_START}<|image_pad|>{_END}"
    file = self.folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in (
        {"prompt": f"{run} go", "images": ["a.png"]},
        {"prompt": f"{run}{run} go", "images": ["a.png"]},
        {"prompt": f"{_START}{'<|image_pad|>' * 5}{_END}",
         "images": ["a.png"]})))
    rows = RowFile(file)
    self.processor.check(rows[0], rows.where(0))
    for i, found in ((1, 2), (2, 5)):
      with self.assertRaisesRegex(
          RowError, rf"^{file}:{i + 1}: expected 1 image placeholder \(or 4, "
          rf"already expanded\), found {found}$"):
        self.processor.check(rows[i], rows.where(i))


if __name__ == "__main__":
  absltest.main()
