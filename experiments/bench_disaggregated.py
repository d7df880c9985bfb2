"""Rollplex against a rollout and a trainer apart, on a core each.

Virtual devices of one process share its cores, so that a pool which waits
costs nothing. Here are two processes, each pinned to one core and joined by
`jax.distributed`. Disaggregated, one holds the rollout and the other trains;
under rollplex both do everything, each with half of the prompts, and add their
gradients up.
"""

from __future__ import annotations

import multiprocessing
import os
import pathlib
import queue
import socket
import statistics
import tempfile
import threading
import time
import traceback
from typing import Any

import jax
from jax.experimental import multihost_utils
import numpy as np

from experiments.schedule_workload import (
  SCHEDULES,
  Steps,
  Workload,
  gradient_errors,
  make_models,
)
from rollplex_jax.errors import InputError
from rollplex_jax.models.config import ModelConfig
from rollplex_jax.placement.pools import Pools, sum_over_processes

_PROCESSES = 2
_NAMES = ("disaggregated_unshared", "disaggregated_shared", "rollplex")


def run(config: ModelConfig, workload: Workload, rounds: int,
        timeout: float = 3600.0) -> dict[str, Any]:
  """Runs the schedules in turn.

  Args:
    config: the model.
    workload: the step; `prompts` must divide by 2.
    rounds: measurements of each schedule.
    timeout: seconds after which the processes are ended.

  Returns:
    For each schedule, "seconds" (median), "all_seconds" and the errors of its
    gradient against that of whole sequences.

  Raises:
    InputError: with fewer than two cores.
    RuntimeError: if a process fails, with its reason.
  """
  cores = sorted(os.sched_getaffinity(0))[:_PROCESSES]
  if len(cores) < _PROCESSES:
    raise InputError("--suite=schedule: expected at least 2 cores for the "
                     "disaggregated schedules, found 1")
  if workload.prompts % _PROCESSES:
    raise ValueError(
        f"prompts must divide by {_PROCESSES}, found {workload.prompts}")
  context = multiprocessing.get_context("spawn")
  results = context.Queue()
  port = _free_port()
  with tempfile.TemporaryDirectory() as folder:
    logs = [pathlib.Path(folder, f"{rank}.log") for rank in range(_PROCESSES)]
    workers = [
        context.Process(target=_work, daemon=True, args=(
            rank, core, port, config, workload, rounds, results, str(log)))
        for rank, (core, log) in enumerate(zip(cores, logs))]
    for worker in workers:
      worker.start()
    try:
      found = _wait(workers, results, time.monotonic() + timeout, logs)
      for worker in workers:
        worker.join(30)
      return found
    finally:
      for worker in workers:
        worker.kill()
        worker.join()


def _wait(workers, results, deadline: float, logs) -> dict[str, Any]:
  while True:
    try:
      ok, value = results.get(timeout=1.0)
    except queue.Empty:
      if time.monotonic() > deadline:
        raise RuntimeError("the two processes took too long") from None
      for rank, worker in enumerate(workers):
        if worker.exitcode not in (None, 0):
          last = logs[rank].read_text().strip().splitlines()[-1:]
          raise RuntimeError(f"process {rank} ended with {worker.exitcode}: "
                             f"{' '.join(last)}") from None
      continue
    if not ok:
      raise RuntimeError(value)
    return value


def _free_port() -> int:
  with socket.socket() as s:
    s.bind(("localhost", 0))
    return s.getsockname()[1]


def _work(rank: int, core: int, port: int, config: ModelConfig,
          workload: Workload, rounds: int, results, log: str) -> None:
  """One process: takes part in every schedule; the first reports."""
  # What the runtime says goes to a file, its connection messages too.
  with open(log, "w") as file:
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
  threading.Thread(target=_end_with_parent, daemon=True).start()
  try:
    os.sched_setaffinity(0, {core})
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(
        f"localhost:{port}", num_processes=_PROCESSES, process_id=rank)
    found = _measure(rank, config, workload, rounds)
    if rank == 0:
      results.put((True, found))
    multihost_utils.sync_global_devices("done")
    jax.distributed.shutdown()
  except Exception:
    results.put((False, f"process {rank}: {traceback.format_exc()}"))
    raise


def _end_with_parent() -> None:
  """A bench that is killed leaves no process behind."""
  multiprocessing.parent_process().join()
  os._exit(1)


def _measure(rank, config, workload, rounds) -> dict[str, Any]:
  policy, reference = make_models(config)
  everything = Steps(config, workload, policy, reference)
  share = Steps(config, workload, policy, reference,
                rows=slice(rank, None, _PROCESSES))
  pools = Pools()

  def step(name, version):
    if name != "rollplex":
      return everything.run(SCHEDULES[name], version=version, pools=pools)
    done, grads = share.run(SCHEDULES[name], version=version)
    return done, jax.block_until_ready(sum_over_processes(grads))

  rows: dict[str, Any] = {name: {"all_seconds": []} for name in _NAMES}
  results, tokens = {}, {}
  for version in range(1 + rounds):  # The first compiles.
    for name in _NAMES:
      multihost_utils.sync_global_devices(f"{name} {version} starts")
      start = time.perf_counter()
      done, grads = step(name, version)
      multihost_utils.sync_global_devices(f"{name} {version} ends")
      if version:
        rows[name]["all_seconds"].append(time.perf_counter() - start)
      else:
        results[name], tokens[name] = grads, done.token_ids
  mine = tokens["disaggregated_unshared"][rank::_PROCESSES]
  if not np.array_equal(mine, tokens["rollplex"]):
    raise ValueError("the schedules sampled different tokens")
  for name, row in rows.items():
    row["seconds"] = statistics.median(row["all_seconds"])
    if rank == 0:
      row |= gradient_errors(results["disaggregated_unshared"], results[name])
  return rows
