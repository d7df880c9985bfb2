"""Checkpoints, prompts and responses: what is taken and what is refused."""

import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile

from absl.testing import absltest, parameterized
import numpy as np
import PIL.Image

from rollplex_jax.data import processor as processor_lib
from rollplex_jax.data.processor import Processor
from rollplex_jax.data.row_schema import RowError, validate_row
from rollplex_jax.data.rows import RowList, select_rows
from rollplex_jax.errors import InputError
from rollplex_jax.models.positions import next_position
from tests.goldens import inputs
from tests.helpers import tiny_tokenizer

_START, _END = "<|vision_start|>", "<|vision_end|>"
_IMAGE = f"{_START}<|image_pad|>{_END}"
_VIDEO = f"{_START}<|video_pad|>{_END}"
_PICTURE = inputs.pixels(1, 56, 84)  # 6 merged features.
_WIDE = inputs.pixels(2, 56, 112)  # 8.
_FRAMES = inputs.pixels(3, 4, 56, 56)  # 8.


def _user(*parts):
  return [{"role": "user", "content": list(parts)}]


def _image(pixels=_PICTURE):
  return {"type": "image", "image": pixels}


def _text(text="what?"):
  return {"type": "text", "text": text}


def _run(kind, count):
  return f"{_START}{f'<|{kind}_pad|>' * count}{_END}"


