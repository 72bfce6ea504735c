"""Draw the pictures of the documentation from the recorded runs.

`python benchmarks/figures.py [classic mujoco best best_others dm_control offpolicy memory rnd ppg
multiagent elo atari fast speed] [--output docs/images]` reads `benchmarks/results`. It needs the extra
`report`. All pictures can be read at a width of 800 pixels.

A curve is the mean over seeds of the return, averaged over 4 % of the horizontal axis, with the 95 % t
interval of the mean, or, with less than five seeds, each seed as a thin line. A dashed line is the
published return at the end, its band the published standard deviation. Bars of speed are medians, and their
lines go from the smallest to the largest run. `scaling.py --plot` and `ablate.py` draw their own
measurements.
"""

import argparse
import copy
import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from PIL import Image
from scipy.stats import t

from benchmarks import tables
from ppo_lightning.experiments.curves import curve
from ppo_lightning.experiments.report import published, read_csv

mpl.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
WIDTH = 8.0  # inches: 100 pixels each in a page of 800 pixels
CLASSIC = {"cartpole": "CartPole-v1", "acrobot": "Acrobot-v1", "mountaincar": "MountainCar-v0"}
MUJOCO = {
    "halfcheetah": "HalfCheetah-v4", "hopper": "Hopper-v4", "walker2d": "Walker2d-v4",
    "invertedpendulum": "InvertedPendulum-v4", "pusher": "Pusher-v4", "humanoid": "Humanoid-v4",
}  # fmt: skip
OURS = "ppo_lightning"
BLUE, GREY, RED, GREEN = "tab:blue", "tab:grey", "tab:red", "tab:green"
COLORS = {"DQN": BLUE, "C51": "tab:orange", "SAC": GREEN, "TD3": RED, "DDPG": "tab:purple"}
# Stable-Baselines3 with the tuned settings of its zoo and the same steps: the evaluation of one run, with the
# deterministic policy. MuJoCo: version 3 of the tasks. Source: DLR-RM/rl-baselines3-zoo, benchmark.md.
ZOO = {
    "HalfCheetah-v4": 5819, "Walker2d-v4": 3479, "Hopper-v4": 2410, "Ant-v4": 1327, "Swimmer-v4": 282,
    "CartPole-v1": 500,
}  # fmt: skip
Row = dict[str, Any]


class Panel(NamedTuple):
    """A picture of one task.

    Attributes:
        title: Name of the task.
        runs: Label and color of each algorithm, and the points of the curve of each seed.
        marks: Label, color, mean and standard deviation of each published return.
        points: Label, color, environment steps and return of each single measurement.
    """

    title: str
    runs: dict[tuple[str, str], list[list[Row]]]
    marks: Sequence[tuple[str, str, float, float]] = ()
    points: Sequence[tuple[str, str, float, float]] = ()


def points_of(path: str, value: str = "episodic_return", **labels: str) -> list[list[Row]]:
    """Return the points of the curve of each seed in a file of the results.

    Args:
        path: CSV file in ``benchmarks/results``.
        value: Name of the column of the returns.
        **labels: Values of other columns that select rows.
    """
    seeds: dict[str, list[Row]] = {}
    for row in read_csv(RESULTS / path):
        if all(row[name] == label for name, label in labels.items()) and row[value]:
            point = {"env_steps": float(row["env_steps"]), "episodic_return": float(row[value])}
            seeds.setdefault(row["seed"], []).append(point)
    assert seeds, f"{path} has no rows of {labels}"
    return list(seeds.values())


def mark_of(
    env_id: str, family: str, color: str = RED, label: str = "CleanRL, at the end"
) -> list[tuple[str, str, float, float]]:
    """Return CleanRL's published return of an environment, none if there is none."""
    row = published(env_id, family)
    return [(label, color, float(row["mean"]), float(row["std"] or 0))] if row else []


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
    axis.fill_between(grid, mean - half, mean + half, color=color, alpha=0.2, linewidth=0)


