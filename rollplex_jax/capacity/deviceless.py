"""Programs compiled for accelerators that are not there, and what they say.

jax's CUDA plugin compiles for a described topology without a GPU. Of the
compiled program the planner reads the bytes that a device needs and the
collectives; nothing of it can run here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import importlib.util
import os
import re
import time

import jax
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding
import numpy as np

from rollplex_jax.capacity.devices import DeviceSpec

PIP_COMMAND = "pip install '.[planner]'"

_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.\-]+) .*\{$")
_COLLECTIVE = re.compile(
    r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|"
    r"collective-permute)(-start)?\(")
_CALLED = re.compile(
    r"(?:to_apply|calls|body|true_computation|false_computation)=%?([\w.\-]+)")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64}


def has_plugin(kind: str = "cuda") -> bool:
  """Whether programs can be compiled here for a kind of accelerator."""
  return kind == "cuda" and all(
      importlib.util.find_spec(name)
      for name in ("jax_cuda13_plugin", "jax_plugins.xla_cuda13"))


def devices(spec: DeviceSpec, count: int) -> Sequence[jax.Device]:
  """`count` devices in hosts of `spec.devices_per_host`, none of which exists.
  """
  # The plugin looks for libraries that only running would need.
  os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
  local = min(count, spec.devices_per_host)
  return topologies.get_topology_desc(
      "", spec.kind, topology=f"1x{count // local}x{local}",
      target_config=spec.compiler_text).devices


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
  """Collectives of one kind in one place of a program.

  Attributes:
    kind: "all-reduce" and so on.
    bytes: of the results on a device, once through.
    count: of them.
    group: devices that take part in each.
    far: whether those are of several hosts.
    loop: number of the loop without a known end that holds them, in the
      program's order, or None.
  """

  kind: str
  bytes: int
  count: int
  group: int
  far: bool
  loop: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
  """What a compiled program needs. Bytes are those of a device.

  Attributes:
    argument_bytes, output_bytes, temp_bytes: of these.
    alias_bytes: of outputs that are written into donated arguments.
    collectives: see `Collective`.
    seconds: of tracing and compiling.
  """

  argument_bytes: int
  output_bytes: int
  temp_bytes: int
  alias_bytes: int
  collectives: tuple[Collective, ...]
  seconds: float

  @property
  def added_bytes(self) -> int:
    """Beside the arguments, at the end: outputs in memory of their own."""
    return self.output_bytes - self.alias_bytes


def compile_program(function, args, kwargs, spec: DeviceSpec, *,
                    keep_text: str | None = None) -> Compiled:
  """Compiles a jitted function for the devices of its arguments' shardings.

  Args:
    function: jitted.
    args: abstract, with shardings.
    kwargs: the same.
    spec: of the devices.
    keep_text: a file for the compiled program, or None.
  """
  start = time.perf_counter()
  lowered = lower(function, args, kwargs, spec.kind)
  with no_persistent_cache():
    compiled = _compile(lowered)
  memory, text = compiled.memory_analysis(), compiled.as_text()
  if keep_text:
    with open(keep_text, "w") as file:
      file.write(text)
  return Compiled(
      argument_bytes=memory.argument_size_in_bytes,
      output_bytes=memory.output_size_in_bytes,
      temp_bytes=memory.temp_size_in_bytes,
      alias_bytes=memory.alias_size_in_bytes,
      collectives=tuple(collectives(text, spec.devices_per_host)),
      seconds=time.perf_counter() - start)


def lower(function, args, kwargs, platform: str):
  """Lowers a jitted function for the devices of its arguments' shardings."""
  meshes = {a.sharding.mesh for a in jax.tree.leaves((args, kwargs))
            if isinstance(getattr(a, "sharding", None), NamedSharding)}
  # Since jax 0.12 a kernel asks the mesh in use which device it is for.
  with (jax.sharding.use_abstract_mesh(meshes.pop().abstract_mesh) if meshes
        else contextlib.nullcontext()):
    return function.trace(*args, **kwargs).lower(
        lowering_platforms=(platform,))


def _compile(lowered):
  # Autotuning would run kernels.
  options = {"xla_gpu_autotune_level": 0}
  try:
    return lowered.compile(compiler_options=options)
  except jax.errors.JaxRuntimeError:
    # Untuned, the generator of matrix products knows no tiles for some small
    # and odd shapes. A library's products need as little memory.
    return lowered.compile(
        compiler_options=options | {"xla_gpu_enable_triton_gemm": False})


@contextlib.contextmanager
def no_persistent_cache():
  """Programs for absent devices can be written to the cache, but not read."""
  before = jax.config.jax_enable_compilation_cache
  jax.config.update("jax_enable_compilation_cache", False)
  compilation_cache.reset_cache()
  try:
    yield
  finally:
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()


