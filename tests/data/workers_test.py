"""Worker processes: whatever runs there, every call gets a reply in time."""

from concurrent import futures
import itertools
import os
import signal
import subprocess
import sys
import time
from unittest import mock

from absl.testing import absltest, parameterized

from rollplex_jax.data.worker import SIGNALS
from rollplex_jax.data.workers import Failure, Limits, WorkerPool
from tests.data import misbehavior


def _pool(**limits):
  return WorkerPool(
    misbehavior.handler, (1,),
    Limits(**{"num_workers": 2, "timeout": 0.5, **limits}))


def _runs(process):
  """Whether a process is there and no zombie, which only waits to be reaped."""
  try:
    with open(f"/proc/{process}/stat") as file:
      return file.read().rpartition(")")[2].split()[0] != "Z"
  except FileNotFoundError:
    return False


def _ends(process, seconds=5.0):
  """Whether a process ends in time."""
  end = time.monotonic() + seconds
  while _runs(process) and time.monotonic() < end:
    time.sleep(0.02)
  return not _runs(process)


class WorkerPoolTest(parameterized.TestCase):

  @parameterized.parameters(0, 1, 3)
  def test_values_come_in_order(self, num_workers):
    pool = _pool(num_workers=num_workers)
    self.assertIsNone(pool.start())
    calls = [("slow" if i % 3 == 0 else "fine", i) for i in range(12)]
    self.assertEqual(pool.run(calls), list(range(12)))
    self.assertEqual(pool.run([]), [])

  @parameterized.parameters(
    ("forever", 0, "timeout", "took more than 0.5 s"),
    ("raises", 3, "exception", r"raised ValueError: bad 3 \(misbehavior.py:"),
    ("interrupts", 0, "exception", "raised KeyboardInterrupt"),
    ("exits_hard", 3, "exit", "status 3"),
    ("exits", 3, "exit", r"called sys.exit\(3\)"),
    ("crashes", 0, "exit", "SIGSEGV"),
    ("allocates", 2, "memory", "more memory"),
    ("forks_and_exits", 0, "exit", "status 7"),
    ("closes_files", 0, "exit", "status 1"),
    ("closes_files_and_hangs", 0, "exit", "closed the files"),
    ("returns_what_does_not_pickle", 0, "exception", "can't be sent"),
  )
  def test_a_failure_is_named_and_costs_only_itself(
      self, name, argument, kind, reason):
    pool = _pool()
    calls = [("fine", i) for i in range(6)]
    calls[2] = (name, argument)
    start = time.monotonic()
    found = pool.run(calls)
    self.assertLess(time.monotonic() - start, 4.0)
    failure = found.pop(2)
    self.assertIsInstance(failure, Failure)
    self.assertEqual(failure.kind, kind)
    self.assertRegex(failure.reason, reason)
    self.assertNotIn("\n", failure.reason)
    self.assertEqual(found, [0, 1, 3, 4, 5])
    self.assertEqual(pool.run([("fine", 9)] * 3), [9] * 3)

  def test_output_and_input_are_nobodys(self):
    program = (
      "from tests.data.workers_test import _pool\n"
      "print(_pool().run([('prints', 5), ('reads_input', 0)]))")
    result = subprocess.run(
      [sys.executable, "-c", program], input="typed", capture_output=True,
      text=True, check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(
        sys.path)})
    self.assertEqual((result.stdout, result.stderr), ("[5, 0]\n", ""))

  def test_what_fits_in_memory_is_allowed(self):
    pool = _pool(memory_gb=0.5, timeout=10.0)
    self.assertEqual(pool.run([("allocates", 0.2)]), [0])
    (failure,) = pool.run([("allocates", 0.6)])
    self.assertEqual(failure.kind, "memory")
    pool = _pool(memory_gb=0.0, timeout=10.0)
    self.assertEqual(pool.run([("allocates", 1.0)]), [1])

  def test_hanging_calls_run_side_by_side_and_end_after_a_few(self):
    pool = _pool(max_timeouts=4, timeout=0.3)
    start = time.monotonic()
    found = pool.run([("forever", 0)] * 100 + [("fine", 1)])
    self.assertLess(time.monotonic() - start, 3.0)
    kinds = [failure.kind for failure in found]
    self.assertBetween(kinds.count("timeout"), 4, 5)
    self.assertEqual(kinds.count("skipped"), 101 - kinds.count("timeout"))
    self.assertEqual(pool.run([("fine", 1)]), [1])
    (failure,) = pool.run([("fine", 1)], timeouts=4)
    self.assertEqual(failure.kind, "skipped")

  def test_threads_may_share_a_pool(self):
    pool = _pool(timeout=10.0)
    with futures.ThreadPoolExecutor(4) as threads:
      found = list(threads.map(
        lambda k: pool.run([("fine", 10 * k + i) for i in range(10)]), range(8)))
    self.assertEqual(list(itertools.chain(*found)), list(range(80)))

  def test_a_machine_without_room_costs_rewards_and_not_the_run(self):
    pool = _pool()
    with mock.patch.object(
        subprocess, "Popen", side_effect=BlockingIOError(11, "no room")):
      found = pool.run([("fine", 0)] * 5)
    self.assertEqual([failure.kind for failure in found], ["exit"] * 5)
    self.assertEqual(pool.run([("fine", 3)]), [3])

  def test_calls_of_one_home_share_a_worker(self):
    pool = _pool(num_workers=3)
    homes = [0, 1, 2, 1, 0, 2, 2, 4]
    found = pool.run([("process", 0)] * 8, homes=homes)
    self.assertLen(set(found), 3)
    for home in range(3):
      self.assertLen(
        {process for process, h in zip(found, homes) if h % 3 == home}, 1)
    again = pool.run([("process", 0), ("exits_hard", 1), ("process", 0)],
                     homes=[0, 0, 0])
    self.assertEqual(again[0], found[0])
    self.assertNotIn(again[2], found)
    again = pool.run([("exits_hard", 1)] + [("place", 0)] * 4, homes=[1] * 5)
    self.assertEqual(again[1:], [0, 1, 2, 3])

  def test_nothing_is_left_when_a_pool_ends(self):
    pool = _pool()
    processes = pool.run([("process", 0)] * 2, homes=[0, 1])
    child, *_ = pool.run([("starts_a_child", 0)])
    self.assertTrue(all(map(_runs, [child, *processes])))
    pool.close()
    for process in processes:  # Reaped, too: no zombie.
      self.assertFalse(os.path.exists(f"/proc/{process}"))
    self.assertTrue(_ends(child))

  def test_a_killed_worker_takes_its_children_along(self):
    pool = _pool(num_workers=1)
    child, failure = pool.run([("starts_a_child", 0), ("forever", 0)])
    self.assertEqual(failure.kind, "timeout")
    self.assertTrue(_ends(child))

  def test_nothing_is_left_when_the_run_is_killed(self):
    program = (
      "from tests.data.workers_test import _pool\n"
      "pool = _pool(num_workers=3, timeout=100.0)\n"
      "found = pool.run([('process', 0)] * 3 + [('starts_a_child', 0)],"
      " homes=[0, 1, 2, 0])\n"
      "print(*found, flush=True)\n"
      "pool.run([('forever', 0), ('closes_files_and_hangs', 0)],"
      " homes=[0, 1])\n")
    run = subprocess.Popen(
      [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True,
      env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    processes = run.stdout.readline().split()
    self.assertLen(processes, 4)
    self.assertTrue(_runs(processes[0]))
    time.sleep(0.2)  # The first one hangs by now, deaf to every signal.
    run.kill()
    run.wait()
    run.stdout.close()
    self.assertTrue(all(map(_ends, processes)))

  def test_signals_to_all_processes_cost_no_call(self):
    """Of a job that is to end; also to a worker that only just starts."""
    popen, started = subprocess.Popen, []

    def start(*args, **kwargs):
      started.append(popen(*args, **kwargs))
      for number in SIGNALS:
        started[-1].send_signal(number)
      return started[-1]

    pool = _pool(num_workers=1)
    with mock.patch.object(subprocess, "Popen", start):
      found = pool.run([("is_signaled", number) for number in SIGNALS])
    self.assertEqual(found, [int(number) for number in SIGNALS])
    self.assertLen(started, 1)
    self.assertIn(signal.SIGTERM, SIGNALS)
    self.assertFalse(set(SIGNALS) & signal.pthread_sigmask(
      signal.SIG_BLOCK, ()))

  def test_what_a_worker_starts_heeds_signals(self):
    self.assertEqual(
      _pool().run([("terminates_a_child", False), ("terminates_a_child", True)]),
      [-signal.SIGTERM] * 2)

  def test_starting_can_fail_in_every_way(self):
    for serve, arguments, kind in (
      (misbehavior.forever, (0,), "timeout"),
      (misbehavior.exits_hard, (4,), "exit"),
      (misbehavior.raises, (0,), "exception"),
    ):
      pool = WorkerPool(serve, arguments, Limits(), start_timeout=1.0)
      failure = pool.start()
      self.assertEqual(failure.kind, kind)
      found = pool.run([("fine", 0)] * 3)
      self.assertEqual([failure.kind for failure in found], [kind] * 3)

  def test_a_worker_imports_little(self):
    modules = _pool().run([("modules", 0)])[0].split()
    self.assertIn("rollplex_jax", modules)
    for heavy in ("jax", "transformers", "torch", "absl"):
      self.assertNotIn(heavy, modules)
    program = (
      "import sys\n"
      "from rollplex_jax.data import episode_workers, reward_workers\n"
      "print(*sys.modules)")
    result = subprocess.run(
      [sys.executable, "-c", program], capture_output=True, text=True,
      check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    for heavy in ("jax", "transformers", "torch", "minigrid"):
      self.assertNotIn(heavy, result.stdout.split())


if __name__ == "__main__":
  absltest.main()