def draw_runs(axis: Any, seeds: Sequence[Sequence[Row]], label: str, color: str) -> None:
    """Draw the mean of the seeds with its interval or the seeds, or each seed if they differ in length."""
    ends = [max(float(row["env_steps"]) for row in rows) for rows in seeds]
    if min(ends) < 0.9 * max(ends):
        for rows, end in zip(seeds, ends, strict=True):
            grid = np.linspace(0, end, 101)
            axis.plot(grid, curve(rows, "env_steps", grid), color=color, linewidth=1.4, label=label)
        return
    grid = np.linspace(0, min(ends), 101)
    curves = np.ma.stack([curve(rows, "env_steps", grid) for rows in seeds])
    axis.plot(grid, curves.mean(axis=0), color=color, linewidth=1.8, label=label)
    if len(seeds) >= 5:
        shade_interval(axis, grid, curves, color)
    elif len(seeds) > 1:
        axis.plot(grid, curves.T, color=color, linewidth=0.7, alpha=0.4)


def draw_panel(axis: Any, panel: Panel) -> None:
    """Draw the curves, published returns and single measurements of a task."""
    for (label, color), seeds in panel.runs.items():
        draw_runs(axis, seeds, label, color)
    for label, color, mean, std in panel.marks:
        axis.axhline(mean, color=color, linestyle="--", linewidth=1.1, label=label)
        axis.axhspan(mean - std, mean + std, color=color, alpha=0.08, linewidth=0)
        low, high = axis.get_ylim()
        axis.set_ylim(min(low, mean - 0.05 * (high - low)), max(high, mean + 0.05 * (high - low)))
    for label, color, steps, value in panel.points:
        axis.plot(steps, value, "x", color=color, markersize=7, markeredgewidth=1.6, label=label)
    axis.set_title(panel.title, fontsize=10)
    decorate(axis)


def decorate(axis: Any) -> None:
    """Remove the upper and the right spine, and print steps in thousands or millions."""
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.xaxis.set_major_locator(mpl.ticker.MaxNLocator(4))
    axis.xaxis.set_major_formatter(
        lambda value, _: f"{value / 1e6:g} M" if value >= 1e6 else f"{value / 1e3:g} k" if value else "0"
    )


def save(figure: Any, path: Path) -> None:
    """Write a figure as a PNG of 64 colors and twice the width of its place, and close it."""
    figure.savefig(path, dpi=200)
    Image.open(path).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)
    plt.close(figure)


def draw(
    path: Path,
    panels: Sequence[Panel],
    columns: int = 3,
    last: Callable[[Any], None] | None = None,
    height: float = 2.3,
) -> None:
    """Draw a panel per task, and one legend below them.

    Args:
        path: Path of the picture.
        panels: What to draw.
        columns: Panels in a row.
        last: Function that draws on an additional panel.
        height: Height of a panel in inches.
    """
    count = len(panels) + (last is not None)
    rows = math.ceil(count / columns)
    size = (WIDTH, height * rows + 0.5)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    legend: dict[str, Any] = {}
    for axis, panel in zip(axes.flat, panels, strict=False):
        draw_panel(axis, panel)
        for line in axis.get_legend_handles_labels()[0]:
            known = legend.setdefault(line.get_label(), copy.copy(line))
            if known.get_color() != line.get_color():  # the color is that of the algorithm
                known.set_color("black")
    if last is not None:
        last(axes.flat[len(panels)])
    for axis in axes.flat[count:]:
        axis.set_visible(False)
    axes[0, 0].set_ylabel("return", fontsize=9)
    for axis in axes.flat[max(0, count - columns) : count]:
        axis.set_xlabel(axis.get_xlabel() or "environment steps", fontsize=9)
    options: dict[str, Any] = {"frameon": False, "fontsize": 9, "ncols": min(4, len(legend))}
    figure.legend([*legend.values()], [*legend], loc="outside lower center", **options)
    save(figure, path)


def draw_suite(path: Path, suite: str, tasks: dict[str, str]) -> None:
    """Draw the recipes of a suite beside CleanRL's returns."""
    draw(path, [
        Panel(env_id, {(OURS, BLUE): points_of(f"{suite}/curves.csv", recipe=recipe)}, mark_of(env_id, suite))
        for recipe, env_id in tasks.items()
    ])  # fmt: skip


def classic(path: Path) -> None:
    """Draw classic control."""
    draw_suite(path, "classic", CLASSIC)


def mujoco(path: Path) -> None:
    """Draw MuJoCo."""
    draw_suite(path, "mujoco", MUJOCO)


