"""Measure collection without updates: slow environments, TorchRL's transforms and the backends.

`python benchmarks/collection.py workers [--seconds 3] [--repeats 5] [--json FILE]`: throughput of eight
copies of an environment that sleeps 5 ms a step, and of one that computes for 1 ms of CPU time a step, in
worker processes, next to other vectorized environments. Our rows and "SB3 collects" choose the actions with
a network of 64 x 64 units and store rollouts. The other rows repeat one action, and store nothing. The
columns of Stable-Baselines3 need the extra `benchmark`.

`ray`: sixteen copies of an environment that sleeps 20 ms a step, in Ray actors on two nodes of this
machine, next to worker processes, in 16 and in 4 workers. A step of a worker that has four copies sleeps 80
ms. The overhead is the time of a batched step beyond the sleep. Needs the extra `ray`.

`transforms [--workloads NAME ...] [--repeats 50]`: cost of our collector for TorchRL environments over
TorchRL's bare Collector, in one process: the same environments, transforms and policy. The bare Collector
neither checks for non-finite values nor sums along episodes, clips, normalizes or scales. A cost of 5 %
means that a step takes 1.05 times as long.

`backends [--num_envs 4 64 2048] [--repeats 5]`: milliseconds of a rollout of 128 steps of CartPole.

Everything runs in alternation, with one PyTorch thread. Figures are medians.
"""

