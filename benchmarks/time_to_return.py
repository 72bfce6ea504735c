"""Measure the seconds until a mean return of 475 over the last 100 episodes of CartPole-v1.

`python benchmarks/time_to_return.py [--seeds 1 2 3] [--json PATH]` needs the extra `benchmark` and an idle
machine. The programs run in turn for each seed, each in a fresh process. Imports and compilation count.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import peers

GOAL = 475.0
REFERENCE = ["--config", str(Path(__file__).parent.parent / "configs/classic/cartpole.yaml")]
# Few large updates on many environments: the fastest settings found.
FAST = (
    "--data.num_envs 32 --data.num_steps 32 --data.total_timesteps 150000 --model.update_epochs 10"
    " --model.learning_rate 2.5e-3 --model.gae_lambda 0.8 --model.gamma 0.98 --model.ent_coef 0"
    " --model.anneal_clip_coef true"
)
PROGRAMS = {
    "ours, reference recipe": REFERENCE,
    "ours, reference recipe, compiled": [*REFERENCE, "--model.compile", "true"],
    "ours, fast settings": FAST.split(),
    "stable-baselines3, the same recipe": None,
}


def ours(flags: list[str], seed: int, steps: int | None) -> int:
    """Train with arguments of ``fit``; return the environment steps until the goal, 0 if not reached."""
    import lightning as L

    from ppo_lightning.commands import cli

    class Goal(L.Callback):
        steps = 0

        def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
            returns = pl_module.episode_returns
            if len(returns) == 100 and sum(returns) / 100 >= GOAL:
                self.steps = pl_module.env_steps
                trainer.should_stop = True

    goal = Goal()
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    flags = [*flags, *(part for name in quiet for part in (f"--trainer.{name}", "false"))]
    flags += ["--seed_everything", str(seed), "--trainer.limit_val_batches", "0"]
    flags += ["--data.total_timesteps", str(steps)] if steps else []
    cli.run([goal], ["fit", *flags], save_config=False)
    return goal.steps


def stable_baselines3(seed: int, steps: int | None) -> int:
    """Train Stable-Baselines3 with the same settings; return the steps until the goal, 0 if not reached."""
    import torch
    from stable_baselines3.common.callbacks import BaseCallback

    class Goal(BaseCallback):
        steps = 0
        over = False

        def _on_rollout_start(self) -> None:
            episodes = self.model.ep_info_buffer or ()
            if len(episodes) == 100 and sum(episode["r"] for episode in episodes) / 100 >= GOAL:
                self.steps = self.num_timesteps
                self.over = True

        def _on_step(self) -> bool:
            return not self.over

    if threads := peers.THREADS["classic"]:
        torch.set_num_threads(threads)
    goal = Goal()
    model = peers.stable_baselines3_like_cartpole("CartPole-v1", seed)
    model.learn(steps or 500_000, callback=goal)
    return goal.steps


def main() -> None:
    """Print a table and write all measurements as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument(
        "--steps", type=int, help="environment steps of a run (default: those of the settings)"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        warnings.simplefilter("ignore")
        flags = PROGRAMS[args.programs[0]]
        seed = args.seeds[0]
        reached = stable_baselines3(seed, args.steps) if flags is None else ours(flags, seed, args.steps)
        print("STEPS", reached)
        return
    results: dict[str, list[dict[str, float]]] = {program: [] for program in args.programs}
    for seed in args.seeds:
        for program, runs in results.items():
            command = [sys.executable, "-W", "ignore", __file__, "--one"]
            command += ["--seeds", str(seed), "--programs", program]
            command += ["--steps", str(args.steps)] if args.steps else []
            start = time.perf_counter()
            completed = subprocess.run(command, capture_output=True, text=True, check=False)
            if completed.returncode:
                raise RuntimeError(f"{program} failed:\n{completed.stderr}")
            steps = int(completed.stdout.rsplit("STEPS ", 1)[1])
            runs.append({"seed": seed, "seconds": time.perf_counter() - start, "env_steps": steps})
            print(f"{program}: {runs[-1]}", file=sys.stderr)
    print("| | seconds by seed | median | environment steps |\n|---|---|---|---|")
    for program, runs in results.items():
        seconds = [run["seconds"] for run in runs]
        listed = ", ".join(f"{value:.1f}" for value in seconds)
        steps = ", ".join(f"{run['env_steps']:.0f}" if run["env_steps"] else "not reached" for run in runs)
        print(f"| {program} | {listed} | {statistics.median(seconds):.1f} | {steps} |")
    if args.json:
        args.json.write_text(json.dumps({"command": sys.argv, "runs": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
