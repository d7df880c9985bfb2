"""Signals: what they ask for, and how a process ends in time."""

import os
import signal
import threading
import time

from absl.testing import absltest

from rollplex_jax.interrupts import Interrupts, Stopped


class InterruptsTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.left = []
    self.gone = threading.Event()

  def leave(self, message, status):
    self.left.append((message, status))
    self.gone.set()

  def listen(self, limit=30.0):
    return self.enterContext(Interrupts(limit, self.leave))

  def send(self, *numbers):
    for number in numbers:
      os.kill(os.getpid(), number)
      time.sleep(0.05)

  def test_handlers_are_what_they_were(self):
    before = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
    with Interrupts():
      self.assertNotEqual(signal.getsignal(signal.SIGTERM), before[0])
    self.assertEqual(
        before, [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)])

  def test_a_save_is_asked_for_once(self):
    interrupts = self.listen()
    self.assertFalse(interrupts.take_save())
    self.send(signal.SIGUSR1)
    self.assertTrue(interrupts.take_save())
    self.assertFalse(interrupts.take_save())
    self.assertIsNone(interrupts.stop)

  def test_a_run_that_reaches_the_end_of_its_step(self):
    interrupts = self.listen(limit=0.4)
    interrupts.watch(lambda _: self.fail("saves beside"))
    self.send(signal.SIGTERM, signal.SIGTERM)
    self.assertEqual(interrupts.stop, signal.SIGTERM)
    interrupts.reached()
    interrupts.__exit__()
    time.sleep(0.5)
    self.assertEmpty(self.left)
    self.assertEqual(Stopped("", interrupts.stop).status, 143)

  def test_a_step_that_takes_too_long(self):
    interrupts = self.listen(limit=1.2)
    saved = []
    interrupts.watch(lambda last: saved.append(last) or "in step 3")
    self.send(signal.SIGINT)
    start = time.monotonic()
    self.assertTrue(self.gone.wait(1.0))
    self.assertEqual(self.left, [("stopped by SIGINT in step 3", 130)])
    self.assertBetween(saved[0] - start, 0.3, 1.2)

  def test_a_save_that_hangs(self):
    interrupts = self.listen(limit=0.4)
    interrupts.watch(lambda _: time.sleep(5))
    self.send(signal.SIGTERM)
    self.assertTrue(self.gone.wait(1.0))
    self.assertEqual(self.left, [(
        "stopped by SIGTERM: saving did not end within 0.4 s; the last "
        "checkpoint counts", 143)])

  def test_a_second_interrupt_ends_at_once(self):
    self.listen()
    self.send(signal.SIGINT)
    self.assertEmpty(self.left)
    self.send(signal.SIGINT)
    self.assertEqual(
        self.left,
        [("stopped at once by SIGINT; the last checkpoint counts", 130)])


if __name__ == "__main__":
  absltest.main()
