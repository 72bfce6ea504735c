"""Time rollouts of CartPole, by backend, in alternation: `python benchmarks/rollouts.py [--repeats 5]`.

Each row is the median duration in milliseconds of a rollout of 128 steps, with one PyTorch thread.
"""

import argparse
import statistics
import time

import torch

from ppo_lightning import MLPAgent
from ppo_lightning.envs.factory import EnvFactory
from ppo_lightning.envs.specs import specs_of
from ppo_lightning.rollouts.make_collector import make_collector

KINDS = {
    "gymnasium": ("gymnasium", False),
    "vectorized": ("vectorized", False),
    "torch": ("torch", False),
    "torch, compiled": ("torch", True),
}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--num_envs", type=int, nargs="+", default=[4, 64, 2048])
    options = parser.parse_args()
    torch.set_num_threads(1)
    for num_envs in options.num_envs:
        collectors = {}
        for kind, (backend, compiled) in KINDS.items():
            if backend == "gymnasium" and num_envs > 64:
                continue
            env = EnvFactory("CartPole-v1", backend).make(num_envs)
            collectors[kind] = make_collector(env, MLPAgent(*specs_of(env)), 128, compile=compiled)
        times: dict[str, list[float]] = {kind: [] for kind in collectors}
        for collector in collectors.values():
            collector.rollout()  # compiles
        for _ in range(options.repeats):
            for kind, collector in collectors.items():
                begun = time.perf_counter()
                for _ in range(5):
                    collector.rollout()
                times[kind].append((time.perf_counter() - begun) / 5)
        for kind, values in times.items():
            print(f"| {num_envs} x 128 | {kind} | {1000 * statistics.median(values):.1f} |", flush=True)


if __name__ == "__main__":
    main()
