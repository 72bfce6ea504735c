#!/usr/bin/env bash
# One recipe for seven MuJoCo tasks: a study of 20 trials over all of them, 500 000 steps and seed 11 each.
# Usage: run.sh OUTPUT. The same command resumes the study; study.db in OUTPUT has what is done.
# The comparison that follows has seeds 12 to 16, also with 500 000 steps.
# Begun at commit 7d4b3143; trial 0 is today's recipe. `collect.py OUTPUT > runs.csv` prints what has finished.
# A trial takes 20 minutes of two idle cores at 2 GHz. A new machine begins again.
set -eu
output=$1
here=$(dirname "$0")
mkdir -p "$output/recipes"
recipes=()
for task in Humanoid Ant Walker2d Hopper Swimmer Pusher HalfCheetah; do # the longest runs first
  backend=gymnasium
  [ "$task" != Pusher ] || backend=envpool
  recipe=$output/recipes/${task,,}.yaml
  sed "s/^  env_id: .*/  env_id: $task-v4/; s/^  backend: .*/  backend: $backend/" \
    "$here/../../../configs/ppo/mujoco_best.yaml" > "$recipe"
  recipes+=("$recipe")
done
ppo-lightning tune --recipes "${recipes[@]}" --space "$here/space.yaml" --trials 20 --seeds 1 --first_seed 11 \
  --workers 2 --threads 1 --data.total_timesteps 500000 --output "$output"