def best_panel(name: str, task: tables.Task, reference: tables.Task) -> Panel:
    """Return the curves of both sides, and the returns that others published for the same steps."""
    family = "mujoco" if name in tables.MUJOCO else "classic"
    row = published(name, family)
    same = row and row["env_steps"] and abs(int(row["env_steps"]) / task.env_steps - 1) < 0.1
    marks = mark_of(name, family) if same else []
    if name in ZOO:
        marks.append(("SB3's zoo (evaluation of one run)", GREEN, ZOO[name], 0.0))
    return Panel(name, {("reference", GREY): reference.curves, ("best", BLUE): task.curves}, marks)


def best(path: Path) -> None:
    """Draw the best recipes of MuJoCo beside the reference."""
    runs, _, references = tables.best_and_references()
    sides = zip(*((runs[task].returns, references[task].returns) for task in tables.MUJOCO), strict=True)
    result = tables.aggregate(*sides)

    def draw_aggregate(axis: Any) -> None:
        low, high = result["interval"]
        errors = [[result["iqm"] - low], [high - result["iqm"]]]
        axis.errorbar([result["iqm"]], [0], xerr=errors, fmt="o", color=BLUE, capsize=3)
        axis.axvline(1, color=GREY)
        axis.set_title("all tasks", fontsize=10)
        axis.set_xlabel("return / reference, 95 % interval")
        axis.set_yticks([])
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right", "left"]].set_visible(False)

    draw(path, [best_panel(task, runs[task], references[task]) for task in tables.MUJOCO], 3, draw_aggregate)


def best_others(path: Path) -> None:
    """Draw the best recipes of classic control and dm_control beside the reference."""
    runs, _, references = tables.best_and_references()
    tasks = (*tables.CLASSIC, *tables.DM_CONTROL)
    draw(path, [best_panel(task, runs[task], references[task]) for task in tasks])


def dm_control(path: Path) -> None:
    """Draw PPO and RPO on all tasks of dm_control beside CleanRL's PPO."""
    by_side = {}
    for side in ("ppo", "rpo"):
        for row in read_csv(RESULTS / f"dm_control/{side}/curves.csv"):
            seeds = by_side.setdefault((side, row["recipe"].split()[1]), {})
            point = {name: float(row[name]) for name in ("env_steps", "episodic_return")}
            seeds.setdefault(row["seed"], []).append(point)
    panels = []
    for env_id in sorted(env_id for side, env_id in by_side if side == "ppo"):
        runs = {
            (side.upper(), color): [*by_side[side, env_id].values()]
            for side, color in (("ppo", BLUE), ("rpo", "tab:orange"))
        }
        marks = mark_of(env_id, "dm_control", GREY, "CleanRL's PPO, 8 M steps")
        panels.append(Panel(env_id.removesuffix("-v1"), runs, marks))
    draw(path, panels, columns=4, height=1.6)


def offpolicy(path: Path) -> None:
    """Draw the off-policy algorithms beside the returns of CleanRL and Stable-Baselines3."""
    panels = []
    for recipe, env_id in CLASSIC.items():
        names = ("DQN", "C51")
        runs = {
            (name, COLORS[name]): points_of("offpolicy/curves.csv", series=f"{name.lower()}_{recipe}_50")
            for name in names
        }
        marks = [mark_of(env_id, n.lower(), COLORS[n], "CleanRL, at the end")[0] for n in names]
        panels.append(Panel(env_id, runs, marks))
    for recipe, env_id in (("pendulum", "Pendulum-v1"), ("invertedpendulum", "InvertedPendulum-v4")):
        runs = {
            (name, COLORS[name]): points_of("offpolicy/curves.csv", series=f"{name.lower()}_{recipe}")
            for name in ("SAC", "TD3", "DDPG")
        }
        panels.append(Panel(env_id, runs))
    for folder, env_id in (("halfcheetah", "HalfCheetah-v4"), ("hopper", "Hopper-v4")):
        runs, marks, points = {}, [], []
        for name in ("SAC", "TD3"):
            curves = points_of(f"offpolicy/{folder}/curves.csv", "avg_episodic_return", recipe=name.lower())
            runs[name, COLORS[name]] = curves
            if folder == "halfcheetah":
                marks += mark_of(env_id, name.lower(), COLORS[name], "CleanRL, at the end")
            points += [
                (
                    "Stable-Baselines3, after 200 k steps",
                    COLORS[name],
                    float(row["env_steps"]),
                    float(row["episodic_return"]),
                )
                for row in read_csv(RESULTS / f"offpolicy/{folder}/sb3.csv")
                if row["recipe"].endswith(name.lower())
            ]
        panels.append(Panel(env_id, runs, marks, points))
    draw(path, panels)


