#!/usr/bin/env bash
# Third stage of the candidates: 32 quantiles against no change, seeds 21 to 30 of seven MuJoCo tasks.
#
# Decided before the first run: 140 runs, both sides of a seed on one machine, the stratified permutation test of
# tables.py, one look after the last run. p < 0.05 makes the critic an option, otherwise the answer is no.
# Usage, at commit c985f8b8: run.sh OUTPUT [SEED ...]. A stopped series continues.
# runs.csv has all 70 pairs. The machine changed between pairs, also within seeds 28 and 29, never within one.
set -u
output=$1
shift
[ $# -gt 0 ] || set -- $(seq 21 30)
quantiles="--model benchmarks.candidates.DistributionalPPO --model.agent benchmarks.candidates.QuantileAgent"
for seed; do
  while read -r task recipe env_id; do
    for change in base quantiles; do
      flags=""
      [ "$change" = base ] || flags=$quantiles
      # shellcheck disable=SC2086
      ppo-lightning benchmark --recipes "configs/ppo/${recipe}_best.yaml" ${env_id:+--env_ids $env_id} \
        --seeds "$seed" $flags --output "$output/$change/$task/$seed" < /dev/null
    done
  done <<'TASKS'
halfcheetah halfcheetah
hopper hopper
walker2d hopper Walker2d-v4
ant ant
humanoid mujoco
swimmer swimmer
pusher pusher
TASKS
done
