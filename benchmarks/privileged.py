"""Compare a critic with privileged entries with a critic without on Go1, with the same budget and seeds.

`python benchmarks/privileged.py [--seeds 1 2 3] [--steps N] [--output FOLDER]` trains one run at a time, with
one thread, and writes `runs.csv` (one row per run) and `curves.csv` (one row per rollout). Runs that are in
`runs.csv` are not repeated. `--report` prints the table of `runs.csv`.
"""

import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ppo_lightning.checkpoints.agent import trained_agent
from ppo_lightning.checkpoints.file import read_checkpoint

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "configs/ppo/go1.yaml"
CRITICS = {"privileged": ["privileged_state", "state"], "state": ["state"]}
LAST = 0.25  # share of the run over which explained variance and training return are averaged
COLUMNS = {
    "losses/explained_variance": "explained_variance",
    "charts/episodic_return": "episodic_return",
    "charts/episodic_length": "episodic_length",
    "eval/episodic_return": "eval_return",
    "eval/episodic_length": "eval_length",
}


def train(critic: str, seed: int, steps: int) -> tuple[dict, list[dict]]:
    """Train one run in a process of its own, and return the row of the run and those of the rollouts."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        flags = {"seed_everything": seed, "data.total_timesteps": steps, "name": critic}
        flags["data.env_kwargs.num_threads"] = 1
        flags["model.agent.critic_keys"] = f"[{','.join(CRITICS[critic])}]"
        command = [sys.executable, "-m", "ppo_lightning", "fit", "--config", str(RECIPE)]
        command += [part for name, value in flags.items() for part in (f"--{name}", str(value))]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        subprocess.run(command, cwd=folder, env=env, check=True, stderr=subprocess.DEVNULL)
        (metrics,) = Path(folder).rglob("metrics.csv")
        checkpoint = max(Path(folder).rglob("*.ckpt"), key=lambda path: path.stat().st_mtime)
        agent = trained_agent(read_checkpoint(str(checkpoint)))
        with metrics.open() as file:
            logged = list(csv.DictReader(file))
    curve = [
        {"critic": critic, "seed": seed, "env_steps": int(row["step"])}
        | {name: row.get(key, "") for key, name in COLUMNS.items()}
        for row in logged
    ]
    late = [row for row in curve if row["env_steps"] > (1 - LAST) * steps]
    inputs = {
        f"{name}_input": next(body.parameters()).shape[1]
        for name, body in (("actor", agent.actor_body), ("critic", agent.critic_body))
    }
    logged_names = ("explained_variance", "episodic_return", "episodic_length")
    means = {name: mean_of(late, name) for name in logged_names}
    evaluation = [row for row in curve if row["eval_return"]][-1]
    result = {"critic": critic, "seed": seed, "env_steps": curve[-1]["env_steps"], **inputs, **means}
    result |= {name: float(evaluation[name]) for name in ("eval_return", "eval_length")}
    return result | {"seconds": round(time.perf_counter() - started, 1)}, curve


def mean_of(rows: list[dict], name: str) -> float:
    """Return the mean of the values that were logged."""
    return statistics.fmean(float(row[name]) for row in rows if row[name])


def append(path: Path, rows: list[dict]) -> None:
    """Append rows to a CSV file, with a header if the file is new."""
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(rows)


def report(rows: list[dict]) -> str:
    """Return a table with mean and sample standard deviation over the seeds."""
    names = ("explained_variance", "episodic_return", "episodic_length", "eval_return", "eval_length")
    lines = [
        f"| critic | runs | actor's input | critic's input | {' | '.join(names)} |",
        "|---|---|---|---|" + "---|" * len(names),
    ]
    for critic in CRITICS:
        runs = [row for row in rows if row["critic"] == critic]
        if not runs:
            continue
        cells = [critic, str(len(runs)), runs[0]["actor_input"], runs[0]["critic_input"]]
        for name in names:
            values = [float(row[name]) for row in runs]
            spread = f" ± {statistics.stdev(values):.2g}" if len(values) > 1 else ""
            cells.append(f"{statistics.fmean(values):.3g}{spread}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Train what is missing, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=409_600, help="environment steps of a run")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/privileged")
    parser.add_argument("--report", action="store_true", help="print the table of finished runs only")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    runs = options.output / "runs.csv"
    rows = list(csv.DictReader(runs.open())) if runs.exists() else []
    done = {(row["critic"], int(row["seed"])) for row in rows}
    for seed in options.seeds if not options.report else []:
        for critic in CRITICS:
            if (critic, seed) not in done:
                result, curve = train(critic, seed, options.steps)
                append(options.output / "curves.csv", curve)
                append(runs, [result])
                print(result, flush=True)
    if runs.exists():
        print(report(list(csv.DictReader(runs.open()))))


if __name__ == "__main__":
    main()
