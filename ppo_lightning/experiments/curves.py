"""Learning curves as figures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ppo_lightning.errors import import_extra

WINDOW = 0.04  # share of the horizontal axis over which curves are averaged
Row = dict[str, Any]


def curve(rows: Sequence[Row], x: str, grid: np.ndarray) -> np.ma.MaskedArray:
    """Compute a learning curve on a grid: at each point, the mean return over the 4 % of the axis before it.

    Windows without an episode end are interpolated linearly. Points before the first episode end are masked,
    which may be all of them: the grid ends where the shortest run ends, and another run may have begun later.
    """
    xs, returns = (np.array([float(row[key]) for row in rows]) for key in (x, "episodic_return"))
    windows = [returns[(xs > point - WINDOW * grid[-1]) & (xs <= point)] for point in grid]
    means = np.array([window.mean() if len(window) else np.nan for window in windows])
    found = ~np.isnan(means)
    if not found.any():
        return np.ma.masked_all(len(grid))
    return np.ma.masked_array(np.interp(grid, grid[found], means[found]), mask=np.cumsum(found) == 0)


def draw(points: Sequence[Row], x: str, lines: dict[str, float], path: Path) -> None:
    """Draw ``curves.csv``, one panel per recipe: thin for seeds, thick for their mean, dashed if published.

    All curves end where the shortest one of the recipe ends.
    """
    import_extra("matplotlib", extra="report").use("Agg")
    import matplotlib.pyplot as plt

    recipes: dict[str, dict[str, list[Row]]] = {}
    for point in points:
        recipes.setdefault(point["recipe"], {}).setdefault(str(point["seed"]), []).append(point)
    columns = min(3, len(recipes))
    rows = -(-len(recipes) // columns)
    size = max(5, 3.7 * columns), 2.8 * rows + 0.3
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    legend: dict[str, Any] = {}
    for axis, (label, seeds) in zip(axes.flat, recipes.items(), strict=False):
        grid = np.linspace(0, min(max(float(row[x]) for row in rows) for rows in seeds.values()), 101)
        curves = np.ma.stack([curve(rows, x, grid) for rows in seeds.values()])
        axis.plot(grid, curves.T, color="tab:blue", linewidth=0.8, alpha=0.35)
        label_of_mean = "ppo_lightning: mean, and each seed"
        axis.plot(grid, curves.mean(axis=0), color="tab:blue", linewidth=2, label=label_of_mean)
        if label in lines:
            axis.axhline(
                lines[label], color="grey", linestyle="--", linewidth=0.9, label="CleanRL, at the end"
            )
        axis.set_title(label, fontsize=10)
        decorate(axis, x)
        legend |= {line.get_label(): line for line in axis.get_legend_handles_labels()[0]}
    for axis in axes.flat[len(recipes) :]:
        axis.set_visible(False)
    axes[0, 0].set_ylabel("return", fontsize=8)
    # A legend inside a panel would cover a curve.
    options: dict[str, Any] = {"ncols": len(legend), "frameon": False, "fontsize": 8}
    figure.legend(list(legend.values()), list(legend), loc="outside lower center", **options)
    save(figure, path)


def decorate(axis: Any, x: str) -> None:
    """Label the horizontal axis and remove the upper and the right spine."""
    axis.set_xlabel("seconds of training" if x == "seconds" else "environment steps (thousands)", fontsize=8)
    if x == "env_steps":
        axis.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}")
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def save(figure: Any, path: Path) -> None:
    """Write a figure as PNG and SVG and close it."""
    for suffix in (".png", ".svg"):
        figure.savefig(path.with_suffix(suffix), dpi=130)
    import_extra("matplotlib.pyplot", extra="report").close(figure)
