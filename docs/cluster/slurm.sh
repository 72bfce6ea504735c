#!/bin/bash
# Train on two machines with two ranks each, and resume after preemption, time limits and lost machines:
#   sbatch docs/cluster/slurm.sh --config configs/mujoco/halfcheetah_fast.yaml
#SBATCH --job-name=ppo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=4
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
# For GPUs, add: #SBATCH --gpus-per-node=2

srun --kill-on-bad-exit=1 ppo-lightning fit "$@" --auto_resume \
  --trainer.num_nodes "$SLURM_NNODES" --trainer.devices "$SLURM_NTASKS_PER_NODE" --trainer.strategy ddp
code=$?

case $code in
  0 | 2) ;;  # complete, or an invalid setting
  143) scontrol requeue "$SLURM_JOB_ID" ;;  # SIGTERM: the ranks wrote preempted.ckpt
  *) [ "${SLURM_RESTART_COUNT:-0}" -ge 3 ] || scontrol requeue "$SLURM_JOB_ID" ;;
esac
exit $code
