"""A worker process: other people's code, away from the run that needs it.

It is started by `workers.WorkerPool`, reads requests from one pipe and writes a
reply to each, in order, to another. What it imports is light: no jax.
"""

from __future__ import annotations

from collections.abc import Callable
import ctypes
import fcntl
import os
import pickle
import resource
import signal
import struct
import sys
import threading
from typing import Any

from rollplex_jax.data.functions import (
  NotFiniteError,
  WrongTypeError,
  describe,
)
from rollplex_jax.errors import InputError

HEADER = struct.Struct("<Q")
# What a job's end or a terminal sends to every process: the run answers for all.
SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# Linux's; Python has no names for them.
_F_SETSIG = 10
_PR_SET_PDEATHSIG = 1
_LONGEST_REASON = 500

Handle = Callable[[Any], Any]


class WorkError(Exception):
  """A request that failed, of one `kind`; the message is one line."""

  def __init__(self, kind: str, reason: str):
    super().__init__(reason)
    self.kind = kind


def answer(handle: Handle, request: Any) -> tuple[str, Any]:
  """("ok", what `handle` returns), or (kind, why it failed)."""
  try:
    return "ok", handle(request)
  except WorkError as error:
    kind, reason = error.kind, str(error)
  except MemoryError as error:
    kind, reason = "memory", f"used more memory than it may ({describe(error)})"
  except SystemExit as error:
    kind, reason = "exit", f"called sys.exit({error.code!r:.60})"
  except WrongTypeError as error:
    kind, reason = "wrong_type", str(error)
  except NotFiniteError as error:
    kind, reason = "not_finite", str(error)
  except InputError as error:
    kind, reason = "exception", " ".join(str(error).split())
  except BaseException as error:
    kind, reason = "exception", f"raised {_describe(error)}{_place(error)}"
  return kind, reason[:_LONGEST_REASON]


def _describe(error: BaseException) -> str:
  try:
    return describe(error)
  except Exception:  # An error may even fail to say what it is.
    return type(error).__name__


def _place(error: BaseException) -> str:
  """Where it was raised: " (file.py:12)"."""
  trace = error.__traceback__
  while trace is not None and trace.tb_next is not None:
    trace = trace.tb_next
  if trace is None:
    return ""
  name = os.path.basename(trace.tb_frame.f_code.co_filename)
  return f" ({name}:{trace.tb_lineno})"


def main(requests: int, replies: int, lifeline: int, lasts: int) -> None:
  """Serves until the pipe of requests is closed.

  Args:
    requests: file descriptor to read from. The first message is (serve,
      arguments, bytes of memory): `serve(*arguments)` gives the function that
      answers all that follow, None excepted.
    replies: file descriptor to write to.
    lifeline: its other end closes when the parent ends, however that is.
    lasts: 1 if the thread that started this process lives as long as its own
      process, else 0.
  """
  _bear_signals()
  for descriptor in (requests, replies, lifeline):
    os.set_inheritable(descriptor, False)  # Programs it starts don't hold them.
  _end_with_parent(lifeline, bool(lasts))
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  reader = os.fdopen(requests, "rb", closefd=False)
  serve, arguments, memory = _receive(reader)
  if memory:
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
  handle: Handle | None = None

  def start(_):
    nonlocal handle
    handle = serve(*arguments)

  _send(replies, answer(start, None))
  while handle is not None:
    request = _receive(reader)
    # None only asks whether it has started.
    reply = ("ok", None) if request is None else answer(handle, request)
    _send(replies, reply)


def _receive(reader) -> Any:
  header = reader.read(HEADER.size)
  if len(header) < HEADER.size:
    os._exit(0)  # The parent has no more to ask.
  return pickle.loads(reader.read(*HEADER.unpack(header)))


def _send(replies: int, reply: tuple[str, Any]) -> None:
  try:
    data = pickle.dumps(reply, protocol=pickle.HIGHEST_PROTOCOL)
  except Exception as error:
    reason = f"returned what can't be sent: {_describe(error)}"
    data = pickle.dumps(("exception", reason[:_LONGEST_REASON]))
  view = memoryview(HEADER.pack(len(data)) + data)
  while view:
    view = view[os.write(replies, view):]


def _bear_signals() -> None:
  """Has `SIGNALS`, which are blocked so far, do nothing to this process.

  A handler that does nothing, for what is ignored stays so in the programs that
  this process starts: it could not end them.
  """
  for number in SIGNALS:
    signal.signal(number, lambda *_: None)
    signal.siginterrupt(number, False)
  os.register_at_fork(after_in_child=_heed_signals)
  signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _heed_signals() -> None:
  for number in SIGNALS:
    signal.signal(number, signal.SIG_DFL)


def _end_with_parent(lifeline: int, lasts: bool) -> None:
  """Has this process and all it started killed when the parent ends.

  On Linux the kernel does that, whatever the code that runs here is up to: when
  the lifeline closes and, should that code have closed its own end, when the
  thread that started this process has gone, if it `lasts`.
  """
  if sys.platform != "linux":
    threading.Thread(target=_watch, args=(lifeline,), daemon=True).start()
    return
  if lasts:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
  fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
  fcntl.fcntl(lifeline, _F_SETSIG, signal.SIGKILL)
  fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
  try:
    closed = not os.read(lifeline, 1)
  except BlockingIOError:
    closed = False
  if closed:  # Before the kernel was asked to watch.
    os._exit(0)


def _watch(lifeline: int) -> None:
  os.read(lifeline, 1)
  os.killpg(0, signal.SIGKILL)
