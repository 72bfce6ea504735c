"""Report of a benchmark: CSV files, a table with published results, learning curves."""

import csv
import math
import pydoc
import re
import statistics
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ppo_lightning.errors import ConfigError, import_extra
from ppo_lightning.experiments.curves import Row, draw
from ppo_lightning.experiments.jobs import Job
from ppo_lightning.experiments.runner import Runner, metrics_of
from ppo_lightning.utils.rounding import decimals

PUBLISHED = Path(__file__).with_name("published.csv")
# Families of other algorithms than PPO
OTHERS = {"dqn", "c51", "ddpg", "td3", "sac", "discretesac", "rnd", "rpo", "ppg", "recurrentppo"}


def interval(runs: Sequence[float], reference: Sequence[float] | None = None) -> tuple[float, float]:
    """Compute the 95 % t interval of a mean, or of its difference to the mean of a reference (Welch).

    The coverage is 95 % for normal distributions. A percentile bootstrap of three runs covers 76 %.
    Bimodal returns, such as HalfCheetah's, need ten or more runs. The bounds of one run are NaN.
    """
    stats = import_extra("scipy.stats", extra="report")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SciPy warns of equal runs and of single ones
        welch = reference is not None
        test = stats.ttest_ind(runs, reference, equal_var=False) if welch else stats.ttest_1samp(runs, 0.0)
        low, high = test.confidence_interval(0.95)
    return float(low), float(high)


def published(env_id: str, family: str) -> Row | None:
    """Return CleanRL's result for an environment: of this family of recipes, or PPO's for a family of PPO."""
    name = common_id(env_id)
    names = {name, f"{name}-v5"} if env_id.startswith("ALE/") else {name}  # EnvPool's, of all games
    rows = [row for row in read_csv(PUBLISHED) if common_id(row["env_id"]) in names]
    rows = [row for row in rows if "CleanRL" in row["source"]]
    rows = [row for row in rows if row["recipe"] == family or not OTHERS & {family, row["recipe"]}]
    return min(rows, key=lambda row: row["recipe"] != family, default=None)


def family_of(job: Job) -> str:
    """Return the family of a job's results: the algorithm it is or extends, for PPO its recipe's name."""
    algorithm = pydoc.locate(job.algorithm)  # None for a name without a module
    names = [base.__name__ for base in getattr(algorithm, "__mro__", ())] or [job.algorithm]
    return next((name.lower() for name in names if name.lower() in OTHERS), job.recipe.stem)


def common_id(env_id: str) -> str:
    """Return one id for all names of an Atari game, of PettingZoo, too, or of a task of dm_control."""
    if env_id.startswith("ALE/") or "NoFrameskip" in env_id:
        return env_id.removeprefix("ALE/").replace("NoFrameskip", "").split("-v")[0]
    if env_id.startswith("dm_control/"):  # dm_control/cheetah-run-v0 is EnvPool's CheetahRun-v1
        words = re.split("[-_]", env_id.removeprefix("dm_control/").removesuffix("-v0"))
        return "".join(word[0].upper() + word[1:] for word in words) + "-v1"
    return env_id.removeprefix("atari/")


def read_csv(path: Path) -> list[dict[str, str]]:
    """Read a CSV file with a header, or ``runs.csv`` in the folder of a benchmark."""
    with (path / "runs.csv" if path.is_dir() else path).open() as file:
        return list(csv.DictReader(file))


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write rows to a CSV file with a header."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def results_of(runner: Runner, job: Job) -> tuple[Row, list[Row]]:
    """Return the row of a finished run in ``runs.csv``, and its rows in ``curves.csv``."""
    folder = runner.folder_of(job)
    record = runner.record_of(job)
    if not (metrics := list(metrics_of(folder))):
        raise ConfigError(f"{folder} has no runs/NAME/version_*/metrics.csv: leave out trainer.fast_dev_run.")
    names = ("eval/episodic_return", "charts/avg_episodic_return", "charts/avg_episodic_length")
    last = {name: float(row[name]) for name in names for row in metrics if row.get(name)}
    shared = {"recipe": job.label, "seed": job.seed}
    run = shared | {
        "env_id": job.settings["env_id"],
        "env_steps": int(metrics[-1]["step"]),
        "episodic_return": round(last.get("charts/avg_episodic_return", math.nan), 4),
        "episodic_length": last.get("charts/avg_episodic_length", math.nan),
        "eval_return": last.get("eval/episodic_return", math.nan),
        "wall_seconds": record["seconds"],
        "commit": " + ".join(dict.fromkeys(source["commit"] for source in record["sources"])),
    }
    columns = {"env_steps": "step", "seconds": "seconds", "episodic_return": "charts/episodic_return"}
    points = [point for point in metrics if point.get("charts/episodic_return")]
    curve = [shared | {name: point[column] for name, column in columns.items()} for point in points]
    return run, curve


