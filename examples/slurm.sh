#!/usr/bin/env bash
# Train on several nodes of GPUs under Slurm: sbatch examples/slurm.sh [OPTION OF fivefold train…]
# README.md beside this file explains each line. Not yet run on GPUs.
#SBATCH --job-name=fivefold
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=01:00:00
#SBATCH --requeue
#SBATCH --output=%x-%j.log
set -euo pipefail

layout=${LAYOUT:-dp2,cp2,pp2,tp2,ep4}
device=${DEVICE:-cuda}
folder=${FOLDER:-$SLURM_SUBMIT_DIR/checkpoints}
ranks=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-8}}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

resume=
if compgen -G "$folder/step-*" >/dev/null; then
  resume=--resume
fi

srun torchrun \
  --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$ranks" \
  --rdzv-backend c10d --rdzv-endpoint "$first:${PORT:-29500}" --rdzv-id "$SLURM_JOB_ID" \
  -m fivefold.cli train --device "$device" --layout "$layout" --checkpoint "$folder" $resume "$@"
