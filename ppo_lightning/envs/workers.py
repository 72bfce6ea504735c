"""Gymnasium environments stepped in worker processes, for slow environments."""

import contextlib
import faulthandler
import functools
import gc
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
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import gymnasium
import numpy as np
import torch
from gymnasium.vector.utils import CloudpickleWrapper

from ppo_lightning.envs.batched import BatchedEnv
from ppo_lightning.envs.gymnasium import GymnasiumEnv
from ppo_lightning.envs.state import Row
from ppo_lightning.errors import ConfigError
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
    """N copies of a Gymnasium environment in W worker processes.

    Each worker steps N / W copies as :class:`~ppo_lightning.envs.gymnasium.GymnasiumEnv` does. For each
    request, the name of a method and its arguments, it sends one :class:`Reply`. The episodes are the same as
    in one process, to the bit, for any number of workers.

    On Linux, the workers end with the process that made them, even if that process is killed. They ignore
    SIGINT and SIGTERM, which schedulers send to all processes of a run: a run stops its own workers.

    Args:
        num_workers: Number of processes W, a divisor of N.
        env_id: As for ``GymnasiumEnv``.
        seeds: One seed per environment, N in total.
        first_env: Global index of the first environment, for messages.
        step_timeout: Maximum duration of a step in seconds; None: no limit.
        **env_kwargs: As for ``GymnasiumEnv``.

    Raises:
        ConfigError: As for ``GymnasiumEnv``, or this process is daemonic.
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
        /,
        **env_kwargs: Any,
    ) -> None:
        if multiprocessing.current_process().daemon:
            raise ConfigError("data.num_workers must be 0 in a daemonic process, which cannot start others.")
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
        if sample.valid is not None:
            self.valid = np.ones(self.num_envs, bool)
        self._started = False
        self._waiting = False  # whether an exchange with the workers was interrupted
        self.workers: list[Worker] = []
        for start in range(0, self.num_envs, size):
            rows = slice(start, start + size)
            make = functools.partial(Members, env_id, seeds[rows], first_env + start, **env_kwargs)
            self.workers.append(Worker(rows, make))
        # At exit, multiprocessing waits for its processes, which ignore its SIGTERM.
        multiprocessing.util.Finalize(self, _kill, [self.workers], exitpriority=100)
        try:
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
        requests = {worker: ("step_arrays", action[worker.rows]) for worker in self.workers}
        for worker, reply in self._ask(requests).items():
            arrays = self._observation, *self._results
            for array, part in zip(arrays, reply.value, strict=True):
                array[worker.rows] = part
            if self.valid is not None:
                self.valid[worker.rows] = reply.valid
            if reply.infos:
                self.infos |= {worker.rows.start + row: info for row, info in reply.infos.items()}
        return self._observation, *self._results

    def reseed(self, seeds: list[int]) -> None:
        """Set the seeds of the next reset."""
        self._ask({worker: ("reseed", seeds[worker.rows]) for worker in self.workers})

    def set_attr(self, name: str, value: Any) -> None:
        """Set an attribute in the workers."""
        self._ask(dict.fromkeys(self.workers, ("set_attr", name, value)))

    def get_state(self) -> list[Row] | None:
        """Return states as :class:`GymnasiumEnv` does."""
        replies = self._ask(dict.fromkeys(self.workers, ("get_state",)))
        groups = [reply.value for reply in replies.values()]
        return None if None in groups else [row for rows in groups for row in rows]

    def set_state(self, states: list[Row]) -> None:
        """Restore the environments."""
        requests = {worker: ("set_state", states[worker.rows]) for worker in self.workers}
        self._ask(requests, loading=True)

    def _ask(self, requests: Mapping["Worker", tuple], loading: bool = False) -> dict["Worker", Reply]:
        """Send requests, and return the replies, or raise the first error among them.

        While environments are ``loading``, workers have more time for an answer.
        """
        self._waiting = True
        share = LOADING_SHARE if loading else TIMEOUT_SHARE
        try:
            for worker, request in requests.items():
                worker.transport.limit(share * (self.step_timeout or 0.0))
                worker.transport.send(request)
            replies = {worker: worker.transport.receive() for worker in requests}
        except (EOFError, OSError):  # the worker is dead or does not answer
            self._raise_death(share)
        self._waiting = False
        for reply in replies.values():
            if reply.error is not None:
                raise reply.error
        return replies

    def _raise_death(self, share: float) -> NoReturn:
        """Raise an error that names a worker that ended, or had a share of ``step_timeout`` in vain."""
        timeout = self.step_timeout or 0.0
        limit = f"{share:g} * data.step_timeout = {share * timeout:g} s"
        late = [worker for worker in self.workers if worker.transport.late]
        for worker in late:
            os.kill(worker.process.pid, signal.SIGALRM)
        seconds = min(CLOSE_SECONDS, ALARM_SHARE * timeout) if late else CLOSE_SECONDS
        ended = multiprocessing.connection.wait([worker.process.sentinel for worker in self.workers], seconds)
        dead = [worker for worker in self.workers if worker.process.sentinel in ended]
        if not (dead or late):
            raise RuntimeError("A worker closed its pipe: set data.num_workers to 0 to see the reason.")
        worker = (dead or late)[0]
        if dead:
            worker.process.join()  # the exit code follows the sentinel
        code = worker.process.exitcode
        if code is None:
            end = f"did not answer for {limit}, nor react to SIGALRM, as a process that is stopped (SIGSTOP)"
        elif code >= 0:
            end = f"ended with exit code {code}"
        elif late and -code == signal.SIGALRM:
            end = f"hung for {limit} (the traceback above shows where)"
        else:
            end = f"was ended by {signal.Signals(-code).name}"
            if end.endswith("SIGKILL"):
                end += ", as Linux does when memory runs out"
        rows = range(self.num_envs)[worker.rows]
        numbers = ", ".join(str(self._first_env + row) for row in rows)
        remedy = "resume from the last checkpoint with --auto_resume or ckpt_path"
        if not self._started:
            remedy = "start the run under `if __name__ == '__main__':`, or set data.num_workers to 0"
        raise RuntimeError(
            f"Worker {self.workers.index(worker)} of {len(self.workers)} (environments {numbers}) {end}:"
            f" {remedy}."
        ) from None

    def _close_envs(self) -> None:
        """Close the environments, unless an exchange was interrupted, and end the workers."""
        if not self._waiting:
            for worker in self.workers:
                with contextlib.suppress(OSError):
                    worker.transport.send(("close",))
            deadline = time.monotonic() + CLOSE_SECONDS
            for worker in self.workers:
                worker.process.join(max(0, deadline - time.monotonic()))
        _kill(self.workers)
        for worker in self.workers:
            worker.transport.close()


class Transport(multiprocessing.connection.Connection):
    """One end of the pipe between the main process and a worker. Another transport has the same methods.

    ``send`` and ``receive`` raise ``BlockingIOError`` after a time limit. The kernel counts the time, and
    begins again when this process is stopped and continued (``man 7 signal``): that time does not count.
    """

    late = False  # whether the other end exceeded the limit
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
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)  # faster than multiprocessing's own
        try:
            self.send_bytes(data)
        except BlockingIOError:
            self.late = True
            raise

    def receive(self) -> Any:
        """Receive a request or a reply."""
        try:
            return pickle.loads(self.recv_bytes())
        except BlockingIOError:
            self.late = True
            raise


class Worker:
    """A worker process, whose environments ``make`` creates, and their rows among all."""

    def __init__(self, rows: slice, make: Callable[[], "Members"]) -> None:
        self.rows = rows
        context: Any = multiprocessing.get_context(START_METHOD)
        ours, theirs = context.Pipe()
        self.transport = Transport(os.dup(ours.fileno()))
        ours.close()
        self.process = context.Process(target=serve, args=(theirs, CloudpickleWrapper(make)), daemon=True)
        self.process.start()
        theirs.close()  # so that the death of the worker closes the pipe


def _kill(workers: list[Worker]) -> None:
    for worker in workers:
        worker.process.kill()
    for worker in workers:
        worker.process.join()


class Members(GymnasiumEnv):
    """The environments of a worker."""

    def __init__(self, env_id: Any, seeds: list[int], first_env: int, /, **env_kwargs: Any) -> None:
        # A forked process inherits the global generators: without seeds, all workers would draw the same.
        random.seed(seeds[0])
        np.random.seed(seeds[0])  # noqa: NPY002
        torch.manual_seed(seeds[0])
        super().__init__(env_id, seeds, first_env, **env_kwargs)


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
    torch.set_num_threads(1)
    members: Any = None
    while (request := transport.receive())[0] != "close":
        try:
            if members is None:
                members = make()
            method, *arguments = request
            reply = Reply(getattr(members, method)(*arguments), members.valid, members.infos or None)
        except (Exception, SystemExit) as error:
            reply = Reply(error=portable(error))
        transport.send(reply)
        if reply.infos:
            members.infos.clear()
    if members is not None:
        members.close()


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
