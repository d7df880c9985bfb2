"""`evaluate`: every task on tiny checkpoints, plain and compressed."""

import json
import pathlib
import tempfile

from absl.testing import absltest, parameterized
import numpy as np

from rollplex_jax.data.processor import Processor
from rollplex_jax.models import hf
from tests.experiments import commands
from tests.helpers import compressed, tiny_checkpoint
from tests.models import cases

_REWARD = "def reward(completion, row):\n  return float(len(completion) % 3)\n"
_GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2,
         "n_positions": 64}
_HELLASWAG = {"activity_label": "go", "ctx_a": "go to", "ctx_b": "the",
              "endings": ["red ball", "blue key", "picture"], "label": 2}


class EvaluateTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = pathlib.Path(
        cls.enterClassContext(tempfile.TemporaryDirectory()))
    cls.model = tiny_checkpoint.write(
        cls.folder / "model", eos=tiny_checkpoint.EOS)
    cls.small = compressed.compress(
        cls.model, cls.folder / "small", num_centroids=64)
    cls.gpt2 = tiny_checkpoint.write_text(cls.folder / "gpt2", _GPT2)
    cls.text = cls.folder / "text.txt"
    cls.text.write_text("go to the red ball, then pick up the blue key. " * 20)
    (cls.folder / "reward.py").write_text(_REWARD)

  def evaluate(self, *args, model=None):
    out = self.folder / "result.json"
    result = commands.run(
        "evaluate", f"--model_path={model or self.small}", f"--json={out}", *args)
    self.assertEqual((result.status, result.err), (0, ""))
    return json.loads(out.read_text())

  def rows(self, *rows):
    return tiny_checkpoint.write_rows(self.folder / "rows.jsonl", rows)

  def test_perplexity(self):
    found = self.evaluate(
        f"--data={self.text}", f"--reference_path={self.model}",
        "--window_length=16", "--batch_size=3")
    ids = Processor.from_checkpoint(self.model).encode(self.text.read_text())
    windows = [ids[i:i + 16] for i in range(0, len(ids) - 15, 16)]
    self.assertEqual((found["windows"], found["tokens"]),
                     (len(windows), 15 * len(windows)))
    for name, path in (("perplexity", self.small),
                       ("reference_perplexity", self.model)):
      self.assertAlmostEqual(
          found[name] / np.exp(self.loss(path, windows)), 1, places=4)
    self.assertGreater(found["mean_kl"], 0)
    for name in ("change_percent", "change_percent_stderr", "mean_kl_stderr",
                 "nominal_ratio", "true_ratio", "bits_per_parameter"):
      self.assertIsInstance(found[name], float)

  def loss(self, path, windows):
    """By another way to the logits: prompts one by one, unpadded."""
    config, params = hf.load_checkpoint(path)
    losses = []
    for ids in windows[:]:
      prompt = cases.Prompt(
          np.array(ids, np.int32), np.full(len(ids), -1, np.int32),
          np.zeros((0, 1), np.float32), (), (), ())
      (logits,) = cases.batch_logits(params, config, [prompt])
      logits = logits.astype(np.float64)
      p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
      losses.append(-np.mean([p[t, ids[t + 1]] for t in range(len(ids) - 1)]))
    return np.mean(losses)

  def test_against_itself(self):
    found = self.evaluate(
        "--task=kl", f"--data={self.text}", f"--reference_path={self.small}",
        "--window_length=8", "--limit=5")
    self.assertEqual(found["windows"], 5)
    self.assertEqual((found["mean_kl"], found["change_percent"]), (0, 0))
    self.assertEqual(found["top1_agreement"], 1)

  def test_documents(self):
    """Windows end where their document does."""
    path = self.rows(*({"text": "go to the red ball then"} for _ in range(3)))
    count = len(Processor.from_checkpoint(self.model).encode(
        "go to the red ball then"))
    found = self.evaluate(f"--data={path}", f"--window_length={count}")
    self.assertEqual(found["windows"], 3)
    self.assertNotIn("mean_kl", found)

  def test_questions(self):
    path = self.rows({"text": "go to the ball"}, {"text": "the red key"})
    found = self.evaluate("--task=lambada", f"--data={path}",
                          f"--reference_path={self.model}", "--batch_size=2")
    self.assertEqual(found["items"], 2)
    self.assertIn("accuracy_change_stderr", found)
    path = self.rows(_HELLASWAG, _HELLASWAG | {"label": "0"})
    found = self.evaluate("--task=hellaswag", f"--data={path}", model=self.gpt2)
    # The same question with two answers, of which one may be right.
    self.assertIn(found["acc"], (0, 0.5))
    self.assertIn(found["acc_norm"], (0, 0.5))

  def test_reward_on_rows(self):
    path = self.rows(*({"prompt": f"go to {i}"} for i in range(3)))
    args = ("--task=reward", f"--data={path}", "--max_completion_length=4",
            f"--reward={self.folder / 'reward.py'}:reward", "--batch_size=2")
    found = self.evaluate(*args, f"--reference_path={self.small}")
    self.assertEqual(found["rows"], 3)
    self.assertEqual(found["reward"], found["reference_reward"])
    self.assertEqual((found["reward_change"], found["same_completions"]), (0, 1))
    self.assertEqual(self.evaluate(*args, "--limit=2")["rows"], 2)

  def test_success_in_a_world(self):
    found = self.evaluate(
        "--task=reward", "--world=level=BabyAI-GoToObjS4-v0", "--limit=3",
        "--world=must_stop=true", "--world=max_actions=4",
        "--max_completion_length=3")
    self.assertEqual(found["rows"], 3)
    self.assertBetween(found["success"], found["success_low"],
                       found["success_high"])

  @parameterized.parameters(
      (("--task=perplexity",), "--data is not set"),
      (("--task=kl", "--data={text}"), "--reference_path is not set"),
      (("--data={text}x",), "can't be read: No such file"),
      (("--data={text}", "--window_length=9999"), "of 9999 tokens, found"),
      (("--data={text}", "--window_length=65", "--model_path={gpt2}"),
       "at most the model's 64 tokens"),
      (("--data={text}", "--model_path={text}x"), "no such checkpoint folder"),
      (("--task=lambada", "--data={text}"), "text.txt:1: not valid JSON"),
      (("--task=reward",), "--data is not set: expected rows, or a level"),
      (("--task=reward", "--data={text}"), "--reward is not set"),
      (("--task=reward", "--world=level=Nothing"), "Nothing"),
      (("--task=reward", "--world=size=3"), "--world.size: no such key"),
      (("--task=reward", "--world=max_actions=many"), "max_actions='many'"),
      (("--task=reward", "--model_path={gpt2}",
        "--world=level=BabyAI-GoToObjS4-v0"), "GPT-2 can't be drawn"))
  def test_refuses(self, args, message):
    names = {"text": self.text, "gpt2": self.gpt2}
    result = commands.run("evaluate", f"--model_path={self.small}",
                          *(a.format(**names) for a in args))
    self.assertEqual(result.status, 1)
    self.assertRegex(result.err, f"^error: .*{message}.*\n$")
    self.assertEqual(result.err.count("\n"), 1)

  def test_another_vocabulary(self):
    other = self.folder / "other"
    tiny_checkpoint.write(other)
    raw = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(raw | {"vocab_size": 321}))
    result = commands.run(
        "evaluate", f"--model_path={self.small}", f"--data={self.text}",
        f"--reference_path={other}")
    self.assertRegex(result.err, "expected a vocabulary of 320 tokens.*321")


if __name__ == "__main__":
  absltest.main()
