"""The small tokenizer: words, bytes, template and processor settings."""

import json
import os
import tempfile
import unicodedata

from absl.testing import absltest, parameterized
import numpy as np

from rollplex_jax.data import babyai, environments, tokenizer
from rollplex_jax.errors import InputError

_MOVES = ("left", "right", "forward")
_TEXTS = [
  "",
  "plain words, and punctuation: (yes) don't!",
  "caf\u00e9 na\u00efve \u4e16\u754c \u0645\u0631\u062d\u0628\u0627 \U0001f642",
  "tabs\tand\r\nline\n\n ends   and 1234567890",
  "\x00\x7f\u200b\ufffd",
  "e\u0301 composes",
  " leading and trailing ",
]


def _corpus():
  world = babyai.MiniGridEnvironment("BabyAI-GoToLocalS6N2-v0", actions=_MOVES)
  task = environments.PlanTask(world)
  for row in task.demonstrations(range(500)):
    yield row["prompt"][0]["content"][1]["text"]
    yield row["response"]


class TokenizerTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    from transformers import AutoTokenizer

    cls.corpus = list(_corpus())
    cls.folder = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.ids = tokenizer.build_tokenizer(cls.corpus, 512, cls.folder)
    cls.loaded = AutoTokenizer.from_pretrained(cls.folder)

  def test_loads_as_qwen2_without_more_tokens(self):
    self.assertEqual(type(self.loaded).__name__, "Qwen2Tokenizer")
    self.assertLen(self.loaded, self.ids["vocab_size"])
    self.assertLessEqual(self.ids["vocab_size"], 512)
    for token in tokenizer.SPECIAL_TOKENS:
      self.assertEqual(
        self.loaded.encode(token, add_special_tokens=False), [self.ids[token]]
      )
    self.assertEqual(self.loaded.eos_token, "<|im_end|>")
    self.assertEqual(self.loaded.pad_token, "<|endoftext|>")

  def test_special_tokens_come_last(self):
    last = self.ids["vocab_size"]
    self.assertEqual(
      [self.ids[token] for token in tokenizer.SPECIAL_TOKENS],
      list(range(last - 8, last)),
    )

  def test_every_word_of_the_level_is_one_token(self):
    for text in set(self.corpus):
      self.assertLen(self.loaded.encode(text), len(text.split()), text)
    for word in _MOVES:
      self.assertLen(self.loaded.encode(word), 1)
      self.assertLen(self.loaded.encode(f" {word}"), 1)

  @parameterized.parameters(*_TEXTS)
  def test_any_text_comes_back(self, text):
    back = self.loaded.decode(self.loaded.encode(text))
    self.assertEqual(back, unicodedata.normalize("NFC", text))

  def test_random_text_comes_back(self):
    rng = np.random.default_rng(0)
    for _ in range(50):
      points = rng.integers(1, 0x10FFFF, 40)
      text = "".join(chr(p) for p in points if not 0xD800 <= p < 0xE000)
      text = unicodedata.normalize("NFC", text)
      self.assertEqual(self.loaded.decode(self.loaded.encode(text)), text)

  def test_same_texts_give_the_same_folder(self):
    again = self.enterContext(tempfile.TemporaryDirectory())
    tokenizer.build_tokenizer(self.corpus, 512, again)
    names = sorted(os.listdir(self.folder))
    self.assertEqual(sorted(os.listdir(again)), names)
    for name in names:
      contents = []
      for folder in (self.folder, again):
        with open(os.path.join(folder, name), "rb") as file:
          contents.append(file.read())
      self.assertEqual(*contents)

  @parameterized.parameters(True, False)
  def test_chat_template(self, generate):
    messages = [
      {"role": "system", "content": "Be brief. "},
      {
        "role": "user",
        "content": [
          {"type": "video", "video": ["a.png"], "fps": 1.0},
          {"type": "text", "text": "What moved?\n"},
          {"type": "image", "image": "b.png"},
          {"type": "text", "text": " And this?"},
        ],
      },
    ]
    text = self.loaded.apply_chat_template(
      messages, add_generation_prompt=generate, tokenize=False
    )
    self.assertEqual(
      text,
      "<|im_start|>system\nBe brief. <|im_end|>\n"
      "<|im_start|>user\n"
      "<|vision_start|><|video_pad|><|vision_end|>What moved?\n"
      "<|vision_start|><|image_pad|><|vision_end|> And this?<|im_end|>\n"
      + ("<|im_start|>assistant\n" if generate else ""),
    )

  def test_image_processor_keeps_small_frames(self):
    from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl

    processor = (
      image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil.from_pretrained(
        self.folder
      )
    )
    frame = np.zeros((56, 56, 3), np.uint8)
    out = processor([frame], return_tensors="np")
    np.testing.assert_array_equal(out["image_grid_thw"], [[1, 4, 4]])
    self.assertEqual(out["pixel_values"].shape, (16, 3 * 2 * 14 * 14))

  @parameterized.parameters((14, 2, 784), (7, 2, 196), (14, 1, 196))
  def test_processor_settings(self, patch_size, merge_size, min_pixels):
    folder = self.enterContext(tempfile.TemporaryDirectory())
    tokenizer.build_tokenizer(
      ["a"], 264, folder, patch_size=patch_size, merge_size=merge_size
    )
    for name in ("preprocessor_config", "video_preprocessor_config"):
      with open(os.path.join(folder, f"{name}.json"), encoding="utf-8") as file:
        settings = json.load(file)
      self.assertEqual(settings["patch_size"], patch_size)
      self.assertEqual(settings["merge_size"], merge_size)
      self.assertEqual(settings["size"]["shortest_edge"], min_pixels)
      self.assertEqual(settings["min_pixels"], min_pixels)

  def test_black_is_zero_where_asked(self):
    from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl

    folder = self.enterContext(tempfile.TemporaryDirectory())
    tokenizer.build_tokenizer(
      ["a"], 264, folder, image_mean=(0, 0, 0), image_std=(0.25, 0.25, 0.5)
    )
    processor = (
      image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil.from_pretrained(
        folder
      )
    )
    frames = [np.full((28, 28, 3), value, np.uint8) for value in (0, 255)]
    pixels = processor(frames, return_tensors="np")["pixel_values"]
    pixels = pixels.reshape(2, 4, 3, 2 * 14 * 14)
    np.testing.assert_array_equal(pixels[0], 0.0)
    for channel, white in enumerate((4.0, 4.0, 2.0)):
      np.testing.assert_allclose(pixels[1, :, channel], white, rtol=1e-6)

  def test_bad_input(self):
    folder = self.enterContext(tempfile.TemporaryDirectory())
    with self.assertRaisesRegex(InputError, "at least 264.*found 263"):
      tokenizer.build_tokenizer(["a"], 263, folder)
    with self.assertRaisesRegex(InputError, "found 784 and 100"):
      tokenizer.build_tokenizer(["a"], 300, folder, max_pixels=100)
    with self.assertRaisesRegex(InputError, "image_mean and image_std"):
      tokenizer.build_tokenizer(["a"], 300, folder, image_std=(1, 0, 1))
    file = os.path.join(folder, "tokenizer.json")
    with open(file, "w", encoding="utf-8"):
      pass
    with self.assertRaisesRegex(InputError, file):
      tokenizer.build_tokenizer(["a"], 300, file)


if __name__ == "__main__":
  absltest.main()
