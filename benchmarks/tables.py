"""Print the tables of the documentation that compare recorded runs.

`python benchmarks/tables.py [best candidates selection rpo ppo_or_sac]` reads `benchmarks/results` and
prints the tables in Markdown. It needs the extra `report`. Rows that compare two sets of runs end with p:
the probability of a difference at least as large if the second set is not better (one-sided permutation
test).

- `best`: the best recipes beside the references, from `best`. The best recipe of a task is its own recipe
  if there is one, else `configs/ppo/mujoco_best.yaml`.
- `candidates`: published changes beside the same recipes without them, from `candidates`. The change `base`
  has the runs without a change, on the same machine.
- `selection`: candidate changes to the best recipes over several tasks, a table for each stage: the mean
  return of each task, the interquartile mean, and p of a permutation test of the normalized returns,
  stratified by task. Holm's correction is for all changes of a stage together.
- `rpo`: PPO and RPO on MuJoCo and dm_control beside CleanRL's (documentation of RPO: after 8 000 000 steps,
  10 seeds), from `mujoco`, `mujoco_unclipped` (an unclipped value loss), `rpo_mujoco` and `dm_control`,
  where `terminal` treats time limits as terminal states (seed 1). The last row of dm_control has the means
  of all tasks, and p of the stratified test.
- `ppo_or_sac`: PPO, SAC and TD3 on HalfCheetah after 10 and 60 minutes of one core, from the evaluations of
  `offpolicy/halfcheetah` (seed 1, one thread, two runs at a time on a machine with two cores). Each figure
  is the last evaluation within the time. A slow environment is computed: it adds its duration to each step.
  PPO, whose learning rate depends on the length of a run, is the longest run that is complete.

Aggregate: the interquartile mean, over the runs of all tasks, of returns divided by the mean of the
reference, with a 95 % bootstrap interval that is stratified by task and by side. Where returns are negative
(Pusher), the mean of the reference is divided by the return.

Source: Agarwal et al., "Deep Reinforcement Learning at the Edge of the Statistical Precipice" (2021).
"""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import trim_mean

from ppo_lightning.experiments.compare import format_difference, p_worse
from ppo_lightning.experiments.report import PUBLISHED, common_id, read_csv
from ppo_lightning.utils.rounding import decimals

