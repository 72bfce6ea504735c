"""Gymnasium environments stepped by workers, for slow environments."""

import contextlib
import faulthandler
import functools
import gc
import multiprocessing.connection
import multiprocessing.util
import os
import pickle
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

from ppo_lightning.envs.batched import BatchedEnv, Step
from ppo_lightning.envs.gymnasium import GymnasiumEnv, in_process
from ppo_lightning.errors import ConfigError
from ppo_lightning.private import may_have_children
from ppo_lightning.utils.seeding import derive_seed, seed_globally
from ppo_lightning.utils.watch import end_with_the_parent

# Share of `step_timeout` after which a worker that does not answer is ended. The watchdog of the run ends the
# whole process after 1 to 1.1, but only the worker's traceback shows where it hangs.
TIMEOUT_SHARE = 0.8
LOADING_SHARE = 10.0  # instead, while environments are created or first reset, which may load a simulator
CLOSE_SECONDS = 5.0  # for the `close` methods of the environments, before the workers are killed
# Forked workers start in milliseconds, even from a script without `if __name__ == "__main__"`, as those of
# PyTorch's DataLoader do. Spawned ones import PyTorch first. TorchRL sets Python's default to `spawn`.
START_METHOD = "fork" if sys.platform == "linux" else "spawn"


class Reply(NamedTuple):
    """What the method of a request returned, and infos; or its error."""

    value: Any = None
    infos: Mapping[int, dict[str, Any]] | None = None
    error: Any = None  # an exception that can be pickled


