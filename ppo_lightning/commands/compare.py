"""``ppo-lightning compare``: test whether one set of runs is worse than another."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ppo_lightning.commands.report import interval, read_csv
from ppo_lightning.errors import ConfigError, import_extra
from ppo_lightning.utils.rounding import decimals

ALPHA = 0.05  # probability of a false alarm, over all recipes
POWER = 0.8  # probability of detecting the smallest detectable difference
# Exit codes. Code 2 means invalid input.
WORSE = 1
NO_TEST = 3
Runs = dict[str, dict[str, float]]  # recipe -> seed -> return


def difference(before: np.ndarray, after: np.ndarray, axis: int = -1) -> Any:
    """Return the mean of ``after`` minus the mean of ``before``."""
    return np.mean(after, axis=axis) - np.mean(before, axis=axis)


def probability_of_improvement(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the share of pairs in which the run of ``after`` is better. A tie counts half."""
    pairs = np.asarray(after)[:, None] - np.asarray(before)[None]
    return float((pairs > 0).mean() + 0.5 * (pairs == 0).mean())


def p_worse(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the p value of a one-sided permutation test for a lower mean of ``after``.

    The test is exact for small samples and for every distribution.
    """
    options = {
        "permutation_type": "independent",
        "alternative": "less",
        "n_resamples": 9999,
        "rng": 0,
        "vectorized": True,
    }
    arrays = np.asarray(before, float), np.asarray(after, float)
    test = import_extra("scipy.stats", extra="report").permutation_test(arrays, difference, **options)
    return float(test.pvalue)


def smallest_difference(before: Sequence[float], after: Sequence[float], alpha: float) -> float:
    """Return the smallest detectable difference: the drop that is detected with a probability of 80 %.

    The power is that of the t test, which is close to that of the permutation test.

    Args:
        before: Returns of the first set of runs.
        after: Returns of the second set of runs.
        alpha: Significance level.
    """
    t = import_extra("scipy.stats", extra="report").t
    counts = len(before), len(after)
    freedom = sum(counts) - 2
    samples = zip(counts, (before, after), strict=True)
    variance = sum((count - 1) * np.var(runs, ddof=1) for count, runs in samples) / freedom
    error = math.sqrt(variance * sum(1 / count for count in counts))
    return float((t.ppf(1 - alpha, freedom) + t.ppf(POWER, freedom)) * error)


def compare(before: Path, after: Path, key: str = "episodic_return", by: str = "recipe") -> tuple[str, int]:
    """Compare two sets of runs, recipe by recipe.

    Args:
        before: CSV file with the columns ``recipe``, ``seed`` and ``key``, or a folder with ``runs.csv``.
        after: CSV file or folder of the second set of runs.
        key: Column to compare. Higher is better.
        by: Column that the sets share: ``recipe``, or ``env_id`` for different recipes of an environment.

    Returns:
        A table in Markdown and the exit code. The code is 1 if a recipe is worse (5 % false alarms) or has
        fewer runs in the second set, otherwise 3 if a recipe has too few runs for a test, otherwise 0.

    Raises:
        ConfigError: A file cannot be read, a value is non-finite, or the sets share no recipe.
    """
    first = read_runs(before, key, by)
    second = read_runs(after, key, by)
    shared = [label for label in first if label in second]
    if not shared:
        raise ConfigError(
            f"{before} and {after} share no {by}: compare benchmarks of the same recipes, or of the same"
            " environments with --by env_id."
        )
    alpha = ALPHA / len(shared)  # Bonferroni correction
    needed = next(count for count in range(2, 1000) if _smallest_p(count, count) <= alpha)
    lines = [
        f"| {by} | runs | before | after | difference [95 %] | probability of improvement"
        " | smallest detectable difference | p | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lost: list[str] = []
    untested: list[str] = []
    worse = False
    for label, runs in first.items():
        old = list(runs.values())
        new = list(second.get(label, {}).values())
        if len(new) < len(old):
            missing_seeds = [seed for seed in runs if seed not in second.get(label, {})]
            seeds = f" (without seeds {', '.join(missing_seeds)})" if len(missing_seeds) < len(runs) else ""
            lost.append(f"{label} has {len(new)} of {len(old)} runs in {after}{seeds}: train as many.")
        if label not in shared:
            continue
        p = ""
        verdict = "no test"
        if min(len(old), len(new)) > 1 and _smallest_p(len(old), len(new)) <= alpha:
            probability = p_worse(old, new)
            p = f"{probability:.3f}"
            verdict = "**worse**" if probability <= alpha else ""
            worse = worse or probability <= alpha
        else:
            counts = f"{len(old)} and {len(new)}"
            untested.append(f"{label} has too few runs for a test ({counts}): train {needed} seeds each.")
        lines.append(f"| {label} | {len(old)}, {len(new)} | {_figures(old, new, alpha)} | {p} | {verdict} |")
    lines += [f"\n{sentence}" for sentence in (*lost, *untested)]
    if added := [label for label in second if label not in first]:
        lines.append(f"\nOnly in {after}, and not compared: {', '.join(added)}.")
    return "\n".join(lines), WORSE if worse or lost else NO_TEST if untested else 0


def _figures(old: Sequence[float], new: Sequence[float], alpha: float) -> str:
    """Return the cells of a row, from the means to the smallest detectable difference."""
    mean = float(np.mean(old))
    spec = decimals(mean)
    detectable = f"{smallest_difference(old, new, alpha):{spec}}" if min(len(old), len(new)) > 1 else ""
    better = f"{probability_of_improvement(old, new):.2f}"
    change = format_difference(old, new)
    return f"{mean:{spec}} | {float(np.mean(new)):{spec}} | {change} | {better} | {detectable}"


def format_difference(before: Sequence[float], after: Sequence[float]) -> str:
    """Return the difference of two means as text, with its 95 % interval if both sets have two runs."""
    spec = decimals(float(np.mean(before)))
    change = f"{float(difference(np.asarray(before), np.asarray(after))):+{spec}}"
    if min(len(before), len(after)) < 2:
        return change
    low, high = interval(after, before)
    return f"{change} [{low:+{spec}}, {high:+{spec}}]"


def _smallest_p(old: int, new: int) -> float:
    """Return the smallest p value that the permutation test can give for these numbers of runs."""
    return 1 / math.comb(old + new, new)


def read_runs(path: Path, key: str, by: str = "recipe") -> Runs:
    """Read the values of a column by recipe, or environment, and seed.

    Args:
        path: CSV file, or folder with ``runs.csv``.
        key: Name of the column.
        by: ``recipe`` or ``env_id``.

    Raises:
        ConfigError: The file cannot be read, a value is non-finite, or a recipe has a seed twice.
    """
    path = path / "runs.csv" if path.is_dir() else path
    runs: Runs = {}
    try:
        for line, row in enumerate(read_csv(path), start=2):
            recipe = row[by]
            seed = row["seed"]
            value = float(row[key])
            location = f"{path}, line {line} ({by} {recipe}, seed {seed})"
            if not math.isfinite(value):
                raise ConfigError(f"{location}: {key} is {value}; train this run until an episode ends.")
            if seed in runs.setdefault(recipe, {}):
                raise ConfigError(
                    f"{location}: an earlier line has the same {by} and seed; keep one of them."
                )
            runs[recipe][seed] = value
    except ConfigError:
        raise
    except (OSError, KeyError, TypeError, ValueError) as error:
        columns = f"the columns {by}, seed and {key}"
        raise ConfigError(f"{path} cannot be read as runs with {columns}: {error}.") from error
    return runs


def main(args: Sequence[str]) -> None:
    """Run ``ppo-lightning compare``.

    Raises:
        SystemExit: With the exit code of :func:`compare` if it is not 0.
    """
    parser = argparse.ArgumentParser(
        "ppo-lightning compare",
        description="Test, recipe by recipe, whether the runs of the second benchmark are worse than"
        " those of the first.",
        epilog="Exit codes: 0 no recipe is worse; 1 a recipe is worse or has fewer runs in the second;"
        " 2 invalid input; 3 too few runs for a test.",
        allow_abbrev=False,
    )
    parser.add_argument("before", type=Path, help="folder of a benchmark, or its runs.csv")
    parser.add_argument("after", type=Path, help="folder of another benchmark, or its runs.csv")
    parser.add_argument(
        "--key", default="episodic_return", help="column to compare (default: episodic_return)"
    )
    parser.add_argument(
        "--by",
        choices=["recipe", "env_id"],
        default="recipe",
        help="what the benchmarks share; env_id compares different recipes of an environment",
    )
    options = parser.parse_args(args)
    text, exit_code = compare(options.before, options.after, options.key, options.by)
    print(text)
    if exit_code:
        raise SystemExit(exit_code)
