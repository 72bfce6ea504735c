"""Measure the seconds from the start of a process to a mean training return over the last 100 episodes.

`python benchmarks/time_to_return.py [--workloads NAME ...] [--seeds N ...] [--json FILE]`
needs the extra `benchmark`, `mujoco` for HalfCheetah, and an idle machine. The programs run in turn for each
seed, each in a fresh process. Start of the interpreter, imports and compilation count.

Compiled programs run twice: with an empty cache of the compiler on disk, and with the cache of that run.
The headers that PyTorch compiles once on a machine stay in the temporary folder (`TMPDIR`).
`--peer DIRECTORY --python PYTHON` adds PureJaxRL, see `purejaxrl.py`. It cannot stop at the return: the rest
of its run is subtracted.
"""

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import peers
import purejaxrl

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


class Workload(NamedTuple):
    """Environment, mean return to reach, arguments of ``fit``, and steps and arguments of the peer."""

    env_id: str
    goal: float
    flags: str
    steps: int
    sb3: dict[str, Any]


def annealed(left: float) -> float:
    """Return Stable-Baselines3's clipping range, given the remaining share of the run."""
    return 0.2 * left


WORKLOADS = {
    "cartpole": Workload("CartPole-v1", 475.0, f"--config {CONFIGS / 'ppo/classic.yaml'}", 500_000, {}),
    # Few large updates on many environments: the fastest settings found.
    "cartpole-fast": Workload(
        "CartPole-v1",
        475.0,
        "--data.num_envs 32 --data.num_steps 32 --model.update_epochs 10 --model.num_minibatches 2"
        " --model.learning_rate 6e-3 --model.gae_lambda 0.8 --model.gamma 0.98 --model.ent_coef 0"
        " --model.anneal_clip_coef true",
        150_000,
        {
            "num_envs": 32, "n_steps": 32, "batch_size": 512, "n_epochs": 10, "learning_rate": 6e-3,
            "gae_lambda": 0.8, "gamma": 0.98, "ent_coef": 0.0,
            "clip_range": annealed, "clip_range_vf": annealed,
        },
    ),
    "halfcheetah": Workload(
        "HalfCheetah-v4",
        3000.0,
        f"--config {CONFIGS / 'ppo/halfcheetah_best.yaml'}",
        1_000_000,
        {
            "num_envs": 8, "norm": True, "n_steps": 256, "batch_size": 64, "n_epochs": 10,
            "learning_rate": 3e-4, "ent_coef": 0.0, "clip_range_vf": None,
            "policy_kwargs": {"log_std_init": -1.0},
        },
    ),
}  # fmt: skip
PROGRAMS = {
    "eager": "--model.compile false",
    "compiled": "--model.compile true",
    "tensors": "--model.compile true --data.backend torch",
    "stable-baselines3": "",
    "purejaxrl": "",
}


def ours(workload: Workload, program: str, seed: int, steps: int) -> int:
    """Train with ``fit``; return the environment steps until the goal, 0 if not reached."""
    import lightning as L

    from ppo_lightning.commands import cli
    from ppo_lightning.commands.arguments import Arguments

    class Goal(L.Callback):
        steps = 0

        def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
            returns = pl_module.episode_returns
            if len(returns) == 100 and sum(returns) / 100 >= workload.goal:
                self.steps = pl_module.env_steps
                trainer.should_stop = True

    goal = Goal()
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    flags = [*workload.flags.split(), *PROGRAMS[program].split(), "--seed_everything", str(seed)]
    flags += [part for name in quiet for part in (f"--trainer.{name}", "false")]
    flags += ["--trainer.limit_val_batches", "0", "--data.total_timesteps", str(steps)]
    cli.run([goal], Arguments(["fit", *flags]), save_config=False)
    return goal.steps


