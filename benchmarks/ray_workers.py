"""Throughput of slow environments in Ray actors on two nodes of this machine, next to worker processes.

`python benchmarks/ray_workers.py [--seconds 3] [--repeats 5] [--json FILE]`. Sixteen copies of an environment
that sleeps 20 ms a step, in 16 and in 4 workers, in alternation. A step of a worker that has four copies
sleeps 80 ms. Nothing is trained: a network of 64 x 64 units chooses the actions. The overhead is the time of
a batched step beyond the sleep.
"""

import functools
import os
import statistics
import time

os.environ |= {"OMP_NUM_THREADS": "1", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # loopback addresses only

import ray
from ray.cluster_utils import Cluster
from workers import Slow, parse, write

from ppo_lightning import MLPAgent, RolloutCollector
from ppo_lightning.envs.factory import EnvFactory

NUM_ENVS = 16
SLEEP = 0.02


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


def main() -> None:
    """Measure, and print and write the table."""
    args = parse(__doc__)
    cluster = Cluster(True, head_node_args={"num_cpus": 16, "include_dashboard": False})
    cluster.add_node(num_cpus=16)
    ray.init(cluster.address, logging_level="ERROR")
    collectors = {}
    for num_workers in (16, 4):
        for backend in ("process", "ray"):
            make = functools.partial(Slow, sleep=SLEEP)
            env = EnvFactory(make, num_workers=num_workers, worker_backend=backend).make(NUM_ENVS)
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
        f"{NUM_ENVS} environments that sleep {1000 * SLEEP:g} ms a step, {os.cpu_count()} cores; medians.\n"
    )
    print("| | environment steps per second | overhead of a batched step, ms |\n|---|---|---|")
    for name, times in runs.items():
        step = statistics.median(times)
        asleep = SLEEP * NUM_ENVS / int(name.split()[1])
        print(f"| {name} | {NUM_ENVS / step:.0f} | {1000 * (step - asleep):.1f} |")
    write(args, num_envs=NUM_ENVS, sleep=SLEEP, step_times=runs)


if __name__ == "__main__":
    main()
