#!/usr/bin/env bash
# Trains recipes with seeds 1, 2 and 3, two runs at a time with one thread each, and writes benchmarks/results/NAME.csv
# (a row a run) and NAME_curves.csv (mean return of the episodes of each rollout).
# Usage: bash benchmarks/runs.sh NAME [RUN ...]     each RUN is "LABEL RECIPE.yaml SEED [OPTION ...]"
#        without RUN, those in benchmarks/NAME.txt
set -euo pipefail
cd "$(dirname "$0")/.."
name=$1; shift
bin=$(realpath "${BIN:-.venv/bin}") logs=${LOGS:-$(mktemp -d)} root=$PWD
export OMP_NUM_THREADS=1 bin logs root
if [ $# -gt 0 ]; then printf '%s\n' "$@"; else grep -v '^#' "benchmarks/$name.txt"; fi |
  xargs -P 2 -L 1 bash -c 'label=$0 recipe=$1 seed=$2; shift 2; folder="$logs/$label-$seed"
    [ ! -e "$folder/done" ] || exit 0
    mkdir -p "$folder" && cd "$folder" && PYTHONPATH=$root "$bin"/python -W ignore -m ppo_lightning fit --config "$root/$recipe" \
    --seed_everything "$seed" --trainer.enable_progress_bar false "$@" >log.txt 2>&1 && touch done || cat log.txt'
"$bin"/python benchmarks/collect.py "$logs" "$name"
