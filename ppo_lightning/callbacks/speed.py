"""Throughput of a run, load of the machine, and the fastest of several settings."""

import os
from typing import NamedTuple

from ppo_lightning.utils.processors import processors

GAIN = 1.1  # smallest speedup for which another setting is recommended


class RunSpeed(NamedTuple):
    """Throughput and CPU usage over a number of iterations, evaluations excluded.

    Attributes:
        sps: Environment steps per second, median over the iterations.
        used: CPU time of this process per wall-clock time, in cores.
        threads: Number of PyTorch threads.
        available: Number of CPU cores that this process may use.
        load: Load average of the machine over the last minute.
    """

    sps: float
    used: float
    threads: int
    available: int
    load: float


def load_average() -> float:
    """Return the load average of the machine over the last minute."""
    return os.getloadavg()[0]


def other_load() -> str:
    """Describe the machine's load if it exceeds the number of cores; otherwise return an empty string."""
    load = load_average()
    available = processors()
    return f"load average {load:.1f} on {available} processors" if load > available else ""


def recommendation(sps: float, tried: dict[tuple[str, ...], float]) -> str:
    """Return a sentence that names the fastest alternative, ignoring other numbers of environments.

    Args:
        sps: Environment steps per second of the unchanged recipe.
        tried: Environment steps per second of each alternative, by flags.
    """
    comparable = {change: speed for change, speed in tried.items() if change[0] != "--data.num_envs"}
    best = max(comparable, key=lambda change: comparable[change], default=())
    if not best or comparable[best] < GAIN * sps:
        return "None of these settings is more than 10 % faster."
    return f"Set {' '.join(best)}: {comparable[best] / sps:.1f} times as fast."
