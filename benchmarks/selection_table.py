"""Compare candidate changes to the best recipes over several tasks.

`python benchmarks/selection_table.py` reads `benchmarks/results/candidates/selection/CHANGE/*/runs.csv` and
prints a table in Markdown: the mean return of each task, the interquartile mean of the returns divided by the
mean of the reference, with its interval (`best.py` says how), and p. It needs the extra `report`.

p is the probability of a mean gain at least as large if the change does nothing: a permutation test of the
normalized returns, stratified by task. Holm's correction is for all changes together.
"""

import argparse
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.best import aggregate, normalized
from benchmarks.candidate_table import RESULTS, returns_of
from ppo_lightning.commands.report import read_csv

TASKS = ("HalfCheetah-v4", "Hopper-v4", "Walker2d-v4", "Ant-v4")
CHANGES = {
    "base": "no change",
    "residual_value": "residual value function",
    "residual": "residual policy and value function",
    "hl_gauss": "HL-Gauss bins",
    "quantiles": "32 quantiles",
    "state_std": "state-dependent deviation",
    "beta": "Beta distribution",
    "time_left": "time observed",
}
RESAMPLES = 100_000
Returns = Mapping[str, np.ndarray]  # task -> returns of the seeds


def stratified_p(before: Returns, after: Returns) -> float:
    """Return the p value of a permutation test, within each task, for a higher mean of ``after``.

    Args:
        before: Normalized returns without the change.
        after: Normalized returns with the change.
    """
    generator = np.random.default_rng(0)
    observed, drawn = 0.0, np.zeros(RESAMPLES)
    for task, base in before.items():
        runs = np.concatenate([after[task], base])
        shuffled = generator.permuted(np.tile(runs, (RESAMPLES, 1)), axis=1)
        count = len(after[task])
        observed += after[task].mean() - base.mean()
        drawn += shuffled[:, :count].mean(1) - shuffled[:, count:].mean(1)
    return float((1 + (drawn >= observed - 1e-9).sum()) / (1 + RESAMPLES))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p values after Holm's correction, in the same order.

    Example:
        >>> holm([0.04, 0.01, 0.5])
        [0.08, 0.03, 0.5]
    """
    order = np.argsort(p_values)
    scaled = np.asarray(p_values)[order] * np.arange(len(p_values), 0, -1)
    corrected = np.empty(len(p_values))
    corrected[order] = np.maximum.accumulate(scaled).clip(max=1)
    return [float(p) for p in corrected]


def read(change: str) -> tuple[dict[str, np.ndarray], float]:
    """Return the returns of a change by task, and its hours."""
    pattern = f"candidates/selection/{change}/*/runs.csv"
    seconds = [float(run["wall_seconds"]) for path in RESULTS.glob(pattern) for run in read_csv(path)]
    returns = returns_of(pattern).items()
    return {env_id.rpartition("/")[2]: np.array(runs) for env_id, runs in returns}, sum(seconds) / 3600


def main(args: Sequence[str] | None = None) -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args(args)
    everywhere = returns_of("best/reference_runs.csv")
    references = {task: np.array(everywhere[task]) for task in TASKS}
    results = {change: read(change) for change in CHANGES}
    scaled = {
        change: {task: normalized(returns[task], references[task].mean()) for task in TASKS}
        for change, (returns, _) in results.items()
        if returns.keys() >= set(TASKS)
    }
    p_values = {
        change: stratified_p(scaled["base"], runs) for change, runs in scaled.items() if change != "base"
    }
    corrected = dict(zip(p_values, holm([*p_values.values()]), strict=True))
    print(f"| change | {' | '.join(TASKS)} | interquartile mean [95 %] | p | Holm | hours |")
    print("|---|" + "---|" * (len(TASKS) + 4))
    for change in scaled:
        returns, hours = results[change]
        means = [f"{returns[task].mean():.0f} ± {returns[task].std(ddof=1):.0f}" for task in TASKS]
        sides = [returns[task] for task in TASKS], [*references.values()]
        score = aggregate(*sides)
        low, high = score["interval"]
        p = f"{p_values[change]:.3f} | {corrected[change]:.3f}" if change in p_values else " | "
        figures = f"{' | '.join(means)} | {score['iqm']:.2f} [{low:.2f}, {high:.2f}] | {p}"
        print(f"| {CHANGES[change]} | {figures} | {hours:.1f} |")


if __name__ == "__main__":
    main()