def memory(path: Path) -> None:
    """Draw recipes with and without memory."""
    tasks = {
        "CartPole without velocities": (
            "cartpole_masked_velocity",
            "cartpole_lstm_masked_velocity",
            "cartpole_masked_velocity",
        ),
        "MiniGrid-MemoryS7": ("minigrid", "minigrid", "minigrid_without_memory"),
    }
    panels = []
    for title, (file, with_memory, without) in tasks.items():
        sides = (("with memory", BLUE, with_memory), ("without", GREY, without))
        name = f"memory/{file}_curves.csv"
        panels.append(
            Panel(title, {(label, color): points_of(name, recipe=recipe) for label, color, recipe in sides})
        )
    draw(path, panels, columns=2)


def rnd(path: Path) -> None:
    """Draw RND beside PPO with the same settings."""
    titles = {
        "mountaincar": "MountainCar", "mountaincar_sparse": "MountainCar, sparse", "multiroom": "MultiRoom",
        "cartpole": "CartPole", "acrobot": "Acrobot",
    }  # fmt: skip
    arms = {"RND": ("rnd", BLUE), "PPO, same settings": ("ppo", GREY)}
    draw(path, [
        Panel(title, {
            (label, color): points_of("rnd/curves.csv", "mean_return", task=task, arm=arm)
            for label, (arm, color) in arms.items()
        })
        for task, title in titles.items()
    ])  # fmt: skip


def ppg(path: Path) -> None:
    """Draw PPG beside PPO with the same settings."""
    sides = {"PPG": ("ppg", BLUE), "PPO": ("ppo", GREY)}
    panels = [
        Panel("CartPole-v1", {
            (label, color): points_of(f"ppg/cartpole_{name}_curves.csv")
            for label, (name, color) in sides.items()
        })
    ]  # fmt: skip
    runs = {}
    for label, (name, color) in sides.items():
        rows = [row for row in read_csv(RESULTS / f"ppg/bigfish_{name}.csv") if row["charts/episodic_return"]]
        points = [
            {"env_steps": float(row["step"]), "episodic_return": float(row["charts/episodic_return"])}
            for row in rows
        ]
        runs[label, color] = [points]
    draw(path, [*panels, Panel("Procgen's bigfish, one seed", runs)], columns=2)


def multiagent(path: Path) -> None:
    """Draw IPPO and MAPPO on simple_spread beside TorchRL's tutorial."""
    colors = {
        "ippo": ("IPPO", BLUE),
        "mappo": ("MAPPO", GREEN),
        "torchrl": ("MAPPO of TorchRL's tutorial", GREY),
    }
    runs = {}
    for name, key in colors.items():
        rows = read_csv(RESULTS / f"multiagent/{name}_1.csv")
        runs[key] = [
            [{"env_steps": row["game_steps"], "episodic_return": row["episodic_return"]} for row in rows]
        ]
    draw(path, [Panel("simple_spread, one seed", runs)], columns=1)


def elo(path: Path) -> None:
    """Draw the ratings of Connect Four by self-play."""
    rows = read_csv(RESULTS / "selfplay/elo.csv")
    names = ("step", "charts/elo", "charts/elo_low", "charts/elo_high")
    step, rating, low, high = (np.array([float(row[name]) for row in rows]) for name in names)
    figure, axis = plt.subplots(figsize=(WIDTH, 3.2), layout="constrained")
    axis.fill_between(step, low, high, color=BLUE, alpha=0.2, linewidth=0, label="95 % interval")
    axis.plot(step, rating, color=BLUE, marker="o", markersize=4, label="agent")
    axis.axhline(0, color=GREY, linestyle="--", label="random play")
    decorate(axis)
    axis.set(xlabel="environment steps", ylabel="Elo", title="Connect Four by self-play")
    axis.legend(frameon=False, fontsize=9)
    save(figure, path)


def atari(path: Path) -> None:
    """Draw the Atari runs beside CleanRL's returns after ten million steps."""
    panels = []
    for title, env_id, names in (
        ("Pong", "ALE/Pong-v5", ("pong_fast", "pong_fast-again")),
        ("Breakout", "ALE/Breakout-v5", ("breakout_fast",)),
    ):
        seeds = [rows for name in names for rows in points_of("atari_curves.csv", recipe=name)]
        marks = mark_of(env_id, "atari", label="CleanRL, 10 M steps")
        panels.append(Panel(title, {(OURS, BLUE): seeds}, marks))
    draw(path, panels, columns=2)


