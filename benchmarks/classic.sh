#!/usr/bin/env bash
# Trains each classic control recipe with seeds 1, 2 and 3, two runs at a time with one thread each, and writes
# benchmarks/results/classic.csv (a row a run) and classic_curves.csv (mean return of the episodes of each rollout).
# Usage: bash benchmarks/classic.sh [RECIPE ...]      (5 minutes on 2 cores)
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$(realpath "${BIN:-.venv/bin}") logs=$(mktemp -d) root=$PWD
recipes=("$@"); [ $# -gt 0 ] || recipes=(cartpole acrobot mountaincar)
export OMP_NUM_THREADS=1 bin logs root
for recipe in "${recipes[@]}"; do for seed in 1 2 3; do echo "$recipe $seed"; done; done |
  xargs -P 2 -L 1 bash -c 'mkdir "$logs/$0-$1" && cd "$logs/$0-$1" && "$bin"/ppo-lightning fit \
    --config "$root/configs/classic/$0.yaml" --seed_everything "$1" --trainer.enable_progress_bar false >log.txt 2>&1 || cat log.txt'
"$bin"/python benchmarks/collect.py "$logs" classic