RESULTS = Path(__file__).parent / "results"
MUJOCO = tuple(
    f"{name}-v4" for name in ("HalfCheetah", "Hopper", "Walker2d", "Ant", "Humanoid", "Swimmer", "Pusher")
)
CLASSIC = ("CartPole-v1", "Acrobot-v1", "MountainCar-v0", "LunarLander-v3")
DM_CONTROL = ("WalkerWalk-v1", "WalkerRun-v1", "FishUpright-v1", "FingerSpin-v1", "HopperHop-v1")
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
SELECTION_TASKS = ("HalfCheetah-v4", "Hopper-v4", "Walker2d-v4", "Ant-v4")
SELECTION = {
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
THIRD = ("base", "quantiles")  # the open question of the second stage
SECOND_TASKS = (*SELECTION_TASKS, "Humanoid-v4", "Swimmer-v4", "Pusher-v4")
BOOTSTRAPS = 10_000
PERMUTATIONS = 100_000
STEPS = "8000000"
CLEANRL = "CleanRL's PPO, 8 M steps | CleanRL's RPO, 8 M steps"
ALGORITHMS = ("PPO", "SAC", "TD3")
DELAYS = {"as it is": 0.0, "with 5 ms per step": 0.005}  # seconds
MINUTES = (10, 60)
Row = dict[str, str]
Returns = Mapping[str, np.ndarray]  # task -> returns of the seeds


class Task(NamedTuple):
    """Runs of a recipe in an environment.

    Attributes:
        recipe: Name of the recipe.
        returns: Returns at the end, [seeds].
        curves: Points of the curve of each seed.
        env_steps: Steps of a run.
    """

    recipe: str
    returns: np.ndarray
    curves: list[list[dict[str, str]]]
    env_steps: int


def rows_of(path: str, **labels: str | Sequence[str]) -> list[Row]:
    """Return the runs of a file of the results whose columns have the given values."""
    wanted = {name: (value,) if isinstance(value, str) else value for name, value in labels.items()}
    return [row for row in read_csv(RESULTS / path) if all(row[name] in wanted[name] for name in wanted)]


def returns_of(rows: Iterable[Row]) -> dict[str, list[float]]:
    """Return the returns of runs by environment."""
    returns: dict[str, list[float]] = {}
    for row in rows:
        returns.setdefault(row["env_id"], []).append(float(row["episodic_return"]))
    return returns


def probability_of_improvement(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the share of pairs in which the run of ``after`` is better. A tie counts half."""
    pairs = np.asarray(after)[:, None] - np.asarray(before)[None]
    return float((pairs > 0).mean() + 0.5 * (pairs == 0).mean())


def row_of(label: str, before: Sequence[float], after: Sequence[float]) -> str:
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


def normalized(returns: np.ndarray, reference: np.ndarray | float) -> np.ndarray:
    """Return how many times better than the reference the returns are: a negative one is divided by them."""
    return (returns / reference) ** np.sign(reference)


def aggregate(best: Sequence[np.ndarray], references: Sequence[np.ndarray]) -> dict[str, Any]:
    """Compute the interquartile mean with its interval, and the mean probability of improvement.

    Args:
        best: Returns of the runs of each task.
        references: The same for the reference.
    """

    def normalized_runs(sides: Sequence[np.ndarray]) -> np.ndarray:  # [..., runs of all tasks]
        pairs = zip(sides[: len(best)], sides[len(best) :], strict=True)
        return np.concatenate([normalized(b, r.mean(-1, keepdims=True)) for b, r in pairs], axis=-1)

    sides = [*best, *references]
    counts = [len(runs) for runs in sides]
    columns = np.repeat(counts, counts)  # number of runs among which each is drawn
    rows = np.random.default_rng(0).integers(columns, size=(BOOTSTRAPS, len(columns)))
    parts = np.split(rows, np.cumsum(counts)[:-1], axis=1)
    samples = normalized_runs([runs[part] for runs, part in zip(sides, parts, strict=True)])
    improvements = [
        probability_of_improvement(list(r), list(b)) for b, r in zip(best, references, strict=True)
    ]
    return {
        "iqm": float(trim_mean(normalized_runs(sides), 0.25)),
        "interval": np.percentile(trim_mean(samples, 0.25, axis=1), [2.5, 97.5]),
        "improvement": float(np.mean(improvements)),
    }


def read(runs: Path, curves: Path) -> dict[str, Task]:
    """Read the results of a benchmark by environment."""
    by_recipe: dict[str, dict[str, list[dict[str, str]]]] = {}
    for point in read_csv(curves):
        by_recipe.setdefault(point["recipe"], {}).setdefault(point["seed"], []).append(point)
    rows: dict[tuple[str, str], list[dict[str, str]]] = {}
    for run in read_csv(runs):
        rows.setdefault((run["env_id"], run["recipe"]), []).append(run)
    return {
        env_id: Task(
            recipe.split()[0],
            np.array([float(run["episodic_return"]) for run in group]),
            list(by_recipe[recipe].values()),
            int(group[0]["env_steps"]),
        )
        for (env_id, recipe), group in rows.items()
    }


def print_tasks(tasks: Iterable[str], runs: dict[str, Task], references: dict[str, Task]) -> None:
    """Print a row per task that compares its runs with the reference."""
    print(
        "| task | recipe | reference | with the recipe | difference [95 %] | probability of improvement | p |"
    )
    print("|---|---|---|---|---|---|---|")
    for task in tasks:
        recipe = runs[task].recipe
        folder = "rpo" if recipe == "dm_control" else "ppo"
        label = f"{task} | [{recipe}](../configs/{folder}/{recipe}_best.yaml)"
        print(row_of(label, list(references[task].returns), list(runs[task].returns)))


def print_aggregate(
    tasks: Iterable[str], runs: dict[str, Task], references: dict[str, Task]
) -> dict[str, Any]:
    """Print and return the aggregate over tasks. See :func:`aggregate`."""
    sides = zip(*((runs[task].returns, references[task].returns) for task in tasks), strict=True)
    result = aggregate(*sides)
    low, high = result["interval"]
    print(
        f"\nInterquartile mean of normalized returns: {result['iqm']:.2f} [{low:.2f}, {high:.2f}],"
        f" probability of improvement: {result['improvement']:.2f}\n"
    )
    return result


def best_and_references() -> tuple[dict[str, Task], dict[str, Task], dict[str, Task]]:
    """Return the runs of the best recipe of each task, of the common recipe and of the reference."""
    folder = RESULTS / "best"
    references = read(folder / "reference_runs.csv", folder / "reference_curves.csv")
    paths = {path.parent.name: path.parent for path in sorted(folder.glob("*/runs.csv"))}
    results = {name: read(path / "runs.csv", path / "curves.csv") for name, path in paths.items()}
    common = results.pop("mujoco")
    best = dict(common)
    for tasks in results.values():
        best |= tasks
    return best, common, references


def print_best() -> None:
    """Print the best recipes beside the references, with the aggregates."""
    best, common, references = best_and_references()
    print_tasks((*MUJOCO, *CLASSIC, *DM_CONTROL), best, references)
    print_aggregate(MUJOCO, best, references)
    print_tasks(common, common, references)
    print_aggregate(common, common, references)


def print_candidates() -> None:
    """Print published changes beside the recipes without them."""
    print("| change | task | without | with | difference [95 %] | probability of improvement | p |")
    print("|---|---|---|---|---|---|---|")
    for name, title in CHANGES.items():
        group, change = name.split("/")
        before, after = (
            returns_of(rows_of("candidates/runs.csv", group=group, change=side)) for side in ("base", change)
        )
        for env_id, runs in after.items():
            print(row_of(f"{title} | {env_id}", before[env_id], runs))


def stratified_p(before: Returns, after: Returns) -> float:
    """Return the p value of a permutation test, within each task, for a higher mean of ``after``.

    Args:
        before: Normalized returns without the change.
        after: Normalized returns with the change.
    """
    generator = np.random.default_rng(0)
    observed, drawn = 0.0, np.zeros(PERMUTATIONS)
    for task, base in before.items():
        runs = np.concatenate([after[task], base])
        shuffled = generator.permuted(np.tile(runs, (PERMUTATIONS, 1)), axis=1)
        count = len(after[task])
        observed += after[task].mean() - base.mean()
        drawn += shuffled[:, :count].mean(1) - shuffled[:, count:].mean(1)
    return float((1 + (drawn >= observed - 1e-9).sum()) / (1 + PERMUTATIONS))


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


def print_stage(runs: Sequence[Row], changes: Iterable[str], tasks: Sequence[str], spread: bool) -> None:
    """Print the table of a stage.

    Args:
        runs: Its runs.
        changes: Names of the changes, the recipes without a change first.
        tasks: Tasks of the stage.
        spread: Whether to print the standard deviations of the returns.
    """
    everywhere = returns_of(rows_of("best/reference_runs.csv"))
    references = {task: np.array(everywhere[task]) for task in tasks}
    rows = {change: [run for run in runs if run["change"] == change] for change in changes}
    results = {
        change: {env_id.rpartition("/")[2]: np.array(values) for env_id, values in returns_of(runs).items()}
        for change, runs in rows.items()
    }
    hours = {change: sum(float(run["wall_seconds"]) for run in runs) / 3600 for change, runs in rows.items()}
    scaled = {
        change: {task: normalized(returns[task], references[task].mean()) for task in tasks}
        for change, returns in results.items()
    }
    base, *others = scaled
    p_values = {change: stratified_p(scaled[base], scaled[change]) for change in others}
    corrected = dict(zip(p_values, holm([*p_values.values()]), strict=True))
    print(f"| change | {' | '.join(tasks)} | interquartile mean [95 %] | p | Holm | hours |")
    print("|---|" + "---|" * (len(tasks) + 4))
    for change, returns in results.items():
        means = [f"{returns[task].mean():.4g}" for task in tasks]
        if spread:
            deviations = [f"{returns[task].std(ddof=1):.0f}" for task in tasks]
            means = [" ± ".join(pair) for pair in zip(means, deviations, strict=True)]
        score = aggregate([returns[task] for task in tasks], [*references.values()])
        low, high = score["interval"]
        p = f"{p_values[change]:.3f} | {corrected[change]:.3f}" if change in p_values else " | "
        figures = f"{' | '.join(means)} | {score['iqm']:.2f} [{low:.2f}, {high:.2f}] | {p}"
        print(f"| {SELECTION[change]} | {figures} | {hours[change]:.1f} |")


def print_selection() -> None:
    """Print the candidates of the three stages."""
    first = rows_of("candidates/runs.csv", group="selection")
    second = rows_of("candidates/runs.csv", group=("selection", "selection_2"))
    print_stage(first, SELECTION, SELECTION_TASKS, spread=True)
    print()
    print_stage(second, SECOND, SECOND_TASKS, spread=False)
    print()
    print_stage(rows_of("candidates/selection_3/runs.csv"), THIRD, SECOND_TASKS, spread=False)


def figure(runs: Sequence[float]) -> str:
    """Return the mean, with the sample standard deviation of several runs."""
    return f"{np.mean(runs):.1f}" + (f" ± {np.std(runs, ddof=1):.1f}" if len(runs) > 1 else "")


def compared(before: Sequence[float], after: Sequence[float]) -> str:
    """Return the cells of a row: two sets of runs, and their difference with its interval."""
    return f"{figure(before)} | {figure(after)} | {format_difference(before, after)}"


def print_rpo() -> None:
    """Print PPO and RPO on MuJoCo and dm_control beside the published returns."""
    published = {
        (run["recipe"], common_id(run["env_id"])): f"{float(run['mean']):.1f} ± {float(run['std']):.1f}"
        for run in read_csv(PUBLISHED)
        if run["env_steps"] == STEPS
    }

    mujoco, rpo = (returns_of(rows_of(f"{name}/runs.csv")) for name in ("mujoco", "rpo_mujoco"))
    print(f"| task | PPO | RPO | difference [95 %] | {CLEANRL} |\n|---|---|---|---|---|---|")
    for env_id, runs in mujoco.items():
        figures = f"{published['mujoco', env_id]} | {published['rpo', env_id]}"
        print(f"| {env_id} | {compared(runs, rpo[env_id])} | {figures} |")

    unclipped = returns_of(rows_of("mujoco_unclipped/runs.csv"))
    print("\n| task | clipped | unclipped | difference [95 %] | CleanRL's, clipped, 8 M steps |")
    print("|---|---|---|---|---|")
    for env_id, runs in mujoco.items():
        print(f"| {env_id} | {compared(runs, unclipped[env_id])} | {published['mujoco', env_id]} |")
    score = aggregate(*([np.array(side[task]) for task in mujoco] for side in (unclipped, mujoco)))
    low, high = score["interval"]
    print(f"| interquartile mean, relative to clipped | 1 | {score['iqm']:.2f} [{low:.2f}, {high:.2f}] | | |")

    sides = (rows_of(f"dm_control/{name}/runs.csv") for name in ("ppo", "rpo", "terminal"))
    ppo, rpo, terminal = map(returns_of, sides)
    print(f"\n| task | PPO | RPO | {CLEANRL} |\n|---|---|---|---|---|")
    for env_id, runs in ppo.items():
        figures = f"{published['dm_control', env_id]} | {published['rpo', env_id]}"
        print(f"| {env_id} | {figure(runs)} | {figure(rpo[env_id])} | {figures} |")
    before, after = ({task: np.array(runs) for task, runs in side.items()} for side in (ppo, rpo))
    means = [np.mean([runs.mean() for runs in side.values()]) for side in (before, after)]
    means += [
        np.mean([float(published[recipe, task].split()[0]) for task in ppo])
        for recipe in ("dm_control", "rpo")
    ]
    label = f"mean of {len(ppo)} tasks, p = {stratified_p(before, after):.2f}"
    print(f"| {label} | {' | '.join(f'{mean:.1f}' for mean in means)} |")

    print("\n| task | bootstrapped | terminal state | CleanRL's PPO, 8 M steps |\n|---|---|---|---|")
    for env_id, runs in terminal.items():
        print(
            f"| {env_id} | {figure(ppo[env_id][:1])} | {figure(runs)} | {published['dm_control', env_id]} |"
        )


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


def print_ppo_or_sac() -> None:
    """Print PPO, SAC and TD3 after the same time."""
    rows = rows_of("offpolicy/halfcheetah/evaluations.csv")
    print(f"| HalfCheetah-v4 | minutes | {' | '.join(ALGORITHMS)} |")
    print("|---|---|---|---|---|")
    for environment, delay in DELAYS.items():
        for minutes in MINUTES:
            figures = [
                last_within([row for row in rows if row["algorithm"] == name], 60 * minutes, delay)
                for name in ALGORITHMS
            ]
            print(f"| {environment} | {minutes} | {' | '.join(figures)} |")


TABLES = {
    "best": print_best,
    "candidates": print_candidates,
    "selection": print_selection,
    "rpo": print_rpo,
    "ppo_or_sac": print_ppo_or_sac,
}


def main(args: Sequence[str] | None = None) -> None:
    """Print the tables that are named, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"{', '.join(TABLES)} (default: all)")
    names = parser.parse_args(args).tables or [*TABLES]
    if unknown := set(names) - TABLES.keys():
        parser.error(f"no table is called {' or '.join(unknown)}")
    for name in names:
        TABLES[name]()
        print()


if __name__ == "__main__":
    main()
