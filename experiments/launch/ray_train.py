"""The same run on a Ray cluster, by Ray Train's `JaxTrainer`.

    python -m experiments.launch.ray_train --num_workers=4 --gpus_per_worker=8 \\
      -- --config=experiments/configs/grpo.py --output_dir=/shared/run ...

What stands after `--` are the flags of `experiments.train`. Ray starts a process
per worker and joins them by `jax.distributed`; then each runs the command.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
import sys

from absl import flags


def train_worker(config: dict) -> None:
  """Runs `experiments.train` in a worker of Ray.

  Args:
    config: "argv", the command's flags.
  """
  # A worker is a new process: the command's flags are defined here.
  from experiments import train

  flags.FLAGS(["train", *config["argv"]])
  train.main()


def main(argv: Sequence[str]) -> None:
  """Starts the workers and waits for them."""
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
  parser.add_argument("--num_workers", type=int, required=True,
                      help="Processes, one for each host.")
  kind = parser.add_mutually_exclusive_group(required=True)
  kind.add_argument("--gpus_per_worker", type=int, help="GPUs of each.")
  kind.add_argument("--tpu_topology", help='TPU slice, such as "4x4".')
  parser.add_argument("--accelerator_type", help='Such as "TPU-V6E".')
  parser.add_argument("train", nargs=argparse.REMAINDER,
                      help="-- and the flags of experiments.train.")
  args = parser.parse_args(argv)
  command = [arg for i, arg in enumerate(args.train) if i or arg != "--"]
  if not command:
    parser.error("expected the flags of experiments.train after --")
  try:
    from ray.train import ScalingConfig
    from ray.train.v2.jax import JaxTrainer
  except ImportError:
    parser.error("Ray Train is not installed: pip install 'ray[train]'")
  if args.tpu_topology:
    devices = dict(use_tpu=True, topology=args.tpu_topology)
  else:
    devices = dict(use_gpu=True,
                   resources_per_worker={"GPU": args.gpus_per_worker})
  JaxTrainer(
      train_worker, train_loop_config={"argv": command},
      scaling_config=ScalingConfig(
          num_workers=args.num_workers, accelerator_type=args.accelerator_type,
          **devices)).fit()


if __name__ == "__main__":
  main(sys.argv[1:])