def fast(path: Path) -> None:
    """Draw the return of HalfCheetah over time, with one environment and with the fast recipe."""
    figure, axis = plt.subplots(figsize=(WIDTH, 3.2), layout="constrained")
    rows = read_csv(RESULTS / "fast_curves.csv")
    for recipe, label, color in (
        ("halfcheetah", "one environment", GREY),
        ("halfcheetah_fast", "fast", BLUE),
    ):
        seeds: dict[str, list[Row]] = {}
        for row in rows:
            if row["recipe"] == recipe:
                seeds.setdefault(row["seed"], []).append(row)
        for number, points in enumerate(seeds.values()):
            grid = np.linspace(0, max(float(point["seconds"]) for point in points), 101)
            named = {} if number else {"label": f"{label}, each of three seeds"}
            axis.plot(grid, curve(points, "seconds", grid), color=color, linewidth=1.4, **named)
    ((_, _, mean, _),) = mark_of("HalfCheetah-v4", "mujoco")
    axis.axhline(mean, color=RED, linestyle="--", linewidth=1.1, label="CleanRL, after a million steps")
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set(xlabel="seconds of training", ylabel="return", title="HalfCheetah-v4, a million steps")
    axis.legend(frameon=False, fontsize=9)
    save(figure, path)


def speed(path: Path) -> None:
    """Draw the throughput of compiled runs and of TorchRL's loop as multiples of Stable-Baselines3's."""
    series = {
        "ours, compiled (AVX2)": ("ours, compiled", ("speed_avx2", "speed_avx2_again"), BLUE),
        "ours, compiled (AVX-512)": ("ours, compiled", ("speed_compiled",), "tab:cyan"),
        "TorchRL's loop (AVX-512, an earlier series)": ("torchrl", ("speed_all",), GREY),
    }
    titles = {
        "cartpole-4x128": "CartPole, 4 x 128", "cartpole-64x128": "CartPole, 64 x 128",
        "halfcheetah-1x2048": "HalfCheetah, 1 x 2048", "halfcheetah-16x256": "HalfCheetah, 16 x 256",
        "breakout-8x128": "Breakout, 8 x 128",
    }  # fmt: skip
    figure, axis = plt.subplots(figsize=(WIDTH, 4.6), layout="constrained")
    height = 0.8 / len(series)
    for number, (label, (program, files, color)) in enumerate(series.items()):
        for place, workload in enumerate(titles):
            ratios = []
            for file in files:
                content = json.loads((RESULTS / f"{file}.json").read_text())
                for call in content.get("calls", [content]):
                    runs = call["runs"].get(workload, {})
                    pairs = zip(runs.get(program, ()), runs.get("stable-baselines3", ()), strict=False)
                    ratios += [one["sps"] / other["sps"] for one, other in pairs]
            if not ratios:
                continue
            y, middle = place + (number - 1) * height, statistics.median(ratios)
            axis.barh(y, middle, height, color=color, label=label if place == 0 else None)
            axis.plot([min(ratios), max(ratios)], [y, y], color="black", linewidth=1)
            axis.text(max(ratios) + 0.08, y, f"{middle:.1f}", va="center", fontsize=9)
    axis.axvline(1, color="black", linewidth=1, linestyle="--")
    axis.set_yticks(range(len(titles)), titles.values(), fontsize=9)
    axis.invert_yaxis()
    axis.tick_params(axis="x", labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel("environment steps per second, Stable-Baselines3 = 1", fontsize=9)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    save(figure, path)


FIGURES: dict[str, Callable[[Path], None]] = {
    function.__name__: function
    for function in (
        classic, mujoco, best, best_others, dm_control, offpolicy, memory, rnd, ppg, multiagent, elo, atari,
        fast, speed,
    )
}  # fmt: skip


def main(args: Sequence[str] | None = None) -> None:
    """Draw the figures that are named, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=f"{', '.join(FIGURES)} (default: all)")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/images", help="folder of the pictures")
    options = parser.parse_args(args)
    if unknown := set(options.figures) - FIGURES.keys():
        parser.error(f"no figure is called {' or '.join(unknown)}")
    for name in options.figures or FIGURES:
        FIGURES[name](options.output / f"{name}.png")


if __name__ == "__main__":
    main()
