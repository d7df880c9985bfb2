"""What docs/rewards.md has its reader write works."""

import pathlib
import re
import tempfile
import textwrap

from absl.testing import absltest

from rollplex_jax.data import fallbacks
from rollplex_jax.data.reward_workers import RewardWorkers
from rollplex_jax.data.settings import DataConfig, EnvironmentConfig
from rollplex_jax.data.workers import Limits
from rollplex_jax.errors import InputError
from rollplex_jax.tasks import EpisodesTask

_PAGE = (pathlib.Path(__file__).parents[1] / "docs" / "rewards.md").read_text()


class PageTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(
      self.enterContext(tempfile.TemporaryDirectory()))
    self.files = {}
    for block in re.findall(r"(?:^ {4}.*\n|^\n)+", _PAGE, re.M):
      block = textwrap.dedent(block).strip("\n")
      if block.startswith("# my_"):
        name = block.splitlines()[0][2:]
        self.files[name] = self.folder / name
        self.files[name].write_text(block + "\n")

  def test_reward(self):
    workers = RewardWorkers(f"{self.files['my_reward.py']}:reward", Limits())
    workers.check({"prompt": "x", "answer": "left"}, "train.jsonl:1")
    (scores,) = workers.score(["To the LEFT"], [{"answer": "left"}], [0])
    self.assertEqual(fallbacks.split(scores)[0], {"overall": 1.0, "words": 3.0})
    with self.assertRaises(InputError) as caught:
      workers.check({"prompt": "x"}, "train.jsonl:1")
    line = str(caught.exception).replace(f"{self.folder}/", "")
    self.assertIn(f"error: {line}\n", _PAGE)

  def test_environment(self):
    for turns in (1, 8):
      task = EpisodesTask(DataConfig(environment=EnvironmentConfig(
        make=f"{self.files['my_world.py']}:Corridor", max_turns=turns,
        num_workers=0)), demonstrations=True)
      row = task.train_rows[0]
      if turns == 1:
        (scores,) = task.score([row["response"]], [row], [0])
      else:
        player = task.player()
        player.start([row])
        for turn in row["turns"]:
          player.step([turn["response"]])
        (scores,) = player.scores()
      self.assertEqual(scores["success"], 1.0)


if __name__ == "__main__":
  absltest.main()
