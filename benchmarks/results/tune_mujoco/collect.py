"""Print runs.csv of a study: a row for each finished run. Usage: collect.py OUTPUT > runs.csv."""

import csv
import json
import sys
from pathlib import Path

from ppo_lightning.experiments.runner import metrics_of
from ppo_lightning.experiments.tune import read_space

RETURN = "charts/avg_episodic_return"

_, targets = read_space(Path(__file__).with_name("space.yaml"))
bounds = {env_id.partition("-")[0].lower(): bound for env_id, bound in targets.items()}
writer = csv.writer(sys.stdout, lineterminator="\n")
writer.writerow(["trial", "task", "seed", "env_steps", "episodic_return", "score", "flags"])
files = Path(sys.argv[1]).glob("trials/*/runs/*/job.json")
for file in sorted(files, key=lambda file: (int(file.parts[-4]), file)):
    job = json.loads(file.read_text())
    if not job.get("finished"):
        continue
    rows = list(metrics_of(file.parent))
    result = [float(row[RETURN]) for row in rows if row.get(RETURN)][-1]
    task, _, seed = file.parent.name.partition("-")
    low, high = bounds[task]
    score = (result - low) / (high - low)
    cells = [file.parts[-4], task, seed, rows[-1]["step"], f"{result:.2f}", f"{score:.3f}"]
    writer.writerow([*cells, job["settings"]["flags"]])
