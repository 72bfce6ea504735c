"""Compare published changes to PPO with the same recipes without them.

`python benchmarks/candidate_table.py` reads `benchmarks/results/candidates/GROUP/CHANGE/*/runs.csv` and
prints a table in Markdown. It needs the extra `report`. `GROUP/base` has the runs without a change, on the
same machine.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ppo_lightning.experiments.compare import format_difference, p_worse, read_runs
from ppo_lightning.utils.rounding import decimals

RESULTS = Path(__file__).parent / "results"
CHANGES = {
    "best/spo": "SPO's loss",
    "best/adam_rel": "Adam-Rel",
    "best/coloured": "coloured noise (beta 0.5)",
    "best/fresh_advantages": "fresh advantages in each epoch",
    "best/reuse": "reuse of the last rollout, simplified from GePPO",
    "rn_d/bins": "RN-D's actor of bins",
    "rn_d/residual": "RN-D's residual networks",
    "rn_d/whole": "RN-D: bins and residual networks",
}


def returns_of(pattern: str) -> dict[str, list[float]]:
    """Return the returns of the runs in some files of the results by environment."""
    returns: dict[str, list[float]] = {}
    for path in sorted(RESULTS.glob(pattern)):
        for env_id, runs in read_runs(path, "env_id").items():
            returns.setdefault(env_id, []).extend(runs.values())
    return returns


def probability_of_improvement(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the share of pairs in which the run of ``after`` is better. A tie counts half."""
    pairs = np.asarray(after)[:, None] - np.asarray(before)[None]
    return float((pairs > 0).mean() + 0.5 * (pairs == 0).mean())


def row(label: str, before: Sequence[float], after: Sequence[float]) -> str:
    """Return a row of a table in Markdown that compares two sets of runs.

    Args:
        label: First cells of the row.
        before: Returns of the standard.
        after: Returns of the runs to compare.

    Returns:
        Means with standard deviations, the difference with its interval, the probability of improvement, and
        p: the probability of a difference at least as large if `after` is not better (one-sided permutation
        test).
    """
    spec = decimals(float(np.mean(before)))
    figures = [f"{np.mean(runs):{spec}} ± {np.std(runs, ddof=1):{spec}}" for runs in (before, after)]
    better = probability_of_improvement(before, after)
    p = p_worse(after, before)
    return (
        f"| {label} | {' | '.join(figures)} | {format_difference(before, after)} | {better:.2f} | {p:.3f} |"
    )


def main(args: Sequence[str] | None = None) -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args(args)
    print("| change | task | without | with | difference [95 %] | probability of improvement | p |")
    print("|---|---|---|---|---|---|---|")
    for folder, change in CHANGES.items():
        before = returns_of(f"candidates/{folder.partition('/')[0]}/base/*/runs.csv")
        for env_id, after in returns_of(f"candidates/{folder}/*/runs.csv").items():
            print(row(f"{change} | {env_id}", before[env_id], after))


if __name__ == "__main__":
    main()
