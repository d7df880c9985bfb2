"""`library_texts`: passages that can be guessed, in LAMBADA's format."""

import json
import pathlib
import tempfile

from absl.testing import absltest

from experiments import texts
from legolm_jax import benchmarks
from tests.experiments import commands


class LibraryTextsTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.folder = pathlib.Path(folder)

  def test_files(self):
    lambada, whole = self.folder / "lambada.jsonl", self.folder / "text.jsonl"
    ran = commands.run("library_texts", f"--lambada={lambada}",
                       f"--text={whole}", "--items=300")
    self.assertEqual((ran.status, ran.err), (0, ""))
    self.assertIn("passages: 300", ran.out)
    questions = benchmarks.read_lambada(lambada)
    self.assertLen(questions, 300)
    for question in questions:
      (word,) = question.choices
      self.assertRegex(word, "^ [a-z]{5,}$")
      self.assertIn(word.strip(), question.context.lower())
    documents = [json.loads(line)["text"]
                 for line in whole.read_text().splitlines()]
    self.assertEqual(documents, texts.library_documents())
    self.assertLen(documents, len(texts.LIBRARY_MODULES))

  def test_passages_end_at_a_sentence(self):
    words = " ".join(f"w{i}" for i in range(30))
    text = f"Take the number {words} and a number. More follows.\n\n>>> number."
    self.assertEqual(list(texts._passages(text)),
                     [f"Take the number {words} and a number"])
    self.assertEmpty(list(texts._passages(
        f"Take the number {words} and a letter.")))

  def test_refuses(self):
    for args, message in (
        ((), "--lambada and --text are not set"),
        (("--lambada=/nowhere/x",), "there is no folder"),
        ((f"--lambada={self.folder}/x", "--items=100000"),
         "--items=100000: the library has [0-9]+ passages")):
      ran = commands.run("library_texts", *args)
      self.assertEqual(ran.status, 1)
      self.assertRegex(ran.err, f"^error: .*{message}.*\n$")
      self.assertFalse((self.folder / "x").exists())


if __name__ == "__main__":
  absltest.main()
