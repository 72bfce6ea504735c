"""Compare candidate changes to the best recipes over several tasks.

`python benchmarks/selection_table.py` reads `benchmarks/results/candidates/selection*/CHANGE/*/runs.csv` and
prints two tables in Markdown, one for each stage: the mean return of each task, the interquartile mean of the
returns divided by the mean of the reference, with its interval (`best.py` says how), and p. It needs the
extra `report`.

p is the probability of a mean gain at least as large if the change does nothing: a permutation test of the
normalized returns, stratified by task. Holm's correction is for all changes of a stage together.
"""

import argparse
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from benchmarks.best import aggregate, normalized
from benchmarks.candidate_table import RESULTS, returns_of
from ppo_lightning.experiments.report import read_csv

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
SECOND = ("base", "hl_gauss", "quantiles")  # the two best of the first stage
SECOND_TASKS = (*TASKS, "Humanoid-v4", "Swimmer-v4", "Pusher-v4")
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


def read(change: str, folder: str) -> tuple[dict[str, np.ndarray], float]:
    """Return the returns of a change by task, and its hours.

    Args:
        change: Name of the change.
        folder: Pattern of the folders of its stage.
    """
    pattern = f"candidates/{folder}/{change}/*/runs.csv"
    seconds = [float(run["wall_seconds"]) for path in RESULTS.glob(pattern) for run in read_csv(path)]
    returns = returns_of(pattern).items()
    return {env_id.rpartition("/")[2]: np.array(runs) for env_id, runs in returns}, sum(seconds) / 3600


def print_stage(folder: str, changes: Iterable[str], tasks: Sequence[str], spread: bool) -> None:
    """Print the table of a stage.

    Args:
        folder: Pattern of its folders.
        changes: Names of the changes, the recipes without a change first.
        tasks: Tasks of the stage.
        spread: Whether to print the standard deviations of the returns.
    """
    everywhere = returns_of("best/reference_runs.csv")
    references = {task: np.array(everywhere[task]) for task in tasks}
    results = {change: read(change, folder) for change in changes}
    scaled = {
        change: {task: normalized(returns[task], references[task].mean()) for task in tasks}
        for change, (returns, _) in results.items()
    }
    base, *others = scaled
    p_values = {change: stratified_p(scaled[base], scaled[change]) for change in others}
    corrected = dict(zip(p_values, holm([*p_values.values()]), strict=True))
    print(f"| change | {' | '.join(tasks)} | interquartile mean [95 %] | p | Holm | hours |")
    print("|---|" + "---|" * (len(tasks) + 4))
    for change, (returns, hours) in results.items():
        means = [f"{returns[task].mean():.4g}" for task in tasks]
        if spread:
            deviations = [f"{returns[task].std(ddof=1):.0f}" for task in tasks]
            means = [" ± ".join(pair) for pair in zip(means, deviations, strict=True)]
        score = aggregate([returns[task] for task in tasks], [*references.values()])
        low, high = score["interval"]
        p = f"{p_values[change]:.3f} | {corrected[change]:.3f}" if change in p_values else " | "
        figures = f"{' | '.join(means)} | {score['iqm']:.2f} [{low:.2f}, {high:.2f}] | {p}"
        print(f"| {CHANGES[change]} | {figures} | {hours:.1f} |")


def main(args: Sequence[str] | None = None) -> None:
    """Print the tables."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args(args)
    print_stage("selection", CHANGES, TASKS, spread=True)
    print()
    print_stage("selection*", SECOND, SECOND_TASKS, spread=False)


if __name__ == "__main__":
    main()
