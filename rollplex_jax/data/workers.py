"""A pool of worker processes with limits that hold whatever runs in them.

Workers are programs of their own (no fork: the parent has threads). A call that
takes too long costs its worker, which is killed with all that it started and
replaced; so does one that ends the process. What a call uses in memory is
bounded by the kernel. Every call gets a reply: a value or a `Failure`.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
import dataclasses
import os
import selectors
import threading
import time
from typing import Any
import weakref

from rollplex_jax.data.functions import describe
from rollplex_jax.data.worker import answer
from rollplex_jax.data.worker_process import WorkerProcess

_MAX_WORKERS = 4
_FAILED_STARTS = 3
_SLICE = 0.1  # Seconds after which a worker that is silent is looked at.
_PENDING = object()


@dataclasses.dataclass(frozen=True)
class Limits:
  """What calls may take.

  Attributes:
    num_workers: processes; 0 runs calls in this one, which nothing guards.
    timeout: seconds of one call.
    memory_gb: memory that a worker may allocate, in GiB; 0 for no limit.
    max_timeouts: after so many timeouts in one `run`, the calls that are left
      are not made; 0 for never.
  """

  num_workers: int = 2
  timeout: float = 10.0
  memory_gb: float = 1.0
  max_timeouts: int = 8


@dataclasses.dataclass(frozen=True)
class Failure:
  """A call without a value.

  Attributes:
    kind: "timeout", "exit", "memory", "exception", "skipped", or what the
      function that serves calls has named it.
    reason: one line.
  """

  kind: str
  reason: str


def default_num_workers() -> int:
  """One per core that this process may use, and few."""
  if hasattr(os, "sched_getaffinity"):
    cores = len(os.sched_getaffinity(0))
  else:
    cores = os.cpu_count() or 1
  return min(cores, _MAX_WORKERS)


class WorkerPool:
  """Workers that all serve the same calls. Any thread may use it."""

  def __init__(
    self,
    serve: Callable,
    arguments: Sequence[Any],
    limits: Limits,
    *,
    start_timeout: float = 120.0,
  ):
    """Nothing is started yet.

    Args:
      serve: a module's function, light to import: serve(*arguments) is called
        in each worker and returns the function that answers calls.
      arguments: whatever pickles.
      limits: of calls.
      start_timeout: seconds that a worker may take to start, for what is to be
        run may have much to import.
    """
    self.limits = limits
    self.start_timeout = start_timeout
    self.serving = (serve, tuple(arguments))
    self.workers: list[WorkerProcess | None] = [None] * limits.num_workers
    self._local: Callable | None = None
    self._lock = threading.Lock()
    weakref.finalize(self, _end_all, self.workers)

  def close(self) -> None:
    """Ends all workers. Without it they end with the pool or the process."""
    with self._lock:
      _end_all(self.workers)

  def start(self) -> Failure | None:
    """Starts a worker, if none runs, and says why that failed if it did."""
    with self._lock:
      if not self.limits.num_workers:
        return self._start_here()
      (started,) = _Run(self, [None], None, failed_starts=1).results()
      return started

  def run(
    self,
    calls: Sequence[Any],
    *,
    homes: Sequence[int] | None = None,
    timeouts: int = 0,
  ) -> list[Any]:
    """Makes N calls.

    Args:
      calls: whatever pickles.
      homes: N numbers; calls of one number go to one worker, in order, so that
        it may keep what the next one needs. A worker that was replaced has
        forgotten. None lets any worker take any call.
      timeouts: that there were before, for `limits.max_timeouts`.

    Returns:
      For each call, in order, its value or a `Failure`.
    """
    with self._lock:
      if not self.limits.num_workers:
        failure = self._start_here()
        if failure is not None:
          return [failure] * len(calls)
        return [_value(answer(self._local, call)) for call in calls]
      return _Run(self, calls, homes, timeouts=timeouts).results()

  def _start_here(self) -> Failure | None:
    def start(_):
      serve, arguments = self.serving
      self._local = serve(*arguments)

    return None if self._local else _value(answer(start, None))


class _Run:
  """The calls of one `WorkerPool.run`, on their way."""

  def __init__(
    self, pool, calls, homes, *, failed_starts=_FAILED_STARTS, timeouts=0
  ):
    self._pool, self._limits = pool, pool.limits
    self._workers: list[WorkerProcess | None] = pool.workers
    self._calls = calls
    self._found: list[Any] = [_PENDING] * len(calls)
    self._left = len(calls)
    self._starts_left = failed_starts
    self._timeouts = timeouts
    # One queue for all workers, or one for each.
    shared = collections.deque(range(len(calls)) if homes is None else ())
    self._queues = [shared] * len(self._workers)
    if homes is not None:
      self._queues = [collections.deque() for _ in self._workers]
      for i, home in enumerate(homes):
        self._queues[home % len(self._queues)].append(i)
    # With one more on the way a worker need not wait for this process.
    self._depth = 2 if homes is None else len(calls)

  def results(self) -> list[Any]:
    self._skip_after_timeouts()
    try:
      while self._left:
        self._hand_out()
        self._attend()
    finally:
      # After an interrupt nobody waits for what they would still say.
      for i, worker in enumerate(self._workers):
        if worker is not None and (worker.waiting or not worker.ready):
          self._end(i)
    return self._found

  def _hand_out(self) -> None:
    for depth in range(self._depth):
      for i, queue in enumerate(self._queues):
        worker = self._workers[i]
        if not queue or (worker and len(worker.waiting) > depth):
          continue
        if worker is None or (not worker.waiting and worker.has_ended()):
          self._end(i)
          worker = self._start(i)
          if worker is None:
            continue
        if worker.ready and not worker.waiting:
          worker.deadline = time.monotonic() + self._limits.timeout
        call = queue.popleft()
        worker.waiting.append(call)
        worker.send(self._calls[call])
      if not any(self._queues):
        break
    for worker in self._workers:
      if worker is not None and worker.unsent:
        worker.flush()

  def _start(self, i: int) -> WorkerProcess | None:
    """A new worker, or None if the machine has no room for one just now."""
    try:
      self._workers[i] = WorkerProcess(
        *self._pool.serving, self._limits.memory_gb, self._pool.start_timeout
      )
    except OSError as error:
      time.sleep(_SLICE)
      self._note_failed_start(
        Failure("exit", f"could not be started: {describe(error)}")
      )
    return self._workers[i]

  def _note_failed_start(self, failure: Failure) -> None:
    self._starts_left -= 1
    if self._starts_left <= 0:
      self._drop(failure)

  def _attend(self) -> None:
    """Waits for replies or a deadline, and deals with either."""
    busy = {i: w for i, w in enumerate(self._workers) if w and w.waiting}
    with selectors.DefaultSelector() as selector:
      for worker in busy.values():
        selector.register(worker.replies, selectors.EVENT_READ)
        if worker.unsent:
          selector.register(worker.requests, selectors.EVENT_WRITE)
      first = min((w.deadline for w in busy.values()), default=0.0)
      selector.select(min(max(first - time.monotonic(), 0.0), _SLICE))
    for i, worker in busy.items():
      worker.flush()
      late = time.monotonic() >= worker.deadline
      ended = worker.has_ended()
      try:
        replies, is_open = worker.receive()
      except Exception as error:  # What it has written is no reply.
        self._fail(i, Failure("exit", f"broke its pipe ({error!r:.100})"))
        continue
      if replies:
        if not self._take(i, replies):
          continue
      if ended or not is_open:
        self._fail(i, Failure("exit", worker.status()))
      elif late and not replies:
        self._fail(i, self._timeout(worker))

  def _take(self, i: int, replies: list[Any]) -> bool:
    """Notes replies. Returns whether the worker has calls left to answer."""
    worker = self._workers[i]
    for reply in replies:
      if not worker.ready:
        if reply[0] != "ok":
          self._fail(i, _value(reply))
          return False
        worker.ready = True
      elif worker.waiting:
        self._note(worker.waiting.popleft(), _value(reply))
    worker.deadline = time.monotonic() + self._limits.timeout
    return bool(worker.waiting)

  def _timeout(self, worker: WorkerProcess) -> Failure:
    if not worker.ready:
      return Failure("timeout", "took more than "
                     f"{self._pool.start_timeout:g} s to start")
    self._timeouts += 1
    return Failure("timeout", f"took more than {self._limits.timeout:g} s")

  def _fail(self, i: int, failure: Failure) -> None:
    """Replaces a worker; the call that it was at has failed."""
    worker = self._workers[i]
    again = list(worker.waiting)
    if worker.ready:
      self._note(again.pop(0), failure)
    self._queues[i].extendleft(reversed(again))
    self._end(i)
    if not worker.ready:
      self._note_failed_start(failure)
    self._skip_after_timeouts()

  def _skip_after_timeouts(self) -> None:
    if self._timeouts >= self._limits.max_timeouts > 0:
      self._drop(
        Failure("skipped", f"was not called, after {self._timeouts} timeouts")
      )

  def _drop(self, failure: Failure) -> None:
    for queue in self._queues:
      while queue:
        self._note(queue.popleft(), failure)

  def _note(self, call: int, value: Any) -> None:
    self._found[call] = value
    self._left -= 1

  def _end(self, i: int) -> None:
    if self._workers[i] is not None:
      self._workers[i].end()
      self._workers[i] = None


def _value(reply: tuple[str, Any]) -> Any:
  kind, value = reply
  return value if kind == "ok" else Failure(kind, value)


def _end_all(workers: list[WorkerProcess | None]) -> None:
  for i, worker in enumerate(workers):
    if worker is not None:
      worker.end()
      workers[i] = None
