"""Measure the cost of our collector for TorchRL environments over TorchRL's bare Collector.

`python benchmarks/transforms.py [--workloads NAME ...] [--repeats 50] [--json PATH]` collects rollouts with
both in alternation, in one process with one PyTorch thread: the same environments, transforms and policy.
The bare Collector neither checks for non-finite values nor sums along episodes, clips, normalizes or scales.
The cost is the median over the repeats: 5 % means that a step takes 1.05 times as long.
"""

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.collectors import BaseCollector, Collector
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.envs import (
    CatTensors,
    Compose,
    EnvBase,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    UnsqueezeTransform,
)
from torchrl.envs.custom import PendulumEnv
from torchrl.envs.libs.gym import GymEnv

from ppo_lightning import MLPAgent
from ppo_lightning.models.normalizers import RewardScaler
from ppo_lightning.rollouts.make_collector import make_collector

NUM_STEPS = 64


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


def make(workload: str, variant: str) -> BaseCollector:
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


def measure(workload: str, repeats: int) -> dict[str, list[float]]:
    """Return the seconds per rollout by variant, measured in alternation."""
    collectors = {variant: make(workload, variant) for variant in VARIANTS}
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


def main() -> None:
    """Print throughput and cost of each variant."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results = {}
    print("| workload | variant | steps per second | cost over the bare Collector |\n|---|---|---|---|")
    for workload in args.workloads:
        durations = measure(workload, args.repeats)
        frames = WORKLOADS[workload][1] * NUM_STEPS
        results[workload] = {}
        for variant, times in durations.items():
            ratios = [ours / bare for ours, bare in zip(times, durations["bare"], strict=True)]
            speeds = [frames / duration for duration in times]
            cost = statistics.median(ratios) - 1
            results[workload][variant] = {"sps": speeds, "cost": cost}
            print(f"| {workload} | {variant} | {statistics.median(speeds):.0f} | {cost:+.1%} |", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"command": sys.argv, "runs": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
