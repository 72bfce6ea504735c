"""The results of a benchmark: a CSV of runs, a table beside published results, learning curves."""

import csv
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ppo_lightning.checkpoints.file import read_checkpoint
from ppo_lightning.commands.runner import DONE, Job, Runner, metrics_of
from ppo_lightning.errors import import_extra
from ppo_lightning.utils.rounding import decimals

CONFIDENCE = 0.95
WINDOW = 0.04  # of the horizontal axis, over which curves are averaged
Row = dict[str, Any]


def interquartile_mean(values: np.ndarray, axis: int = -1) -> Any:
    """Returns the mean without the lowest and the highest quarter, both rounded down to whole runs.

    Source: Agarwal et al., "Deep Reinforcement Learning at the Edge of the Statistical Precipice" (2021), whose ``rliable``
    computes it so. Of three runs it is the mean.
    """
    return import_extra("scipy.stats", extra="report").trim_mean(values, 0.25, axis=axis)


def interval(runs: Sequence[float], reference: Sequence[float] | None = None) -> tuple[float, float]:
    """Return the 95 % t interval of the mean of runs, or of its difference from that of a reference (Welch).

    It covers 95 % for normal distributions; a percentile bootstrap of three runs covers 76 %. Returns of two
    kinds, as HalfCheetah's, need ten runs or more for 95 %.

    Args:
        runs: Returns of independent runs.
        reference: Returns of other runs.

    Returns:
        Both bounds; NaN where a sample has fewer than two runs.
    """
    samples = [np.asarray(sample, float) for sample in (runs, reference) if sample is not None]
    if any(len(sample) < 2 for sample in samples):
        return float("nan"), float("nan")
    middle = samples[0].mean() - (0.0 if reference is None else samples[1].mean())
    errors = [sample.var(ddof=1) / len(sample) for sample in samples]  # squared standard errors
    if not (total := sum(errors)):
        return float(middle), float(middle)
    shares = [error**2 / (len(sample) - 1) for error, sample in zip(errors, samples, strict=True)]
    freedom = total**2 / sum(shares)
    half = import_extra("scipy.stats", extra="report").t.ppf((1 + CONFIDENCE) / 2, freedom) * math.sqrt(total)
    return float(middle - half), float(middle + half)


