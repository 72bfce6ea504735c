"""Gymnasium environments stepped by workers, for slow environments."""

import contextlib
import faulthandler
import functools
import gc
import math
import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import pickle
import random
import signal
import socket
import struct
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium.vector.utils import CloudpickleWrapper

from ppo_lightning.envs.batched import BatchedEnv
from ppo_lightning.envs.gymnasium import GymnasiumEnv
from ppo_lightning.envs.state import Row
from ppo_lightning.errors import ConfigError
from ppo_lightning.utils.seeding import derive_seed
from ppo_lightning.utils.watch import end_with_the_parent

# Shares of `step_timeout`. A worker that does not answer for the first share is ended. The watchdog of the
# run ends the whole process after 1 to 1.1, but only the worker's traceback shows where it hangs.
TIMEOUT_SHARE = 0.8
LOADING_SHARE = 10.0  # instead, while environments are created or first reset, which may load a simulator
ALARM_SHARE = 0.1  # for the traceback
CLOSE_SECONDS = 5.0  # for the `close` methods of the environments, before the workers are killed
# Forked workers start in milliseconds, even from a script without `if __name__ == "__main__"`, as those of
# PyTorch's DataLoader do. Spawned ones import PyTorch first. TorchRL sets Python's default to `spawn`.
START_METHOD = "fork" if sys.platform == "linux" else "spawn"


class Reply(NamedTuple):
    """What the method of a request returned, which steps count, and infos; or its error."""

    value: Any = None
    valid: np.ndarray | None = None
    infos: Mapping[int, dict[str, Any]] | None = None
    error: Any = None  # an exception that can be pickled


