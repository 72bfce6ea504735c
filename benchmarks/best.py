"""Compare the best recipes with the references, and draw their learning curves.

`python benchmarks/best.py` reads `benchmarks/results/best`, prints tables and the aggregate over the MuJoCo
tasks, and writes `docs/images/best.png` and `best_others.png`. Bands are 95 % t intervals of the mean over
seeds. The script needs the extra `report`.

The best recipe of a task is its own recipe if there is one, else `configs/best/mujoco.yaml`.

Aggregate: the interquartile mean, over the runs of all tasks, of returns divided by the mean of the
reference, with a 95 % bootstrap interval that is stratified by task and by side. Where returns are negative
(Pusher), the mean of the reference is divided by the return.

Source: Agarwal et al., "Deep Reinforcement Learning at the Edge of the Statistical Precipice" (2021).
"""

import argparse
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from scipy.stats import t, trim_mean

from benchmarks.candidate_table import probability_of_improvement, row
from ppo_lightning.experiments.curves import decorate, plot_mean
from ppo_lightning.experiments.report import published, read_csv

mpl.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/best"
MUJOCO = tuple(
    f"{name}-v4" for name in ("HalfCheetah", "Hopper", "Walker2d", "Ant", "Humanoid", "Swimmer", "Pusher")
)
CLASSIC = ("CartPole-v1", "Acrobot-v1", "MountainCar-v0", "LunarLander-v3")
DM_CONTROL = ("WalkerWalk-v1", "WalkerRun-v1", "FishUpright-v1", "FingerSpin-v1", "HopperHop-v1")
COLORS = {"reference": "tab:grey", "best": "tab:blue"}
# Stable-Baselines3 with the tuned settings of its zoo and the same steps: the evaluation of one run, with the
# deterministic policy. MuJoCo: version 3 of the tasks. Source: DLR-RM/rl-baselines3-zoo, benchmark.md.
ZOO = {
    "HalfCheetah-v4": 5819,
    "Walker2d-v4": 3479,
    "Hopper-v4": 2410,
    "Ant-v4": 1327,
    "Swimmer-v4": 282,
    "CartPole-v1": 500,
}
RESAMPLES = 10_000


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
    rows = np.random.default_rng(0).integers(columns, size=(RESAMPLES, len(columns)))
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


def shade_interval(axis: Any, grid: np.ndarray, curves: np.ma.MaskedArray, color: str) -> None:
    """Shade the 95 % t interval of the mean over the seeds that have a value.

    Args:
        axis: Axis of matplotlib.
        grid: Values of the horizontal axis, [G].
        curves: Curves of the seeds, [seeds, G].
        color: Color of the mean.
    """
    count = curves.count(axis=0)
    half = t.ppf(0.975, count - 1) * curves.std(axis=0, ddof=1) / np.sqrt(count)
    mean = curves.mean(axis=0)
    axis.fill_between(grid, mean - half, mean + half, color=color, alpha=0.15, linewidth=0)


def draw_task(axis: Any, name: str, sides: dict[str, Task]) -> None:
    """Draw the curves of both sides, and the returns that others published for the same steps."""
    for side, task in sides.items():
        grid, curves = plot_mean(axis, task.curves, "env_steps", side, COLORS[side])
        shade_interval(axis, grid, curves, COLORS[side])
    cleanrl = published(name, "mujoco" if name in MUJOCO else "classic")
    if (
        cleanrl
        and cleanrl["env_steps"]
        and abs(int(cleanrl["env_steps"]) / sides["best"].env_steps - 1) < 0.1
    ):
        axis.axhline(float(cleanrl["mean"]), color="tab:red", linestyle="--", linewidth=0.9, label="CleanRL")
    if name in ZOO:
        label = "SB3's zoo (evaluation of one run)"
        axis.axhline(ZOO[name], color="tab:green", linestyle=":", linewidth=1.2, label=label)
    axis.set_title(name, fontsize=10)
    decorate(axis, "env_steps")


def draw_aggregate(axis: Any, result: dict[str, Any]) -> None:
    """Draw the interquartile mean with its interval."""
    low, high = result["interval"]
    axis.errorbar([result["iqm"]], [0], xerr=[[result["iqm"] - low], [high - result["iqm"]]], fmt="o")
    axis.axvline(1, color="tab:grey")
    axis.set_title("return / reference, all tasks", fontsize=10)
    axis.set_yticks([])
    axis.spines[["top", "right", "left"]].set_visible(False)


def draw(
    path: Path,
    tasks: Sequence[str],
    best: dict[str, Task],
    references: dict[str, Task],
    result: dict[str, Any] | None = None,
) -> None:
    """Draw a panel per task, and the aggregate if there is one."""
    columns = math.ceil((len(tasks) + (result is not None)) / 2)
    figure, axes = plt.subplots(2, columns, figsize=(3.5 * columns, 6), layout="constrained")
    legend: dict[str, Any] = {}
    for name, axis in zip(tasks, axes.flat, strict=False):
        draw_task(axis, name, {"reference": references[name], "best": best[name]})
        legend |= {line.get_label(): line for line in axis.get_legend_handles_labels()[0]}
    for axis in axes.flat[len(tasks) :]:
        axis.set_visible(False)
    if result is not None:
        axes.flat[-1].set_visible(True)
        draw_aggregate(axes.flat[-1], result)
    figure.legend([*legend.values()], [*legend], loc="outside lower center", ncols=len(legend), frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def print_table(tasks: Iterable[str], runs: dict[str, Task], references: dict[str, Task]) -> None:
    """Print a row per task that compares its runs with the reference."""
    print(
        "| task | recipe | reference | with the recipe | difference [95 %] | probability of improvement | p |"
    )
    print("|---|---|---|---|---|---|---|")
    for task in tasks:
        recipe = runs[task].recipe
        label = f"{task} | [{recipe}](../configs/best/{recipe}.yaml)"
        print(row(label, list(references[task].returns), list(runs[task].returns)))


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


def main(args: Sequence[str] | None = None) -> None:
    """Print the tables and the aggregates, and draw the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=Path, default=ROOT / "docs/images", help="folder of the figures")
    images = parser.parse_args(args).images
    references = read(RESULTS / "reference_runs.csv", RESULTS / "reference_curves.csv")
    folders = {path.parent.name: path.parent for path in sorted(RESULTS.glob("*/runs.csv"))}
    results = {name: read(folder / "runs.csv", folder / "curves.csv") for name, folder in folders.items()}
    common = results.pop("mujoco")
    best = dict(common)
    for tasks in results.values():
        best |= tasks

    print_table((*MUJOCO, *CLASSIC, *DM_CONTROL), best, references)
    result = print_aggregate(MUJOCO, best, references)
    print_table(common, common, references)
    print_aggregate(common, common, references)
    draw(images / "best.png", MUJOCO, best, references, result)
    draw(images / "best_others.png", (*CLASSIC, *DM_CONTROL), best, references)


if __name__ == "__main__":
    main()