def stable_baselines3(workload: Workload, seed: int, steps: int) -> int:
    """Train Stable-Baselines3 with the same settings; return the steps until the goal, 0 if not reached."""
    import torch
    from stable_baselines3.common.callbacks import BaseCallback

    class Goal(BaseCallback):
        steps = 0
        over = False

        def _on_rollout_start(self) -> None:
            episodes = self.model.ep_info_buffer or ()
            if len(episodes) == 100 and sum(episode["r"] for episode in episodes) / 100 >= workload.goal:
                self.steps = self.num_timesteps
                self.over = True

        def _on_step(self) -> bool:
            return not self.over

    if threads := peers.THREADS["classic"]:
        torch.set_num_threads(threads)
    goal = Goal()
    peers.stable_baselines3_like_cartpole(workload.env_id, seed, **workload.sb3).learn(steps, callback=goal)
    return goal.steps


def measure_peer(seed: int, args: argparse.Namespace) -> dict[str, float]:
    """Run PureJaxRL in a fresh process; subtract the part of the run after the goal."""
    num_envs, iterations = purejaxrl.SIZES["4x128"]
    run = purejaxrl.run("peer", "4x128", seed, args)
    seconds = run["process"] + run["running_to_goal"] - num_envs * purejaxrl.STEPS * iterations / run["sps"]
    if math.isnan(seconds):
        return {"seed": seed, "seconds": run["process"], "env_steps": 0}
    return {"seed": seed, "seconds": seconds, "env_steps": round(run["running_to_goal"] * run["sps"])}


def measure(name: str, program: str, seed: int, args: argparse.Namespace, cache: str) -> dict[str, float]:
    """Run a program in a fresh process, with a folder for the compiler's cache."""
    if program == "purejaxrl":
        return measure_peer(seed, args)
    command = [sys.executable, "-W", "ignore", __file__, "--one"]
    command += ["--workloads", name, "--programs", program, "--seeds", str(seed)]
    command += ["--steps", str(args.steps)] if args.steps else []
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
    start = time.perf_counter()
    completed = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if completed.returncode:
        raise RuntimeError(f"{name}, {program} failed:\n{completed.stderr}")
    seconds = time.perf_counter() - start
    return {"seed": seed, "seconds": seconds, "env_steps": int(completed.stdout.rsplit("STEPS ", 1)[1])}


def exists(name: str, program: str, args: argparse.Namespace) -> bool:
    """Return whether a program has a workload."""
    if program == "purejaxrl":
        return name == "cartpole" and args.peer is not None
    return program != "tensors" or name != "halfcheetah"


def main() -> None:
    """Print a table and write all measurements as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument(
        "--steps", type=int, help="environment steps of a run (default: those of the settings)"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peer", type=Path)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        warnings.simplefilter("ignore")
        workload, program, seed = WORKLOADS[args.workloads[0]], args.programs[0], args.seeds[0]
        steps = args.steps or workload.steps
        is_peer = program == "stable-baselines3"
        print(
            "STEPS",
            stable_baselines3(workload, seed, steps) if is_peer else ours(workload, program, seed, steps),
        )
        return
    machine = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    runs: dict[str, list[dict[str, float]]] = {}
    for seed in args.seeds:
        for name in args.workloads:
            for program in args.programs:
                if not exists(name, program, args):
                    continue
                caches = ("cold cache", "warm cache") if program in ("compiled", "tensors") else ("",)
                with tempfile.TemporaryDirectory() as cache:
                    for state in caches:
                        label = ", ".join(filter(None, (name, program, state)))
                        run = measure(name, program, seed, args, cache)
                        runs.setdefault(label, []).append(run)
                        print(f"{label}: {run}", file=sys.stderr)
        if args.json:
            content = {**machine, "command": sys.argv, "runs": runs}
            args.json.write_text(json.dumps(content, indent=1) + "\n")
    print("| | seconds by seed | median | environment steps |\n|---|---|---|---|")
    for label, measured in runs.items():
        listed = ", ".join(f"{run['seconds']:.1f}" for run in measured)
        median = statistics.median(run["seconds"] if run["env_steps"] else math.inf for run in measured)
        steps_listed = ", ".join(str(run["env_steps"] or "not reached") for run in measured)
        print(f"| {label} | {listed} | {median:.1f} | {steps_listed} |")


if __name__ == "__main__":
    main()
