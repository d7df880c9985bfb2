"""Programs compiled for GPUs that are not there, and what they say.

jax's CUDA plugin compiles for a described device; the scheduled program is text
that a test can read. Only tests marked `cuda_plugin` may call these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import dataclasses
import functools
import itertools
import math
import re

import jax
import numpy as np

from rollplex_jax.capacity import deviceless
from rollplex_jax.capacity.devices import device_of

_INSTRUCTION = re.compile(r"(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)")
_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.\-]+) .*\{$")
# What makes no array, and what leaves that to another computation.
_HANDS_ON = ("parameter", "get-tuple-element", "tuple", "bitcast")
_CALLS = ("while", "conditional", "call", "call-start", "call-done")


def has_plugin() -> bool:
  """Whether programs can be compiled for GPUs here."""
  return deviceless.has_plugin()


def h100_mesh(shape: Sequence[int],
              axes: Sequence[str]) -> jax.sharding.Mesh:
  """A mesh of H100s in one host, none of which exists."""
  found = deviceless.devices(device_of("h100"), math.prod(shape))
  return jax.sharding.Mesh(np.array(found).reshape(shape), axes)


def compile_for_gpu(function, *args, options=None, **kwargs) -> Program:
  """Compiles a jitted function for the devices of its arguments' shardings.

  `options` are of the compiler, beside what is needed here.
  """
  lowered = deviceless.lower(function, args, kwargs, "cuda")
  with deviceless.no_persistent_cache():
    # Autotuning would run kernels.
    compiled = lowered.compile(
        compiler_options={"xla_gpu_autotune_level": 0} | (options or {}))
  return Program(compiled.as_text())


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line of a program: `type` is its result's, `rest` all that follows."""

  name: str
  type: str
  op: str
  rest: str

  @functools.cached_property
  def operands(self) -> list[str]:
    """Names of the instructions that it reads."""
    depths = itertools.accumulate(
        {"(": 1, ")": -1}.get(sign, 0) for sign in self.rest)
    inside = itertools.takewhile(lambda pair: pair[1] >= 0,
                                 zip(self.rest, depths))
    return re.findall(r"%([\w.\-]+)", "".join(sign for sign, _ in inside))

  @property
  def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
    """Element type and dimensions of each result."""
    return [(kind, tuple(int(n) for n in dims.split(",")) if dims else ())
            for kind, dims in re.findall(r"(\w+)\[([\d,]*)\]", self.type)]

  def attribute(self, name: str) -> str | None:
    """The value of `name=`, without quotes or sign."""
    found = re.search(rf'\b{name}="?%?([\w.\-]+)', self.rest)
    return found and found.group(1)


class Program:
  """A compiled program.

  Attributes:
    computations: instructions of each computation, in order, by name.
    entry: those of the computation that starts.
    outputs: element type and dimensions of each result.
    donated: the same of those results that are written into an argument.
  """

  def __init__(self, text: str):
    self.computations: dict[str, list[Instruction]] = {}
    self.entry = lines = None
    self.outputs = []
    for line in text.splitlines():
      header = None if line.startswith(" ") else _COMPUTATION.match(line)
      if header:
        lines = self.computations[header.group(1)] = []
        if line.startswith("ENTRY"):
          self.entry = lines
      elif line.startswith("}"):
        lines = None
      elif lines is not None:
        found = _INSTRUCTION.match(line.strip())
        if found:
          lines.append(Instruction(*found.groups()))
          if lines is self.entry and line.startswith("  ROOT"):
            self.outputs = lines[-1].shapes
    aliases = re.search(r"input_output_alias=\{ (.*?\)) \}", text)
    found = re.findall(r"\{(\d*)\}: \(", aliases[1]) if aliases else ()
    self.donated = [self.outputs[int(i or 0)] for i in found]

  def loop_bodies(self) -> list[list[Instruction]]:
    """The bodies of all while loops, in the program's order."""
    return [self.computations[i.attribute("body")]
            for lines in self.computations.values() for i in lines
            if i.op == "while"]

  def with_calls(self, lines: list[Instruction]) -> Iterator[Instruction]:
    """Instructions of a computation and of those that it calls."""
    for line in lines:
      yield line
      called = []
      if line.op in ("call", "call-start"):
        called = [line.attribute("to_apply")]
      elif line.op == "conditional":
        branches = re.search(r"branch_computations=\{(.*?)\}", line.rest)
        called = re.findall(r"%([\w.\-]+)", branches[1]) if branches else [
            line.attribute(f"{case}_computation") for case in ("true", "false")]
      for name in called:
        yield from self.with_calls(self.computations[name])

  def kernels(self, lines: list[Instruction]) -> list[str]:
    """Names of the Pallas kernels that a computation and its calls run."""
    return [
        re.search(r'\bname = "(\w+)"', line.rest)[1]
        for line in self.with_calls(lines) if line.op == "custom-call"
        and line.rest.endswith("}") and "xla.gpu.triton" in line.rest]

  def stream_calls(self, lines: list[Instruction]) -> list[Instruction]:
    """Starts and ends of the calls on streams that compute, in order.

    Since jax 0.12 each element of a call's result passes through one more call,
    which does nothing.
    """
    found = {}
    for line in lines:
      if line.op == "call-start":
        inside = self.computations[line.attribute("to_apply")]
        if not all(i.op in _HANDS_ON for i in inside):
          found[line.name] = line
      elif line.op == "call-done" and line.operands[0] in found:
        found[line.name] = line
    return list(found.values())

  def copies(self, lines: list[Instruction],
             sizes: set[tuple[str, int]]) -> list[Instruction]:
    """What makes an array of one of the sizes (type, elements) anew.

    Updates in place are told by their names, which XLA gives after the roots
    of fusions; what calls hand on was made inside of them.
    """
    return [
        line for line in self.with_calls(lines)
        if line.op not in _HANDS_ON + _CALLS and "dynamic_update_slice" not in line.name
        and any((kind, math.prod(dims)) in sizes
                for kind, dims in line.shapes)]


def users(lines: list[Instruction], name: str) -> list[Instruction]:
  """What computes with an instruction's result, seen through bitcasts."""
  found = []
  for line in lines:
    if name in line.operands and line.op != "tuple":
      found += users(lines, line.name) if line.op == "bitcast" else [line]
  return found
