"""Runs whose episodes have several turns."""

import pathlib
import signal
import tempfile

from absl.testing import absltest, parameterized
import numpy as np
import pytest

from rollplex_jax import supervised
from rollplex_jax.config import Algorithm, CheckpointConfig, RolloutConfig
from rollplex_jax.data.rows import RowList
from rollplex_jax.errors import InputError
from rollplex_jax.full_passes import score_groups
from rollplex_jax.interrupts import Interrupts, Stopped
from rollplex_jax.loop import Run
from rollplex_jax.placement.mesh import MeshConfig
from rollplex_jax.placement.residency import ResidencyConfig
from rollplex_jax.run_comparison import compare
from rollplex_jax.schedule import ScheduleConfig
from rollplex_jax.stages.objectives import ObjectiveConfig
from rollplex_jax.trainer import Trainer
from tests.helpers import devices, tiny_checkpoint, tiny_task

_TURNS = 3


def setUpModule():
  devices.use_virtual_devices()


class EchoTask(tiny_task.VowelTask):
  """The world shows a picture after every response; an "e" ends the episode."""

  max_turns = _TURNS

  def __init__(self):
    super().__init__()
    self.train_rows = RowList([{**row, "turns": [
        {"response": "aa", "message": _seen(i), "train": i % 2 == 0},
        {"response": "a", "message": None, "train": True}]}
                               for i, row in enumerate(self.train_rows)])

  def player(self):
    return _Player()


class _Player:

  def start(self, rows):
    self._texts = [[] for _ in rows]

  def step(self, completions):
    for texts, text in zip(self._texts, completions):
      if text is not None:
        texts.append(text)
    return [None if text is None or "e" in text or len(texts) == _TURNS
            else _seen(len(text))
            for text, texts in zip(completions, self._texts)]

  def fail(self, index, reason):
    raise AssertionError(reason)

  def scores(self):
    return [{"overall": "".join(texts).count("a") / 8} for texts in self._texts]


def _seen(i):
  content = [{"type": "image", "image": tiny_task._image(50 + i)},
             {"type": "text", "text": "then"}]
  return {"role": "user", "content": content[i % 2:]}


class TurnsTrainingTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = pathlib.Path(
        cls.enterClassContext(tempfile.TemporaryDirectory()))
    cls.path = tiny_checkpoint.write(cls.folder / "model")

  def config(self, **kwargs):
    return tiny_task.config(self.path, **{
        "objective": ObjectiveConfig(loss_type="dapo", beta=0.05),
        "micro_batch_size": 8, **kwargs})

  def steps(self, count=2, **kwargs):
    return tiny_task.run_steps(self.config(**kwargs), count, EchoTask())

  def test_a_checked_run(self):
    """Nothing is alive that the plan does not have."""
    trainer, values = self.steps(
        3, residency=ResidencyConfig(check=True), num_iterations=2)
    for step in values:
      self.assertLess(step["training/rollout_logprobs_diff_max"], 1e-4)
      self.assertEqual(step["actor/update_skipped"], 0)
      self.assertGreater(step["episode_length/mean"],
                         step["response_length/mean"])
    self.assertNotEmpty(trainer.residency.ledger.found)

  @pytest.mark.slow
  def test_same_steps_on_a_mesh(self):
    mesh = MeshConfig(data=4, training_tp=1, rollout_tp=2)
    window = ScheduleConfig(
        name="rollplex", prefix_source="window", window_chunk=16)
    _, want = self.steps(1, schedule=window, train_batch_size=8)
    trainer, got = self.steps(
        1, schedule=window, mesh=mesh, train_batch_size=8)
    for name in ("actor/loss", "actor/grad_norm", "critic/score/mean",
                 "actor/kl_loss", "episode_length/mean"):
      np.testing.assert_allclose(got[0][name], want[0][name], rtol=2e-5,
                                 atol=1e-6, err_msg=name)
    self.assertLen(trainer.evaluate(trainer.task.eval_rows).scores, 3)

  def test_run_writes_and_evaluates(self):
    trainer = Trainer(self.config(total_steps=2), task=EchoTask())
    run = Run(trainer, self.folder / "run", tensorboard=False)
    summary = run.train()
    self.assertLen(summary["evaluations"], 2)
    (_, before), _ = run.evaluations
    self.assertLen(before.scores, 3)
    self.assertIn("\n", "".join(before.completions))

  @pytest.mark.slow
  def test_a_resumed_run_is_the_same(self):
    config = self.config(total_steps=3, checkpoint=CheckpointConfig(every=1))
    Run(Trainer(config, task=EchoTask()), self.folder / "whole",
        tensorboard=False).train()
    interrupts = Interrupts()

    def stop(progress):
      if progress.step == 2:
        interrupts.stop = signal.SIGTERM

    with self.assertRaises(Stopped):
      Run(Trainer(config, task=EchoTask()), self.folder / "resumed",
          tensorboard=False, on_step=stop, interrupts=interrupts).train()
    Run(Trainer(config, task=EchoTask()), self.folder / "resumed",
        tensorboard=False).train()
    self.assertEqual(
        compare(self.folder / "whole", self.folder / "resumed"), [])

  def test_supervised_learning_leaves_out_what_is_not_taught(self):
    config = self.config(algorithm=Algorithm.SUPERVISED, micro_batch_size=0)
    trainer = Trainer(config, task=EchoTask())
    examples = next(trainer.batches())
    batch, groups = supervised.collect(trainer.model_config, examples, 1, None)
    eos = trainer.processor.tokenizer.eos_token_id
    encode = trainer.processor.encode
    for example, ids, length in zip(
        examples, groups.token_ids[:, 0], groups.lengths[:, 0]):
      first, second = ([*encode(turn["response"]), eos]
                       for turn in example.row["turns"])
      taught = example.row["turns"][0]["train"]
      self.assertEqual(ids[:length].tolist(), first * taught + second)
    before = score_groups(trainer.params, trainer.model_config, batch, groups,
                          temperature=1.0)
    loss = trainer.step(examples, 0)[0]["train/loss"]
    np.testing.assert_allclose(
        loss, -before.sum() / groups.lengths.sum(), rtol=1e-5)

  def test_no_turns_where_pools_are_apart(self):
    with self.assertRaisesRegex(InputError, "disaggregated with episodes of 3"):
      Trainer(self.config(schedule=ScheduleConfig(name="disaggregated")),
              task=EchoTask())

  def test_an_episode_has_room_for_an_answer(self):
    with self.assertRaisesRegex(InputError, "max_episode_length=3: expected"):
      RolloutConfig(max_completion_length=4, max_episode_length=3)


if __name__ == "__main__":
  absltest.main()
