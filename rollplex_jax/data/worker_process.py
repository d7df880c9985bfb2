"""A worker process as the run sees it: how it starts, is told, heard and ended.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
import contextlib
import fcntl
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from rollplex_jax.data.worker import HEADER, SIGNALS

_PIPE_BYTES = 1 << 20
_PROGRAM = (
  "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
  "from rollplex_jax.data.worker import main; main(*map(int, sys.argv[2:]))"
)
# The devices and the cores are the run's.
_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "",
                "OMP_NUM_THREADS": "1"}


class WorkerProcess:
  """A process and the pipes to it.

  Attributes:
    replies: file descriptor to select on.
    ready: it has started.
    waiting: calls that were sent and have no reply yet, oldest first.
    deadline: by when something has to come.
    unsent: whether some of a request waits for room in its pipe.
  """

  def __init__(
    self,
    serve: Callable,
    arguments: tuple,
    memory_gb: float,
    start_timeout: float,
  ):
    """Starts it.

    Args:
      serve, arguments, start_timeout: see `workers.WorkerPool`.
      memory_gb: see `workers.Limits`.

    Raises:
      OSError: the machine has no room for one.
    """
    theirs, self._requests = os.pipe()
    self.replies, answers = os.pipe()
    lifeline, self._lifeline = os.pipe()
    # When this process ends, the kernel may kill the worker, whose parent is
    # gone, before it closes the lifeline; then nobody would be left to read that,
    # and what the worker has started would live on. So this process keeps a
    # reader too, of a lower number: Linux lets go of a process's files from the
    # highest number down.
    self._reader = lifeline
    ends = (theirs, answers, lifeline)
    _enlarge(self.replies)
    lasts = threading.current_thread() is threading.main_thread()
    # The process inherits this and takes them once it can bear them.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
      # In a session of its own: it may be killed with all that it has started,
      # and a terminal's interrupt doesn't reach it.
      self._process = subprocess.Popen(
        [
          sys.executable, "-c", _PROGRAM, json.dumps(sys.path),
          *map(str, ends), str(int(lasts)),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=ends,
        start_new_session=True,
        env={**os.environ, **_ENVIRONMENT},
      )
    except OSError:
      self._close_pipes()
      raise
    finally:
      signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
      for descriptor in (theirs, answers):
        os.close(descriptor)
    os.set_blocking(self._requests, False)
    os.set_blocking(self.replies, False)
    self.ready = False
    self.waiting: collections.deque[int] = collections.deque()
    self.deadline = time.monotonic() + start_timeout
    self._inbox, self._outbox = bytearray(), bytearray()
    self.send((serve, arguments, int(memory_gb * (1 << 30))))
    self.flush()

  @property
  def unsent(self) -> bool:
    return bool(self._outbox)

  @property
  def requests(self) -> int:
    return self._requests

  def send(self, request: Any) -> None:
    """Makes a request ready for `flush`."""
    data = pickle.dumps(request, protocol=pickle.HIGHEST_PROTOCOL)
    self._outbox += HEADER.pack(len(data)) + data

  def flush(self) -> None:
    """Writes what there is room for."""
    try:
      while self._outbox:
        del self._outbox[: os.write(self._requests, self._outbox)]
    except BlockingIOError:
      pass
    except BrokenPipeError:
      self._outbox.clear()  # It has ended; the pipe of replies will tell.

  def receive(self) -> tuple[list[Any], bool]:
    """Replies that have come, and whether more may come."""
    is_open = True
    try:
      while data := os.read(self.replies, 1 << 20):
        self._inbox += data
      is_open = False
    except BlockingIOError:
      pass
    found, start = [], 0
    while len(self._inbox) - start >= HEADER.size:
      (size,) = HEADER.unpack_from(self._inbox, start)
      end = start + HEADER.size + size
      if len(self._inbox) < end:
        break
      found.append(pickle.loads(self._inbox[start + HEADER.size : end]))
      start = end
    del self._inbox[:start]
    return found, is_open

  def has_ended(self) -> bool:
    return self._process.poll() is not None

  def status(self) -> str:
    """How it ended, or that it goes on without its pipes."""
    try:
      status = self._process.wait(0.2)
    except subprocess.TimeoutExpired:
      return "closed the files of its process"
    if status >= 0:
      return f"ended its process with status {status}"
    try:
      return f"ended its process by {signal.Signals(-status).name}"
    except ValueError:
      return f"ended its process by signal {-status}"

  def end(self) -> None:
    """Kills it, and what it has started, and leaves nothing behind."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
      os.killpg(self._process.pid, signal.SIGKILL)
    self._process.wait()
    self._close_pipes()

  def _close_pipes(self) -> None:
    ours = (self._requests, self.replies, self._lifeline, self._reader)
    for descriptor in ours:
      os.close(descriptor)


def _enlarge(pipe: int) -> None:
  """Makes room for many frames, so that a worker need not wait to be heard."""
  if hasattr(fcntl, "F_SETPIPE_SZ"):
    with contextlib.suppress(OSError):  # A user's pipes have a limit.
      fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
