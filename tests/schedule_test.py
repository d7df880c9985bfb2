"""Plans as data: complete, ordered, printable, and without wasted work."""

import collections

from absl.testing import absltest, parameterized

from rollplex_jax import schedule
from rollplex_jax.errors import InputError
from rollplex_jax.schedule import Facts, ScheduleConfig, Stage

_MICRO = [(0, 0), (0, 1), (1, 0), (1, 1)]


def _plans(config, facts, first=True):
  return (schedule.rollout_plan(config, facts)
          + schedule.scoring_plan(config, facts, _MICRO)
          + schedule.update_plan(config, facts, _MICRO, first=first))


def _facts(**kwargs):
  return Facts(**{**dict(has_media=True, has_reference=True,
                         trains_tower=False, scores_policy=False), **kwargs})


def _count(plan, stage, model=None):
  return sum(u.stage == stage and model in (None, u.model) for u in plan)


class PlanTest(parameterized.TestCase):

  @parameterized.product(
      config=(ScheduleConfig(), ScheduleConfig(share_prefix=False),
              ScheduleConfig(name="rollplex"),
              ScheduleConfig(name="disaggregated"),
              ScheduleConfig(name="disaggregated", share_prefix=False),
              ScheduleConfig(name="rollplex", prefix_source="window")),
      media=(True, False), reference=(True, False), tower=(True, False),
      policy=(True, False), first=(True, False))
  def test_everything_is_written_before_it_is_read(
      self, config, media, reference, tower, policy, first):
    facts = _facts(has_media=media, has_reference=reference,
                   trains_tower=tower, scores_policy=policy)
    plan = _plans(config, facts, first)
    schedule.check(plan)
    self.assertLen(schedule.describe(plan).splitlines(), len(plan))
    produced = {name for unit in plan for name in unit.writes}
    self.assertIn("grads", produced)
    self.assertEqual("ref_logprobs" in produced, reference)
    self.assertEqual("old_logprobs" in produced, policy)

  def test_check_names_what_is_missing(self):
    plan = schedule.update_plan(
        ScheduleConfig(name="rollplex"), _facts(), _MICRO, first=True)
    with self.assertRaisesRegex(ValueError, "rollout/kv"):
      schedule.check(plan, given=["policy/features", "policy/saved"])

  def test_prefixes_of_each_schedule(self):
    """How often each model's prefixes are computed in a step."""
    def prefixes(**kwargs):
      plan = _plans(ScheduleConfig(**kwargs), _facts())
      return (_count(plan, Stage.PREFIX, "policy"),
              _count(plan, Stage.PREFIX, "reference"),
              _count(plan, Stage.WINDOW))

    # The rollout's, then each block's again in training.
    self.assertEqual(prefixes(), (1 + 2, 2, 0))
    self.assertEqual(prefixes(share_prefix=False), (1, 0, 0))
    # Zero extra forward passes: training takes the rollout's.
    self.assertEqual(prefixes(name="rollplex"), (1, 0, 1))

  def test_no_reference_no_reference_work(self):
    plan = _plans(ScheduleConfig(name="rollplex"), _facts(has_reference=False))
    self.assertFalse([u for u in plan if u.model == "reference"])
    self.assertEqual(_count(plan, Stage.WINDOW), 0)
    self.assertEqual(_count(plan, Stage.DECODE), 1)

  def test_frozen_tower_runs_once(self):
    for kwargs in (dict(), dict(share_prefix=False), dict(name="rollplex")):
      plan = _plans(ScheduleConfig(**kwargs), _facts())
      self.assertEqual(_count(plan, Stage.VISION), 1)
      plan = _plans(ScheduleConfig(**kwargs), _facts(trains_tower=True))
      self.assertEqual(_count(plan, Stage.VISION, "reference"), 1)

  def test_later_updates_do_not_read_window_artifacts(self):
    plan = schedule.update_plan(
        ScheduleConfig(name="rollplex"), _facts(), _MICRO, first=False)
    read = {name for unit in plan for name in unit.reads}
    self.assertFalse(read & {"rollout/kv", "policy/saved", "policy/kv"})

  def test_lifetimes_end_at_the_last_consumer(self):
    plan = schedule.update_plan(
        ScheduleConfig(), _facts(), _MICRO, first=True)
    drops = schedule.last_reads(plan, keep=["policy/features"])
    alive, most = set(), collections.Counter()
    for i, unit in enumerate(plan):
      alive |= set(unit.writes) | set(unit.reads)
      for name in alive:
        most[name.split(".")[0]] = max(
            most[name.split(".")[0]],
            sum(other.startswith(name.split(".")[0] + ".") for other in alive))
      alive -= set(drops.get(i, ()))
    # Never two blocks' prefixes at once.
    self.assertEqual(most["policy/kv"], 1)
    self.assertEqual(most["policy/saved"], 1)
    self.assertEqual(alive, {"policy/features"})


class ConfigTest(parameterized.TestCase):

  @parameterized.parameters(
      (dict(name="fast"), "name='fast': expected one of serial, "),
      (dict(save="all"), "save='all': expected one of layer_inputs, "),
      (dict(window_chunk=0), "window_chunk=0: expected at least 1$"),
      (dict(prefix_budget_gb=-1.0), "prefix_budget_gb=-1.0: expected at least 0$"),
      (dict(name="rollplex", share_prefix=False),
       "name=rollplex with share_prefix=False: "),
      (dict(name="rollplex", prefix_source="window", save="activations"),
       "prefix_source=window with save=activations: "))
  def test_refuses(self, kwargs, message):
    with self.assertRaisesRegex(InputError, f"^{message}") as caught:
      ScheduleConfig(**kwargs)
    self.assertNotIn("\n", str(caught.exception))


if __name__ == "__main__":
  absltest.main()
