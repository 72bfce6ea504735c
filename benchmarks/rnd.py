"""Compare RND with PPO of the same settings: where novelty helps, and where it does not.

`python benchmarks/rnd.py mountaincar mountaincar_sparse multiroom [--seeds 1 2 3]` trains each arm of the
tasks, one run at a time with one thread. `--report` prints the table of finished runs.

Results go to `benchmarks/results/rnd/`: `runs.csv` (one row per run, with the command) and `curves.csv`
(about 50 rows per run). Returns are means over the last 100 training episodes. `steps_to_target` and
`minutes_to_target` say when they first exceeded the target. The minutes include the random steps of RND, and
no imports. Runs that are in `runs.csv` are not repeated.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from privileged import append

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/rnd"
OWN = {
    "update_proportion",
    "int_coef",
    "ext_coef",
    "int_gamma",
    "num_iterations_obs_norm_init",
}
SHORT = {"data.total_timesteps": 200_000}
ACROBOT = SHORT | {"data.env_id": "Acrobot-v1"}
MOUNTAINCAR = {"data.env_id": "MountainCar-v0", "data.total_timesteps": 400_000}
# Task -> target of the mean return, and arm -> recipe, algorithm and settings that differ from the recipe.
TASKS: dict[str, tuple[float, dict[str, tuple[str, str, dict[str, Any]]]]] = {
    "mountaincar": (
        -130.0,
        {
            "rnd": ("rnd/mountaincar", "RND", {}),
            "ppo": ("rnd/mountaincar", "PPO", {}),
            "ppo_classic": ("ppo/classic", "PPO", MOUNTAINCAR),
        },
    ),
    "mountaincar_sparse": (
        0.95,
        {"rnd": ("rnd/mountaincar_sparse", "RND", {}), "ppo": ("rnd/mountaincar_sparse", "PPO", {})},
    ),
    "multiroom": (0.5, {"rnd": ("rnd/multiroom", "RND", {}), "ppo": ("rnd/multiroom", "PPO", {})}),
    "cartpole": (
        475.0,
        {"rnd": ("ppo/classic", "RND", SHORT), "ppo": ("ppo/classic", "PPO", SHORT)},
    ),
    "acrobot": (-100.0, {"rnd": ("ppo/classic", "RND", ACROBOT), "ppo": ("ppo/classic", "PPO", ACROBOT)}),
}


def config(recipe: str, algorithm: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe with another algorithm and other settings."""
    made = yaml.safe_load((ROOT / f"configs/{recipe}.yaml").read_text())
    made["model"]["class_path"] = f"ppo_lightning.{algorithm}"
    if algorithm == "PPO":
        arguments = made["model"]["init_args"]
        made["model"]["init_args"] = {key: value for key, value in arguments.items() if key not in OWN}
    for name, value in settings.items():
        group, _, key = name.partition(".")
        entries = made[group]["init_args"] if group == "model" else made[group]
        entries[key] = value
    return made


