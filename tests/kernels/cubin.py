"""What Triton's compiler makes of a kernel for a GPU that is not there.

Only tests marked `triton` may call these.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import re
import subprocess
import tempfile

from pallas_kernels.codebook_matmul import triton_call

_TYPES = {
    "bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32", "uint8": "*u8",
    "uint16": "*u16", "uint32": "*u32",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cubin:
  """Of one kernel.

  Attributes:
    registers: of a thread.
    spilled_bytes: of a thread's registers that are stored in memory.
    shared_bytes: of a block's shared memory.
    loops: instructions of every loop without those of loops inside of it, by
      name; the longest first.
  """

  registers: int
  spilled_bytes: int
  shared_bytes: int
  loops: tuple[collections.Counter[str], ...]


def compile_for_h100(launch: triton_call.Launch) -> Cubin:
  """Compiles a launch's kernel as jax_triton does."""
  import triton
  from triton.backends.compiler import GPUTarget
  from triton.compiler import ASTSource

  kernel = triton_call.kernel_of(launch)
  arrays = (*launch.operands, *launch.results)
  signature = dict(zip(kernel.arg_names,
                       (_TYPES[str(array.dtype)] for array in arrays)))
  source = ASTSource(
      kernel, signature | dict.fromkeys(launch.constants, "constexpr"),
      constexprs=launch.constants,
      attrs={(i,): [["tt.divisibility", 16]] for i in range(len(arrays))})
  with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
    triton.knobs.cache.dir = folder
    compiled = triton.compile(
        source, target=GPUTarget("cuda", 90, 32),
        options=dict(num_warps=launch.num_warps, num_stages=1,
                     enable_fp_fusion=True))
    path = pathlib.Path(folder, "kernel.cubin")
    path.write_bytes(compiled.asm["cubin"])
    tools = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin"
    run = lambda *args: subprocess.run(
        args, check=True, capture_output=True, text=True).stdout
    usage = run(tools / "cuobjdump", "-res-usage", path)
    code = run(tools / "nvdisasm", "-c", path)
  number = lambda what: int(re.search(rf"{what}:(\d+)", usage)[1])
  return Cubin(
      registers=number("REG"), spilled_bytes=number("STACK") + number("LOCAL"),
      shared_bytes=number("SHARED") + compiled.metadata.shared,
      loops=_loops(code))


def _loops(code: str) -> tuple[collections.Counter[str], ...]:
  """From nvdisasm's lines: labels, and instructions after their addresses."""
  labels, instructions = {}, []
  for line in code.splitlines():
    label = re.match(r"\s*(\.L_x_\d+):", line)
    instruction = re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line)
    if label:
      labels[label[1]] = len(instructions)
    elif instruction:
      instructions.append(instruction[1])
  found = []
  for end, text in enumerate(instructions):
    target = re.search(r"BRA.*?(\.L_x_\d+)", text)
    start = target and labels[target[1]]
    # A branch to itself ends every kernel.
    if target and start < end:
      found.append(range(start, end + 1))
  counts = []
  for loop in found:
    inner = set().union(*(
        other for other in found if set(other) < set(loop)))
    names = (re.sub(r"^@!?U?P\d+\s+", "", instructions[i]).split()[0]
             for i in loop if i not in inner)
    counts.append(collections.Counter(name.split(".")[0] for name in names))
  return tuple(sorted(counts, key=lambda count: -count.total()))
