"""Draws the curves that collect.py gathered: `python benchmarks/plot.py NAME` writes docs/images/NAME.png."""

import csv
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

ROOT = Path(__file__).parent.parent
# Published mean after 500 000 steps: CleanRL's PPO documentation.
PUBLISHED = {"cartpole": 490.04, "acrobot": -86.36, "mountaincar": -200.0}


def main(name: str) -> None:
    """Draws one panel a recipe: each seed thin and smoothed, their mean thick, the published mean dashed."""
    with (ROOT / f"benchmarks/results/{name}_curves.csv").open() as file:
        rows = list(csv.DictReader(file))
    recipes = list(PUBLISHED)
    figure, axes = plt.subplots(1, len(recipes), figsize=(11, 2.8))
    grid = np.linspace(0, 500_000, 101)
    for axis, recipe in zip(axes, recipes, strict=True):
        curves = []
        for seed in sorted({row["seed"] for row in rows if row["recipe"] == recipe}):
            chosen = [row for row in rows if (row["recipe"], row["seed"]) == (recipe, seed)]
            steps = np.array([int(row["env_steps"]) for row in chosen])
            returns = np.array([float(row["episodic_return"]) for row in chosen])
            # mean of the rollouts in the 20 000 steps before each point of the grid
            windows = [returns[(steps > point - 20_000) & (steps <= point)] for point in grid]
            curves.append([window.mean() if len(window) else np.nan for window in windows])
            axis.plot(grid, curves[-1], color="tab:blue", linewidth=0.8, alpha=0.4)
        mean = np.ma.masked_invalid(curves).mean(axis=0)
        axis.plot(grid, mean, color="tab:blue", linewidth=2, label="ppo_lightning, 3 seeds")
        axis.axhline(PUBLISHED[recipe], color="grey", linestyle="--", linewidth=0.9, label="CleanRL, after 500 000 steps")
        axis.set_title(recipe, fontsize=10)
        axis.set_xlabel("environment steps", fontsize=8)
        axis.ticklabel_format(axis="x", style="plain")
        axis.set_xticks([0, 250_000, 500_000], ["0", "250 k", "500 k"], fontsize=8)
        axis.tick_params(axis="y", labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("return", fontsize=8)
    axes[0].legend(frameon=False, fontsize=7, loc="lower right")
    figure.tight_layout()
    figure.savefig(ROOT / f"docs/images/{name}.png", dpi=130)


if __name__ == "__main__":
    main(sys.argv[1])