def results_of(job: Job, folder: Path, sources: Sequence[Row]) -> tuple[Row, list[Row]]:
    """Read a finished run.

    Args:
        job: The run.
        folder: Of the run.
        sources: What the run recorded at its start and at each resumption.

    Returns:
        The run's row, and the points of its learning curve.

    Raises:
        FileNotFoundError: It left no checkpoint.
    """
    found = sorted(folder.glob("runs/*/version_*/checkpoints/*.ckpt"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise FileNotFoundError(f"{folder} has no checkpoint.")
    checkpoint, metrics = read_checkpoint(str(found[-1])), list(metrics_of(folder))
    evaluations = [float(row["eval/episodic_return"]) for row in metrics if row.get("eval/episodic_return")]
    row = {
        "recipe": job.label,
        "env_id": job.settings["env_id"],
        "seed": job.seed,
        "env_steps": checkpoint["env_steps"],
        "episodic_return": _mean(checkpoint["episode_returns"]),
        "eval_return": evaluations[-1] if evaluations else float("nan"),
        "wall_seconds": json.loads((folder / DONE).read_text())["wall_seconds"],
        "commit": " + ".join(dict.fromkeys(its["commit"] for its in sources)),
    }
    curve = [
        {
            "recipe": job.label,
            "seed": job.seed,
            "env_steps": int(its["step"]),
            "seconds": float(its["seconds"]),
            "episodic_return": round(float(its["charts/episodic_return"]), 4),
        }
        for its in metrics
        if its.get("charts/episodic_return")
    ]
    return row, curve


def _mean(values: Sequence[float]) -> float:
    return round(statistics.fmean(values), 4) if values else float("nan")


def published(env_id: str, family: str) -> Row | None:
    """Returns CleanRL's published result for an environment, of the recipe's family if it has one; None: there is none.

    The figures stand in ``published.csv``, each with its source.
    """

    def plain(name: str) -> str:
        return name.removeprefix("ALE/").replace("NoFrameskip", "").split("-v")[0] if _atari(name) else name

    with Path(__file__).with_name("published.csv").open() as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if row["metric"] == "episodic_return" and "CleanRL" in row["source"]
        ]
    rows = [row for row in rows if plain(row["env_id"]) == plain(env_id)]
    return next((row for row in rows if row["recipe"] == family), rows[0] if rows else None)


def _atari(name: str) -> bool:
    return name.startswith("ALE/") or "NoFrameskip" in name


def read_csv(path: Path) -> list[dict[str, str]]:
    """Reads a CSV with a header."""
    with path.open() as file:
        return list(csv.DictReader(file))


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Writes rows with one header line."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def write_report(runner: Runner, jobs: Sequence[Job], command: Sequence[str]) -> str:
    """Writes runs.csv, curves.csv, report.md and the pictures into the benchmark's folder.

    Args:
        runner: Has run the jobs.
        jobs: Jobs of the command; the report leaves out those that have not finished, and says so.
        command: The command line.

    Returns:
        The table.
    """
    done = [job for job in jobs if (runner.of(job) / DONE).exists()]
    if not done:
        return "No run has finished."
    results = [results_of(job, runner.of(job), runner.record_of(job)["sources"]) for job in done]
    runs, curves = [row for row, _ in results], [point for _, its in results for point in its]
    write_csv(runner.folder / "runs.csv", runs)
    families = {job.label: job.recipe.resolve().parent.name for job in jobs}
    text = table(runs, families)
    missing = len(jobs) - len(done)
    left = [f"\n{missing} of {len(jobs)} runs have not finished.\n"] if missing else []
    (runner.folder / "report.md").write_text("\n".join([text, *left, about(command, runner, done), ""]))
    if curves:
        write_csv(runner.folder / "curves.csv", curves)
        lines = {
            label: published(its["env_id"], families[label]) for its in runs for label in [its["recipe"]]
        }
        for x in ("env_steps", "seconds"):
            draw(
                curves,
                x,
                {label: float(its["mean"]) for label, its in lines.items() if its},
                runner.folder / f"curves_{x}",
            )
    return text


def table(runs: Sequence[Row], families: dict[str, str]) -> str:
    """Returns the results as Markdown, one line a recipe."""
    lines = [
        "| recipe | environment | seeds | steps | return, mean ± std [95 % of the mean] | interquartile mean"
        " | CleanRL | wall time |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for label in dict.fromkeys(run["recipe"] for run in runs):
        its = [run for run in runs if run["recipe"] == label]
        returns = [float(run["episodic_return"]) for run in its]
        mean, spread = statistics.fmean(returns), ""
        form = decimals(mean)
        if len(returns) > 1:
            low, high = interval(returns)
            spread = f" ± {statistics.stdev(returns):{form}} [{low:{form}}, {high:{form}}]"
        known = published(its[0]["env_id"], families[label])
        cleanrl = "" if known is None else f"{float(known['mean']):{form}} ± {float(known['std']):{form}}"
        if known is not None and int(known["env_steps"] or 0) > 1.1 * int(its[0]["env_steps"]):
            cleanrl += f" ({int(known['env_steps']):_} steps)".replace("_", " ")
        steps = f"{int(its[0]['env_steps']):_}".replace("_", " ")
        seconds = statistics.median(float(run["wall_seconds"]) for run in its)
        lines.append(
            f"| {label} | {its[0]['env_id']} | {len(its)} | {steps} | {mean:{form}}{spread}"
            f" | {float(interquartile_mean(np.array(returns))):{form}} | {cleanrl} | {seconds:.0f} s |"
        )
    return "\n".join(lines)


def about(command: Sequence[str], runner: Runner, done: Sequence[Job]) -> str:
    """Return where the results come from: the command, and what the runs recorded about themselves."""
    records = {job: runner.record_of(job) for job in done}
    names: dict[str, list[str]] = {}
    for job, record in records.items():
        for its in record["sources"]:
            runs = "1 run" if its["workers"] == 1 else f"{its['workers']} runs"
            text = f"commit {its['commit']}; {its['versions']}; {its['machine']}; {runs} at a time"
            names.setdefault(text, []).append(job.name)
    one = len(names) == 1
    sources = [f"- {text}" if one else f"- {', '.join(runs)}: {text}" for text, runs in names.items()]
    recipes = {f"{job.label} {record['recipe_sha256'][:10]}": None for job, record in records.items()}
    return "\n".join(
        [
            "\nMean ± sample standard deviation over seeds of the return over the last 100 training episodes.",
            "",
            f"- `{' '.join(command)}`",
            f"- SHA-256 of the recipes: {', '.join(recipes)}; PyTorch threads of each run: {runner.threads}",
            *sources,
        ]
    )


def curve(rows: Sequence[Row], x: str, grid: np.ndarray) -> np.ma.MaskedArray:
    """Return a learning curve on a grid [G]: the mean return over the 4 % of the axis before each point.

    Where no episode ended in a window, the curve is a straight line between its neighbours. Before the first
    episode it is masked.
    """
    xs, returns = (np.array([float(row[key]) for row in rows]) for key in (x, "episodic_return"))
    windows = [returns[(xs > point - WINDOW * grid[-1]) & (xs <= point)] for point in grid]
    means = np.array([window.mean() if len(window) else np.nan for window in windows])
    found = ~np.isnan(means)
    return np.ma.masked_array(np.interp(grid, grid[found], means[found]), mask=np.cumsum(found) == 0)


def draw(points: Sequence[Row], x: str, lines: dict[str, float], path: Path, columns: int = 3) -> None:
    """Draw learning curves, one panel a recipe: each seed thin, their mean thick, the published mean dashed.

    Args:
        points: Of ``curves.csv``.
        x: ``"env_steps"`` or ``"seconds"``.
        lines: The published mean of a recipe, where there is one.
        path: Without its ending: PNG and SVG are written.
        columns: Panels in a row.
    """
    import_extra("matplotlib", extra="report").use("Agg")
    import matplotlib.pyplot as plt

    labels = list(dict.fromkeys(point["recipe"] for point in points))
    columns = min(columns, len(labels))
    rows = -(-len(labels) // columns)
    size = max(5, 3.7 * columns), 2.8 * rows + 0.3
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    legend: dict[str, Any] = {}
    for axis, label in zip(axes.flat, labels, strict=False):
        for_seed: dict[str, list[Row]] = {}
        for point in points:
            if point["recipe"] == label:
                for_seed.setdefault(str(point["seed"]), []).append(point)
        plot_mean(axis, list(for_seed.values()), x, "ppo_lightning: mean, and each seed")
        if label in lines:
            axis.axhline(
                lines[label], color="grey", linestyle="--", linewidth=0.9, label="CleanRL, at the end"
            )
        axis.set_title(label, fontsize=10)
        decorate(axis, x)
        legend |= {line.get_label(): line for line in axis.get_legend_handles_labels()[0]}
    for axis in axes.flat[len(labels) :]:
        axis.set_visible(False)
    axes[0, 0].set_ylabel("return", fontsize=8)
    handles, names = list(legend.values()), list(legend)
    # Within a panel the legend would cover a curve.
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False, fontsize=8)
    save(figure, path)


def plot_mean(
    axis: Any, seeds: Iterable[Sequence[Row]], x: str, label: str, colour: str = "tab:blue"
) -> None:
    """Draw the curve of each seed thin and their mean thick; both end where the shortest curve ends."""
    seeds = list(seeds)
    grid = np.linspace(0, min(max(float(row[x]) for row in rows) for rows in seeds), 101)
    curves = [curve(rows, x, grid) for rows in seeds]
    for one in curves:
        axis.plot(grid, one, color=colour, linewidth=0.8, alpha=0.35)
    axis.plot(grid, np.ma.mean(curves, axis=0), color=colour, linewidth=2, label=label)


def decorate(axis: Any, x: str) -> None:
    """Label the horizontal axis and remove the frame above and on the right."""
    axis.set_xlabel("seconds of training" if x == "seconds" else "environment steps (thousands)", fontsize=8)
    if x == "env_steps":
        axis.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}")
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def save(figure: Any, path: Path) -> None:
    """Write a figure as PNG and SVG."""
    for ending in ("png", "svg"):
        figure.savefig(path.with_suffix(f".{ending}"), dpi=130)
    import_extra("matplotlib.pyplot", extra="report").close(figure)
