"""Makes a Hugging Face checkpoint of a run's checkpoint.

`python -m experiments.export --output_dir=RUN --output_path=FOLDER`

The run may be going on: its newest checkpoint is taken.
"""

from __future__ import annotations

from absl import flags

from experiments import common
from legolm_jax.safetensors_files import CheckpointFolder
from rollplex_jax import run_export

_RUN = flags.DEFINE_string("output_dir", None, "The run's folder.")
_STEP = flags.DEFINE_integer(
    "step", None, "Step of the checkpoint, by default the newest.",
    lower_bound=1)
_OUTPUT = flags.DEFINE_string(
    "output_path", None, "Folder to make, or a checkpoint to replace.")
_POLICY = flags.DEFINE_string(
    "policy_path", "", "Where the model that the run began with lies now, if "
    "it was moved.")


def main():
  """Runs the command."""
  run, output = common.required(_RUN), common.required(_OUTPUT)
  step = run_export.export(
      run, output, step=_STEP.value, policy_path=_POLICY.value)
  written = CheckpointFolder(output)
  print(f"step {step} of {run}: {len(written.tensors)} tensors, "
        f"{written.weight_bytes:,} bytes -> {output}")
  return {"step": step, "tensors": len(written.tensors),
          "bytes_out": written.weight_bytes}


if __name__ == "__main__":
  common.run(main)
