"""`study` on a tiny checkpoint: its files, its claims, and how it refuses."""

import csv
import dataclasses
import json
import pathlib
import tempfile

from absl.testing import absltest
import numpy as np
import pytest

from experiments import evaluate_reward, study_report
from experiments.study_subjects import Episodes, spread
from legolm_jax import baselines
from legolm_jax.safetensors_files import CheckpointFolder
from rollplex_jax import inference
from rollplex_jax.data.processor import Processor
from rollplex_jax.data.settings import EnvironmentConfig
from rollplex_jax.models import hf
from rollplex_jax.stages.sampling import SamplingConfig
from rollplex_jax.tasks import make_task
from tests.experiments import commands
from tests.helpers import compressed, tiny_checkpoint

_RAW = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "eos_token_id": 5}
_FAST = ("--num_centroids=64", "--vector_centroids=256", "--window_length=24",
         "--num_windows=4")


class StudyTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = pathlib.Path(
        cls.enterClassContext(tempfile.TemporaryDirectory()))
    cls.model = tiny_checkpoint.write_text(
        cls.folder / "model", _RAW, std=0.1)
    cls.lambada = tiny_checkpoint.write_rows(
        cls.folder / "lambada.jsonl",
        [{"text": f"go to the ball {i}"} for i in range(3)])
    cls.out, result = cls.folder / "out", cls.folder / "result.json"
    cls.ran = cls.study(f"--output_dir={cls.out}", f"--json={result}",
                        f"--lambada={cls.lambada}")
    cls.found = result.exists() and json.loads(result.read_text())

  @classmethod
  def study(cls, *args):
    return commands.run("study", f"--model_path={cls.model}", *_FAST, *args)

  @pytest.mark.slow
  def test_study(self):
    out, found = self.out, self.found
    self.assertEqual((self.ran.status, self.ran.err), (0, ""))
    rows = {row["name"]: row for row in found["rows"]}
    with (out / "study.csv").open(newline="") as file:
      table = list(csv.DictReader(file))
    self.assertLen(table, len(found["rows"]))
    for row in table:
      self.assertAlmostEqual(
          float(row["mean_kl"]), rows[row["name"]]["mean_kl"])
    for name in ("distortion.png", "quality.png"):
      self.assertGreater((out / name).stat().st_size, 5000)
    page = (out / "study.md").read_text()
    for claim in found["claims"]:
      self.assertIn(claim["claim"], page)
      self.assertNotEqual(claim["measured"], "")
    measured = {c["claim"]: c["measured"] for c in found["claims"]}
    self.assertIn("not measured: no file", measured["HellaSwag at K=64, p=99"])
    self.assertIn("+-", measured["LAMBADA at K=64, p=99"])
    self.assertIn("one checkpoint", measured["full replacement and model size"])
    # More bits, less error; and a reconstruction that is kept has none.
    row = rows["published K=64 p=99"]
    self.assertAlmostEqual(row["nominal_ratio"], 5.112, places=3)
    self.assertAlmostEqual(row["true_ratio"], 32 / row["bits_per_parameter"])
    error = lambda name: rows[name]["relative_squared_error"]
    self.assertLess(error("published K=128 p=99"), error("published K=64 p=99"))
    self.assertLess(error("other percentiles K=128 p=80"),
                    error("published K=128 p=99"))
    self.assertLess(error("published K=128 p=99"),
                    error("vector blocks d=2 K=128 p=99"))
    self.assertLess(error("vector blocks d=2 K=128 p=99"),
                    error("vector blocks d=4 K=128 p=99"))

  @pytest.mark.slow
  def test_episodes(self):
    """The checkpoint's own plans: the likeliest tokens, and no KL to itself."""
    model = tiny_checkpoint.write(self.folder / "policy", seed=3)
    config, params = hf.load_checkpoint(model)
    processor = Processor.from_checkpoint(model)
    subject = Episodes(config, processor, params,
                       ["level=BabyAI-GoToObjS4-v0"], limit=3, batch_size=2,
                       max_completion_length=4)
    same = subject.compare(params)
    self.assertEqual((same.summary()["mean_kl"], len(same.loss)), (0, 3))
    outcomes = subject.outcomes(params)["world"]["success"]
    self.assertLen(outcomes, 3)
    # The losses are those of the log-probs that drawing recorded.
    rows = make_task(
        evaluate_reward.settings(None, "", ["level=BabyAI-GoToObjS4-v0"], 3),
        processor, supervised=False).eval_rows
    drawn = [c for _, (c,) in inference.complete(
        params, config, processor, rows, SamplingConfig(
            max_completion_length=4, temperature=1.0,
            eos_token_ids=config.eos_token_ids,
            banned_token_ids=config.vision_token_ids, top_k=1))]
    np.testing.assert_allclose(
        same.loss, [-np.mean(c.logprobs) for c in drawn], rtol=1e-4)
    self.assertEqual(same.tokens, sum(len(c.token_ids) for c in drawn))

  def test_squared_error(self):
    """By hand: int8 of the two middle blocks."""
    folder = CheckpointFolder(self.model)
    made = baselines.int8(folder, per_row=True)
    error = norm = 0.0
    for name, tensor in made.tensors():
      if name.startswith(("model.layers.1", "model.layers.2")) and tensor.ndim == 2:
        source = folder.read(name).astype("float64")
        error += ((source - tensor) ** 2).sum()
        norm += (source ** 2).sum()
    (row,) = [r for r in self.found["rows"] if r["group"] == "8-bit per row"]
    self.assertAlmostEqual(
        row["relative_squared_error"] / (error / norm), 1, places=4)

  def test_groups(self):
    """Those that were asked for; a claim that needs another says so."""
    result = self.folder / "groups.json"
    ran = self.study(f"--output_dir={self.folder}/groups", "--groups=published",
                     "--groups=8-bit per row", f"--json={result}")
    self.assertEqual((ran.status, ran.err), (0, ""))
    found = json.loads(result.read_text())
    self.assertEqual({row["group"] for row in found["rows"]},
                     {"published", "8-bit per row"})
    measured = {c["claim"]: c["measured"] for c in found["claims"]}
    self.assertStartsWith(measured["full replacement at K=128"],
                          "not measured: left out")
    whole = {row["name"]: row for row in self.found["rows"]}
    for row in found["rows"]:
      self.assertEqual(row["mean_kl"], whole[row["name"]]["mean_kl"])

  def test_world_of_a_quick_start(self):
    """Its policy is measured in the world that it was trained in."""
    run = self.folder / "quickstart"
    two = pathlib.Path(tiny_checkpoint.write(run / "two", seed=3))
    file = two / "config.json"
    file.write_text(json.dumps(
        json.loads(file.read_text()) | {"num_hidden_layers": 3}))
    config, model = hf.load_config(two), run / "policy"
    hf.save_checkpoint(model, config, tiny_checkpoint.random_params(config),
                       assets_from=two)
    (run / "quickstart.json").write_text(json.dumps({"environment": {
        **dataclasses.asdict(EnvironmentConfig()),
        "level": "BabyAI-GoToObjS4-v0", "must_stop": True}}))
    out, result = self.folder / "world", self.folder / "world.json"
    ran = commands.run(
        "study", f"--model_path={model}", "--num_windows=2",
        "--max_completion_length=4", "--groups=8-bit per row",
        f"--output_dir={out}", f"--json={result}")
    self.assertEqual((ran.status, ran.err), (0, ""))
    found = json.loads(result.read_text())
    self.assertEqual(
        found["data"], 'the checkpoint\'s plans in level="BabyAI-GoToObjS4-v0" '
        "must_stop=true")
    self.assertLen(found["rows"], 1)

  def test_windows_are_spread(self):
    windows = np.arange(10)[:, None]
    self.assertEqual(spread(windows, 4).ravel().tolist(), [0, 2, 5, 7])
    for limit in (0, 10, 99):
      self.assertIs(spread(windows, limit), windows)

  def test_refuses(self):
    small = compressed.compress(self.model, self.folder / "small")
    shallow = tiny_checkpoint.write(self.folder / "shallow")
    for args, message in (
        ((), "--output_dir is not set"),
        ((f"--output_dir={self.model}",), "output folder is not empty"),
        ((f"--output_dir={self.folder}/x", f"--model_path={small}"),
         "is compressed"),
        ((f"--output_dir={self.folder}/x", "--model_path=/nowhere"), "/nowhere"),
        ((f"--output_dir={self.folder}/x", f"--model_path={shallow}"),
         "has no matrix to compress between"),
        ((f"--output_dir={self.folder}/x", "--world=level=x",
          f"--lambada={self.lambada}"), "either a world or texts"),
        ((f"--output_dir={self.folder}/x", "--groups=published",
          "--groups=unheard of"), "--groups=unheard of: expected some of"),
        ((f"--output_dir={self.folder}/x", "--data=/nothing.txt"),
         "can't be read")):
      ran = self.study(*args)
      self.assertEqual(ran.status, 1)
      self.assertRegex(ran.err, f"^error: .*{message}.*\n$")
      self.assertFalse((self.folder / "x").exists())


class ClaimsTest(absltest.TestCase):

  def test_what_is_missing_is_said(self):
    found = study_report.claims([], {64: 1 / 64})
    self.assertLen(found, 12)
    measured = [c["measured"] for c in found]
    self.assertEqual(measured[5], "K=64: 1.56e-02 (1.00/K)")
    del measured[5]
    for text in measured:
      self.assertStartsWith(text, "not measured: ")


if __name__ == "__main__":
  absltest.main()
