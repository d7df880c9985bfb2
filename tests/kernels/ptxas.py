"""What a kernel needs of a GPU that is not there.

Only tests marked `cuda_plugin` may call `compile_for_gpu`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
import re
import subprocess
import tempfile

import jax

from tests.helpers import gpu_program


@dataclasses.dataclass(frozen=True, kw_only=True)
class Needs:
  """Of one kernel.

  Attributes:
    registers: of a thread.
    spilled_bytes: of a thread's registers that are stored in memory.
    shared_bytes: of a block's shared memory, as the launch asks for it.
    static_bytes: of shared memory that the kernel itself declares.
    grid: blocks.
    threads: of a block.
    loop: instructions of one turn of the longest loop, by the shortest way; None
      where there is no disassembler.
  """

  registers: int
  spilled_bytes: int
  shared_bytes: int
  static_bytes: int
  grid: tuple[int, ...]
  threads: int
  loop: int | None


def ptxas() -> pathlib.Path | None:
  """NVIDIA's assembler, which comes with jax's CUDA plugin."""
  try:
    spec = importlib.util.find_spec("nvidia.cu13")
  except ModuleNotFoundError:
    return None
  for folder in spec.submodule_search_locations if spec else ():
    path = pathlib.Path(folder, "bin", "ptxas")
    if path.exists():
      return path
  return None


def nvdisasm() -> pathlib.Path | None:
  """NVIDIA's disassembler, which comes with Triton."""
  try:
    spec = importlib.util.find_spec("triton.backends.nvidia")
  except ModuleNotFoundError:
    return None
  for folder in spec.submodule_search_locations if spec else ():
    path = pathlib.Path(folder, "bin", "nvdisasm")
    if path.exists():
      return path
  return None


def can_compile() -> bool:
  """Whether `compile_for_gpu` works here."""
  return gpu_program.has_plugin() and ptxas() is not None


def compile_for_gpu(function, *args
                    ) -> tuple[dict[str, Needs], gpu_program.Program]:
  """Compiles a jitted function for an H100.

  Args:
    function: jitted.
    *args: abstract, with shardings.

  Returns:
    What each kernel needs, by its name, and the program.
  """
  with tempfile.TemporaryDirectory() as folder:
    program = gpu_program.compile_for_gpu(
        function, *args, options={"xla_dump_to": folder})
    return _needs(pathlib.Path(folder)), program


def _needs(folder: pathlib.Path) -> dict[str, Needs]:
  """Of the kernels that were dumped to a folder."""
  launches = "\n".join(
      path.read_text() for path in folder.glob("*.thunk_sequence.txt"))
  found = {}
  for path in sorted(folder.glob("*.ptx")):
    if not path.stat().st_size:
      continue
    binary = path.with_suffix(".cubin")
    text = subprocess.run(
        [ptxas(), "-v", "-arch=sm_90a", path, "-o", binary],
        check=True, capture_output=True, text=True).stderr
    code = subprocess.run(
        [nvdisasm(), "-c", binary], check=True, capture_output=True,
        text=True).stdout if nvdisasm() else None
    for part in text.split("Compiling entry function '")[1:]:
      name = part.split("'")[0]
      number = lambda what, text=part: int(re.search(what, text)[1])
      launch = re.search(
          rf" {re.escape(name)} .*grid: \[([\d, ]+)\] threads: \[(\d+).*"
          r"shared_memory: (\d+) bytes", launches)
      found[name] = Needs(
          registers=number(r"Used (\d+) registers"),
          spilled_bytes=number(r"(\d+) bytes spill stores"),
          shared_bytes=int(launch[3]), static_bytes=int(
              (re.search(r"(\d+) bytes smem", part) or (0, 0))[1]),
          threads=int(launch[2]), loop=code and _loop(code, name),
          grid=tuple(int(n) for n in launch[1].split(",")))
  return found


def _loop(code: str, name: str) -> int:
  """Fewest instructions around a kernel's longest loop; 0 without a loop."""
  instructions, labels = [], {}
  function = code.split(f".text.{name}:\n", 1)[1].split(".section", 1)[0]
  for line in function.splitlines():
    if label := re.match(r"\s*(\.L_\w+):", line):
      labels[label[1]] = len(instructions)
    elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
      instructions.append(instruction[1])
  targets = {}
  for i, text in enumerate(instructions):
    if branch := re.search(r"\bBRA\b.*`\((\.L_\w+)\)", text):
      targets[i] = labels[branch[1]]
  backward = [(i - to, to, i) for i, to in targets.items() if to < i]
  if not backward:
    return 0
  _, first, last = max(backward)
  fewest = {first: 1}
  for i in range(first, last):
    if i not in fewest:
      continue
    is_always = re.match(r"BRA `", instructions[i])
    for to in [targets.get(i)] + ([] if is_always else [i + 1]):
      if to is not None and i < to <= last:
        fewest[to] = min(fewest[i] + 1, fewest.get(to, 1 << 30))
  return fewest[last]


def shapes_on(tree, sharding) -> jax.ShapeDtypeStruct:
  """Abstract arrays like those of a tree."""
  return jax.tree.map(
      lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree)