class _Case(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = tiny_tokenizer.write_checkpoint(
        cls.enterClassContext(tempfile.TemporaryDirectory()))
    cls.processor = Processor.from_checkpoint(cls.folder)

  def prompt(self, row, processor=None):
    return (processor or self.processor).prompt(
        validate_row(row, "rows:7"), "rows:7")

  def assert_refused(self, row, message, reason=None, processor=None):
    with self.assertRaisesRegex(RowError, f"^rows:7: {message}") as caught:
      self.prompt(row, processor)
    self.assertNotIn("\n", str(caught.exception))
    if reason:
      self.assertEqual(caught.exception.reason, reason)
    with self.assertRaises(RowError):
      (processor or self.processor).check(
          validate_row(row, "rows:7"), "rows:7")

  def assert_prompts_equal(self, a, b):
    for name in ("token_ids", "positions", "feature_index", "patches", "grids"):
      np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
      self.assertEqual(getattr(a, name).dtype, getattr(b, name).dtype)
    self.assertEqual(a.modalities, b.modalities)
    self.assertEqual(a.seconds_per_grid, b.seconds_per_grid)


class PromptTest(_Case):

  def test_shapes_and_dtypes(self):
    prompt = self.prompt({"prompt": _user(_image(), _text(), _image(_WIDE))})
    length = len(prompt.token_ids)
    self.assertEqual(prompt.token_ids.dtype, np.int32)
    self.assertEqual(prompt.positions.shape, (3, length))
    self.assertEqual(prompt.positions.dtype, np.int32)
    self.assertEqual(prompt.feature_index.shape, (length,))
    self.assertEqual(prompt.feature_index.dtype, np.int32)
    self.assertEqual(prompt.patches.shape, (24 + 32, 1176))
    np.testing.assert_array_equal(prompt.grids, [[1, 4, 6], [1, 4, 8]])
    self.assertEqual(prompt.grids.dtype, np.int64)
    self.assertEqual(prompt.modalities, ("image", "image"))
    self.assertEqual(prompt.seconds_per_grid, (0.0, 0.0))

  def test_text_only_prompt(self):
    prompt = self.prompt({"prompt": "go"})
    self.assertEqual(prompt.patches.shape, (0, 1176))
    self.assertEqual(prompt.grids.shape, (0, 3))
    self.assertTrue((prompt.feature_index == -1).all())

  def test_string_is_used_as_it_is(self):
    text = "<|im_start|>user\ngo<|im_end|>"
    prompt = self.prompt({"prompt": text})
    self.assertEqual(self.processor.decode(prompt.token_ids, False), text)

  def test_string_equals_messages(self):
    messages = _user(_image(), _text("a"), {
        "type": "video", "video": _FRAMES, "fps": 4.0}, _image(_WIDE))
    text = ("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
            f"<|im_start|>user\n{_IMAGE}a{_VIDEO}{_IMAGE}<|im_end|>\n"
            "<|im_start|>assistant\n")
    expected = self.prompt({"prompt": messages})
    self.assertEqual(expected.modalities, ("image", "video", "image"))
    row = {"images": [_PICTURE, _WIDE], "videos": [_FRAMES], "fps": 4}
    self.assert_prompts_equal(self.prompt({"prompt": text, **row}), expected)
    # Expanded by whoever wrote the row: expanded once, not twice.
    text = text.replace(_IMAGE, _run("image", 6), 1)
    text = text.replace(_IMAGE, _run("image", 8))
    text = text.replace(_VIDEO, _run("video", 8))
    self.assert_prompts_equal(self.prompt({"prompt": text, **row}), expected)

  def test_row_media_fill_parts_and_written_placeholders(self):
    expected = self.prompt({"prompt": _user(
        _image(), _text(), {"type": "video", "video": _FRAMES, "fps": 1.0})})
    self.assert_prompts_equal(self.prompt({
        "prompt": _user({"type": "image"}, _text(), {"type": "video"}),
        "images": [_PICTURE], "videos": [_FRAMES], "fps": 1.0}), expected)
    self.assert_prompts_equal(self.prompt({
        "prompt": [{"role": "user", "content": f"{_IMAGE}what?{_VIDEO}"}],
        "images": [_PICTURE], "videos": [_FRAMES], "fps": 1.0}), expected)

  def test_features_of_a_row_are_its_own(self):
    one = {"prompt": _user(_image(_WIDE), _text())}
    three = {"prompt": _user(_image(), _image(_WIDE), _text(), _image())}
    alone = [self.prompt(row) for row in (one, three, one)]
    self.assert_prompts_equal(alone[0], alone[2])
    wide = alone[0].patches
    np.testing.assert_array_equal(alone[1].patches[24:24 + 32], wide)
    self.assertEqual(alone[1].feature_index.max(), 6 + 8 + 6 - 1)

  def test_rate_decides_temporal_positions(self):
    def prompt(fps):
      return self.prompt({"prompt": _user(
          {"type": "video", "video": _FRAMES, "fps": fps}, _text())})
    slow, fast = prompt(1.0), prompt(30.0)
    np.testing.assert_array_equal(slow.token_ids, fast.token_ids)
    np.testing.assert_array_equal(slow.patches, fast.patches)
    self.assertEqual(slow.seconds_per_grid, (2.0,))
    self.assertEqual(fast.seconds_per_grid, (2 / 30,))
    video = slow.feature_index >= 0
    # tokens_per_second 2 x 2 seconds; below one position at 30 fps.
    self.assertEqual(np.ptp(slow.positions[0, video]), 4)
    self.assertEqual(np.ptp(fast.positions[0, video]), 0)
    np.testing.assert_array_equal(slow.positions[1:, video],
                                  fast.positions[1:, video])

  def test_frames_default_to_two_per_second(self):
    prompt = self.prompt({"prompt": _user({"type": "video", "video": _FRAMES})})
    self.assertEqual(prompt.seconds_per_grid, (1.0,))

  def test_frame_files_equal_arrays(self):
    folder = self.enterContext(tempfile.TemporaryDirectory())
    paths = [os.path.join(folder, f"{i}.png") for i in range(len(_FRAMES))]
    for path, frame in zip(paths, _FRAMES):
      PIL.Image.fromarray(frame).save(path)
    sources = [paths, list(_FRAMES), [PIL.Image.fromarray(f) for f in _FRAMES]]
    expected = self.prompt({"prompt": _user(
        {"type": "video", "video": _FRAMES, "fps": 3})})
    for source in sources:
      self.assert_prompts_equal(self.prompt({"prompt": _user(
          {"type": "video", "video": source, "fps": 3})}), expected)

  def test_threads_agree(self):
    rows = [{"prompt": _user(_image(), _text(str(i)))} for i in range(8)]
    expected = [self.prompt(row) for row in rows]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
      for a, b in zip(pool.map(self.prompt, rows * 4), expected * 4):
        self.assert_prompts_equal(a, b)


class RefusalTest(_Case):

  def test_placeholders_against_media(self):
    count = "placeholder count"
    self.assert_refused(
        {"prompt": f"{_IMAGE}a{_IMAGE}", "images": [_PICTURE]},
        r"expected 1 image placeholder \(or 6, already expanded\), found 2$",
        count)
    self.assert_refused(
        {"prompt": "a", "images": [_PICTURE]},
        r"expected 1 image placeholder \(or 6, already expanded\), found 0$",
        count)
    self.assert_refused(
        {"prompt": _run("image", 7), "images": [_PICTURE]},
        r"expected 1 image placeholder \(or 6, already expanded\), found 7$",
        count)
    self.assert_refused({"prompt": f"a{_VIDEO}"},
                        "expected 0 video placeholders, found 1$", count)
    # One written into a message's text, next to a real picture.
    self.assert_refused({"prompt": _user(_image(), _text("<|image_pad|>"))},
                        "expected 1 image placeholder .* found 2$", count)

  def test_parts_against_row_media(self):
    self.assert_refused(
        {"prompt": _user({"type": "image"}, {"type": "image"}),
         "images": [_PICTURE]},
        "expected a path for each image part or in images, found too few")
    self.assert_refused(
        {"prompt": _user(_image(), _text()), "images": [_PICTURE]},
        "images: expected one for each image part .* found 1 more")

  def test_media_files(self):
    self.assert_refused({"prompt": _user(_image("/no/a.png"))},
                        "no such file: /no/a.png$", "missing media file")
    folder = self.enterContext(tempfile.TemporaryDirectory())
    path = os.path.join(folder, "a.jpg")
    PIL.Image.fromarray(_PICTURE).save(path)
    with open(path, "r+b") as file:
      file.truncate(os.path.getsize(path) // 2)
    row = {"prompt": _user(_image(path))}
    self.assert_refused(row, f"can't read {path} ", "unreadable media")
    # The header is whole, so the length is known.
    length = self.processor.check(row, "rows:7", decode=False)
    self.assertLen(self.prompt({"prompt": _user(_image())}).token_ids, length)

  def test_limit(self):
    row = {"prompt": _user(_image(), _text())}
    length = len(self.prompt(row).token_ids)
    exact = Processor.from_checkpoint(self.folder, max_prompt_length=length)
    self.assertLen(self.prompt(row, exact).token_ids, length)
    # The cut would land in the picture's run; the row is refused instead.
    small = Processor.from_checkpoint(self.folder, max_prompt_length=20)
    self.assert_refused(
        row, f"expected a prompt of at most 20 tokens, found {length}$",
        processor_lib.OVER_LIMIT, small)

  def test_selected_by_reason(self):
    processor = Processor.from_checkpoint(self.folder, max_prompt_length=40)
    rows = RowList([
        {"prompt": "a"},
        {"prompt": "a" * 50},
        {"prompt": _run("image", 5), "images": [_PICTURE]},
        {"prompt": _IMAGE, "images": [_PICTURE], "response": "b"},
        {"prompt": "x" * 60},
        {"prompt": "a", "response_token_ids": [10_000]}])
    selected = select_rows(rows, processor.check, skip_bad_rows=True)
    self.assertEqual(selected.indices.tolist(), [0, 3])
    self.assertEqual(selected.skipped, {
        "prompt over the limit": 2, "placeholder count": 1, "response": 1})

  def test_template_that_refuses(self):
    processor = Processor.from_checkpoint(self.folder)
    processor.chat_template = "{{ raise_exception('roles must alternate') }}"
    self.assert_refused({"prompt": _user(_text())},
                        "the chat template refuses .*roles must alternate",
                        "chat template", processor)


class ContinuationTest(_Case):
  """What is added after a response is what one conversation would hold."""

  def setUp(self):
    super().setUp()
    self.first = _user(_image(), _text())
    self.then = _user(
        _text(), {"type": "video", "video": _FRAMES, "fps": 2.0},
        _image(_WIDE))

  def test_goes_on_as_one_conversation(self):
    whole = self.prompt({"prompt": [
        *self.first, {"role": "assistant", "content": "go to the ball"},
        *self.then]})
    before = self.prompt({"prompt": self.first})
    response = self.processor.encode("go to the ball")
    for end in (False, True):
      seen = self.processor.continuation(self.then[0], after_end=end)
      drawn = response + [self.processor.tokenizer.eos_token_id] * end
      np.testing.assert_array_equal(whole.token_ids, np.concatenate(
          [before.token_ids, drawn, seen.token_ids]))
      start = len(before.token_ids) + len(drawn)
      first = next_position(before.positions) + len(drawn)
      np.testing.assert_array_equal(
          whole.positions[:, start:], seen.positions + first)
      features = len(before.patches) // 4
      np.testing.assert_array_equal(
          whole.feature_index[start:],
          np.where(seen.feature_index >= 0, seen.feature_index + features, -1))
      np.testing.assert_array_equal(
          whole.patches, np.concatenate([before.patches, seen.patches]))

  def test_the_limit_is_one_of_prompts(self):
    processor = Processor.from_checkpoint(self.folder, max_prompt_length=4)
    self.assertGreater(len(processor.continuation(
        self.then[0], after_end=True).token_ids), 4)

  def test_a_template_without_answers_is_refused(self):
    processor = Processor.from_checkpoint(self.folder)
    processor.chat_template = "{{ messages[0]['content'] }}"
    with self.assertRaisesRegex(
        RowError, "^episode 3, turn 1: the chat template leaves out an answer"):
      processor.continuation(
          self.then[0], "episode 3, turn 1", after_end=True)


class ResponseTest(_Case):

  def test_nothing_is_appended(self):
    ids = self.processor.response({"response": "go to the ball"})
    self.assertEqual(self.processor.decode(ids, False), "go to the ball")
    self.assertEqual(self.processor.response({"response": ""}), [])
    ids = self.processor.response({"response": "a<|im_end|>"})
    self.assertEqual(ids[-1], self.processor.config.eos_token_ids[0])

  def test_token_ids_win(self):
    # Tokens that encoding the text again would not give.
    ids = [self.processor.encode(letter)[0] for letter in "ball"]
    self.assertNotEqual(self.processor.encode("ball"), ids)
    row = validate_row(
        {"prompt": "a", "response": "x", "response_token_ids": ids}, "here")
    self.assertEqual(self.processor.response(row), ids)

  def test_placeholder_in_a_response_stays_a_token(self):
    image = self.processor.config.image_token_id
    row = {"prompt": _user(_image()), "response_token_ids": [5, image, image],
           "response": ""}
    self.assertEqual(self.processor.response(row), [5, image, image])
    self.assertEqual(
        self.processor.response({"response": "<|image_pad|>"}), [image])
    # The prompt's features are what they are without it.
    self.assertEqual(self.prompt(row).feature_index.max(), 5)

  @parameterized.parameters(
      ({}, "expected response or response_token_ids, found neither"),
      ({"response_token_ids": [1, 320]}, "expected ids below 320, found 320"))
  def test_refused(self, row, message):
    with self.assertRaisesRegex(RowError, f"^rows:7: .*{message}"):
      self.processor.response(row, "rows:7")

  def test_decode(self):
    ids = self.processor.encode("go<|im_end|>")
    self.assertEqual(self.processor.decode(np.array(ids)), "go")
    self.assertEqual(self.processor.decode(ids, False), "go<|im_end|>")


class CheckpointTest(_Case):

  def _write(self, **kwargs):
    return tiny_tokenizer.write_checkpoint(
        self.enterContext(tempfile.TemporaryDirectory()), **kwargs)

  def _edit(self, folder, name, **changes):
    path = os.path.join(folder, name)
    with open(path, encoding="utf-8") as file:
      content = json.load(file)
    with open(path, "w", encoding="utf-8") as file:
      json.dump({**content, **changes}, file)

  @parameterized.product(nested=[False, True],
                         template=["tokenizer", "jinja", "json"])
  def test_file_generations(self, nested, template):
    folder = self._write(nested=nested, template=template)
    row = {"prompt": _user(_image(), _text(), {
        "type": "video", "video": _FRAMES})}
    self.assert_prompts_equal(
        self.prompt(row, Processor.from_checkpoint(folder)), self.prompt(row))

  def test_one_preprocessor_config_for_both(self):
    folder = self._write()
    os.remove(os.path.join(folder, "video_preprocessor_config.json"))
    processor = Processor.from_checkpoint(folder)
    self.assertEqual(processor.video.max_pixels, 140 * 140)

  def test_processors_template_before_tokenizers(self):
    folder = self._write()
    with open(os.path.join(folder, "chat_template.jinja"), "w",
              encoding="utf-8") as file:
      file.write("{{ messages[0]['content'] }}!")
    prompt = self.prompt({"prompt": [{"role": "user", "content": "go"}]},
                         Processor.from_checkpoint(folder))
    self.assertEqual(self.processor.decode(prompt.token_ids), "go!")

  def test_text_only_checkpoint(self):
    folder = self._write(with_vision=False)
    processor = Processor.from_checkpoint(folder)
    prompt = self.prompt({"prompt": _user(_text())}, processor)
    self.assertEqual(prompt.patches.shape[0], 0)
    np.testing.assert_array_equal(
        prompt.positions, np.tile(np.arange(len(prompt.token_ids)), (3, 1)))
    self.assert_refused(
        {"prompt": _user(_image(), _text())},
        f"{folder} is a text-only checkpoint, found 1 images and 0 videos",
        processor_lib.TEXT_ONLY, processor)
    # To such a model the placeholder is a token like any other.
    self.assertLen(self.prompt({"prompt": "<|image_pad|>"},
                               processor).token_ids, 1)

  def test_no_template(self):
    processor = Processor.from_checkpoint(self._write(template="none"))
    self.assert_refused({"prompt": _user(_text())},
                        ".* has no chat template; give the prompt as a string",
                        "chat template", processor)
    self.assertLen(self.prompt({"prompt": "a"}, processor).token_ids, 1)

  @parameterized.named_parameters(
      ("token", "config.json", {"image_token_id": 3},
       r"expected <\|image_pad\|> to be token 3 \(image_token_id\), found"),
      ("patch", "preprocessor_config.json", {"patch_size": 16},
       "image preprocessor: expected patch_size 14 as in the model, found 16"),
      ("merge", "video_preprocessor_config.json", {"merge_size": 1},
       "video preprocessor: expected merge_size 2 as in the model, found 1"),
      ("architecture", "config.json", {"model_type": "mamba"},
       "unsupported architecture 'mamba'"))
  def test_disagreement(self, name, changes, message):
    folder = self._write()
    self._edit(folder, name, **changes)
    with self.assertRaisesRegex(InputError, f"^{folder}.*: {message}"):
      Processor.from_checkpoint(folder)

  def test_tokenizer_larger_than_the_vocabulary(self):
    folder = self._write(with_vision=False)
    self._edit(folder, "config.json", vocab_size=300)
    with self.assertRaisesRegex(
        InputError, f"^{folder}: the tokenizer has 308 tokens, .* 300$"):
      Processor.from_checkpoint(folder)

  @parameterized.parameters(
      ("config.json", "cannot be read"),
      ("tokenizer.json", "can't load the tokenizer"),
      ("preprocessor_config.json", "expected processor_config.json or"))
  def test_missing_file(self, name, message):
    folder = self._write()
    os.remove(os.path.join(folder, name))
    with self.assertRaisesRegex(InputError, f"^{folder}.*{message}") as caught:
      Processor.from_checkpoint(folder)
    self.assertNotIn("\n", str(caught.exception))

  @parameterized.parameters("config.json", "tokenizer.json",
                            "preprocessor_config.json",
                            "video_preprocessor_config.json")
  def test_truncated_file(self, name):
    folder = self._write()
    path = os.path.join(folder, name)
    with open(path, "r+b") as file:
      file.truncate(os.path.getsize(path) // 2)
    with self.assertRaisesRegex(
        InputError, f"^{folder}.*(can't|not valid JSON)") as caught:
      Processor.from_checkpoint(folder)
    self.assertNotIn("\n", str(caught.exception))

  def test_generation_config_ends_completions_too(self):
    folder = self._write()
    with open(os.path.join(folder, "generation_config.json"), "w") as file:
      json.dump({"eos_token_id": [7, 9]}, file)
    self.assertEqual(
        Processor.from_checkpoint(folder).config.eos_token_ids, (7, 9))

  def test_needs_no_torch(self):
    program = (
        "import sys\n"
        "sys.modules.update(torch=None, torchvision=None)\n"
        "import numpy as np\n"
        "from rollplex_jax.data.processor import Processor\n"
        "processor = Processor.from_checkpoint(sys.argv[1])\n"
        "pixels = np.zeros((56, 56, 3), np.uint8)\n"
        "prompt = processor.prompt({'prompt': [{'role': 'user', 'content': [\n"
        "  {'type': 'image', 'image': pixels},\n"
        "  {'type': 'video', 'video': [pixels] * 3}]}]})\n"
        "print(prompt.patches.shape)\n")
    out = subprocess.run(
        [sys.executable, "-c", program, self.folder], capture_output=True,
        text=True, check=True)
    self.assertEqual(out.stdout.strip(), "(48, 1176)")


if __name__ == "__main__":
  absltest.main()
