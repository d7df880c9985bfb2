"""What other people's code may do, for a worker to bear: see `handler`."""

import ctypes
import os
import signal
import subprocess
import sys
import time

import numpy as np

from rollplex_jax.data.environments import Observation, Step


def handler(scale):
  """Serves requests (behavior, argument): what the functions below do."""

  def handle(request):
    name, argument = request
    return globals()[name](argument) * scale

  return handle


def fine(value):
  return value


def slow(value):
  time.sleep(0.05)
  return value


def forever(_):
  """Can't be asked to stop: ignores signals and swallows every exception."""
  for number in range(1, signal.NSIG):
    try:
      signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
      pass
  while True:
    try:
      while True:
        pass
    except BaseException:
      pass


def raises(value):
  raise ValueError(f"bad\n{value}")


def interrupts(_):
  raise KeyboardInterrupt


def exits_hard(status):
  os._exit(status)


def exits(status):
  sys.exit(status)


def crashes(_):
  ctypes.string_at(0)


def allocates(gigabytes):
  return len(bytearray(int(gigabytes * (1 << 30)))) >> 30


def prints(value):
  print("garbage " * 10000)
  os.write(1, b"\0\xff" * 4096)
  os.write(2, b"\0\xff" * 4096)
  print(input, file=sys.stderr)
  return value


def reads_input(_):
  return len(sys.stdin.read())


def starts_a_child(_):
  """Returns the number of a process that would outlive it."""
  return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]
                          ).pid


def terminates_a_child(in_python):
  """Returns the status of a process that was asked to end."""
  if in_python:
    child = os.fork()
    if not child:
      time.sleep(600)
    time.sleep(0.1)
    os.kill(child, signal.SIGTERM)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
  child = subprocess.Popen(["sleep", "600"])
  child.terminate()
  return child.wait()


def is_signaled(number):
  """Gets a signal in the middle of a call, and sleeps on."""
  os.kill(os.getpid(), number)
  time.sleep(0.02)
  return int(number)


def forks_and_exits(_):
  """The fork holds all pipes open."""
  if os.fork():
    os._exit(7)
  time.sleep(600)


def closes_files(value):
  os.closerange(0, 256)
  return value


def closes_files_and_hangs(_):
  os.closerange(0, 256)
  forever(0)


def returns_what_does_not_pickle(_):
  class Mine:
    def __mul__(self, other):
      return self
  return Mine()


_seen = []


def place(value):
  """Which of this worker's calls of the kind it is, from 0."""
  _seen.append(value)
  return len(_seen) - 1


def process(_):
  return os.getpid()


def modules(_):
  return " ".join(sorted(name for name in sys.modules if "." not in name))


class World:
  """Shows how many steps were taken; some of its words, and seeds, are bad."""

  actions = ("on", "win", "forever", "raises", "exits_hard", "allocates",
             "nothing", "nan")

  broken = False

  def reset(self, seed):
    if self.broken:
      raises("broken before")
    if seed % 100 == 13:
      raises(seed)
    if seed % 100 == 14:
      return None
    self.seed, self.time = seed, 0
    return self._see()

  def step(self, action):
    self.time += 1
    if action == "nothing":
      return None
    if action == "nan":
      return Step(self._see(), float("nan"), False)
    if action not in ("on", "win"):
      self.broken = True
      globals()[action](2)
    won = action == "win"
    return Step(self._see(), float(won), won)

  def expert(self):
    return "win" if self.time == 1 else "on"

  def _see(self):
    frame = np.full((1, 4, 4, 3), 100 + self.time, np.uint8)
    return Observation(frame, f"seed {self.seed}")
