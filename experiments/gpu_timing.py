"""Device time of compiled programs, on a GPU and, roughly, elsewhere.

jax exposes no CUDA events. Its profiler records, through CUPTI, when each kernel
began and ended on the device, and names the program that it belongs to: so one
session times many programs, and what the host does between two launches doesn't
count. Before it is trusted, it has to agree with a host clock around a loop of
large copies, where launches cost nothing. If it doesn't, or records nothing, all
times come from such loops: many runs in one program, which a host clock times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import concurrent.futures
import dataclasses
import itertools
import pathlib
import re
import statistics
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp

# Two of the largest level-2 caches of today's GPUs: arguments that together
# have as many bytes are no longer there when their turn comes again.
CACHE_BYTES = 128 << 20
_CALLS = 20
_COPY_BYTES = 1 << 30
# Of the device's time over the host's, for a copy of that size.
_AGREES = (0.7, 1.1)
# Compiler options where nothing is measured.
HURRY = {"xla_backend_optimization_level": 0}
_NUMBERS = itertools.count()


@dataclasses.dataclass(frozen=True)
class Timing:
  """How long a run of a program takes.

  Attributes:
    seconds: of a run, the median; of the device's kernels and copies, without
      what lies between them, or by a host clock (see `method`).
    lowest, highest: the range.
    kernels: names of what ran, of the first run; empty for a host clock.
    method: "trace" or "host".
  """

  seconds: float
  lowest: float
  highest: float
  kernels: tuple[str, ...]
  method: str


class Program:
  """A compiled function and sets of arguments that take turns.

  Attributes:
    compiled: the function.
    module: the compiler's name for it, which no other program has.
    sets: of arguments, on the device.
  """

  def __init__(self, function: Callable, sets: Sequence[tuple], *,
               options: dict[str, Any] | None = None):
    """Compiles; `options` are the compiler's, for a GPU."""
    self._function, self.sets = function, sets
    if jax.default_backend() != "gpu":
      options = HURRY

    def timed(*args):
      return function(*args)

    timed.__name__ = f"timed_{next(_NUMBERS)}"
    self.compiled = jax.jit(timed).lower(*sets[0]).compile(options)
    self.module = re.match(r"HloModule ([\w.\-]+)",
                           self.compiled.as_text())[1]

  def run(self, calls: int):
    """Runs it and waits; the last run's result."""
    out = None
    for i in range(calls):
      out = self.compiled(*self.sets[i % len(self.sets)])
    return jax.block_until_ready(out)

  def loop(self, rounds: int) -> Callable:
    """A compiled function that runs all sets in turn, `rounds` times."""
    out = jax.eval_shape(self._function, *self.sets[0])

    @jax.jit
    def run(sets):
      def body(_, last):
        for args in sets:
          last = self._function(*_after(last, args))
        return last
      zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), out)
      return jax.lax.fori_loop(0, rounds, body, zeros)

    return run.lower(self.sets).compile()


def _after(last, args):
  """Arguments that depend on a result, as they are in number.

  Else runs would not depend on one another, nor on the round, and the compiler
  would do but one of them: it leaves barriers out through which nothing is read.
  """
  leaves, tree = jax.tree.flatten(args)
  number = jax.tree.leaves(last)[0].ravel()[0].astype(jnp.float32)
  i = next(i for i, leaf in enumerate(leaves)
           if jnp.issubdtype(leaf.dtype, jnp.floating))
  leaves[i] += (0 * number).astype(leaves[i].dtype)  # NaN would stay.
  return tree.unflatten(leaves)


def compile_all(makers: Sequence[Callable[[], Any]], threads: int = 8
                ) -> list[Any]:
  """Calls all at once: the compiler leaves Python's lock alone.

  Returns:
    What each returned, or the exception that it raised.
  """

  def attempt(make):
    try:
      return make()
    except Exception as error:  # Of a compiler: any.
      return error

  with concurrent.futures.ThreadPoolExecutor(threads) as pool:
    return list(pool.map(attempt, makers))


