"""The speed of a run over time, who has the processors meanwhile, and the setting that is faster."""

import os
import statistics
import time
from typing import NamedTuple

from torch import get_num_threads

GAIN = 1.1  # from which on another setting is recommended


class RunSpeed(NamedTuple):
    """The speed of some iterations, without evaluations.

    Attributes:
        sps: Environment steps per second; the median over the iterations.
        used: CPU seconds of this process per second.
        threads: Number of PyTorch's threads.
        available: Number of processors that this process may use.
        load: Load average of the machine over the last minute; None where the system has none.
    """

    sps: float
    used: float
    threads: int
    available: int
    load: float | None

    @property
    def crowded(self) -> bool:
        """Whether the machine has more work than processors."""
        return self.load is not None and self.load > self.available


class SpeedLog:
    """Measures the speed of stretches of iterations: ``speeds``, the newest last.

    Args:
        least: Iterations of a stretch, at least.
    """

    def __init__(self, least: int = 10) -> None:
        self.least = least
        self.speeds: list[RunSpeed] = []
        self._seconds: list[tuple[float, float]] = []  # wall-clock and CPU time of each iteration
        self._clocks: tuple[float, float] | None = None

    def restart(self) -> None:
        """Start the time of the next iteration now."""
        self._clocks = time.perf_counter(), time.process_time()

    def end_iteration(self) -> None:
        """Note the time of an iteration; the time before the first is not known."""
        before = self._clocks
        self.restart()
        if before is not None and self._clocks is not None:
            self._seconds.append((self._clocks[0] - before[0], self._clocks[1] - before[1]))

    def end_stretch(self, frames: int) -> None:
        """Add the speed of the iterations since the last stretch, if they are enough.

        Args:
            frames: Environment steps of an iteration, of all ranks.
        """
        if len(self._seconds) < self.least:
            return
        wall, cpu = (sum(seconds) for seconds in zip(*self._seconds, strict=True))
        sps = frames / statistics.median(seconds for seconds, _ in self._seconds)
        self.speeds.append(RunSpeed(sps, cpu / wall, get_num_threads(), processors(), load_average()))
        self._seconds.clear()


def processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load_average() -> float | None:
    """Return the machine's load average over the last minute; None where the system has none."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def other_load() -> str:
    """Return the load average and the number of processors if the load is higher; otherwise nothing."""
    load, available = load_average(), processors()
    if load is None or load <= available:
        return ""
    return f"load average {load:.1f} on {available} processors"


def recommendation(sps: float, tried: dict[tuple[str, ...], float]) -> str:
    """Return a sentence that names the fastest of other settings, more environments excepted.

    Args:
        sps: Environment steps per second as the recipe is.
        tried: Environment steps per second by flags.
    """
    same = {change: speed for change, speed in tried.items() if change[0] != "--data.num_envs"}
    best = max(same, key=lambda change: same[change], default=())
    if not best or same[best] < GAIN * sps:
        return "None of these settings is more than 10 % faster."
    return f"Set {' '.join(best)}: {same[best] / sps:.1f} times as fast."