import argparse
import functools
import json
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Loopback addresses only in Ray.
os.environ |= {
    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from tensordict import TensorDict, TensorDictBase
from torchrl.collectors import BaseCollector, Collector
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.envs import (
    CatTensors,
    Compose,
    EnvBase,
    GymWrapper,
    ParallelEnv,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    UnsqueezeTransform,
)
from torchrl.envs.custom import PendulumEnv
from torchrl.envs.libs.gym import GymEnv

from ppo_lightning import MLPAgent, RolloutCollector
from ppo_lightning.envs.factory import EnvFactory
from ppo_lightning.envs.specs import specs_of
from ppo_lightning.models.normalizers import RewardScaler
from ppo_lightning.rollouts.make_collector import make_collector

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


def compare_workers(args: argparse.Namespace) -> dict[str, Any]:
    """Measure worker processes and other vectorized environments."""
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
    return {"num_envs": NUM_ENVS, "runs": runs}


def step_times(collector: RolloutCollector, seconds: float) -> list[float]:
    """Return the mean duration of a batched step of each rollout in seconds, after a warm-up."""
    collector.rollout()
    times = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        collector.rollout()
        times.append((time.perf_counter() - start) / collector.num_steps)
    return times


def compare_ray(args: argparse.Namespace) -> dict[str, Any]:
    """Measure Ray actors and worker processes."""
    import ray
    from ray.cluster_utils import Cluster

    num_envs, sleep = 16, 0.02
    cluster = Cluster(True, head_node_args={"num_cpus": 16, "include_dashboard": False})
    cluster.add_node(num_cpus=16)
    ray.init(cluster.address, logging_level="ERROR")
    collectors = {}
    for num_workers in (16, 4):
        for backend in ("process", "ray"):
            make = functools.partial(Slow, sleep=sleep)
            env = EnvFactory(make, num_workers=num_workers, worker_backend=backend).make(num_envs)
            agent = MLPAgent(*env.agent_specs)
            collectors[f"{backend}, {num_workers} workers"] = RolloutCollector(env, agent, 16)
    runs: dict[str, list[float]] = {name: [] for name in collectors}
    try:
        for _ in range(args.repeats):
            for name, collector in collectors.items():
                runs[name] += step_times(collector, args.seconds)
    finally:
        for collector in collectors.values():
            collector.shutdown()
        ray.shutdown()
        cluster.shutdown()
    print(
        f"{num_envs} environments that sleep {1000 * sleep:g} ms a step, {os.cpu_count()} cores; medians.\n"
    )
    print("| | environment steps per second | overhead of a batched step, ms |\n|---|---|---|")
    for name, times in runs.items():
        step = statistics.median(times)
        asleep = sleep * num_envs / int(name.split()[1])
        print(f"| {name} | {num_envs / step:.0f} | {1000 * (step - asleep):.1f} |")
    return {"num_envs": num_envs, "sleep": sleep, "step_times": runs}


class PointMass(EnvBase):
    """Batched environment: a force moves a point on a line to 0; episodes have no end."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(batch_size=[num_envs])
        shape = (num_envs, 1)
        self.observation_spec = Composite(observation=Unbounded((num_envs, 2)), shape=(num_envs,))
        self.action_spec = Bounded(-1.0, 1.0, shape)
        self.reward_spec = Unbounded(shape)
        self.state = torch.zeros(num_envs, 2)

    def _flags(self) -> dict[str, torch.Tensor]:
        return {key: torch.zeros(*self.batch_size, 1, dtype=torch.bool) for key in ("done", "terminated")}

    def _reset(self, tensordict: TensorDictBase | None = None, **_: object) -> TensorDictBase:
        fresh = torch.randn(*self.batch_size, 2)
        resets = None if tensordict is None else tensordict.get("_reset", None)
        self.state = fresh if resets is None else torch.where(resets, fresh, self.state)
        return TensorDict({"observation": self.state, **self._flags()}, batch_size=self.batch_size)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        place, speed = self.state.split(1, dim=-1)
        speed = 0.99 * speed + 0.1 * tensordict["action"].clamp(-1, 1)
        self.state = torch.cat([place + 0.1 * speed, speed], dim=-1)
        outcome = {"observation": self.state, "reward": -place.square()}
        return TensorDict(outcome | self._flags(), batch_size=self.batch_size)

    def _set_seed(self, seed: int | None) -> None:
        torch.manual_seed(0 if seed is None else seed)


def cartpole(num_envs: int) -> EnvBase:
    """Make Gymnasium's CartPole through TorchRL's wrapper."""
    env = SerialEnv(num_envs, lambda: GymEnv("CartPole-v1", categorical_action_encoding=True))
    return TransformedEnv(env, Compose(StepCounter(200)))


def pendulum(num_envs: int) -> EnvBase:
    """Make TorchRL's stateless pendulum with the transforms of the documentation."""
    angles = UnsqueezeTransform(-1, in_keys=["th", "thdot"], out_keys=["th_1", "thdot_1"])
    joined = CatTensors(["th_1", "thdot_1"], "observation", del_keys=False)
    return TransformedEnv(SerialEnv(num_envs, PendulumEnv), Compose(angles, joined, StepCounter(200)))


WORKLOADS: dict[str, tuple[Callable[[int], EnvBase], int]] = {
    f"{make.__name__}-{num_envs}": (make, num_envs)
    for make in (cartpole, pendulum, PointMass)
    for num_envs in (1, 8)
}
VARIANTS = ("bare", "ours", "norm_reward", "norm_obs", "both")


def make_variant(workload: str, variant: str) -> BaseCollector:
    """Make the collector of a variant."""
    make_env, num_envs = WORKLOADS[workload]
    torch.manual_seed(0)
    env = make_env(num_envs)
    env.set_seed(1)
    specs = env.observation_spec_unbatched["observation"], env.action_spec_unbatched
    agent = MLPAgent(*specs, norm_obs=variant in ("norm_obs", "both"))
    if variant == "bare":
        return Collector(
            env, agent, frames_per_batch=num_envs * NUM_STEPS, total_frames=-1, track_traj_ids=False
        )
    scaler = RewardScaler(0.99) if variant in ("norm_reward", "both") else None
    return make_collector(env, agent, NUM_STEPS, reward_scaler=scaler)


def durations_of(workload: str, repeats: int) -> dict[str, list[float]]:
    """Return the seconds per rollout by variant, measured in alternation."""
    collectors = {variant: make_variant(workload, variant) for variant in VARIANTS}
    rollouts = {variant: iter(collector) for variant, collector in collectors.items()}
    durations: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for repeat in range(repeats + 1):
        for variant, running in rollouts.items():
            start = time.perf_counter()
            next(running)
            if repeat:  # the first rollout warms up
                durations[variant].append(time.perf_counter() - start)
    for collector in collectors.values():
        collector.shutdown()
    return durations


def compare_transforms(args: argparse.Namespace) -> dict[str, Any]:
    """Measure our collector for TorchRL environments and the bare one."""
    warnings.simplefilter("ignore")
    results = {}
    print("| workload | variant | steps per second | cost over the bare Collector |\n|---|---|---|---|")
    for workload in args.workloads:
        durations = durations_of(workload, args.repeats)
        frames = WORKLOADS[workload][1] * NUM_STEPS
        results[workload] = {}
        for variant, times in durations.items():
            ratios = [ours / bare for ours, bare in zip(times, durations["bare"], strict=True)]
            speeds = [frames / duration for duration in times]
            cost = statistics.median(ratios) - 1
            results[workload][variant] = {"sps": speeds, "cost": cost}
            print(f"| {workload} | {variant} | {statistics.median(speeds):.0f} | {cost:+.1%} |", flush=True)
    return {"runs": results}


KINDS = {
    "gymnasium": ("gymnasium", False),
    "vectorized": ("vectorized", False),
    "torch": ("torch", False),
    "torch, compiled": ("torch", True),
}


def compare_backends(args: argparse.Namespace) -> dict[str, Any]:
    """Measure rollouts of CartPole."""
    runs = {}
    for num_envs in args.num_envs:
        collectors = {}
        for kind, (backend, compiled) in KINDS.items():
            if backend == "gymnasium" and num_envs > 64:
                continue
            env = EnvFactory("CartPole-v1", backend).make(num_envs)
            collectors[kind] = make_collector(env, MLPAgent(*specs_of(env)), 128, compile=compiled)
        times: dict[str, list[float]] = {kind: [] for kind in collectors}
        for collector in collectors.values():
            collector.rollout()  # compiles
        for _ in range(args.repeats):
            for kind, collector in collectors.items():
                begun = time.perf_counter()
                for _ in range(5):
                    collector.rollout()
                times[kind].append((time.perf_counter() - begun) / 5)
        runs[f"{num_envs} x 128"] = times
        for kind, values in times.items():
            print(f"| {num_envs} x 128 | {kind} | {1000 * statistics.median(values):.1f} |", flush=True)
    return {"runs": runs}


PARTS: dict[str, tuple[Callable[[argparse.Namespace], dict[str, Any]], int]] = {  # function, repeats
    "workers": (compare_workers, 5),
    "ray": (compare_ray, 5),
    "transforms": (compare_transforms, 50),
    "backends": (compare_backends, 5),
}


def main() -> None:
    """Measure a part, and print and write its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="of a measurement of workers and ray (default: 3)"
    )
    parser.add_argument("--repeats", type=int, help="number of alternations")
    parser.add_argument(
        "--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="of transforms"
    )
    parser.add_argument("--num_envs", type=int, nargs="+", default=[4, 64, 2048], help="of backends")
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    measure_part, repeats = PARTS[args.part]
    args.repeats = args.repeats or repeats
    results = measure_part(args)
    if args.json is not None:
        machine = {"cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()}
        args.json.write_text(
            json.dumps({"machine": machine, "command": sys.argv, **results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
