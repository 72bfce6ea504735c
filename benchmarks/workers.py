"""Throughput of slow environments in worker processes, next to other vectorized environments.

`python benchmarks/workers.py [--seconds 3] [--repeats 5] [--json FILE]`. Eight copies of an environment that
sleeps 5 ms a step, and of one that computes for 1 ms of CPU time a step. Nothing is trained: every row counts
environment steps per second of batched steps. Our rows and "SB3 collects" choose the actions with a network
of 64 x 64 units and store rollouts. The other rows repeat one action, and store nothing. The rows run in
alternation. The columns of Stable-Baselines3 need the extra `benchmark`.
"""

import argparse
import functools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from torchrl.envs import GymWrapper, ParallelEnv

from ppo_lightning import MLPAgent, RolloutCollector
from ppo_lightning.envs.factory import EnvFactory

NUM_ENVS = 8
NUM_STEPS = 64  # batched steps between two looks at the clock
Contender = tuple[Callable[[], object], Callable[[], None]]  # runs NUM_STEPS batched steps; closes


class Slow(gymnasium.Env):
    """Environment without an end that sleeps or computes at each step.

    Args:
        sleep: Time to sleep in seconds.
        compute: CPU time to use in seconds.
    """

    observation_space = gymnasium.spaces.Box(-1, 1, (16,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, sleep: float = 0.0, compute: float = 0.0) -> None:
        self.sleep = sleep
        self.compute = compute
        self.observation = np.zeros(16, np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        return self.observation, {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        if self.sleep:
            time.sleep(self.sleep)
        end = time.thread_time() + self.compute
        while time.thread_time() < end:
            pass
        return self.observation, 1.0, False, False, {}


def ours(make: Callable[[], gymnasium.Env], num_workers: int) -> Contender:
    env = EnvFactory(make, num_workers=num_workers).make(NUM_ENVS)
    collector = RolloutCollector(env, MLPAgent(*env.agent_specs), NUM_STEPS)
    return collector.rollout, collector.shutdown


def gymnasium_vector(make: Callable[[], gymnasium.Env]) -> Contender:
    env = AsyncVectorEnv([make] * NUM_ENVS, context="fork", autoreset_mode=AutoresetMode.DISABLED)
    env.reset()
    action = np.zeros(NUM_ENVS, np.int64)
    return lambda: [env.step(action) for _ in range(NUM_STEPS)], env.close


def torchrl_parallel(make: Callable[[], gymnasium.Env]) -> Contender:
    env = ParallelEnv(
        NUM_ENVS, lambda: GymWrapper(make(), categorical_action_encoding=True), mp_start_method="fork"
    )
    state = env.reset()
    state["action"] = torch.zeros(NUM_ENVS, dtype=torch.int64)
    return lambda: [env.step(state) for _ in range(NUM_STEPS)], env.close


def sb3_vector(make: Callable[[], gymnasium.Env]) -> Contender:
    from stable_baselines3.common.vec_env import SubprocVecEnv

    env = SubprocVecEnv([make] * NUM_ENVS, start_method="fork")
    env.reset()
    action = np.zeros(NUM_ENVS, np.int64)
    return lambda: [env.step(action) for _ in range(NUM_STEPS)], env.close


def sb3_collects(make: Callable[[], gymnasium.Env]) -> Contender:
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.vec_env import SubprocVecEnv

    class Nothing(BaseCallback):
        def _on_step(self) -> bool:
            return True

    env = SubprocVecEnv([make] * NUM_ENVS, start_method="fork")
    model = PPO("MlpPolicy", env, n_steps=NUM_STEPS, batch_size=NUM_STEPS, device="cpu")
    model._setup_learn(10**9)
    callback = Nothing()
    callback.init_callback(model)
    return lambda: model.collect_rollouts(env, callback, model.rollout_buffer, NUM_STEPS), env.close


CONTENDERS: dict[str, Callable[[Callable[[], gymnasium.Env]], Contender]] = {
    "ours, num_workers 0": functools.partial(ours, num_workers=0),
    "ours, num_workers 2": functools.partial(ours, num_workers=2),
    "ours, num_workers 8": functools.partial(ours, num_workers=8),
    "Gymnasium AsyncVectorEnv": gymnasium_vector,
    "TorchRL ParallelEnv": torchrl_parallel,
    "SB3 SubprocVecEnv": sb3_vector,
    "SB3 collects": sb3_collects,
}
ENVIRONMENTS = {
    "sleeps 5 ms": functools.partial(Slow, sleep=0.005),
    "computes 1 ms": functools.partial(Slow, compute=0.001),
}


def measure(contender: Contender, seconds: float) -> float:
    """Return the environment steps per second after a warm-up."""
    run, close = contender
    try:
        run()
        rounds = 0
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            run()
            rounds += 1
        return NUM_ENVS * NUM_STEPS * rounds / (time.perf_counter() - start)
    finally:
        close()


def parse(description: str) -> argparse.Namespace:
    """Return the arguments of the command, and let PyTorch use one thread."""
    parser = argparse.ArgumentParser(description=description.split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="duration of a measurement (default: 3)")
    parser.add_argument("--repeats", type=int, default=5, help="number of alternations (default: 5)")
    parser.add_argument("--json", type=Path, help="file for the results")
    torch.set_num_threads(1)
    return parser.parse_args()


def write(args: argparse.Namespace, **results: Any) -> None:
    """Write results to the file of ``--json``, if there is one, with the machine and the arguments."""
    if args.json is not None:
        machine = {"cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()}
        settings = {"seconds": args.seconds, "repeats": args.repeats}
        args.json.write_text(json.dumps({"machine": machine, **settings, **results}, indent=1) + "\n")


def main() -> None:
    """Measure, and print and write the tables."""
    args = parse(__doc__)
    names = list(CONTENDERS)
    try:
        import stable_baselines3  # noqa: F401
    except ImportError:
        names = [name for name in names if "SB3" not in name]
        print("Stable-Baselines3 is not installed.")
    runs: dict[str, dict[str, list[float]]] = {
        environment: {name: [] for name in names} for environment in ENVIRONMENTS
    }
    for _ in range(args.repeats):
        for environment, make in ENVIRONMENTS.items():
            for name in names:
                runs[environment][name].append(measure(CONTENDERS[name](make), args.seconds))
    print(f"{NUM_ENVS} environments, {os.cpu_count()} cores; environment steps per second, medians of")
    print(f"{args.repeats} runs, and the ratio to Gymnasium's AsyncVectorEnv, run by run.\n")
    print("| environment | | SPS | ratio |\n|---|---|---|---|")
    for environment, rows in runs.items():
        base = rows["Gymnasium AsyncVectorEnv"]
        for name, speeds in rows.items():
            ratio = statistics.median(a / b for a, b in zip(speeds, base, strict=True))
            print(f"| {environment} | {name} | {statistics.median(speeds):.0f} | {ratio:.2f} |")
    write(args, num_envs=NUM_ENVS, runs=runs)


if __name__ == "__main__":
    main()