class WorkerEnv(BatchedEnv):
    """N copies of a Gymnasium environment in W workers: processes, or actors on a Ray cluster.

    Each worker steps N / W copies as :class:`~ppo_lightning.envs.gymnasium.GymnasiumEnv` does. For each
    request, the name of a method and its arguments, it returns one :class:`Reply`. The episodes are the same
    as in one process, to the bit, for any number and place of workers.

    ``max_restarts`` is also how often each worker is made anew if it ends or does not answer in time. As
    after the failure of an environment, a step of its rows is truncated and not ``valid``.

    On Linux, worker processes end with the process that made them, even if that process is killed. They
    ignore SIGINT and SIGTERM, which schedulers send to all processes of a run: a run stops its own workers.

    Args:
        num_workers: Number of workers W, a divisor of N.
        env_id: As for ``GymnasiumEnv``.
        seeds: One seed per environment, N in total.
        first_env: Global index of the first environment, for messages.
        step_timeout: Maximum duration of a step in seconds; None: no limit.
        kind: Class of the workers.
        **env_kwargs: As for ``GymnasiumEnv``.

    Raises:
        ConfigError: As for ``GymnasiumEnv``, or a worker of this kind cannot start here.
        RuntimeError: A worker ended, or did not answer in time.

    Example:
        >>> env = WorkerEnv(2, "CartPole-v1", [1, 2, 3, 4])
        >>> env.reset_arrays().shape
        (4, 4)
        >>> env.close()
    """

    envs = ()  # those of the workers
    info_names = ()

    def __init__(
        self,
        num_workers: int,
        env_id: str | Callable[..., gymnasium.Env],
        seeds: list[int],
        first_env: int = 0,
        step_timeout: float | None = None,
        kind: "type[Worker] | None" = None,
        /,
        **env_kwargs: Any,
    ) -> None:
        size, rest = divmod(len(seeds), num_workers)
        assert rest == 0
        # One copy in this process shows the spaces. The copies that are stepped exist in the workers only.
        sample = GymnasiumEnv(env_id, seeds[:1], first_env, **env_kwargs)
        sample.close()
        super().__init__(*sample.spaces, seeds)
        self.samples = sample.envs
        self.step_timeout = step_timeout
        self._bounds = None  # the workers clip actions
        self._first_env = first_env
        self._seeds = seeds
        self._make_members = functools.partial(Members, env_id, **env_kwargs)
        self._max_restarts = env_kwargs.get("max_restarts", 0)
        if sample.valid is not None:
            self.valid = np.ones(self.num_envs, bool)
        self._started = False
        self._waiting = False  # whether an exchange with the workers was interrupted
        self.workers: list[Worker] = []
        self._lost: set[Worker] = set()  # made anew since the last step, so that their episodes must end
        try:
            for start in range(0, self.num_envs, size):
                worker = (kind or Worker)(slice(start, start + size))
                self._start(worker)
                self.workers.append(worker)
            # The first request creates the environments, whatever its method.
            self._ask(dict.fromkeys(self.workers, ("numel",)), loading=True)
        except BaseException:
            self.close()
            raise
        self._started = True

    def reset_arrays(self, mask: np.ndarray | None = None) -> np.ndarray:
        """Reset in the workers."""
        parts = ((worker, None if mask is None else mask[worker.rows]) for worker in self.workers)
        # Workers without a finished episode get no message.
        requests = {worker: ("reset_arrays", part) for worker, part in parts if part is None or part.any()}
        # The first reset may load a simulator.
        for worker, reply in self._ask(requests, loading=mask is None).items():
            self._observation[worker.rows] = reply.value
        return self._observation

    def _step_arrays(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Step in the workers."""
        workers = [worker for worker in self.workers if worker not in self._lost]
        requests = {worker: ("step_arrays", action[worker.rows]) for worker in workers}
        for worker, reply in self._ask(requests).items():
            arrays = self._observation, *self._results
            for array, part in zip(arrays, reply.value, strict=True):
                array[worker.rows] = part
            if self.valid is not None:
                self.valid[worker.rows] = reply.valid
            if reply.infos:
                self.infos |= {worker.rows.start + row: info for row, info in reply.infos.items()}
        for worker in self._lost:
            assert self.valid is not None
            for array, value in zip((self.valid, *self._results), (False, 0.0, False, True), strict=True):
                array[worker.rows] = value
        self._lost.clear()
        return self._observation, *self._results

    def reseed(self, seeds: list[int]) -> None:
        """Set the seeds of the next reset."""
        self._seeds = list(seeds)
        self._ask({worker: ("reseed", seeds[worker.rows]) for worker in self.workers})

    def set_attr(self, name: str, value: Any) -> None:
        """Set an attribute in the workers."""
        self._attributes[name] = value
        self._ask(dict.fromkeys(self.workers, ("set_attr", name, value)))

    def get_state(self) -> list[Row] | None:
        """Return states as :class:`GymnasiumEnv` does."""
        replies = self._ask(dict.fromkeys(self.workers, ("get_state",)))
        groups = [reply.value for reply in replies.values()]
        whole = len(groups) == len(self.workers) and None not in groups
        return [row for rows in groups for row in rows] if whole else None

    def set_state(self, states: list[Row]) -> None:
        """Restore the environments."""
        requests = {worker: ("set_state", states[worker.rows]) for worker in self.workers}
        self._ask(requests, loading=True)

    def _start(self, worker: "Worker") -> None:
        """Start a worker, with other seeds if it was lost."""
        seeds = self._seeds[worker.rows]
        if worker.losses:
            seeds = [derive_seed(seed, "train", worker.losses) for seed in seeds]
        first_env = self._first_env + worker.rows.start
        worker.start(functools.partial(self._make_members, seeds, first_env, self._attributes))

    def _ask(self, requests: Mapping["Worker", tuple], loading: bool = False) -> dict["Worker", Reply]:
        """Send requests, and return the replies, or raise the first error among them.

        While environments are ``loading``, workers have more time for an answer, and one that is made anew
        gets the request again. Otherwise its reply is missing.
        """
        self._waiting = True
        share = LOADING_SHARE if loading else TIMEOUT_SHARE
        for worker, request in requests.items():
            worker.send(request, share * (self.step_timeout or 0.0))
        replies = {}
        for worker, request in requests.items():
            while worker not in replies:
                try:
                    replies[worker] = worker.receive()
                except (EOFError, OSError):  # the worker is dead or does not answer
                    self._make_anew(worker, share)
                    if not loading:
                        break
                    worker.send(request, share * (self.step_timeout or 0.0))
        self._waiting = False
        if loading:  # all environments begin anew
            self._lost.clear()
        for reply in replies.values():
            if reply.error is not None:
                raise reply.error
        return replies

    def _make_anew(self, worker: "Worker", share: float) -> None:
        """Start a worker again that ended, or had a share of ``step_timeout`` in vain.

        Raises:
            RuntimeError: It was lost ``max_restarts`` times. The message names the worker.
        """
        timeout = self.step_timeout or math.inf
        limit = f"{share:g} * data.step_timeout = {share * timeout:g} s"
        end = worker.end(limit, min(CLOSE_SECONDS, ALARM_SHARE * timeout))
        rows = range(self.num_envs)[worker.rows]
        numbers = ", ".join(str(self._first_env + row) for row in rows)
        end = f"Worker {self.workers.index(worker)} of {len(self.workers)} (environments {numbers}) {end}"
        if worker.losses >= self._max_restarts:
            remedy = "resume from the last checkpoint (--auto_resume), or raise data.env_kwargs.max_restarts"
            raise RuntimeError(f"{end}: {remedy if self._started else worker.remedy}.") from None
        worker.losses += 1
        warnings.warn(
            f"{end}: it is made anew (restart {worker.losses} of {self._max_restarts}), and the returns of"
            " its episodes do not count.",
            stacklevel=2,
        )
        worker.kill()
        self._start(worker)
        self._lost.add(worker)

    def _close_envs(self) -> None:
        """Close the environments, unless an exchange was interrupted, and end the workers."""
        if not self._waiting:
            for worker in self.workers:
                worker.send(("close",), CLOSE_SECONDS)
            deadline = time.monotonic() + CLOSE_SECONDS
            for worker in self.workers:
                worker.wait(max(0, deadline - time.monotonic()))
        for worker in self.workers:
            worker.kill()


class Transport(multiprocessing.connection.Connection):
    """One end of the pipe between the main process and a worker process.

    ``send`` and ``receive`` raise ``BlockingIOError`` after a time limit. The kernel counts the time, and
    begins again when this process is stopped and continued (``man 7 signal``): that time does not count.
    """

    _seconds = 0.0

    def limit(self, seconds: float) -> None:
        """Set the time limit; 0: none."""
        if seconds == self._seconds:
            return
        self._seconds = seconds
        interval = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        with socket.socket(fileno=os.dup(self.fileno())) as end:
            end.setblocking(True)  # whatever `socket.setdefaulttimeout` says
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                end.setsockopt(socket.SOL_SOCKET, option, interval)

    def send(self, message: Any) -> None:
        """Send a request or a reply."""
        self.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))  # faster than multiprocessing's own

    def receive(self) -> Any:
        """Receive a request or a reply."""
        return pickle.loads(self.recv_bytes())


class Worker:
    """A worker process, and the rows of its environments among all. Another kind has the same methods."""

    remedy = "start the run under `if __name__ == '__main__':`, or set data.num_workers to 0"  # at the start
    losses = 0  # how often it was made anew

    def __init__(self, rows: slice) -> None:
        self.rows = rows

    def start(self, make: Callable[[], "Members"]) -> None:
        """Start the process, whose environments ``make`` creates."""
        if multiprocessing.current_process().daemon:
            raise ConfigError("data.num_workers must be 0 in a daemonic process, which cannot start others.")
        context: Any = multiprocessing.get_context(START_METHOD)
        ours, theirs = context.Pipe()
        self._transport = Transport(os.dup(ours.fileno()))
        ours.close()
        self.process = context.Process(target=serve, args=(theirs, CloudpickleWrapper(make)), daemon=True)
        self.process.start()
        theirs.close()  # so that the death of the worker closes the pipe
        # At exit, multiprocessing waits for its processes, which ignore its SIGTERM.
        multiprocessing.util.Finalize(self, _end, [self.process], exitpriority=100)

    def send(self, request: tuple, seconds: float) -> None:
        """Send a request, whose reply may take a number of seconds; 0: no limit."""
        self._late = False  # whether the worker exceeded the limit
        try:
            self._transport.limit(seconds)
            self._transport.send(request)
        except BlockingIOError:
            self._late = True
        except OSError:  # `receive` raises, too
            pass

    def receive(self) -> Reply:
        """Return the reply, or raise ``EOFError`` or ``OSError`` if the worker ended or is late."""
        if not self._late:
            try:
                return self._transport.receive()
            except BlockingIOError:
                self._late = True
        raise TimeoutError

    def wait(self, seconds: float) -> None:
        """Wait until the request ``close`` is done."""
        self.process.join(seconds)

    def end(self, limit: str, seconds: float) -> str:
        """Return how the worker ended, as a verb, or let it print where it hangs, within some seconds."""
        late = self._late
        if late:
            os.kill(self.process.pid, signal.SIGALRM)
        self.process.join(seconds)
        code = self.process.exitcode
        if code is None and late:
            return f"did not answer for {limit}, nor react to SIGALRM, as a process that is stopped (SIGSTOP)"
        if code is None:
            return "closed its pipe"
        if code >= 0:
            return f"ended with exit code {code}"
        if late and -code == signal.SIGALRM:
            return f"hung for {limit} (the traceback above shows where)"
        name = signal.Signals(-code).name
        return f"was ended by {name}" + ", as Linux does when memory runs out" * (name == "SIGKILL")

    def kill(self) -> None:
        """End the worker."""
        _end(self.process)
        self._transport.close()


def _end(process: Any) -> None:
    process.kill()
    process.join()


class Members(GymnasiumEnv):
    """The environments of a worker."""

    def __init__(
        self, env_id: Any, seeds: list[int], first_env: int, attributes: dict[str, Any], /, **env_kwargs: Any
    ) -> None:
        # A forked process inherits the global generators: without seeds, all workers would draw the same.
        random.seed(seeds[0])
        np.random.seed(seeds[0])  # noqa: NPY002
        torch.manual_seed(seeds[0])
        super().__init__(env_id, seeds, first_env, **env_kwargs)
        for name, value in attributes.items():
            self.set_attr(name, value)


class Host:
    """What answers requests in a worker. The first request creates the environments."""

    def __init__(self, make: Callable[[], Members]) -> None:
        torch.set_num_threads(1)
        self._make = make
        self._members: Members | None = None

    def answer(self, request: tuple) -> Reply:
        """Call a method of the environments."""
        method, *arguments = request
        try:
            if self._members is None:
                if method == "close":
                    return Reply()
                self._members = self._make()
            value = getattr(self._members, method)(*arguments)
        except (Exception, SystemExit) as error:
            return Reply(error=portable(error))
        reply = Reply(value, self._members.valid, self._members.infos or None)
        if reply.infos:
            self._members.infos = {}
        return reply


def serve(pipe: multiprocessing.connection.Connection, make: Callable[[], Members]) -> None:
    """Reply to requests in a worker process, until one says ``close``."""
    transport = Transport(os.dup(pipe.fileno()))
    if sys.platform == "linux":
        end_with_the_parent(signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # The main process sends SIGALRM to a worker that hangs. After the traceback, the default action of the
    # signal ends the process, even inside C code.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    faulthandler.register(signal.SIGALRM, file=sys.__stderr__ or 2, all_threads=True, chain=True)
    gc.freeze()  # objects of the main process, whose finalizers would act on its pipes
    host = Host(make)
    while True:
        request = transport.receive()
        reply = host.answer(request)
        if request[0] == "close":
            return
        transport.send(reply)


def portable(error: BaseException) -> BaseException:
    """Return an error that can be pickled, with the traceback of this process as a note.

    A ``ConfigError`` gets no note: it is one sentence.
    """
    if isinstance(error, ConfigError):
        return error
    report = "".join(traceback.format_exception(error)).rstrip()  # with the notes
    error.__notes__ = [f"In the worker process:\n{report}"]
    with contextlib.suppress(Exception):
        copy = pickle.loads(pickle.dumps(error))
        if type(copy) is type(error) and str(copy) == str(error):
            return error
    stand_in = RuntimeError(f"{type(error).__name__}: {error}")
    stand_in.__notes__ = error.__notes__
    return stand_in
