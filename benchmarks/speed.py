"""Environment steps a second of ours, of Stable-Baselines3 and of TorchRL's own loop, beside what the raw parts allow.

`python benchmarks/speed.py [--workloads NAME ...] [--competitors NAME ...] [--repeats 5] [--seconds 10]
[--quick] [--threads N] [--device cuda] [--json PATH]`; needs the extra `benchmark` and a machine that does
nothing else.

Every run is a process of its own, in alternation, with the same environment, network and hyperparameters.
The speed is that of whole iterations (collection and update) after the first ones, so that start-up and
compilation do not count. A step is a decision of the agent: of Atari four frames. Each of the others runs
with the number of PyTorch's threads with which it is fastest (`peers.THREADS`), ours with the package's
default. The floor is what the environment, the policy and the updates of a minibatch take alone, added up
(`benchmarks/floor.py`).
"""

import argparse
import functools
import json
import platform
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import peers

# Environment, hyperparameters, backend of ours, environments, steps, least seconds to measure.
WORKLOADS: dict[str, tuple[str, str, str, int, int, float]] = {
    "cartpole-4x128": ("CartPole-v1", "classic", "gymnasium", 4, 128, 0),
    "cartpole-lstm-4x128": ("CartPole-v1", "lstm", "gymnasium", 4, 128, 0),
    "cartpole-64x128": ("CartPole-v1", "classic", "vectorized", 64, 128, 0),
    "cartpole-2048x128": ("CartPole-v1", "classic", "vectorized", 2048, 128, 20),
    "halfcheetah-1x2048": ("HalfCheetah-v4", "mujoco", "gymnasium", 1, 2048, 0),
    "halfcheetah-16x256": ("HalfCheetah-v4", "mujoco", "envpool", 16, 256, 0),
    "breakout-8x128": ("ALE/Breakout-v5", "atari", "envpool", 8, 128, 20),
    "breakout-64x128": ("ALE/Breakout-v5", "atari", "envpool", 64, 128, 20),
    "breakout-lstm-8x128": ("ALE/Breakout-v5", "atari-lstm", "envpool", 8, 128, 20),
    "starpilot-64x256": ("starpilot", "procgen", "procgen", 64, 256, 1),
}
# In our names; the peers' are in `peers.py`.
RECIPES: dict[str, dict[str, Any]] = {
    "classic": {"learning_rate": 2.5e-4, "num_minibatches": 4, "update_epochs": 4, "ent_coef": 0.01, "clip_coef": 0.2},
    "mujoco": {
        "learning_rate": 3e-4, "num_minibatches": 32, "update_epochs": 10, "ent_coef": 0.0, "clip_coef": 0.2,
        "norm_reward": True,
    },
    "atari": {"learning_rate": 2.5e-4, "num_minibatches": 4, "update_epochs": 4, "ent_coef": 0.01, "clip_coef": 0.1},
    "procgen": {
        "learning_rate": 5e-4, "anneal_lr": False, "gamma": 0.999, "num_minibatches": 8, "update_epochs": 3,
        "ent_coef": 0.01, "clip_coef": 0.2, "norm_reward": True,
    },
}  # fmt: skip
RECIPES |= {"lstm": RECIPES["classic"], "atari-lstm": RECIPES["atari"]}
QUICK = ("cartpole-4x128", "cartpole-64x128")


def competitors(workload: str, device: str) -> dict[str, Any]:
    """Returns who runs a workload: ours with the options of PPO and the Trainer's precision, and the peers' functions."""
    kind = WORKLOADS[workload][1]
    ours: dict[str, Any] = {"ours": ({}, "32-true"), "ours, compiled": ({"compile": True}, "32-true")}
    if kind == "lstm":
        ours["ours, without memory"] = ({"memory": None}, "32-true")
        return ours | {
            "sb3-contrib, like ours": peers.recurrent_ppo_like_ours,
            "sb3-contrib": peers.recurrent_ppo,
        }
    if kind == "atari-lstm":
        without = {"ours, without memory": ({"memory": None}, "32-true")}
        return ours | {"ours, compiled, bf16": ({"compile": True}, "bf16-mixed")} | without
    if kind == "procgen":  # compiling gains nothing there on a CPU
        return {
            "ours": ours["ours"],
            "ours, bf16": ({}, "bf16-mixed"),
            "without channels-last and parts": without_channels_last,
        }
    if kind == "atari":
        ours["ours, compiled, bf16"] = ({"compile": True}, "bf16-mixed")
        return ours | {"stable-baselines3": peers.stable_baselines3}
    if WORKLOADS[workload][3] > 100 or device != "cpu":
        return ours
    return ours | {"stable-baselines3": peers.stable_baselines3, "torchrl": peers.torchrl_loop}