def fit(path: str, seed: int, target: float) -> None:
    """Train a recipe, and print the result and the curve of the run as JSON."""
    import lightning as L

    from ppo_lightning.commands import cli
    from ppo_lightning.commands.arguments import Arguments

    class Curve(L.Callback):
        def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
            self.started = time.perf_counter()
            self.rows: list[dict] = []
            self.reached: tuple[int, float] | None = None

        def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
            returns = pl_module.episode_returns
            mean = sum(returns) / len(returns) if returns else float("nan")
            minutes = (time.perf_counter() - self.started) / 60
            if self.reached is None and len(returns) == 100 and mean > target:
                self.reached = pl_module.env_steps, minutes
            done = pl_module.rollouts_done
            if done % max(1, pl_module.data.num_rollouts // 50) == 0 or done == pl_module.data.num_rollouts:
                curiosity = trainer.callback_metrics.get("charts/episode_curiosity_reward")
                row = {"env_steps": pl_module.env_steps, "mean_return": mean, "minutes": minutes}
                self.rows.append(row | {"curiosity": "" if curiosity is None else float(curiosity)})

    curve = Curve()
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    flags = [part for name in quiet for part in (f"--trainer.{name}", "false")]
    flags += ["--seed_everything", str(seed), "--num_threads", "1", "--trainer.limit_val_batches", "0"]
    cli.run([curve], Arguments(["fit", "--config", path, *flags]), save_config=False)
    print(json.dumps({"rows": curve.rows, "reached": curve.reached}))


def train(task: str, arm: str, seed: int, made: dict[str, Any], target: float) -> tuple[dict, list[dict]]:
    """Train one run in a process of its own, and return the row of the run and those of its curve."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(yaml.safe_dump(made))
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = [
            sys.executable,
            __file__,
            "--fit",
            str(path),
            "--seeds",
            str(seed),
            "--target",
            str(target),
        ]
        options = {"cwd": folder, "env": env, "check": True, "text": True, "stderr": subprocess.DEVNULL}
        done = subprocess.run(command, stdout=subprocess.PIPE, **options)
    result = json.loads(done.stdout.splitlines()[-1])
    last = result["rows"][-1]
    steps, minutes = result["reached"] or ("", "")
    row = {"task": task, "arm": arm, "seed": seed, "target": target, "steps_to_target": steps}
    row |= {"minutes_to_target": minutes and round(minutes, 2), "env_steps": last["env_steps"]}
    row |= {"final_return": round(last["mean_return"], 3), "minutes": round(last["minutes"], 2)}
    row["command"] = f"python benchmarks/rnd.py {task} --arms {arm} --seeds {seed}"
    curve = [
        {"task": task, "arm": arm, "seed": seed}
        | {key: round(value, 4) if isinstance(value, float) else value for key, value in point.items()}
        for point in result["rows"]
    ]
    return row, curve


def report(rows: list[dict]) -> str:
    """Return a table with one line for each arm of each task."""
    lines = ["| task | arm | runs above the target | environment steps | minutes | final return |"]
    lines.append("|---|---|---|---|---|---|")
    for task, (target, arms) in TASKS.items():
        for arm in arms:
            runs = [row for row in rows if (row["task"], row["arm"]) == (task, arm)]
            reached = [row for row in runs if row["steps_to_target"]]
            if not runs:
                continue
            steps = sorted(int(row["steps_to_target"]) for row in reached)
            minutes = sorted(float(row["minutes_to_target"]) for row in reached)
            spans = [f"{values[0]} to {values[-1]}" if values else "" for values in (steps, minutes)]
            finals = [float(row["final_return"]) for row in runs]
            spread = f" ± {statistics.stdev(finals):.3g}" if len(finals) > 1 else ""
            final = f"{statistics.fmean(finals):.3g}{spread}"
            share = f"{len(reached)} of {len(runs)} above {target:g}"
            lines.append(f"| {task} | {arm} | {share} | {' | '.join(spans)} | {final} |")
    return "\n".join(lines)


def main() -> None:
    """Train what is missing, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="*", help=", ".join(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--arms", nargs="+", help="arms of the tasks; all by default")
    parser.add_argument("--steps", type=int, help="environment steps of a run (default: those of the arm)")
    parser.add_argument("--report", action="store_true", help="print the table of finished runs only")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--fit", help="train this recipe with the first seed, and print the result")
    parser.add_argument("--target", type=float, default=0.0, help="for --fit")
    options = parser.parse_args()
    if options.fit:
        fit(options.fit, options.seeds[0], options.target)
        return
    runs = options.output / "runs.csv"
    options.output.mkdir(parents=True, exist_ok=True)
    rows = list(csv.DictReader(runs.open())) if runs.exists() else []
    done = {(row["task"], row["arm"], int(row["seed"])) for row in rows}
    for task in options.tasks if not options.report else []:
        target, arms = TASKS[task]
        short = {"data.total_timesteps": options.steps} if options.steps else {}
        for seed in options.seeds:
            for arm in options.arms or arms:
                if (task, arm, seed) not in done:
                    recipe, algorithm, settings = arms[arm]
                    made = config(recipe, algorithm, settings | short)
                    row, curve = train(task, arm, seed, made, target)
                    append(options.output / "curves.csv", curve)
                    append(runs, [row])
                    print(row, flush=True)
    print(report(list(csv.DictReader(runs.open())) if runs.exists() else []))


if __name__ == "__main__":
    main()
