"""Draws the curves that collect.py gathered: `python benchmarks/plot.py NAME` writes docs/images/NAME.png."""

import csv
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

ROOT = Path(__file__).parent.parent
# CleanRL's published mean of each panel, and the recipes that it shows. Source: CleanRL's PPO and RPO documentation.
PANELS = {
    "classic": {"cartpole": 490.04, "acrobot": -86.36, "mountaincar": -200.0},
    "mujoco": {
        "halfcheetah": 1442.64, "walker2d": 2287.95, "hopper": 2382.86, "invertedpendulum": 963.09, "humanoid": 716.11,
        "pusher": -40.38,
    },
    "fast": {"halfcheetah": 1442.64},
}  # fmt: skip
COLOURS = ("tab:blue", "tab:orange")


def curve(rows: list[dict[str, str]], x: str, grid: np.ndarray) -> np.ma.MaskedArray:
    """Returns, for each point of the grid, the mean return of the 4 % of the axis before it; masked where there is none."""
    xs, returns = (np.array([float(row[key]) for row in rows]) for key in (x, "episodic_return"))
    windows = [returns[(xs > point - 0.04 * grid[-1]) & (xs <= point)] for point in grid]
    return np.ma.masked_invalid([window.mean() if len(window) else np.nan for window in windows])


def main(name: str) -> None:
    """Draws one panel a task: each seed thin and smoothed, their mean thick, the published mean dashed."""
    with (ROOT / f"benchmarks/results/{name}_curves.csv").open() as file:
        rows = list(csv.DictReader(file))
    panels, x = PANELS[name], "seconds" if name == "fast" else "env_steps"
    columns = min(3, len(panels))
    size = (11, 2.8 * -(-len(panels) // columns)) if columns > 1 else (6, 3.5)
    figure, axes = plt.subplots(-(-len(panels) // columns), columns, figsize=size, squeeze=False)
    for axis, (task, published) in zip(axes.flat, panels.items(), strict=True):
        recipes = [recipe for recipe in (task, f"{task}_fast") if any(row["recipe"] == recipe for row in rows)]
        for recipe, colour in zip(recipes, COLOURS, strict=False):
            chosen = [row for row in rows if row["recipe"] == recipe]
            seeds = sorted({row["seed"] for row in chosen})
            # The mean over seeds ends where the first seed does.
            grid = np.linspace(0, min(max(float(r[x]) for r in chosen if r["seed"] == seed) for seed in seeds), 101)
            curves = [curve([row for row in chosen if row["seed"] == seed], x, grid) for seed in seeds]
            for one in curves:
                axis.plot(grid, one, color=colour, linewidth=0.8, alpha=0.4)
            label = f"ppo_lightning{', fast' if recipe != task else ''}, {len(seeds)} seeds"
            axis.plot(grid, np.ma.mean(curves, axis=0), color=colour, linewidth=2, label=label)
        axis.axhline(published, color="grey", linestyle="--", linewidth=0.9, label="CleanRL, at the end")
        axis.set_title(task, fontsize=10)
        axis.set_xlabel("seconds" if x == "seconds" else "environment steps (thousands)", fontsize=8)
        if x == "env_steps":
            axis.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:.0f}")
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("return", fontsize=8)
    axes[0, 0].legend(frameon=False, fontsize=7, loc="lower right")
    figure.tight_layout()
    figure.savefig(ROOT / f"docs/images/{name}.png", dpi=130)


if __name__ == "__main__":
    main(sys.argv[1])
