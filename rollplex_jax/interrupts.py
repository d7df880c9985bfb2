"""Signals that ask a run to end, or to save.

    with Interrupts(limit=30.0) as interrupts:
      Run(trainer, folder, interrupts=interrupts).train()

SIGTERM and SIGINT end a run after its step and with its state saved, SIGUSR1
only saves it. Python runs its own handlers between bytecodes, and a step may
spend minutes in one: two threads wait beside it. The first reads what the
interpreter writes into a socket the moment a signal comes. The second has the
state of the last finished step saved where the step doesn't end in time, and
ends the process at the limit whatever happens.
"""

from __future__ import annotations

from collections.abc import Callable
import os
import signal
import socket
import sys
import threading
import time
from typing import NoReturn

_ENDING = (signal.SIGTERM, signal.SIGINT)
_ALL = (*_ENDING, signal.SIGUSR1)
# Seconds of the limit that are left for the process's end.
_MARGIN = 3.0


class Stopped(Exception):
  """The run ended on a signal; its message is one line for the user.

  Attributes:
    status: the process's exit status, as shells count signals.
  """

  def __init__(self, message: str, number: int):
    super().__init__(message)
    self.status = 128 + number


def leave(message: str, status: int) -> NoReturn:
  """Prints a line and ends the process from any thread."""
  print(message, file=sys.stderr, flush=True)
  os._exit(status)


class Interrupts:
  """Listens while it is entered, in the main thread.

  Attributes:
    stop: the signal that asks the run to end, or None.
  """

  def __init__(self, limit: float = 30.0,
               leave: Callable[[str, int], NoReturn] = leave):
    """Listens to nothing yet.

    Args:
      limit: seconds from a signal to the end of the process.
      leave: prints a message and ends the process with a status.
    """
    self.stop: signal.Signals | None = None
    self._limit = limit
    self._leave = leave
    self._save_asked = False
    self._save: Callable[[float], str] = lambda _: ""
    self._grace = limit / 3
    self._claim = threading.Lock()
    self._reached = threading.Event()
    self._over = threading.Event()

  def watch(self, save: Callable[[float], str], grace: float | None = None,
            ) -> None:
    """What to do where a step takes too long.

    Args:
      save: saves the state of the last finished step until a moment of
        `time.monotonic`, from another thread; returns a line that says so.
      grace: seconds that the step may take to its end first.
    """
    self._save = save
    if grace is not None:
      self._grace = min(grace, self._limit)

  def take_save(self) -> bool:
    """Whether a save was asked for since the last call."""
    asked, self._save_asked = self._save_asked, False
    return asked

  def reached(self) -> None:
    """The run has seen that it is to stop, and will save and raise Stopped.

    Does not return where the other thread is already ending the process.
    """
    self._claim.acquire()
    self._reached.set()

  def __enter__(self) -> Interrupts:
    self._wake, self._socket = socket.socketpair()
    self._socket.setblocking(False)
    # The interpreter's part of a handler writes the number; ours does nothing.
    self._before = {s: signal.signal(s, lambda *_: None) for s in _ALL}
    self._before_fd = signal.set_wakeup_fd(
        self._socket.fileno(), warn_on_full_buffer=False)
    self._reader = threading.Thread(target=self._read, daemon=True)
    self._reader.start()
    return self

  def __exit__(self, *args) -> None:
    self._over.set()
    self._reached.set()
    signal.set_wakeup_fd(self._before_fd)
    for number, handler in self._before.items():
      signal.signal(number, handler)
    self._socket.close()
    self._reader.join()
    self._wake.close()

  def _read(self) -> None:
    while data := self._wake.recv(1):
      number = data[0]
      if number == signal.SIGUSR1:
        self._save_asked = True
      elif number in _ENDING and self.stop is None:
        self.stop = signal.Signals(number)
        threading.Thread(target=self._end_in_time, daemon=True).start()
      elif number == signal.SIGINT:
        self._leave("stopped at once by SIGINT; the last checkpoint counts",
                    128 + number)

  def _end_in_time(self) -> None:
    start = time.monotonic()
    status = 128 + self.stop
    last = start + max(self._limit - _MARGIN, self._limit / 2)
    threading.Thread(target=self._end_at, args=(last, status),
                     daemon=True).start()
    if self._reached.wait(min(self._grace, last - start)):
      return
    if self._claim.acquire(blocking=False):
      self._leave(f"stopped by {self.stop.name} {self._save(last)}", status)

  def _end_at(self, last: float, status: int) -> None:
    """The last resort: a save that hangs, a disk that doesn't answer."""
    if not self._over.wait(max(last - time.monotonic(), 0.0)):
      self._leave(f"stopped by {self.stop.name}: saving did not end within "
                  f"{self._limit:g} s; the last checkpoint counts", status)
