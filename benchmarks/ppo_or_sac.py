"""Print the returns of PPO, SAC and TD3 on HalfCheetah after 10 and 60 minutes of one core.

`python benchmarks/ppo_or_sac.py` reads the evaluations of `results/offpolicy/halfcheetah/evaluations.csv`
(seed 1, one thread, two runs at a time on a machine with two cores) and prints a table in Markdown.
Each figure is the last evaluation within the time. A slow environment is computed: it adds its duration to
each step. PPO, whose learning rate depends on the length of a run, is the longest run that is complete.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from ppo_lightning.experiments.report import read_csv

EVALUATIONS = Path(__file__).parent / "results/offpolicy/halfcheetah/evaluations.csv"
ALGORITHMS = ("PPO", "SAC", "TD3")
DELAYS = {"as it is": 0.0, "with 5 ms per step": 0.005}  # seconds
MINUTES = (10, 60)


def last_within(rows: Sequence[dict[str, str]], seconds: float, delay: float) -> str:
    """Return the last evaluation within a time, and its steps. Of several runs, only the last ones count."""
    runs: dict[int, list[dict[str, str]]] = {}
    for row in rows:
        runs.setdefault(int(row["total_timesteps"]), []).append(row)
    within = [
        (int(row["env_steps"]), float(row["eval_return"]))
        for run in runs.values()
        for row in (run if len(runs) == 1 else run[-1:])
        if float(row["seconds"]) + delay * int(row["env_steps"]) <= seconds
    ]
    steps, value = max(within)
    return f"{value:.1f} ({steps:,})".replace(",", " ")


def main(args: Sequence[str] | None = None) -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args(args)
    rows = read_csv(EVALUATIONS)
    print(f"| HalfCheetah-v4 | minutes | {' | '.join(ALGORITHMS)} |")
    print("|---|---|---|---|---|")
    for environment, delay in DELAYS.items():
        for minutes in MINUTES:
            figures = [
                last_within([row for row in rows if row["algorithm"] == name], 60 * minutes, delay)
                for name in ALGORITHMS
            ]
            print(f"| {environment} | {minutes} | {' | '.join(figures)} |")


if __name__ == "__main__":
    main()
