"""Gathers finished runs: `python benchmarks/collect.py FOLDER NAME`, with a FOLDER/RECIPE-SEED/log.txt for each run."""

import csv
import re
import sys
from pathlib import Path


def number(pattern: str, text: str) -> str:
    """Returns the number that the pattern captures in what a run printed."""
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"No {pattern!r} in the log.")
    return match.group(1)


def write(path: Path, rows: list[dict[str, str]]) -> None:
    """Writes rows with one header line."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main(folder: Path, name: str) -> None:
    """Writes NAME.csv, a row a run, and NAME_curves.csv, a row a rollout in which an episode ended."""
    runs, curves = [], []
    for log in sorted(folder.glob("*/log.txt")):
        text = log.read_text()
        if "wall time:" not in text:
            print(f"not finished, left out: {log.parent.name}")
            continue
        recipe, seed = log.parent.name.rsplit("-", 1)
        runs.append(
            {
                "recipe": recipe,
                "seed": seed,
                "env_steps": number(r"for (\d+) environment steps", text),
                "return_last_100": number(r"return over the last \d+ episodes: (-?[\d.]+)", text),
                "eval_return": number(r"deterministic: return (-?[\d.]+)", text),
                "wall_seconds": number(r"wall time: ([\d.]+)", text),
            }
        )
        for path in log.parent.rglob("metrics.csv"):
            for row in csv.DictReader(path.open()):
                if row.get("charts/episodic_return"):
                    steps, returned = row["step"], f"{float(row['charts/episodic_return']):.2f}"
                    seconds = f"{int(steps) / float(row['charts/SPS']):.1f}"  # SPS counts from the start of the run
                    point = {"recipe": recipe, "seed": seed, "env_steps": steps, "seconds": seconds}
                    curves.append(point | {"episodic_return": returned})
    results = Path(__file__).parent / "results"
    write(results / f"{name}.csv", runs)
    write(results / f"{name}_curves.csv", curves)
    print((results / f"{name}.csv").read_text())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
