"""Watchdogs that end hung processes."""

import contextlib
import ctypes
import datetime
import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

# Multiple of the timeout after which the timer of `faulthandler` ends the process.
TIMER_FACTOR = 10
_lock = threading.Lock()  # held while a watch starts, stops or sets the timer


class StepWatch:
    """Watchdog that ends the process when an environment step exceeds a timeout.

    The process ends with code 1 and prints the Python tracebacks of all threads.

    A thread counts ticks of at most one second. The time during which the process is stopped (SIGSTOP, a
    suspended machine) counts as one tick. A step that holds the GIL blocks the thread, and is found by the
    timer of ``faulthandler`` after ten times the timeout. This timer runs outside of Python. It counts the
    time during which the process is stopped by SIGSTOP, too. A timeout of None is no limit.
    """

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self._began = False  # whether a step began since the last tick
        self._watching = False
        self._counting = False  # whether the thread runs

    def step_begins(self) -> None:
        """Begin to watch a step: a write of an attribute, except for the first step of a rollout."""
        self._began = True
        if not self._watching:
            self._start()

    def stop(self) -> None:
        """Stop watching until the next step. The thread ends at its next tick, and the timer with it."""
        with _lock:
            self._watching = False

    def _start(self) -> None:
        with _lock:
            self._watching = True
            if self.timeout is not None and not self._counting:
                self._counting = True
                self._set_timer(self.timeout)  # takes a new thread: not at every rollout
                threading.Thread(target=self._count, args=[self.timeout], daemon=True).start()

    def _set_timer(self, timeout: float) -> None:
        faulthandler.dump_traceback_later(TIMER_FACTOR * timeout, exit=True, file=2)

    def _count(self, timeout: float) -> None:
        """Count the ticks since the last step."""
        tick = min(1.0, timeout / 10)
        ticks = 0
        while ticks < timeout / tick:
            time.sleep(tick)
            ticks += 1
            with _lock:
                if not self._watching:
                    self._counting = False
                    faulthandler.cancel_dump_traceback_later()
                    return
                if self._began:
                    self._began = False
                    ticks = 0
                    self._set_timer(timeout)
        try:
            os.write(2, f"Timeout ({datetime.timedelta(seconds=timeout)})!\n".encode())
            faulthandler.dump_traceback(2)
            for child in multiprocessing.active_children():  # of a user's vector environment
                if child.daemon:  # which would end with this process
                    child.kill()
        finally:  # also if nobody reads standard error
            os._exit(1)


class Interrupted(BaseException):
    """The end of a call that a signal cuts short.

    Python ignores exceptions in ``__del__`` and callbacks of weak references. There the call goes on.
    """


class EndRequest:
    """The last signal that asks this process to end its run, 0 for none, and the call that it cuts short."""

    number = 0
    _cuts: Callable[[], Any] | None = None

    def receive(self, number: int) -> None:
        """Note a signal, in its handler."""
        self.number = number
        if self._cuts is not None and self._cuts():
            self._cuts = None  # the block has to clean up
            raise Interrupted

    @contextlib.contextmanager
    def may_cut(self, when: Callable[[], Any]) -> Iterator[None]:
        """Let a signal, also an earlier one, raise Interrupted in a block of the main thread when it may."""
        if threading.current_thread() is not threading.main_thread():  # handlers run in that one
            yield
            return
        self._cuts = when
        try:
            if self.number:
                self.receive(self.number)
            yield
        finally:
            self._cuts = None


end_request = EndRequest()


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise a TimeoutError in a call that takes longer. Only the main thread has a limit."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    def end(*_: Any) -> None:
        raise TimeoutError(f"no end within {seconds:g} s")

    previous = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


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
    """Let the kernel send a signal to this process when its parent process ends; on Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG
