"""Measure the seconds from the start of a process to a mean training return over the last 100 episodes.

`python benchmarks/time_to_return.py [--workloads NAME ...] [--seeds N ...] [--json FILE]`
needs the extra `benchmark`, `mujoco` for HalfCheetah, and an idle machine. The programs run in turn for each
seed, each in a fresh process. Start of the interpreter, imports and compilation count.

Compiled programs run twice: with an empty cache of the compiler on disk, and with the cache of that run.
The headers that PyTorch compiles once on a machine stay in the temporary folder (`TMPDIR`).
`--peer DIRECTORY --python PYTHON` adds PureJaxRL. It cannot stop at the return: the rest of its run is
subtracted. DIRECTORY holds `ppo.py` and `wrappers.py` from the folder `purejaxrl` of
https://github.com/luchris429/purejaxrl (measured: 31756b1). PYTHON is the interpreter of an environment with
`pip install gymnax==0.0.9 jax flax optax distrax` (measured: jax 0.10.2).

`--sizes 4x128 64x128 2048x128` compares the throughput of CartPole on the backend `torch` with PureJaxRL
instead, in alternation, without compilation, `--repeats` times. Both use the settings of
`configs/classic/cartpole.yaml` and their best number of threads: JAX all cores, ours `--threads`.
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
from unittest.mock import MagicMock

import peers

SIZES = {"4x128": (4, 1000), "64x128": (64, 120), "2048x128": (2048, 8)}  # environments, iterations
PEER_STEPS = 128
PEER_GOAL = 475.0
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


def purejaxrl(num_envs: int, iterations: int, seed: int) -> dict[str, float]:
    """Train PureJaxRL in this process."""
    import jax
    import numpy as np

    for name in ("brax", "brax.envs", "brax.envs.wrappers", "brax.envs.wrappers.training", "navix"):
        sys.modules[name] = MagicMock()  # for other environments than CartPole
    from ppo import make_train  # type: ignore[import-not-found]

    begun = time.perf_counter()
    settings = {"LR": 2.5e-4, "ANNEAL_LR": True, "UPDATE_EPOCHS": 4, "NUM_MINIBATCHES": 4, "GAMMA": 0.99}
    settings |= {"GAE_LAMBDA": 0.95, "CLIP_EPS": 0.2, "ENT_COEF": 0.01, "VF_COEF": 0.5, "MAX_GRAD_NORM": 0.5}
    settings |= {"ACTIVATION": "tanh", "ENV_NAME": "CartPole-v1", "DEBUG": False}
    settings |= {
        "NUM_ENVS": num_envs,
        "NUM_STEPS": PEER_STEPS,
        "TOTAL_TIMESTEPS": num_envs * PEER_STEPS * iterations,
    }
    train = jax.jit(make_train(settings)).lower(jax.random.PRNGKey(seed)).compile()
    compiled = time.perf_counter()
    result = jax.block_until_ready(train(jax.random.PRNGKey(seed)))
    seconds = time.perf_counter() - compiled
    metrics = result["metrics"]
    ended = np.asarray(metrics["returned_episode"]).reshape(-1)  # in the order of the steps
    returns = np.asarray(metrics["returned_episode_returns"]).reshape(-1)[ended]
    means = np.convolve(returns, np.ones(100) / 100, "valid")
    reached = np.flatnonzero(means >= PEER_GOAL)
    share = (np.flatnonzero(ended)[reached[0] + 99] + 1) / len(ended) if len(reached) else float("nan")
    sps = num_envs * PEER_STEPS * iterations / seconds
    return {"sps": sps, "compiling": compiled - begun, "running_to_goal": share * seconds}


def tensors(num_envs: int, iterations: int, seed: int, threads: int) -> dict[str, float]:
    """Train with the recipe of CartPole in this process."""
    import lightning as L
    import torch

    from ppo_lightning import PPO, RolloutDataModule

    class Clock(L.Callback):
        def __init__(self) -> None:
            self.ends: list[float] = []
            self.goal = float("nan")

        def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
            self.ends.append(time.perf_counter())
            returns = pl_module.episode_returns
            if self.goal != self.goal and len(returns) == 100 and sum(returns) / 100 >= PEER_GOAL:
                self.goal = self.ends[-1]

    torch.set_num_threads(threads)
    L.seed_everything(seed, verbose=False)
    clock = Clock()
    total = num_envs * PEER_STEPS * iterations
    data = RolloutDataModule("CartPole-v1", "torch", num_envs, PEER_STEPS, total)
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = L.Trainer(max_epochs=-1, accelerator="cpu", callbacks=[clock], limit_val_batches=0, **quiet)
    begun = time.perf_counter()
    trainer.fit(PPO(compile=True), data)
    warm = 3  # iterations, of which the first two compile
    sps = num_envs * PEER_STEPS * (iterations - warm) / (clock.ends[-1] - clock.ends[warm - 1])
    compiling = clock.ends[warm - 1] - begun
    return {"sps": sps, "compiling": compiling, "running_to_goal": clock.goal - clock.ends[warm - 1]}


def run_beside(kind: str, size: str, seed: int, options: argparse.Namespace) -> dict[str, float]:
    """Train in a fresh process."""
    python = options.python if kind == "peer" else sys.executable
    command = [python, str(Path(__file__).resolve()), "--beside", kind, "--sizes", size, "--seeds", str(seed)]
    command += ["--threads", str(options.threads)]
    folder = options.peer if kind == "peer" else None
    environment = {"PYTHONPATH": str(folder.resolve())} if folder is not None else {}
    begun = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment)
    if done.returncode:
        raise RuntimeError(f"{kind} failed:\n{done.stderr}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    result["process"] = time.perf_counter() - begun
    return result


def measure_peer(seed: int, args: argparse.Namespace) -> dict[str, float]:
    """Run PureJaxRL in a fresh process; subtract the part of the run after the goal."""
    num_envs, iterations = SIZES["4x128"]
    run = run_beside("peer", "4x128", seed, args)
    seconds = run["process"] + run["running_to_goal"] - num_envs * PEER_STEPS * iterations / run["sps"]
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


def compare_throughput(options: argparse.Namespace) -> None:
    """Print and write the throughput of CartPole on tensors beside that of PureJaxRL."""
    results: dict[str, Any] = {"command": sys.argv[1:]}
    for size in options.sizes:
        rows: dict[str, list[dict[str, float]]] = {"ours": [], "peer": []}
        for seed in range(1, options.repeats + 1):
            for kind, measured in rows.items():
                measured.append(run_beside(kind, size, seed, options))
        results[size] = rows
        speeds = {kind: [row["sps"] for row in measured] for kind, measured in rows.items()}
        ratios = [one / other for one, other in zip(speeds["ours"], speeds["peer"], strict=True)]
        medians = {kind: statistics.median(values) for kind, values in speeds.items()}
        ratio = statistics.median(ratios)
        print(f"| {size} | {medians['ours']:,.0f} | {medians['peer']:,.0f} | {ratio:.2f} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


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
    parser.add_argument("--sizes", nargs="+", choices=SIZES)
    parser.add_argument("--repeats", type=int, default=5, help="of --sizes")
    parser.add_argument("--beside", choices=["peer", "ours"], help=argparse.SUPPRESS)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--threads", type=int, default=1, help="of ours with --sizes")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.beside:
        arguments = (*SIZES[args.sizes[0]], args.seeds[0])
        print(
            json.dumps(purejaxrl(*arguments) if args.beside == "peer" else tensors(*arguments, args.threads))
        )
        return
    if args.sizes:
        compare_throughput(args)
        return
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
