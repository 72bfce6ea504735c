"""What ends a process that would wait for ever."""

import ctypes
import faulthandler
import math
import os
import signal
import sys
import time


class StepWatch:
    """Ends the process, with code 1 and the Python tracebacks of all threads, when a step takes too long.

    ``faulthandler`` keeps the time outside of Python, so that it works where C code holds the interpreter.

    Args:
        timeout: In seconds; None: a step may take for ever.
    """

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self._set = -math.inf  # when the clock was last set

    def step_begins(self) -> None:
        """Sets the clock, unless it was set just now: that takes 40 microseconds."""
        now = time.monotonic()
        if self.timeout is not None and now - self._set > self.timeout / 10:
            faulthandler.dump_traceback_later(self.timeout, exit=True, file=sys.__stderr__ or 2)
            self._set = now

    def stop(self) -> None:
        """Stops the clock."""
        if self.timeout is not None:
            faulthandler.cancel_dump_traceback_later()
            self._set = -math.inf


STARTED_AS_A_RANK = (
    "LOCAL_RANK" in os.environ
)  # Lightning sets it in the process that starts the others, too, but later
LAUNCHER = os.getppid()


def end_with_the_launcher() -> None:
    """Lets a rank that another process has started end with that process, whatever it waits for (on Linux).

    Otherwise one whose launcher is killed before they have met waits half an hour for it.
    """
    if STARTED_AS_A_RANK:
        end_with_the_parent(signal.SIGKILL)
        if os.getppid() != LAUNCHER:
            os.kill(os.getpid(), signal.SIGKILL)


def end_with_the_parent(number: int) -> None:
    """Lets this process get a signal when the one that started it ends, whatever ends it; on Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG
