#!/bin/bash
# Train on the first machine with simulators on the others: sbatch docs/cluster/ray.sh --config RECIPE.yaml
#SBATCH --job-name=ppo-ray
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --time=24:00:00

export RAY_ADDRESS=$(hostname):6379
ray start --head --port 6379 --num-cpus 0 --disable-usage-stats
srun --nodes $((SLURM_NNODES - 1)) --ntasks $((SLURM_NNODES - 1)) --exclude "$(hostname)" \
  ray start --address "$RAY_ADDRESS" --num-cpus "$SLURM_CPUS_PER_TASK" --block &
ppo-lightning fit "$@" --data.worker_backend ray
