"""``ppo-lightning compare A.csv B.csv``: is the second set of runs worse than the first, and could one have seen it?"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ppo_lightning.benchmark.report import interquartile_mean, interval, read_csv
from ppo_lightning.errors import ConfigError, import_extra
from ppo_lightning.rounding import decimals

ALPHA, POWER = 0.05, 0.8  # of all recipes together; with which the smallest difference is seen


def difference(before: np.ndarray, after: np.ndarray, axis: int = -1) -> Any:
    """Returns the interquartile mean of ``after`` minus that of ``before``."""
    return interquartile_mean(after, axis=axis) - interquartile_mean(before, axis=axis)


def probability_of_improvement(before: Sequence[float], after: Sequence[float]) -> float:
    """Returns how often a run of ``after`` is better than one of ``before``, over all pairs; a tie is half a time."""
    pairs = np.asarray(after)[:, None] - np.asarray(before)[None]
    return float((pairs > 0).mean() + 0.5 * (pairs == 0).mean())


def p_worse(before: Sequence[float], after: Sequence[float]) -> float:
    """Returns how often chance alone would make ``after`` so much worse: a permutation test, exact for a few runs.

    The interval of a bootstrap is too narrow for three or five runs; this test is not, whatever the distribution.
    """
    options = {"permutation_type": "independent", "alternative": "less", "n_resamples": 9999, "rng": 0, "vectorized": True}
    arrays = np.asarray(before, float), np.asarray(after, float)

    def drop(before: np.ndarray, after: np.ndarray, axis: int = -1) -> Any:
        return difference(before, after, axis)

    return float(import_extra("scipy.stats", extra="report").permutation_test(arrays, drop, **options).pvalue)


def smallest_difference(before: Sequence[float], after: Sequence[float], alpha: float) -> float:
    """Returns by how much ``after`` must be worse for so many runs of such a spread to show it in four cases of five.

    By the t-test's power, which the permutation test comes close to.
    """
    t = import_extra("scipy.stats", extra="report").t
    counts = len(before), len(after)
    freedom = sum(counts) - 2
    variance = sum((count - 1) * np.var(runs, ddof=1) for count, runs in zip(counts, (before, after), strict=True)) / freedom
    return float((t.ppf(1 - alpha, freedom) + t.ppf(POWER, freedom)) * math.sqrt(variance * sum(1 / count for count in counts)))


def compare(before: Path, after: Path, key: str = "episodic_return") -> tuple[str, bool]:
    """Compares two files of runs, recipe by recipe.

    Args:
        before: A CSV with ``recipe``, ``seed`` and the key.
        after: The same of other runs.
        key: What is compared: the higher, the better.

    Returns:
        A table in Markdown; whether a recipe is worse, with a chance of 5 % to say so of any when nothing has changed.

    Raises:
        ConfigError: A file cannot be read as runs, or they share no recipe with two runs in each.
    """
    samples = [_samples(path, key) for path in (before, after)]
    shared = [label for label in samples[0] if all(len(its.get(label, ())) > 1 for its in samples)]
    if not shared:
        raise ConfigError(f"{before} and {after} share no recipe of which both have two runs or more.")
    lines = [
        "| recipe | runs | before | after | difference [95 %] | probability of improvement | smallest to be seen | p | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    worse = False
    for label in shared:
        old, new = (its[label] for its in samples)
        low, high = interval(difference, old, new)
        form = decimals(float(interquartile_mean(np.array(old))))
        p, alpha = p_worse(old, new), ALPHA / len(shared)  # Bonferroni: one wrong alarm in twenty comparisons of them all
        verdict = "**worse**" if p <= alpha else "no test with so few runs" if _too_few(len(old), len(new), alpha) else ""
        worse = worse or p <= alpha
        lines.append(
            f"| {label} | {len(old)}, {len(new)} | {float(interquartile_mean(np.array(old))):{form}}"
            f" | {float(interquartile_mean(np.array(new))):{form}}"
            f" | {float(difference(np.array(old), np.array(new))):+{form}} [{low:+{form}}, {high:+{form}}]"
            f" | {probability_of_improvement(old, new):.2f} | {smallest_difference(old, new, alpha):{form}}"
            f" | {p:.3f} | {verdict} |"
        )
    alone = sorted(set(samples[0]) ^ set(samples[1]) | set(samples[0]) - set(shared))
    if alone:
        lines.append(f"\nNot compared, for they are not in both, or once only: {', '.join(alone)}.")
    return "\n".join(lines), worse


def _too_few(old: int, new: int, alpha: float) -> bool:
    """Returns whether even the clearest difference of so many runs would not count."""
    return 1 / math.comb(old + new, new) > alpha


def _samples(path: Path, key: str) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {}
    try:
        for row in read_csv(path):
            samples.setdefault(row["recipe"], []).append(float(row[key]))
    except (OSError, KeyError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as runs with the columns recipe and {key}: {error}.") from error
    return samples


def main(args: Sequence[str]) -> None:
    """Runs ``ppo-lightning compare``.

    Raises:
        SystemExit: With code 1 if a recipe has become worse.
    """
    parser = argparse.ArgumentParser(
        "ppo-lightning compare",
        description="Recipe by recipe: are the runs of the second file worse? Exit code 1 if they are, for CI.",
        allow_abbrev=False,
    )
    parser.add_argument("before", type=Path, help="runs.csv of a benchmark")
    parser.add_argument("after", type=Path, help="runs.csv of another")
    parser.add_argument("--key", default="episodic_return", help="the column to compare (default: episodic_return)")
    own = parser.parse_args(args)
    text, worse = compare(own.before, own.after, own.key)
    print(text)
    if worse:
        raise SystemExit(1)
