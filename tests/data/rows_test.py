"""Row files: reading, validation, and what is said of bad rows."""

import json
import os
import tempfile

from absl.testing import absltest, parameterized
import numpy as np
import PIL.Image

from rollplex_jax.data.row_schema import RowError, validate_row
from rollplex_jax.data.rows import RowFile, RowList, select_rows
from rollplex_jax.errors import InputError

_PIXELS = np.zeros((4, 4, 3), np.uint8)


def _parts(*parts):
  return {"prompt": [{"role": "user", "content": list(parts)}]}


class RowFileTest(parameterized.TestCase):

  def _write(self, content):
    folder = self.enterContext(tempfile.TemporaryDirectory())
    path = os.path.join(folder, "rows.jsonl")
    with open(path, "wb") as file:
      file.write(content)
    return path

  def test_reads_lazily_in_order(self):
    path = self._write(
        b'{"prompt": "a", "answer": "1"}\n\n  \n{"prompt": "b"}\n'
        b'{"prompt": "\xc3\xa9"}')
    rows = RowFile(path)
    self.assertLen(rows, 3)
    self.assertEqual([row["prompt"] for row in rows], ["a", "b", "é"])
    self.assertEqual(rows[0]["answer"], "1")
    self.assertEqual(rows.where(1), f"{path}:4")

  def test_paths_resolve_against_the_file(self):
    path = self._write(json.dumps({
        "prompt": [{"role": "user", "content": [
            {"type": "image", "image": "a.png"},
            {"type": "video", "video": ["f/0.png", "/abs/1.png"], "fps": 2},
            {"type": "video", "video": "file:///abs/v.mp4"}]}],
        "images": ["../b.png"], "videos": ["c.mp4"], "fps": 1,
    }).encode())
    folder = os.path.dirname(path)
    row = RowFile(path)[0]
    image, video, clip = row["prompt"][0]["content"]
    self.assertEqual(image["image"], f"{folder}/a.png")
    self.assertEqual(video["video"], [f"{folder}/f/0.png", "/abs/1.png"])
    self.assertEqual(clip["video"], "/abs/v.mp4")
    self.assertEqual(row["images"], [f"{folder}/../b.png"])
    self.assertEqual(row["videos"], [f"{folder}/c.mp4"])
    self.assertEqual(row["fps"], [1.0])

  @parameterized.parameters(
      (b"", "expected JSON rows, found none"),
      (b"\n \n", "expected JSON rows, found none"))
  def test_empty_file(self, content, message):
    path = self._write(content)
    with self.assertRaisesRegex(InputError, f"^{path}: {message}$"):
      RowFile(path)

  def test_missing_file(self):
    with self.assertRaisesRegex(InputError, "^/no/rows.jsonl: can't read"):
      RowFile("/no/rows.jsonl")
    with self.assertRaisesRegex(InputError, "can't read rows: Is a directory"):
      RowFile(tempfile.gettempdir())

  @parameterized.parameters(
      (b'{"prompt": "b", "ans', "not valid JSON"),  # A truncated file.
      (b'{"prompt": "\xff"}', "not valid JSON"),
      (b"[" * 100_000, "not valid JSON"),
      (b'"prompt"', "row: expected a JSON object, found 'prompt'"))
  def test_bad_line_names_file_and_line(self, line, message):
    path = self._write(b'{"prompt": "a"}\n\n' + line)
    rows = RowFile(path)
    self.assertEqual(rows[0]["prompt"], "a")
    with self.assertRaises(RowError) as caught:
      rows[1]
    self.assertStartsWith(str(caught.exception), f"{path}:3: {message}")
    self.assertNotIn("\n", str(caught.exception))


class ValidateRowTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("no_prompt", {}, 'the row has no "prompt"'),
      ("null_prompt", {"prompt": None}, 'the row has no "prompt"'),
      ("empty_prompt", {"prompt": ""}, "prompt is an empty string"),
      ("no_messages", {"prompt": []}, "prompt: expected a string or"),
      ("number", {"prompt": 3}, "prompt: expected a string or .* found 3"),
      ("message", {"prompt": ["hi"]},
       r"prompt\[0\]: expected an object with role and content, found 'hi'"),
      ("role", {"prompt": [{"content": "a"}]},
       r"prompt\[0\].role: expected a string, found nothing"),
      ("content", {"prompt": [{"role": "user", "content": 1}]},
       r"prompt\[0\].content: expected a string or a list of parts, found 1"),
      ("part", _parts("hi"), r"content\[0\]: expected an object with a type"),
      ("part_type", _parts({"type": "audio"}),
       "type: expected text, image or video, found 'audio'"),
      ("text", _parts({"type": "text"}), "text: expected a string"),
      ("unknown_key", _parts({"type": "image", "image": "a", "max_pixels": 9}),
       "unknown key 'max_pixels'; expected image, type"),
      ("fps", _parts({"type": "video", "video": "a", "fps": 0}),
       "fps: expected frames per second > 0, found 0"),
      ("fps_nan", _parts({"type": "video", "video": "a", "fps": float("nan")}),
       "fps: expected frames per second > 0, found nan"),
      ("no_frames", _parts({"type": "video", "video": []}),
       "video: expected a path, a non-empty list of frames"),
      ("array", _parts({"type": "image", "image": _PIXELS.astype(np.float32)}),
       r"uint8 \[h, w, 3\], found float32 \[4, 4, 3\]"),
      ("url", _parts({"type": "image", "image": "https://a.b/c.png"}),
       "expected a local path, found 'https://a.b/c.png'"),
      ("images", {"prompt": "a", "images": "a.png"},
       "images: expected a list, found 'a.png'"),
      ("image", {"prompt": "a", "images": [3]},
       r"images\[0\]: expected a path, a PIL image or uint8"),
      ("rates", {"prompt": "a", "videos": ["a", "b"], "fps": [1, 2, 3]},
       "fps: expected 2 rates, one per video, found 3"),
      ("response", {"prompt": "a", "response": ["b"]},
       r"response: expected a string, found \['b'\]"),
      ("ids", {"prompt": "a", "response_token_ids": [1, -2]},
       "response_token_ids: expected token ids >= 0, found -2"),
      ("bool_id", {"prompt": "a", "response_token_ids": [True]},
       "response_token_ids: expected token ids >= 0, found True"),
  )
  def test_refuses(self, row, message):
    with self.assertRaisesRegex(RowError, f"^here: .*{message}") as caught:
      validate_row(row, "here")
    self.assertEqual(caught.exception.reason, "invalid row")
    self.assertNotIn("\n", str(caught.exception))

  def test_keeps_the_rest_and_the_callers_row(self):
    row = _parts({"type": "text", "text": "a", "image": None})
    row.update(answer={"x": [1]}, level=None, fps="left alone",
               response_token_ids=[np.int64(3)])
    before = json.dumps(row, default=int)
    valid = validate_row(row, "here")
    self.assertEqual(json.dumps(row, default=int), before)
    self.assertEqual(
        valid, {"prompt": [{"role": "user", "content": [
            {"type": "text", "text": "a"}]}],
                "answer": {"x": [1]}, "fps": "left alone",
                "response_token_ids": [3]})

  def test_media_in_memory(self):
    image = PIL.Image.fromarray(_PIXELS)
    row = _parts({"type": "image", "image": _PIXELS},
                 {"type": "image", "image": image},
                 {"type": "video", "video": [_PIXELS, image]},
                 {"type": "video", "video": np.stack([_PIXELS])})
    parts = validate_row(row, "here")["prompt"][0]["content"]
    self.assertIs(parts[0]["image"], _PIXELS)
    self.assertIs(parts[1]["image"], image)
    self.assertIs(parts[2]["video"][1], image)


class SelectRowsTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.rows = RowList(
        [{"prompt": "a"}, {}, {"prompt": "long"}, {"prompt": 3},
         {"prompt": "b"}], "rows")

  def _check(self, row, where):
    if len(row["prompt"]) > 1:
      raise RowError(where, "prompt over the limit", "4 characters")

  def test_first_bad_row_is_an_error(self):
    with self.assertRaisesRegex(RowError, 'rows:2: the row has no "prompt"'):
      select_rows(self.rows, self._check)

  def test_skips_and_counts_by_reason(self):
    selected = select_rows(self.rows, self._check, skip_bad_rows=True)
    self.assertEqual([row["prompt"] for row in selected], ["a", "b"])
    self.assertEqual(selected.where(1), "rows:5")
    self.assertEqual(
        selected.skipped, {"invalid row": 2, "prompt over the limit": 1})
    self.assertEqual(selected.report(), [
        "skipped 3 of 5 rows",
        '  2 invalid row; first: rows:2: the row has no "prompt"',
        "  1 prompt over the limit; first: rows:3: 4 characters",
    ])

  def test_nothing_to_report(self):
    self.assertEqual(select_rows(RowList([{"prompt": "a"}])).report(), [])

  def test_no_good_row_is_an_error(self):
    with self.assertRaisesRegex(InputError, "no good row left: skipped 1 of 1"):
      select_rows(RowList([{}]), skip_bad_rows=True)

  def test_other_errors_are_not_swallowed(self):
    def check(row, where):
      raise ZeroDivisionError
    with self.assertRaises(ZeroDivisionError):
      select_rows(self.rows, check, skip_bad_rows=True)


if __name__ == "__main__":
  absltest.main()