def train(
    workload: str, callback: Any, options: dict[str, Any], env_kwargs: Any = None, **trainer: Any
) -> Any:
    """Trains ours without logs and files until the callback ends it.

    Args:
        workload: Of ``WORKLOADS``.
        callback: A callback of Lightning's, or a stopwatch.
        options: For ``PPO``, beside those of the workload; ``num_threads`` for the callback ``Threads``.
        env_kwargs: For the environment.
        **trainer: For Lightning's Trainer.

    Returns:
        The Trainer.
    """
    import lightning as L

    from ppo_lightning import PPO, CNNAgent, MLPAgent, RecurrentPPO, RolloutDataModule
    from ppo_lightning.callbacks import Threads

    class Until(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            trainer.should_stop = trainer.strategy.broadcast(callback.lap())

    env_id, kind, backend, num_envs, num_steps, _ = WORKLOADS[workload]
    agent: Any = functools.partial(MLPAgent, norm_obs=kind == "mujoco")
    if kind in ("atari", "atari-lstm", "procgen"):
        agent = functools.partial(CNNAgent, body="impala" if kind == "procgen" else "nature")
    if kind == "atari-lstm":  # single frames, with the memory and without
        env_kwargs = {"frame_stack": 1}
    options = {"memory": "lstm" if kind.endswith("lstm") else None, **options}
    threads = Threads(options.pop("num_threads", None))
    if memory := options.pop("memory"):
        agent = functools.partial(agent.func, shared=True, memory=memory)
    made = L.Trainer(
        max_epochs=-1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        limit_val_batches=0, callbacks=[Until() if isinstance(callback, peers.Stopwatch) else callback, threads], **trainer,
    )  # fmt: skip
    data: Any = RolloutDataModule(env_id, backend, num_envs, num_steps, 10**9, env_kwargs=env_kwargs)  # type: ignore[arg-type]
    module = RecurrentPPO if memory else PPO
    made.fit(module(**RECIPES[kind], **options, agent=agent), data)
    return made


def ours(
    workload: str, options: dict[str, Any], precision: str, seconds: float, device: str
) -> dict[str, Any]:
    """Trains; returns speed, shares of time and floor."""
    from floor import FloorClock

    clock = FloorClock(seconds)
    train(workload, clock, options, precision=precision, accelerator=device)
    return {"sps": clock.sps, "fraction": clock.fraction, "floor_sps": clock.floor_sps, "floor": clock.floor}


def without_channels_last(
    env_id: str, recipe: dict[str, Any], num_envs: int, num_steps: int, seconds: float
) -> float:
    """Trains Starpilot without the layout that convolutions on the CPU prefer, and without parts; returns the speed."""
    from ppo_lightning.models import cnn

    cnn.channels_last = lambda network: network
    cnn.scaled = lambda observation: observation.float() / 255
    watch, frames = peers.Stopwatch(seconds), num_envs * num_steps
    train("starpilot-64x256", watch, {"microbatch_size": frames}, accelerator="cpu")
    return watch.rate(frames)


def one(competitor: str, workload: str, seconds: float, device: str, threads: int | None) -> None:
    """Run a competitor in this process and print a line of JSON.

    Args:
        competitor: Of :func:`competitors`.
        workload: Of ``WORKLOADS``.
        seconds: To measure.
        device: Of ours.
        threads: Number of PyTorch's threads; None: the package's default of ours, else ``peers.THREADS``.
    """
    import torch

    warnings.simplefilter("ignore")
    env_id, kind, _, num_envs, num_steps, least = WORKLOADS[workload]
    seconds = max(seconds, least)
    options = competitors(workload, device)[competitor]
    if callable(options):
        if number := threads or peers.THREADS.get(kind):
            torch.set_num_threads(number)
        result = {"sps": options(env_id, RECIPES[kind], num_envs, num_steps, seconds)}
        result["threads"] = torch.get_num_threads()
    else:
        settings, precision = options
        result = ours(workload, settings | {"num_threads": threads}, precision, seconds, device)
        result["threads"] = threads
    print("RESULT", json.dumps(result))


def measure(competitor: str, workload: str, args: argparse.Namespace) -> dict[str, Any]:
    """Runs a competitor in a fresh process."""
    command = [sys.executable, "-W", "ignore", __file__, "--one", competitor, "--workloads", workload]
    command += ["--seconds", str(args.seconds), "--device", args.device]
    command += ["--threads", str(args.threads)] if args.threads else []
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{competitor} on {workload} failed:\n{done.stderr}")
    result = json.loads(done.stdout.rsplit("RESULT", 1)[1])
    took = time.perf_counter() - start
    print(f"{workload}: {competitor} {result['sps']:.0f} ({took:.0f} s for it all)", file=sys.stderr)
    return result


def median(runs: list[dict[str, Any]], key: str) -> float:
    """Returns the median of a figure over the runs."""
    return statistics.median(run[key] for run in runs)


def report(results: dict[str, dict[str, list[dict[str, Any]]]]) -> None:
    """Prints the speeds with their ratios, and where ours spend their time."""
    others = (
        "stable-baselines3", "torchrl", "without channels-last and parts", "sb3-contrib, like ours", "sb3-contrib",
    )  # fmt: skip
    others = tuple(other for other in others if any(other in runs for runs in results.values()))
    print(f"| workload | | threads | SPS | of the floor | {' | '.join(f'x {other}' for other in others)} |")
    print(f"|---|---|---|---|---|{'---|' * len(others)}")
    for workload, runs in results.items():
        for who, its in runs.items():
            of_floor = f"{median(its, 'fraction'):.2f}" if "fraction" in its[0] else ""
            # Run by run, in alternation: the machine's speed drifts.
            ratios = [
                f"{statistics.median(a['sps'] / b['sps'] for a, b in zip(its, runs[other], strict=True)):.2f}"
                if other in runs and other != who
                else ""
                for other in others
            ]
            threads = its[0]["threads"] or "default"
            speed = f"{median(its, 'sps'):.0f}"
            print(f"| {workload} | {who} | {threads} | {speed} | {of_floor} | {' | '.join(ratios)} |")
    clocked = []
    for workload, runs in results.items():
        clocked += [(workload, who, its) for who, its in runs.items() if "shares" in its[0]]
    if not clocked:
        return
    stages = clocked[0][2][0]["shares"]
    print("\nShare of time by stage, %:\n")
    print(f"| workload | | {' | '.join(stages)} |\n|---|---|{'---|' * len(stages)}")
    for workload, who, its in clocked:
        shares = [f"{100 * statistics.median(run['shares'][stage] for run in its):.1f}" for stage in stages]
        print(f"| {workload} | {who} | {' | '.join(shares)} |")


def main() -> None:
    """Prints two tables, and writes every figure as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=None)
    parser.add_argument(
        "--competitors", nargs="+", help='for example "ours, compiled" stable-baselines3; all, if left out'
    )
    parser.add_argument("--repeats", type=int, default=None)
    parser.add_argument("--seconds", type=float, default=None)
    parser.add_argument(
        "--quick", action="store_true", help="the small ones, once, in less than three minutes"
    )
    parser.add_argument("--threads", type=int, help="PyTorch's threads of all (default: the best of each)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = args.workloads or (QUICK if args.quick else tuple(WORKLOADS))
    args.repeats = args.repeats or (1 if args.quick else 5)
    args.seconds = args.seconds or (4 if args.quick else 10)
    if args.one:
        one(args.one, names[0], args.seconds, args.device, args.threads)
        return
    results: dict[str, dict[str, list[dict[str, Any]]]] = {
        name: {
            who: []
            for who in competitors(name, args.device)
            if not args.competitors or who in args.competitors
        }
        for name in names
    }
    for workload, runs in results.items():
        for _ in range(args.repeats):
            for competitor, its in runs.items():
                its.append(measure(competitor, workload, args))
        if args.json:  # as they come: the whole takes an hour
            machine = {
                "machine": platform.processor() or platform.machine(),
                "python": platform.python_version(),
            }
            args.json.write_text(
                json.dumps(machine | {"command": sys.argv, "runs": results}, indent=1) + "\n"
            )
    report(results)


if __name__ == "__main__":
    main()