def num_sets(nbytes: int, most: int = 16) -> int:
  """How many sets of so many bytes don't fit into a cache."""
  return max(1, min(most, -(-CACHE_BYTES // max(1, nbytes))))


class Timer:
  """Times programs by the best method that works here.

  Attributes:
    method: "trace" or "host".
    reason: why, in a few words.
    copy_bandwidth: bytes per second of a large copy, read and written.
  """

  def __init__(self, is_gpu: bool):
    size = _COPY_BYTES if is_gpu else 1 << 20
    self._calls = _CALLS if is_gpu else 1
    x = jax.random.normal(jax.random.key(0), (size // 4,))
    self._copy = Program(lambda x: x + 1, [(x,)])
    self._copy.run(1)
    # A program of its own: calls are counted by program.
    self._warm = Program(lambda x: x - 1, [(x,)])
    self._warm.run(1)
    by_host = self._by_host(self._copy)
    found = by_host
    if not is_gpu:
      self.method, self.reason = "host", "not a GPU"
    else:
      self.method, self.reason = "trace", "the profiler's record of the device"
      try:
        found, = self._by_trace([self._copy])
        if found.method != "trace":
          raise ValueError("the profiler recorded no kernel")
        ratio = found.seconds / by_host.seconds
        if not _AGREES[0] <= ratio <= _AGREES[1]:
          raise ValueError(f"the profiler says {ratio:.2f} of a host clock")
      except Exception as error:  # Of CUPTI: any.
        self.method, found = "host", by_host
        self.reason = f"no profile: {' '.join(str(error).split())[:200]}"
    self.copy_bandwidth = 2 * size / found.seconds

  def measure(self, programs: Sequence[Program]) -> list[Timing]:
    """Times programs, all in one session where the profiler works."""
    for program in programs:
      program.run(1)
    if self.method == "host":
      return [self._by_host(program) for program in programs]
    return self._by_trace(programs)

  def _by_trace(self, programs) -> list[Timing]:
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level, options.host_tracer_level = 0, 1
    with tempfile.TemporaryDirectory() as folder:
      with jax.profiler.trace(folder, profiler_options=options):
        self._warm.run(10)  # Out of an idle clock rate.
        for program in programs:
          program.run(self._calls)
      data = b"".join(path.read_bytes() for path in
                      pathlib.Path(folder).rglob("*.xplane.pb"))
    found = device_events(data)
    return [timing_of(found.get(program.module, []), self._calls)
            or self._by_host(program) for program in programs]

  def _by_host(self, program: Program) -> Timing:
    if self._calls == 1:  # Not a GPU: no loop, a run takes long anyhow.
      run, runs = program.run, 1
    else:
      rounds = max(1, 2 * self._calls // len(program.sets))
      loop, runs = program.loop(rounds), rounds * len(program.sets)
      run = lambda _: jax.block_until_ready(loop(program.sets))
    run(1)
    found = []
    for _ in range(3 if self._calls > 1 else 1):
      start = time.perf_counter()
      run(1)
      found.append((time.perf_counter() - start) / runs)
    return Timing(statistics.median(found), min(found), max(found), (), "host")


def device_events(data: bytes) -> dict[str, list[tuple[float, float, str]]]:
  """What ran on GPUs, by program.

  Args:
    data: a serialized XSpace, as the profiler writes it.

  Returns:
    By the name of the program's module (start, duration) in seconds and a name
    of each kernel and copy, in order.
  """
  found: dict[str, list] = {}
  for plane in jax.profiler.ProfileData.from_serialized_xspace(data).planes:
    if not plane.name.startswith("/device:GPU"):
      continue
    for line in plane.lines:
      # Others repeat the same by operation and by module.
      if not line.name.startswith("Stream"):
        continue
      for event in line.events:
        module = dict(event.stats).get("hlo_module")
        if module is not None:
          found.setdefault(str(module), []).append(
              (event.start_ns / 1e9, event.duration_ns / 1e9, event.name))
  return {module: sorted(events) for module, events in found.items()}


def timing_of(events: Sequence[tuple[float, float, str]], calls: int
              ) -> Timing | None:
  """Of what `calls` runs left; None if that is nothing.

  If it can't be told which run each belongs to, median and range are the mean.
  """
  if not events:
    return None
  each, rest = divmod(len(events), calls)
  if rest:
    mean = sum(duration for _, duration, _ in events) / calls
    return Timing(mean, mean, mean, (), "trace")
  runs = [sum(duration for _, duration, _ in events[i:i + each])
          for i in range(0, len(events), each)]
  return Timing(statistics.median(runs), min(runs), max(runs),
                tuple(name for _, _, name in events[:each]), "trace")
