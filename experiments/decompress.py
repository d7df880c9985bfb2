"""Makes an ordinary checkpoint of a compressed one.

`python -m experiments.decompress --model_path=... --output_path=...`
"""

from __future__ import annotations

import time

from absl import flags

from experiments import common
from legolm_jax import checkpoint_writer
from legolm_jax.safetensors_files import CheckpointFolder

_MODEL = flags.DEFINE_string("model_path", None, "Compressed checkpoint.")
_OUTPUT = flags.DEFINE_string(
    "output_path", None, "Folder to make; empty or not there yet.")


def main():
  """Runs the command."""
  start = time.perf_counter()
  model, output = common.required(_MODEL), common.required(_OUTPUT)
  checkpoint_writer.decompress(
      model, output, threads=common.cores(),
      progress=common.progress("decompressing"))
  written = CheckpointFolder(output)
  seconds = time.perf_counter() - start
  print(f"{len(written.tensors)} tensors, {written.weight_bytes:,} bytes in "
        f"{seconds:.1f} s -> {output}")
  return {"tensors": len(written.tensors), "bytes_out": written.weight_bytes,
          "seconds": seconds}


if __name__ == "__main__":
  common.run(main)
