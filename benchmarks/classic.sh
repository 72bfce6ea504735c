#!/usr/bin/env bash
# Trains each classic control recipe with seeds 1, 2 and 3, two runs at a time with one thread each, and writes
# benchmarks/results/classic.csv.  Usage: bash benchmarks/classic.sh [RECIPE ...]      (about 10 minutes on 2 cores)
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${BIN:-.venv/bin}
logs=$(mktemp -d)
recipes=("$@"); [ $# -gt 0 ] || recipes=(cartpole acrobot mountaincar)
export OMP_NUM_THREADS=1 bin logs
for recipe in "${recipes[@]}"; do for seed in 1 2 3; do echo "$recipe $seed"; done; done |
  xargs -P 2 -L 1 bash -c '"$bin"/ppo-lightning fit --config configs/classic/"$0".yaml --seed_everything "$1" \
    --trainer.enable_progress_bar false --trainer.logger false --trainer.default_root_dir "$logs" >"$logs/$0-$1.txt" 2>&1 || cat "$logs/$0-$1.txt"'
python3 - "$logs" <<'P'
import csv, pathlib, re, sys
rows = []
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.txt")):
    text, (recipe, seed) = path.read_text(), path.stem.split("-")
    number = lambda pattern: re.search(pattern, text).group(1)
    rows.append({
        "recipe": recipe, "seed": seed,
        "env_steps": number(r"for (\d+) environment steps"),
        "return_last_100": number(r"return over the last 100 episodes: (-?[\d.]+)"),
        "eval_return": number(r"deterministic: return (-?[\d.]+)"),
        "wall_seconds": number(r"wall time: ([\d.]+)"),
    })
with open("benchmarks/results/classic.csv", "w", newline="") as file:
    writer = csv.DictWriter(file, rows[0]); writer.writeheader(); writer.writerows(rows)
print(open("benchmarks/results/classic.csv").read())
P
