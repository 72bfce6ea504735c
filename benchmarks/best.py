"""Compare the best recipes with the references, and draw their learning curves.

`python benchmarks/best.py` reads `benchmarks/results/best`, prints a table and the aggregate over the MuJoCo
tasks, and writes `docs/images/best.png` and `best_others.png`. Bands are 95 % t intervals of the mean over
seeds. The script needs the extra `report`.

Aggregate: the interquartile mean, over the runs of all tasks, of returns divided by the mean of the
reference, with a 95 % bootstrap interval that is stratified by task and by side. Where returns are negative
(Pusher), the mean of the reference is divided by the return.

Source: Agarwal et al., "Deep Reinforcement Learning at the Edge of the Statistical Precipice" (2021).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

from ppo_lightning.commands.compare import probability_of_improvement
from ppo_lightning.commands.curves import decorate, plot_mean, shade_interval
from ppo_lightning.commands.report import interquartile_mean, published, read_csv
from ppo_lightning.utils.rounding import decimals

mpl.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/best"
MUJOCO = tuple(
    f"{name}-v4" for name in ("HalfCheetah", "Hopper", "Walker2d", "Ant", "Humanoid", "Swimmer", "Pusher")
)
OTHERS = ("CartPole-v1", "Acrobot-v1", "MountainCar-v0", "LunarLander-v3")
COLORS = {"reference": "tab:grey", "best": "tab:blue"}
# Stable-Baselines3 with the tuned settings of its zoo, 1 M steps, version 3 of the tasks.
# Source: DLR-RM/rl-baselines3-zoo, benchmark.md.
ZOO = {"HalfCheetah-v4": 5819, "Walker2d-v4": 3479, "Hopper-v4": 2410, "Swimmer-v4": 282}
RESAMPLES = 10_000


def normalized(returns: np.ndarray, reference: float) -> np.ndarray:
    """Return how many times better than the reference the returns are."""
    return returns / reference if reference > 0 else reference / returns


def aggregate(best: Sequence[np.ndarray], references: Sequence[np.ndarray]) -> dict[str, Any]:
    """Compute the interquartile mean with its interval, and the mean probability of improvement.

    Args:
        best: Returns of the runs of each task.
        references: The same for the reference.
    """

    def mean(best: Sequence[np.ndarray], references: Sequence[np.ndarray]) -> float:
        pairs = zip(best, references, strict=True)
        return float(interquartile_mean(np.concatenate([normalized(b, r.mean()) for b, r in pairs])))

    random = np.random.default_rng(0)

    def resample(runs: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [random.choice(returns, len(returns)) for returns in runs]

    samples = [mean(resample(best), resample(references)) for _ in range(RESAMPLES)]
    improvements = [
        probability_of_improvement(list(r), list(b)) for b, r in zip(best, references, strict=True)
    ]
    return {
        "iqm": mean(best, references),
        "interval": np.percentile(samples, [2.5, 97.5]),
        "improvement": float(np.mean(improvements)),
    }


def read_side(name: str) -> dict[str, list[dict[str, str]]]:
    """Return the runs and the curves of ``best``, or of ``reference``, each with an ``env_id``."""
    files = {kind: RESULTS.glob(f"*/{kind}.csv") for kind in ("runs", "curves")}
    if name == "reference":
        files = {kind: [RESULTS / f"reference_{kind}.csv"] for kind in files}
    rows = {kind: [row for path in sorted(paths) for row in read_csv(path)] for kind, paths in files.items()}
    env_ids = {row["recipe"]: row["env_id"] for row in rows["runs"]}
    rows["curves"] = [row | {"env_id": env_ids[row["recipe"]]} for row in rows["curves"]]
    return rows


def draw_task(axis: Any, task: str, data: dict[str, dict[str, list[dict[str, str]]]]) -> None:
    """Draw the curves of both sides, and the returns that others published for the same steps."""
    for side, color in COLORS.items():
        by_seed: dict[str, list[dict[str, str]]] = {}
        for row in data[side]["curves"]:
            if row["env_id"] == task:
                by_seed.setdefault(row["seed"], []).append(row)
        grid, curves = plot_mean(axis, by_seed.values(), "env_steps", side, color)
        shade_interval(axis, grid, curves, color)
    steps = max(int(row["env_steps"]) for row in data["best"]["runs"] if row["env_id"] == task)
    row = published(task, "mujoco" if task in MUJOCO else "classic")
    if row and row["env_steps"] and abs(int(row["env_steps"]) / steps - 1) < 0.1:
        axis.axhline(float(row["mean"]), color="tab:red", linestyle="--", linewidth=0.9, label="CleanRL")
    if task in ZOO:
        axis.axhline(ZOO[task], color="tab:green", linestyle=":", linewidth=1.2, label="SB3's zoo")
    axis.set_title(task, fontsize=10)
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
    data: dict[str, dict[str, list[dict[str, str]]]],
    result: dict[str, Any] | None = None,
) -> None:
    """Draw a panel per task, and the aggregate if there is one."""
    columns = len(tasks) // 2 + 1
    figure, axes = plt.subplots(2, columns, figsize=(3.5 * columns, 6), layout="constrained")
    legend: dict[str, Any] = {}
    for task, axis in zip(tasks, axes.flat, strict=False):
        draw_task(axis, task, data)
        legend |= {line.get_label(): line for line in axis.get_legend_handles_labels()[0]}
    for axis in axes.flat[len(tasks) :]:
        axis.set_visible(False)
    if result is not None:
        axes.flat[-1].set_visible(True)
        draw_aggregate(axes.flat[-1], result)
    figure.legend([*legend.values()], [*legend], loc="outside lower center", ncols=len(legend), frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(args: Sequence[str] | None = None) -> None:
    """Print the table and the aggregate, and draw the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=Path, default=ROOT / "docs/images", help="folder of the figures")
    images = parser.parse_args(args).images
    data = {side: read_side(side) for side in COLORS}
    returns: dict[str, list[np.ndarray]] = {task: [] for task in (*MUJOCO, *OTHERS)}
    print("| task | reference | best |\n|---|---|---|")
    for task, sides in returns.items():
        for rows in data.values():
            runs = [row for row in rows["runs"] if row["env_id"] == task]
            sides.append(np.array([float(row["episodic_return"]) for row in runs]))
        spec = decimals(float(sides[0].mean()))
        figures = [f"{side.mean():{spec}} ± {side.std(ddof=1):{spec}}" for side in sides]
        print(f"| {task} | {' | '.join(figures)} |")
    references, best = zip(*(returns[task] for task in MUJOCO), strict=True)
    result = aggregate(best, references)
    low, high = result["interval"]
    print(
        f"\nInterquartile mean of normalized returns: {result['iqm']:.2f} [{low:.2f}, {high:.2f}],"
        f" probability of improvement: {result['improvement']:.2f}"
    )
    draw(images / "best.png", MUJOCO, data, result)
    draw(images / "best_others.png", OTHERS, data)


if __name__ == "__main__":
    main()
