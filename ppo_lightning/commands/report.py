"""Report of a benchmark: CSV files, a table with published results, learning curves."""

import csv
import json
import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ppo_lightning.checkpoints.file import read_checkpoint
from ppo_lightning.commands.curves import Row, draw
from ppo_lightning.commands.jobs import Job
from ppo_lightning.commands.runner import DONE, Runner, metrics_of
from ppo_lightning.errors import import_extra
from ppo_lightning.utils.rounding import decimals

CONFIDENCE = 0.95
PUBLISHED = Path(__file__).with_name("published.csv")


def interquartile_mean(values: np.ndarray, axis: int = -1) -> Any:
    """Compute the mean without the lowest and the highest quarter, both rounded down to whole runs.

    For three runs this is the mean.

    Source: Agarwal et al., "Deep Reinforcement Learning at the Edge of the Statistical Precipice" (2021),
    as implemented in ``rliable``.
    """
    return import_extra("scipy.stats", extra="report").trim_mean(values, 0.25, axis=axis)


def interval(runs: Sequence[float], reference: Sequence[float] | None = None) -> tuple[float, float]:
    """Compute the 95 % t interval of a mean, or of the difference of two means (Welch).

    The coverage is 95 % for normal distributions. A percentile bootstrap of three runs covers 76 %.
    Bimodal returns, such as HalfCheetah's, need ten or more runs for 95 %.

    Args:
        runs: Returns of independent runs.
        reference: Returns of other runs, whose mean is subtracted.

    Returns:
        Lower and upper bound, NaN if a sample has fewer than two runs.
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
    """Read the results of a finished run.

    Args:
        job: The run.
        folder: Folder of the run.
        sources: Provenance that the run recorded at its start and at each resume.

    Returns:
        Row of the run in ``runs.csv``, and its rows in ``curves.csv``.

    Raises:
        FileNotFoundError: The run left no checkpoint.
    """
    checkpoints = sorted(
        folder.glob("runs/*/version_*/checkpoints/*.ckpt"), key=lambda path: path.stat().st_mtime
    )
    if not checkpoints:
        raise FileNotFoundError(f"{folder} has no checkpoint.")
    checkpoint = read_checkpoint(str(checkpoints[-1]))
    metrics = list(metrics_of(folder))
    evaluations = [float(row["eval/episodic_return"]) for row in metrics if row.get("eval/episodic_return")]
    row = {
        "recipe": job.label,
        "env_id": job.settings["env_id"],
        "seed": job.seed,
        "env_steps": checkpoint["env_steps"],
        "episodic_return": _mean(checkpoint["episode_returns"]),
        "eval_return": evaluations[-1] if evaluations else float("nan"),
        "wall_seconds": json.loads((folder / DONE).read_text())["wall_seconds"],
        "commit": " + ".join(dict.fromkeys(source["commit"] for source in sources)),
    }
    curve = [
        {
            "recipe": job.label,
            "seed": job.seed,
            "env_steps": int(point["step"]),
            "seconds": float(point["seconds"]),
            "episodic_return": round(float(point["charts/episodic_return"]), 4),
        }
        for point in metrics
        if point.get("charts/episodic_return")
    ]
    return row, curve


def _mean(values: Sequence[float]) -> float:
    return round(statistics.fmean(values), 4) if values else float("nan")


def published(env_id: str, family: str) -> Row | None:
    """Return CleanRL's published result for an environment, None if there is none.

    Args:
        env_id: Id of the environment.
        family: Folder of the recipe. Results of the same family are preferred.

    Source: ``published.csv``, which names the source of each figure.
    """
    rows = [
        row
        for row in read_csv(PUBLISHED)
        if row["metric"] == "episodic_return" and "CleanRL" in row["source"]
    ]
    rows = [row for row in rows if common_id(row["env_id"]) == common_id(env_id)]
    return next((row for row in rows if row["recipe"] == family), rows[0] if rows else None)


def common_id(env_id: str) -> str:
    """Return one id for all names of an Atari game, or of a task of dm_control."""
    if env_id.startswith("ALE/") or "NoFrameskip" in env_id:
        return env_id.removeprefix("ALE/").replace("NoFrameskip", "").split("-v")[0]
    if env_id.startswith("dm_control/"):  # dm_control/cheetah-run-v0 is EnvPool's CheetahRun-v1
        words = re.split("[-_]", env_id.removeprefix("dm_control/").removesuffix("-v0"))
        return "".join(word[0].upper() + word[1:] for word in words) + "-v1"
    return env_id


def read_csv(path: Path) -> list[dict[str, str]]:
    """Read a CSV file with a header."""
    with path.open() as file:
        return list(csv.DictReader(file))


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write rows to a CSV file with a header."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def write_report(runner: Runner, jobs: Sequence[Job], command: Sequence[str]) -> str:
    """Write runs.csv, curves.csv, report.md and the figures to the folder of the benchmark.

    Args:
        runner: Runner of the jobs.
        jobs: Jobs of the command. The report covers the finished ones and counts the others.
        command: The command line.

    Returns:
        The table of results in Markdown.
    """
    finished = [job for job in jobs if (runner.folder_of(job) / DONE).exists()]
    if not finished:
        return "No run has finished."
    results = [results_of(job, runner.folder_of(job), runner.record_of(job)["sources"]) for job in finished]
    runs = [row for row, _ in results]
    curves = [point for _, points in results for point in points]
    write_csv(runner.folder / "runs.csv", runs)
    families = {job.label: job.recipe.resolve().parent.name for job in jobs}
    text = table(runs, families)
    num_unfinished = len(jobs) - len(finished)
    unfinished = [f"\n{num_unfinished} of {len(jobs)} runs have not finished.\n"] if num_unfinished else []
    sections = [text, *unfinished, describe_sources(command, runner, finished), ""]
    (runner.folder / "report.md").write_text("\n".join(sections))
    if curves:
        write_csv(runner.folder / "curves.csv", curves)
        known = {run["recipe"]: published(run["env_id"], families[run["recipe"]]) for run in runs}
        lines = {label: float(result["mean"]) for label, result in known.items() if result}
        for x in ("env_steps", "seconds"):
            draw(curves, x, lines, runner.folder / f"curves_{x}")
    return text


def table(runs: Sequence[Row], families: dict[str, str]) -> str:
    """Return the results as a Markdown table with one line per recipe."""
    lines = [
        "| recipe | environment | seeds | steps | return, mean ± std [95 % of the mean] | interquartile mean"
        " | CleanRL | wall time |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for label in dict.fromkeys(run["recipe"] for run in runs):
        seeds = [run for run in runs if run["recipe"] == label]
        env_id = seeds[0]["env_id"]
        returns = [float(run["episodic_return"]) for run in seeds]
        mean = statistics.fmean(returns)
        spread = ""
        spec = decimals(mean)
        if len(returns) > 1:
            low, high = interval(returns)
            spread = f" ± {statistics.stdev(returns):{spec}} [{low:{spec}}, {high:{spec}}]"
        reference = published(env_id, families[label])
        cleanrl = ""
        if reference is not None:
            cleanrl = f"{float(reference['mean']):{spec}} ± {float(reference['std']):{spec}}"
            if int(reference["env_steps"] or 0) > 1.1 * int(seeds[0]["env_steps"]):
                cleanrl += f" ({int(reference['env_steps']):_} steps)".replace("_", " ")
        steps = f"{int(seeds[0]['env_steps']):_}".replace("_", " ")
        seconds = statistics.median(float(run["wall_seconds"]) for run in seeds)
        lines.append(
            f"| {label} | {env_id} | {len(seeds)} | {steps} | {mean:{spec}}{spread}"
            f" | {float(interquartile_mean(np.array(returns))):{spec}} | {cleanrl} | {seconds:.0f} s |"
        )
    return "\n".join(lines)


def describe_sources(command: Sequence[str], runner: Runner, finished: Sequence[Job]) -> str:
    """Return the provenance of the results in Markdown: command, commits, versions, machines and recipes."""
    records = {job: runner.record_of(job) for job in finished}
    names: dict[str, list[str]] = {}
    for job, record in records.items():
        for source in record["sources"]:
            runs = "1 run" if source["workers"] == 1 else f"{source['workers']} runs"
            text = f"commit {source['commit']}; {source['versions']}; {source['machine']}; {runs} at a time"
            names.setdefault(text, []).append(job.name)
    one_source = len(names) == 1
    sources = [f"- {text}" if one_source else f"- {', '.join(runs)}: {text}" for text, runs in names.items()]
    recipes = {f"{job.label} {record['recipe_sha256'][:10]}": None for job, record in records.items()}
    return "\n".join(
        [
            "\nReturn over the last 100 training episodes: mean ± sample standard deviation over seeds.",
            "",
            f"- `{' '.join(command)}`",
            f"- SHA-256 of the recipes: {', '.join(recipes)}; PyTorch threads of each run: {runner.threads}",
            *sources,
        ]
    )
