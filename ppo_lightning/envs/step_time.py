"""Share of a run's time that the environments take."""

import time
from collections.abc import Callable
from typing import Any

from ppo_lightning.envs.factory import largest_divisor

SLOW = 0.5  # share of the time of a run from which on its environments are slow
# Workers pay for a step of all environments that takes longer, in seconds. Each worker adds 0.07 ms.
WORTH_WORKERS = 1e-3


class StepClock:
    """Time that the environments of this process take in the first seconds of a run.

    A reading of the clock takes less than 1 microsecond. The collector drops the clock after some seconds.

    Example:
        >>> clock = StepClock()
        >>> clock.time(sum, [1, 2])
        3
        >>> clock.calls
        1
    """

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.seconds = 0.0  # inside of the environments
        self.calls = 0

    def time(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of the environments, and add its time."""
        start = time.perf_counter()
        value = function(*args)
        self.seconds += time.perf_counter() - start
        self.calls += 1
        return value

    def advice(self, num_envs: int, cores: int) -> str:
        """Return what helps if the environments took most of the time, otherwise an empty text.

        Args:
            num_envs: Number of environments of this rank.
            cores: Number of CPU cores of this rank.
        """
        share = self.seconds / (time.perf_counter() - self.started)
        if share < SLOW:
            return ""
        num_workers = largest_divisor(num_envs, cores)
        if num_workers > 1 and self.seconds > WORTH_WORKERS * self.calls:
            remedy = f"set data.num_workers to {num_workers}"
        else:
            remedy = "ppo-lightning profile compares the backends, such as envpool"
        return f"The environments take {share:.0%} of the time: {remedy}."
