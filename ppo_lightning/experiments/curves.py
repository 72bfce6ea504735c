"""Learning curves as figures."""

from collections.abc import Iterable, Sequence
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


def draw(points: Sequence[Row], x: str, lines: dict[str, float], path: Path, columns: int = 3) -> None:
    """Draw learning curves, one panel per recipe: thin for seeds, thick for their mean, dashed if published.

    Args:
        points: Rows of ``curves.csv``.
        x: ``"env_steps"`` or ``"seconds"``.
        lines: Published mean of each recipe that has one.
        path: Path without suffix. A PNG and an SVG are written.
        columns: Number of panels per row.
    """
    import_extra("matplotlib", extra="report").use("Agg")
    import matplotlib.pyplot as plt

    recipes: dict[str, dict[str, list[Row]]] = {}
    for point in points:
        recipes.setdefault(point["recipe"], {}).setdefault(str(point["seed"]), []).append(point)
    columns = min(columns, len(recipes))
    rows = -(-len(recipes) // columns)
    size = max(5, 3.7 * columns), 2.8 * rows + 0.3
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    legend: dict[str, Any] = {}
    for axis, (label, seeds) in zip(axes.flat, recipes.items(), strict=False):
        plot_mean(axis, seeds.values(), x, "ppo_lightning: mean, and each seed")
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


def plot_mean(
    axis: Any, seeds: Iterable[Sequence[Row]], x: str, label: str, color: str = "tab:blue"
) -> tuple[np.ndarray, np.ma.MaskedArray]:
    """Draw a thin curve per seed and their thick mean; return the grid [G] and the curves [seeds, G].

    All curves end where the shortest one ends.
    """
    seeds = list(seeds)
    grid = np.linspace(0, min(max(float(row[x]) for row in rows) for rows in seeds), 101)
    curves = np.ma.stack([curve(rows, x, grid) for rows in seeds])
    for seed_curve in curves:
        axis.plot(grid, seed_curve, color=color, linewidth=0.8, alpha=0.35)
    axis.plot(grid, curves.mean(axis=0), color=color, linewidth=2, label=label)
    return grid, curves


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
