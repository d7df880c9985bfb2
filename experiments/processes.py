"""One run in several processes: how they find each other, and how they end.

Each process is told where the first one listens, how many there are and which
one it is; under SLURM, Open MPI or Kubernetes, and on Cloud TPUs,
`--distributed` finds that out. A process that fails tells the others why before
it ends, and they end too: none of them waits for ever in a collective.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from typing import NoReturn

from absl import flags
import jax
from jax._src import distributed as jax_distributed

from rollplex_jax.errors import InputError

_ADDRESS = flags.DEFINE_string(
    "coordinator_address", None, "host:port of the first process of a run in "
    "several processes.")
_COUNT = flags.DEFINE_integer(
    "num_processes", None, "How many there are.", lower_bound=1)
_ID = flags.DEFINE_integer(
    "process_id", None, "Which one this is, from 0.", lower_bound=0)
_AUTO = flags.DEFINE_bool(
    "distributed", False, "Take address, count and number from the launcher: "
    "SLURM, Open MPI, Kubernetes or Cloud TPU.")

# Seconds after which a process that no longer answers is given up.
_HEARTBEAT = 30
# Seconds for the reason of another process's failure to arrive.
_PATIENCE = 5.0
_FAILURE = "rollplex/failure"
_over = threading.Event()


def start() -> None:
  """Joins the run's other processes, if the flags say that there are any.

  Call it before anything runs on a device.

  Raises:
    InputError: naming the flag that is missing or wrong.
  """
  given = {"--coordinator_address": _ADDRESS.value,
           "--num_processes": _COUNT.value, "--process_id": _ID.value}
  missing = [name for name, value in given.items() if value is None]
  if _AUTO.value:
    if len(missing) < 3:
      raise InputError("--distributed: expected none of "
                       f"{', '.join(given)} beside it")
    _initialize()
  elif len(missing) < 3:
    if missing:
      raise InputError(f"{missing[0]} is not set: a run in several processes "
                       f"needs {', '.join(given)}")
    if _ID.value >= _COUNT.value:
      raise InputError(f"--process_id={_ID.value}: expected less than "
                       f"--num_processes={_COUNT.value}")
    _initialize(
        coordinator_address=_ADDRESS.value, num_processes=_COUNT.value,
        process_id=_ID.value)
  if several():
    watch = threading.Thread(target=_watch, daemon=True)
    watch.start()
    atexit.register(_stop, watch)


def _initialize(**where) -> None:
  try:
    jax.distributed.initialize(heartbeat_timeout_seconds=_HEARTBEAT, **where)
  except (RuntimeError, ValueError) as error:
    reason = str(error).splitlines()[0]
    raise InputError(f"the run's processes did not meet: {reason}") from error


def several() -> bool:
  """Whether this run has several processes."""
  return jax_distributed.global_state.client is not None and (
      jax_distributed.global_state.num_processes > 1)


def is_first() -> bool:
  """Whether this process speaks for the run."""
  return not several() or jax_distributed.global_state.process_id == 0


def end(error: BaseException | str, status: int = 1) -> NoReturn:
  """Ends this process of several, and tells the others why.

  What went wrong here may be the end of another process, which then has told
  the reason, or is about to.
  """
  state = jax_distributed.global_state
  reason = " ".join(str(error).split()) or type(error).__name__
  if isinstance(error, BaseException) and not isinstance(error, InputError):
    reason = f"{type(error).__name__}: {reason}"
    time.sleep(_PATIENCE)  # For the watch to find another's reason.
  try:
    state.client.key_value_set(
        _FAILURE, f"process {state.process_id}: {reason}")
  except Exception:  # Somebody else was first, or the coordinator is gone.
    pass
  print(f"error: process {state.process_id}: {reason}", file=sys.stderr,
        flush=True)
  if state.process_id == 0:
    time.sleep(_PATIENCE)  # The others read the reason from this process.
  # Others are in a collective, where a proper end would wait for them.
  os._exit(status)


def _watch() -> None:
  """Ends this process when another one has failed."""
  state = jax_distributed.global_state
  while not _over.wait(1.0):
    try:
      reason = state.client.key_value_try_get(_FAILURE)
    except Exception:  # There is none.
      continue
    if not reason.startswith(f"process {state.process_id}:"):
      print(f"error: {reason}", file=sys.stderr, flush=True)
      os._exit(1)
    return


def _stop(watch: threading.Thread) -> None:
  """Before the interpreter ends, which a thread in a call would not survive."""
  _over.set()
  watch.join()
