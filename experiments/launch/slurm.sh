#!/bin/bash
# One process per node with all of its GPUs:
#
#   sbatch --nodes=4 experiments/launch/slurm.sh \
#     --config=experiments/configs/grpo.py --config.policy.path=CHECKPOINT ... \
#     --config.mesh.data=4 --config.mesh.training_tp=8 --output_dir=/shared/run
#
# The output folder, checkpoint and rows must be on a file system that all nodes
# see. The job ends as soon as one of its processes does.
#SBATCH --job-name=rollplex
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
set -euo pipefail

if [[ $# -eq 0 ]]; then
  echo "usage: sbatch --nodes=N $0 --config=FILE --output_dir=DIR ..." >&2
  exit 1
fi
srun --kill-on-bad-exit=1 --unbuffered \
  "${PYTHON:-python}" -m experiments.train --distributed "$@"
