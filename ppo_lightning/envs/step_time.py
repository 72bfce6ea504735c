"""Share of a run's time that the environments take."""

import time
from collections.abc import Callable
from typing import Any

SLOW = 0.5  # share of the time of a run from which on its environments are slow


class StepClock:
    """Time that the environments of this process take in the first seconds of a run.

    A reading of the clock takes less than 1 microsecond. The collector drops the clock after some seconds.

    Example:
        >>> clock = StepClock()
        >>> clock.time(sum, [1, 2])
        3
        >>> 0 < clock.share < 1
        True
    """

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.seconds = 0.0  # inside of the environments

    def time(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of the environments, and add its time."""
        start = time.perf_counter()
        value = function(*args)
        self.seconds += time.perf_counter() - start
        return value

    @property
    def share(self) -> float:
        """Share of the time since the start."""
        return self.seconds / (time.perf_counter() - self.started)
