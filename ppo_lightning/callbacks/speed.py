"""Throughput of a run over time, its CPU usage, and the fastest of several settings."""

import os
import statistics
import time
from typing import NamedTuple

from torch import get_num_threads

from ppo_lightning.utils.processors import processors

GAIN = 1.1  # smallest speedup for which another setting is recommended


class RunSpeed(NamedTuple):
    """Throughput and CPU usage over a number of iterations, evaluations excluded.

    Attributes:
        sps: Environment steps per second, median over the iterations.
        used: CPU time of this process per wall-clock time, in cores.
        threads: Number of PyTorch threads.
        available: Number of CPU cores that this process may use.
        load: Load average of the machine over the last minute, None if the system has none.
    """

    sps: float
    used: float
    threads: int
    available: int
    load: float | None

    @property
    def crowded(self) -> bool:
        """Whether the load average exceeds the number of available cores."""
        return self.load is not None and self.load > self.available


class SpeedLog:
    """Record of throughput over stretches of iterations.

    ``speeds`` holds one :class:`RunSpeed` per stretch, the newest last.

    Args:
        min_iterations: Minimum number of iterations in a stretch.
    """

    def __init__(self, min_iterations: int = 10) -> None:
        self.min_iterations = min_iterations
        self.speeds: list[RunSpeed] = []
        self._seconds: list[tuple[float, float]] = []  # wall-clock time and CPU time of each iteration
        self._clocks: tuple[float, float] | None = None

    def restart(self) -> None:
        """Restart the clocks for the next iteration."""
        self._clocks = time.perf_counter(), time.process_time()

    def end_iteration(self) -> None:
        """Record the duration of an iteration; the first call only starts the clocks."""
        previous = self._clocks
        self.restart()
        if previous is not None and self._clocks is not None:
            self._seconds.append((self._clocks[0] - previous[0], self._clocks[1] - previous[1]))

    def end_stretch(self, frames: int) -> None:
        """Add the speed since the last stretch to ``speeds``, if there are enough iterations.

        Args:
            frames: Environment steps of an iteration, summed over ranks.
        """
        if len(self._seconds) < self.min_iterations:
            return
        wall, cpu = (sum(seconds) for seconds in zip(*self._seconds, strict=True))
        sps = frames / statistics.median(seconds for seconds, _ in self._seconds)
        self.speeds.append(RunSpeed(sps, cpu / wall, get_num_threads(), processors(), load_average()))
        self._seconds.clear()


def load_average() -> float | None:
    """Return the load average of the machine over the last minute, None if the system has none."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def other_load() -> str:
    """Describe the machine's load if it exceeds the number of cores; otherwise return an empty string."""
    load = load_average()
    available = processors()
    if load is None or load <= available:
        return ""
    return f"load average {load:.1f} on {available} processors"


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
