"""``ppo-lightning compare``: test whether one set of runs is worse than another."""

import csv
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ppo_lightning.commands.options import parser_of
from ppo_lightning.errors import ConfigError, import_extra
from ppo_lightning.experiments.report import interval, read_csv
from ppo_lightning.utils.rounding import decimals

ALPHA = 0.05  # probability of a false alarm, over all recipes
WORSE = 1  # exit code; 2 means invalid input
NO_TEST = 3  # exit code
Runs = dict[str, dict[str, float]]  # recipe -> seed -> return


def p_worse(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the p value of a one-sided permutation test for a lower mean of ``after``.

    The test is exact for small samples and for every distribution.
    """

    def difference(before: np.ndarray, after: np.ndarray, axis: int) -> np.ndarray:
        return after.mean(axis=axis) - before.mean(axis=axis)

    test = import_extra("scipy.stats", extra="report").permutation_test
    return float(test((before, after), difference, alternative="less", rng=0, vectorized=True).pvalue)


def compare(before: Path, after: Path, by: str = "recipe") -> tuple[str, int]:
    """Return a table in Markdown that compares two benchmarks, and the exit code, see ``--help``."""
    first, tasks = read_runs(before, by)
    second, new_tasks = read_runs(after, by)
    shared = first.keys() & second.keys()
    if not shared:
        raise ConfigError(f"{before} and {after} share no {by}: compare the same ones, or use --by env_id.")
    alpha = ALPHA / len(shared)  # Bonferroni correction
    needed = next(count for count in range(2, 1000) if 1 / math.comb(2 * count, count) <= alpha)
    lines = [f"| {by} | runs | before | after | difference [95 %] | p | |", "|---|---|---|---|---|---|---|"]
    notes = [f"Only in {after}: {label}." for label in second if label not in first]
    notes += [
        f"{label} is not the same task: {tasks[label]} before, {new_tasks[label]} after."
        for label in sorted(shared)
        if tasks[label] != new_tasks[label]
    ]
    codes = {0}
    for label, runs in first.items():
        old = list(runs.values())
        new = list(second.get(label, {}).values())
        if len(new) < len(old):
            codes.add(WORSE)
            notes.append(f"{label} has {len(new)} of {len(old)} runs in {after}: train as many.")
        if not new:
            continue
        counts = f"{len(old)} and {len(new)}"
        if 1 / math.comb(len(old) + len(new), len(new)) <= alpha:  # the smallest p of the test
            probability = p_worse(old, new)
            is_worse = probability <= alpha
            codes.add(WORSE if is_worse else 0)
            p, verdict = f"{probability:.3f}", "**worse**" if is_worse else ""
        else:
            codes.add(NO_TEST)
            p, verdict = "", "no test"
            notes.append(f"{label} has too few runs for a test ({counts}): train {needed} seeds each.")
        means = " | ".join(f"{np.mean(side):{decimals(float(np.mean(old)))}}" for side in (old, new))
        change = format_difference(old, new)
        lines.append(f"| {label} | {len(old)}, {len(new)} | {means} | {change} | {p} | {verdict} |")
    return "\n".join(lines + [f"\n{note}" for note in notes]), WORSE if WORSE in codes else max(codes)


def format_difference(before: Sequence[float], after: Sequence[float]) -> str:
    """Return the difference of two means as text, with its 95 % interval if both sets have two runs."""
    spec = decimals(float(np.mean(before)))
    change = f"{np.mean(after) - np.mean(before):+{spec}}"
    low, high = interval(after, before)
    return change if math.isnan(low) else f"{change} [{low:+{spec}}, {high:+{spec}}]"


def read_runs(path: Path, by: str) -> tuple[Runs, dict[str, str]]:
    """Read the returns and tasks of a benchmark, or its ``runs.csv``, by recipe or environment."""
    runs: Runs = defaultdict(dict)
    tasks: dict[str, set[str]] = defaultdict(set)
    try:
        rows = [(row[by], row["seed"], float(row["episodic_return"]), row) for row in read_csv(path)]
    except (OSError, KeyError, TypeError, ValueError, csv.Error) as error:
        raise ConfigError(f"{path} needs the columns {by}, seed and episodic_return: {error}.") from error
    for line, (label, seed, value, row) in enumerate(rows, start=2):
        place = f"{path}, line {line} ({by} {label}, seed {seed})"
        if not math.isfinite(value):
            raise ConfigError(f"{place}: the return is {value}; train this run until an episode ends.")
        if seed in runs[label]:
            raise ConfigError(f"{place}: an earlier line has the same {by} and seed; keep one of them.")
        runs[label][seed] = value
        tasks[label].add(f"{row.get('env_steps', '?')} steps of {row.get('env_id', '?')}")
    return runs, {label: " and ".join(sorted(found)) for label, found in tasks.items()}


def main(args: Sequence[str]) -> None:
    """Run ``ppo-lightning compare``."""
    parser = parser_of(
        "compare",
        "Each recipe has a test of its own. Exit codes: 0 no recipe is worse; 1 a recipe is worse or has"
        " fewer runs in the second; 2 invalid input; 3 too few runs for a test.",
    )
    parser.add_argument("before", type=Path, help="folder of a benchmark, or its runs.csv")
    parser.add_argument("after", type=Path, help="folder of another benchmark, or its runs.csv")
    parser.add_argument("--by", choices=["recipe", "env_id"], default="recipe", help="what both share")
    text, exit_code = compare(**vars(parser.parse_args(args)))
    print(text)
    raise SystemExit(exit_code)
