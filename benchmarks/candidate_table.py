"""Compare published changes to PPO with the same recipes without them.

`python benchmarks/candidate_table.py` reads `benchmarks/results/candidates/GROUP/CHANGE/*/runs.csv` and
prints a table in Markdown. It needs the extra `report`. `GROUP/base` has the runs without a change: the
recipe on the same machine, or the settings from which a change was published. Other recipes without a change
are in `benchmarks/results/best`.

p is that of a one-sided permutation test: the probability of a difference at least as large if the change
does not gain.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ppo_lightning.commands.compare import p_worse, probability_of_improvement, read_runs
from ppo_lightning.commands.report import interval
from ppo_lightning.utils.rounding import decimals

RESULTS = Path(__file__).parent / "results"
CHANGES = {
    "best/spo": "SPO's loss",
    "best/adam_rel": "Adam-Rel",
    "best/coloured": "coloured noise (beta 0.5)",
    "best/fresh_advantages": "fresh advantages in each epoch",
    "best/reuse": "reuse of the last rollout",
}


def returns_of(pattern: str, key: str) -> dict[str, list[float]]:
    """Return the values of a column by environment, from files in the folder of results."""
    files = sorted(RESULTS.glob(pattern))
    return {env: [*runs.values()] for file in files for env, runs in read_runs(file, key, "env_id").items()}


def row(name: str, env_id: str, before: list[float], after: list[float]) -> str:
    """Return a row of the table, for the runs without and with a change."""
    spec = decimals(float(np.mean(before)))
    low, high = interval(after, before)
    figures = [f"{np.mean(runs):{spec}} ± {np.std(runs, ddof=1):{spec}}" for runs in (before, after)]
    difference = f"{np.mean(after) - np.mean(before):+{spec}} [{low:+{spec}}, {high:+{spec}}]"
    better = probability_of_improvement(before, after)
    p = p_worse(after, before)  # of runs without the change, if those with it are the standard
    return f"| {name} | {env_id} | {' | '.join(figures)} | {difference} | {better:.2f} | {p:.3f} |"


def main(args: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--key", default="episodic_return", help="column to compare (or eval_return)")
    key = parser.parse_args(args).key
    print("| change | task | without | with | difference [95 %] | probability of improvement | p |")
    print("|---|---|---|---|---|---|---|")
    best = returns_of("best/*/runs.csv", key)
    for folder, name in CHANGES.items():
        group = folder.partition("/")[0]
        before = best | returns_of(f"candidates/{group}/base/*/runs.csv", key)
        for env_id, after in returns_of(f"candidates/{folder}/*/runs.csv", key).items():
            print(row(name, env_id, before[env_id], after))


if __name__ == "__main__":
    main()