def collectives(text: str, devices_per_host: int) -> list[Collective]:
  """The collectives of a compiled program, added up by kind and place.

  What stands in a loop of known length counts as often as it turns.
  """
  computations, entry = _computations(text)
  found: dict[tuple, list[int]] = {}
  loops = iter(range(1 << 20))

  def visit(name: str, times: int, loop: int | None) -> None:
    for line in computations.get(name, ()):
      match = _COLLECTIVE.search(line)
      if match:
        group, far = _group(line, devices_per_host)
        if group > 1:
          sums = found.setdefault((match[2], group, far, loop), [0, 0])
          sums[0] += times * _result_bytes(
              match[1], match[2], bool(match[3]), group)
          sums[1] += times
      inside, often = loop, times
      if " while(" in line:
        trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
        if trips:
          often = times * int(trips[1])
        elif loop is None:
          inside = next(loops)
      for called in _callees(line):
        visit(called, often, inside)

  visit(entry, 1, None)
  return [Collective(kind=kind, bytes=sums[0], count=sums[1], group=group,
                     far=far, loop=loop)
          for (kind, group, far, loop), sums in found.items()]


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
  computations, entry, lines = {}, "", None
  for line in text.splitlines():
    header = None if line.startswith(" ") else _COMPUTATION.match(line)
    if header:
      lines = computations[header[1]] = []
      if line.startswith("ENTRY"):
        entry = header[1]
    elif line.startswith("}"):
      lines = None
    elif lines is not None:
      lines.append(line)
  return computations, entry


def _callees(line: str) -> Iterator[str]:
  if " fusion(" in line or " reduce(" in line:
    return
  for match in _CALLED.finditer(line):
    # Starts of collectives call the sum that they compute.
    if not _COLLECTIVE.search(line):
      yield match[1]
  branches = re.search(r"branch_computations=\{(.*?)\}", line)
  if branches:
    yield from re.findall(r"%?([\w.\-]+)", branches[1])


def _result_bytes(kind_text: str, kind: str, started: bool,
                  group: int) -> int:
  """Bytes of a collective's results."""
  sizes = []
  for dtype, dims in _ARRAY.findall(kind_text):
    digits = re.search(r"\d+", dtype)
    bits = _BITS.get(dtype) or int(digits[0] if digits else 8)
    count = int(np.prod([int(n) for n in dims.split(",") if n], dtype=np.int64))
    sizes.append(count * bits // 8)
  total = sum(sizes)
  if not started:
    return total
  # Of these a start's type is (operands, results), which differ by the group.
  return {"all-gather": total * group // (group + 1),
          "reduce-scatter": total // (group + 1),
          "collective-permute": total // 2}.get(kind, total)


def _group(line: str, devices_per_host: int) -> tuple[int, bool]:
  """How many devices take part, and whether they span hosts."""
  iota = re.search(
      r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
  mesh = re.search(
      r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?)\))? ?\{(.*?)\}",
      line)
  if iota:
    shape = [int(n) for n in iota[1].split(",")]
    groups = _numbers(iota[2], iota[3]).reshape(shape)
  elif mesh:
    groups = _mesh_groups(mesh[1], mesh[3])
    order = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", mesh[2] or "")
    if order:
      groups = _numbers(order[1], order[2])[groups]
    elif mesh[2]:
      return 1, False
  else:
    plain = re.search(
        r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}", line)
    if not plain:
      return 1, False
    groups = [[int(n) for n in inner.split(",")]
              for inner in re.findall(r"\{([\d,]+)\}", plain[1])]
  hosts = [{int(n) // devices_per_host for n in group} for group in groups]
  return max(len(g) for g in groups), any(len(h) > 1 for h in hosts)


def _numbers(dims: str, transposed: str | None) -> np.ndarray:
  """Numbers of devices in an order such as [4,8]T(1,0), in one row."""
  ints = lambda s: [int(n) for n in s.split(",")]
  numbers = np.arange(np.prod(ints(dims))).reshape(ints(dims))
  if transposed:
    numbers = numbers.transpose(ints(transposed))
  return numbers.reshape(-1)


def _mesh_groups(mesh: str, axes: str) -> np.ndarray:
  """Groups along some axes, or parts 'axis':(before)size, of a mesh."""
  sizes = {name: [int(n)] for name, n in re.findall(r"'(\w+)'=(\d+)", mesh)}
  picked = []
  for name, before, size in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", axes):
    index = 0
    if before:
      whole, before, size = sizes[name][0], int(before), int(size)
      sizes[name], index = [before, size, whole // before // size], 1
    picked.append((name, index))
  dims, chosen, rest = [], [], []
  for name, parts in sizes.items():
    for i, part in enumerate(parts):
      (chosen if (name, i) in picked else rest).append(len(dims))
      dims.append(part)
  numbers = np.arange(np.prod(dims)).reshape(dims).transpose(rest + chosen)
  return numbers.reshape(-1, int(np.prod([dims[i] for i in chosen])))
