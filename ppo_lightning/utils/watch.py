"""Watchdogs that end hung processes."""

import ctypes
import faulthandler
import math
import os
import signal
import sys
import time


class StepWatch:
    """Watchdog that ends the process when an environment step exceeds a timeout.

    The process ends with code 1 and prints the Python tracebacks of all threads.
    ``faulthandler`` runs its timer outside of Python, so the watchdog works while C code holds the GIL.

    Args:
        timeout: Maximum duration of a step in seconds, None for no limit.

    Example:
        >>> watch = StepWatch(timeout=60.0)
        >>> watch.step_begins()
        >>> watch.stop()
    """

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self._last_set = -math.inf  # time at which the timer was last set

    def step_begins(self) -> None:
        """Restart the timer, unless it was restarted recently: a restart takes 40 microseconds."""
        now = time.monotonic()
        if self.timeout is not None and now - self._last_set > self.timeout / 10:
            faulthandler.dump_traceback_later(self.timeout, exit=True, file=sys.__stderr__ or 2)
            self._last_set = now

    def stop(self) -> None:
        """Stop the timer."""
        if self.timeout is not None:
            faulthandler.cancel_dump_traceback_later()
            self._last_set = -math.inf


# Lightning sets LOCAL_RANK in the launcher, too, but only after this module is imported.
STARTED_AS_A_RANK = "LOCAL_RANK" in os.environ
LAUNCHER = os.getppid()


def end_with_the_launcher() -> None:
    """Let a rank end when its launcher ends, even during a blocking call; on Linux only.

    Otherwise a rank whose launcher dies before rendezvous blocks until the 30-minute timeout.
    """
    if STARTED_AS_A_RANK:
        end_with_the_parent(signal.SIGKILL)
        if os.getppid() != LAUNCHER:
            os.kill(os.getpid(), signal.SIGKILL)


def end_with_the_parent(number: int) -> None:
    """Let the kernel send a signal to this process when its parent process ends; on Linux only.

    Args:
        number: Number of the signal.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG
