#!/usr/bin/env bash
# Trains what benchmarks/NAME.txt lists, two runs at a time with one thread each, and writes benchmarks/results/NAME.csv
# (a row a run) and NAME_curves.csv (mean return of the episodes of each rollout).
# Usage: bash benchmarks/runs.sh NAME       NAME: classic (5 minutes on 2 cores), mujoco (2 hours), dm_control, rpo, fast, atari
# A line of NAME.txt is: LABEL RECIPE.yaml SEED [OPTION ...]. With LOGS=FOLDER, an interrupted series goes on where it was.
set -euo pipefail
cd "$(dirname "$0")/.."
name=$1
bin=$(realpath "${BIN:-.venv/bin}") logs=${LOGS:-$(mktemp -d)} root=$PWD
export OMP_NUM_THREADS=1 bin logs root
grep -v '^#' "benchmarks/$name.txt" |
  xargs -P 2 -L 1 bash -c 'label=$0 recipe=$1 seed=$2; shift 2; folder="$logs/$label-$seed"
    [ ! -e "$folder/done" ] || exit 0
    rm -rf "$folder"; mkdir -p "$folder" && cd "$folder" && PYTHONPATH=$root "$bin"/python -W ignore -m ppo_lightning fit --config "$root/$recipe" \
    --seed_everything "$seed" --trainer.enable_progress_bar false "$@" >log.txt 2>&1 && touch done || cat log.txt'
"$bin"/python benchmarks/collect.py "$logs" "$name"