def write_report(runner: Runner, jobs: Sequence[Job], command: Sequence[str]) -> str:
    """Write runs.csv, curves.csv, report.md and the figures, and return the table of results in Markdown."""
    finished = [job for job in jobs if runner.is_done(job)]
    if not finished:
        return "No run has finished."
    results = [results_of(runner, job) for job in finished]
    runs = [run for run, _ in results]
    curves = [point for _, points in results for point in points]
    known = {job.label: published(job.settings["env_id"], family_of(job)) for job in finished}
    text = table(runs, known)
    sources = dict.fromkeys(
        f"- commit {source['commit']}; {source['versions']}; {source['machine']}"
        for job in finished
        for source in runner.record_of(job)["sources"]
    )
    lines = [
        f"{text}\n\n{len(finished)} of {len(jobs)} runs have finished.",
        "Return over the last 100 training episodes: mean ± sample standard deviation over seeds.\n",
        f"- `{' '.join(command)}`",
        f"- runs at a time: {runner.workers}; PyTorch threads of each run: {runner.threads}",
        *sources,
    ]
    (runner.folder / "report.md").write_text("\n".join(lines) + "\n")
    write_csv(runner.folder / "runs.csv", runs)
    if curves:
        write_csv(runner.folder / "curves.csv", curves)
        is_return = {label: row for label, row in known.items() if row and row["metric"] == "episodic_return"}
        means = {label: float(row["mean"]) for label, row in is_return.items()}
        for x in ("env_steps", "seconds"):
            draw(curves, x, means, runner.folder / f"curves_{x}")
    return text


def table(runs: Sequence[Row], known: dict[str, Row | None]) -> str:
    """Return the results and the published ones as a Markdown table with one line per recipe."""
    lines = [
        "| recipe | environment | seeds | steps | return, mean ± std [95 % of the mean] | CleanRL"
        " | wall time |",
        "|---|---|---|---|---|---|---|",
    ]
    for label, reference in known.items():
        seeds = [run for run in runs if run["recipe"] == label]
        steps = int(seeds[0]["env_steps"])
        returns = [float(run["episodic_return"]) for run in seeds]
        spec = decimals(statistics.fmean(returns))
        shown = f"{statistics.fmean(returns):{spec}}"
        if len(returns) > 1:
            low, high = interval(returns)
            # Without an episode a return is NaN, for which statistics.stdev raises.
            shown += f" ± {np.std(returns, ddof=1):{spec}} [{low:{spec}}, {high:{spec}}]"
        cleanrl = ""
        if reference is not None:
            if reference["metric"] == "episodic_length":  # returns of equal players are 0
                shown += f", length {statistics.fmean(float(run['episodic_length']) for run in seeds):.1f}"
                cleanrl, spec = "length ", ".1f"
            cleanrl += f"{float(reference['mean']):{spec}}"
            if reference["std"]:
                cleanrl += f" ± {float(reference['std']):{spec}}"
            published_steps = int(reference["env_steps"] or 0)
            if not published_steps:
                cleanrl += " (steps not published)"
            elif not steps / 1.1 <= published_steps <= 1.1 * steps:
                cleanrl += f" ({published_steps:_} steps)".replace("_", " ")
        seconds = statistics.median(float(run["wall_seconds"]) for run in seeds)
        cells = [label, seeds[0]["env_id"], str(len(seeds)), f"{steps:_}".replace("_", " "), shown, cleanrl]
        lines.append(f"| {' | '.join(cells)} | {seconds:.0f} s |")
    return "\n".join(lines)