class WorkerEnv(BatchedEnv):
    """N copies of a Gymnasium environment in W workers: processes, or actors on a Ray cluster.

    Each worker steps about N / W copies as :class:`~ppo_lightning.envs.gymnasium.GymnasiumEnv` does. For each
    request, the name of a method and its arguments, it returns one :class:`Reply`. The episodes are the same
    as in one process, to the bit, for any number and place of workers.

    ``max_restarts`` is also how often each worker is made anew if it ends or does not answer in time. As
    after the failure of an environment, a step of its rows is truncated and returns the last observations.

    Args:
        num_workers: Number of workers W, at most N.
        kind: Class of the workers.
        step_timeout: Maximum duration of a step in seconds; None: no limit.
        make: As for ``GymnasiumEnv``, with ``seeds``, ``first_env`` and ``keeps_infos``.
        max_restarts: As for :class:`~ppo_lightning.envs.restarts.RestartOnFailure`, and for each worker.

    Raises:
        RuntimeError: A worker ended, or did not answer in time.

    Example:
        >>> env = WorkerEnv(2, Worker, None, lambda: gymnasium.make("CartPole-v1"), [1, 2, 3, 4])
        >>> env.reset_arrays().shape
        (4, 4)
        >>> env.close()
    """

    envs = ()  # those of the workers
    info_names = ()

    def __init__(
        self,
        num_workers: int,
        kind: "type[Worker]",
        step_timeout: float | None,
        make: Callable[[], gymnasium.Env],
        seeds: list[int],
        first_env: int = 0,
        keeps_infos: bool = False,
        max_restarts: int = 0,
    ) -> None:
        # One copy in this process shows the spaces. The copies that are stepped exist in the workers only.
        sample = in_process(make, seeds[:1], first_env, keeps_infos, max_restarts)
        sample.close()
        super().__init__(*sample.spaces, seeds)
        self.samples = sample.envs
        self.step_timeout = step_timeout
        self.format.bounds = None  # the workers clip actions
        self._seeds = seeds
        self._max_restarts = max_restarts
        bounds = [number * self.num_envs // num_workers for number in range(num_workers + 1)]
        self._keeps_infos = keeps_infos
        self._attributes: dict[str, Any] = {}  # from `set_attr`
        self._waiting: list[Worker] = []  # for replies, also after an exchange that was interrupted
        self.workers: list[Worker] = []
        self._lost: set[Worker] = set()  # made anew since the last step, so that their episodes must end
        try:
            for number in range(num_workers):
                rows = slice(*bounds[number : number + 2])
                numbers = range(first_env, first_env + self.num_envs)[rows]
                name = f"Worker {number} of {num_workers} (environments {', '.join(map(str, numbers))})"
                settings = numbers[0], keeps_infos, max_restarts
                worker = kind(name, rows, functools.partial(make_envs, self._attributes, make, *settings))
                worker.start(seeds[rows])
                self.workers.append(worker)
            # The first request creates the environments, whatever its method.
            self._ask(dict.fromkeys(self.workers, ("__repr__",)), loading=True)
        except BaseException:
            self.close()
            raise

    def reset_arrays(self, mask: np.ndarray | None = None) -> np.ndarray:
        """Reset in the workers."""
        chosen = np.ones(self.num_envs, bool) if mask is None else mask
        # Workers without a finished episode get no message.
        requests = {w: ("reset_arrays", chosen[w.rows]) for w in self.workers if chosen[w.rows].any()}
        loading = mask is None
        while requests:
            replies = self._ask(requests, loading)
            for worker, reply in replies.items():
                self._observation[worker.rows] = reply.value
            # A worker that is lost before all of its episodes begin has none to truncate: it is asked again.
            requests = {w: x for w, x in requests.items() if w not in replies and chosen[w.rows].all()}
            self._lost -= requests.keys()
            loading = True
        return self._observation

    def _step_arrays(self, action: np.ndarray) -> Step:
        if self._keeps_infos:
            self.infos.clear()
        requests = {w: ("step_arrays", action[w.rows]) for w in self.workers if w not in self._lost}
        replies = self._ask(requests)
        arrays = self._observation, *self._results
        for worker in self.workers:
            rows = worker.rows
            # The episodes of a lost worker are truncated.
            lost = self._observation[rows], 0.0, False, True, True
            reply = replies.get(worker) or Reply(lost)
            for array, part in zip(arrays, reply.value, strict=True):
                array[rows] = part
            if reply.infos:
                self.infos |= {rows.start + row: info for row, info in reply.infos.items()}
        self._lost.clear()
        return Step(self._observation, *self._results)

    def reseed(self, seeds: list[int]) -> None:
        """Set the seeds of the next reset."""
        self._seeds = list(seeds)
        self._ask({worker: ("reseed", seeds[worker.rows]) for worker in self.workers})

    def set_attr(self, name: str, value: Any) -> None:
        """Set an attribute in the workers."""
        self._attributes[name] = value
        self._ask(dict.fromkeys(self.workers, ("set_attr", name, value)))

    def get_state(self) -> list[dict[str, Any]] | None:
        """Return states as :class:`GymnasiumEnv` does."""
        replies = self._ask(dict.fromkeys(self.workers, ("get_state",)))
        states = [row for reply in replies.values() for row in reply.value or ()]
        return states if len(states) == self.num_envs else None

    def set_state(self, states: list[dict[str, Any]]) -> None:
        """Restore the environments."""
        self._ask({w: ("set_state", states[w.rows]) for w in self.workers}, loading=True)

    def _ask(self, requests: Mapping["Worker", tuple], loading: bool = False) -> dict["Worker", Reply]:
        """Send requests, and return the replies of workers that are not lost, or raise the first error."""
        self._waiting.extend(requests)
        share = LOADING_SHARE if loading else TIMEOUT_SHARE
        seconds = share * (self.step_timeout or 1e9)
        for worker, request in requests.items():
            worker.send(request, seconds)
        replies = {}
        for worker in requests:
            try:
                replies[worker] = worker.receive()
            except (EOFError, OSError) as error:
                late = f"{share:g} * data.step_timeout = {seconds:g} s" * isinstance(error, BlockingIOError)
                self._make_anew(worker, worker.end(late, min(CLOSE_SECONDS, seconds / 10)))
        self._waiting.clear()
        for reply in replies.values():
            if reply.error is not None:
                raise reply.error
        return replies

    def _make_anew(self, worker: "Worker", end: str) -> None:
        """Start a worker again, which ended in a way that a verb says, or raise an error that names it."""
        worker.kill()
        if worker.losses >= self._max_restarts:
            raise RuntimeError(
                f"{worker.name} {end}: resume from the last checkpoint (--auto_resume), or raise"
                " data.env_kwargs.max_restarts."
            ) from None
        worker.losses += 1
        warnings.warn(
            f"{worker.name} {end}: it is made anew (restart {worker.losses} of {self._max_restarts}), and its"
            " episodes are truncated.",
            stacklevel=2,
        )
        worker.start([derive_seed(seed, "worker", worker.losses) for seed in self._seeds[worker.rows]])
        self._lost.add(worker)

    def close(self) -> None:
        """Close the environments, unless an exchange was interrupted, and end the workers."""
        if self.is_closed:
            return
        self.is_closed = True
        deadline = time.monotonic() + (0.0 if self._waiting else CLOSE_SECONDS)
        for worker in () if self._waiting else self.workers:
            worker.send(("close",), CLOSE_SECONDS)
        for worker in self.workers:
            worker.kill(max(0.0, deadline - time.monotonic()))


class Worker:
    """A worker process, and the rows of its environments among all. Another kind has the same methods."""

    losses = 0  # how often it was made anew

    def __init__(self, name: str, rows: slice, make: Callable[[list[int]], GymnasiumEnv]) -> None:
        self.name = name
        self.rows = rows
        self.make = make

    def start(self, seeds: list[int]) -> None:
        """Start the process, which makes the environments from their seeds."""
        made: Any = functools.partial(self.make, seeds)
        make = CloudpickleWrapper(made)
        context: Any = multiprocessing.get_context(START_METHOD)
        self._pipe, theirs = context.Pipe()
        self._seconds = 0.0
        # Not a daemon: an environment may start processes. The worker ends with its parent all the same.
        self.process = context.Process(target=serve, args=(theirs, make), daemon=False)
        with may_have_children():
            self.process.start()
        theirs.close()  # so that the death of the worker closes the pipe
        # At exit, multiprocessing waits for its processes, which ignore its SIGTERM.
        multiprocessing.util.Finalize(self, self.process.kill, exitpriority=100)

    def send(self, request: tuple, seconds: float) -> None:
        """Send a request, whose reply may take a number of seconds."""
        if seconds != self._seconds:
            # The kernel begins again when this process is stopped and continued (`man 7 signal`).
            limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
            with socket.socket(fileno=os.dup(self._pipe.fileno())) as end:
                end.setblocking(True)  # whatever `socket.setdefaulttimeout` says
                end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            self._seconds = seconds
        try:
            send(self._pipe, request)
        except OSError:
            return  # `receive` raises, too

    def receive(self) -> Reply:
        """Return the reply, or raise ``BlockingIOError`` if it is late, another error if the worker ended."""
        return self._pipe.recv()

    def end(self, late: str, seconds: float) -> str:
        """Return how the worker ended, as a verb. One that is ``late`` prints where it hangs before."""
        if late:
            os.kill(self.process.pid, signal.SIGALRM)
        self.process.join(seconds)
        code = self.process.exitcode
        if late and code == -signal.SIGALRM:
            return f"hung for {late} (the traceback above shows where)"
        if late:
            return f"did not answer for {late}, nor react to SIGALRM, as a process that is stopped (SIGSTOP)"
        if code is None or code >= 0:
            return "closed its pipe" if code is None else f"ended with exit code {code}"
        name = signal.Signals(-code).name
        return f"was ended by {name}" + ", as Linux does when memory runs out" * (name == "SIGKILL")

    def kill(self, seconds: float = 0.0) -> None:
        """End the worker, which may need some seconds for the request ``close``."""
        self.process.join(seconds)
        self.process.kill()
        self.process.join()
        self._pipe.close()


def send(pipe: multiprocessing.connection.Connection, message: Any) -> None:
    """Send a request or a reply, faster than ``pipe.send``."""
    pipe.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def make_envs(
    attributes: Mapping[str, Any],
    make: Callable[[], gymnasium.Env],
    first_env: int,
    keeps_infos: bool,
    max_restarts: int,
    seeds: list[int],
) -> GymnasiumEnv:
    """Make the environments of a worker."""
    # A forked process inherits the global generators: without seeds, all workers would draw the same.
    seed_globally(seeds[0])
    envs = in_process(make, seeds, first_env, keeps_infos, max_restarts)
    for name, value in attributes.items():
        envs.set_attr(name, value)
    return envs


class Host:
    """What answers requests in a worker. The first request creates the environments."""

    def __init__(self, make: Callable[[], GymnasiumEnv]) -> None:
        torch.set_num_threads(1)
        self._make = make
        self._envs: GymnasiumEnv | None = None

    def answer(self, request: tuple) -> Reply:
        """Call a method of the environments."""
        method, *arguments = request
        try:
            if self._envs is None:
                self._envs = self._make()
            value = getattr(self._envs, method)(*arguments)
        except (Exception, SystemExit) as error:
            return Reply(error=portable(error))
        reply = Reply(value, dict(self._envs.infos))
        self._envs.infos.clear()
        return reply


def serve(pipe: multiprocessing.connection.Connection, make: Callable[[], GymnasiumEnv]) -> None:
    """Reply to requests in a worker process, until one says ``close``."""
    end_with_the_parent(signal.SIGKILL)
    # Schedulers send these to all processes of a run, which stops its own workers.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # The main process sends SIGALRM to a worker that hangs. After the traceback, the default action of the
    # signal ends the process, even inside C code.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    faulthandler.register(signal.SIGALRM, file=sys.__stderr__ or 2, all_threads=True, chain=True)
    gc.freeze()  # objects of the main process, whose finalizers would act on its pipes
    host = Host(make)
    for request in iter(pipe.recv, ("close",)):
        send(pipe, host.answer(request))
    host.answer(("close",))


def portable(error: BaseException) -> BaseException:
    """Return an error that can be pickled, with the traceback of this process as a note."""
    if isinstance(error, ConfigError):  # one sentence
        return error
    report = "".join(traceback.format_exception(error)).rstrip()  # with the notes
    copy = None
    with contextlib.suppress(Exception):
        copy = str(pickle.loads(pickle.dumps(error)))
    if copy != str(error):
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.__notes__ = [f"In the worker process:\n{report}"]
    return error
