"""Gymnasium environments stepped in worker processes, for slow environments."""

import contextlib
import functools
import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import pickle
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn, cast

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode

from ppo_lightning.envs.batched import BatchedEnv
from ppo_lightning.envs.gymnasium import GymnasiumEnv
from ppo_lightning.envs.state import Row, pack, unpack
from ppo_lightning.envs.worker_group import Group, Members, record_type
from ppo_lightning.errors import ConfigError

# Shares of `step_timeout`. A worker that does not answer for the first share is ended. The watchdog of the
# run ends the whole process after 1 to 1.1, but only the worker's traceback shows where it hangs.
TIMEOUT_SHARE = 0.8
LOADING_SHARE = 10.0  # instead, while environments are created or first reset, which may load a simulator
ALARM_SHARE = 0.1  # for the traceback
CLOSE_SECONDS = 5.0  # for the `close` methods of the environments, before the workers are killed
# Forked workers start in milliseconds, even from a script without `if __name__ == "__main__"`, as those of
# PyTorch's DataLoader do. Spawned ones import PyTorch first. TorchRL sets Python's default to `spawn`.
START_METHOD = "fork" if sys.platform == "linux" else "spawn"


class WorkerEnv(BatchedEnv):
    """N copies of a Gymnasium environment in W worker processes.

    Gymnasium's ``AsyncVectorEnv`` runs the processes. Each worker steps N / W copies as
    :class:`~ppo_lightning.envs.gymnasium.GymnasiumEnv` does, and writes the results to shared memory.
    The episodes are the same as in one process, to the bit, for any number of workers.

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
        num_envs = len(seeds)
        size, rest = divmod(num_envs, num_workers)
        assert rest == 0
        # One copy in this process shows the spaces. The copies that are stepped exist in the workers only.
        sample = GymnasiumEnv(env_id, seeds[:1], first_env, **env_kwargs)
        row = sample._observation[0]
        sample.close()
        super().__init__(*sample.spaces, seeds)
        self.step_timeout = step_timeout
        self.render_fps = sample.render_fps
        self._bounds = None  # the workers clip actions
        groups = [slice(start, start + size) for start in range(0, num_envs, size)]
        self._members = [range(first_env + rows.start, first_env + rows.stop) for rows in groups]
        record = record_type(size, row)
        results = spaces.Box(0, 255, (record.itemsize,), np.uint8)
        actions = spaces.Box(0, 1, (size, *self.action_spec_unbatched.shape))
        self._action_shape = num_workers, *actions.shape
        makers = [
            functools.partial(
                Group,
                functools.partial(Members, env_id, seeds[rows], first_env + rows.start, **env_kwargs),
                rows,
                results,
                actions,
            )
            for rows in groups
        ]
        try:
            self.envs = Workers(
                makers,
                context=START_METHOD,
                autoreset_mode=AutoresetMode.DISABLED,
                copy=False,
                limit=LOADING_SHARE * (step_timeout or 0.0),
            )
        except (EOFError, OSError) as error:
            raise RuntimeError(
                f"A worker process ended or did not answer at its start ({error or type(error).__name__}):"
                " start the run under `if __name__ == '__main__':`, or set data.num_workers to 0."
            ) from error
        # A view of the shared memory, which every step and reset overwrites: one record per worker, [W].
        self._records = cast(np.ndarray, self.envs.observations).view(record)[:, 0]
        self._row_shape = row.shape
        if sample.valid is not None:
            self.valid = np.ones(num_envs, bool)
        self._waiting = False  # whether an exchange with the workers was interrupted
        try:
            self._read(self._ask(self.envs.call, "start", loading=True))
        except BaseException:
            self.close()
            raise

    def reset_arrays(self, mask: np.ndarray | None = None) -> np.ndarray:
        """Reset in the workers, see :meth:`BatchedEnv.reset_arrays`."""
        options: dict[str, Any] = {"mask": mask}
        if mask is not None:
            # Workers without a finished episode get no message.
            options["reset_mask"] = mask.reshape(len(self._members), -1).any(axis=1)
            if not options["reset_mask"].any():
                return self._observation()
        # The first reset may load a simulator.
        _, info = self._ask(self.envs.reset, options=options, loading=mask is None)
        if info:
            self._read(info["report"])
        return self._observation()

    def _observation(self) -> np.ndarray:
        return self._records["observation"].reshape(self.num_envs, *self._row_shape)

    def _step_arrays(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Step in the workers, see :meth:`BatchedEnv._step_arrays`."""
        info = self._ask(self.envs.step, action.reshape(self._action_shape))[-1]
        if info:
            self._read(info["report"])
        reward, terminated, truncated, valid = (
            self._records[name].reshape(self.num_envs)
            for name in ("reward", "terminated", "truncated", "valid")
        )
        if self.valid is not None:
            self.valid = valid
        return self._observation(), reward, terminated, truncated

    def reseed(self, seeds: list[int]) -> None:
        """Set the seeds of the next reset, see :meth:`BatchedEnv.reseed`."""
        self._call("reseed", seeds)

    def get_state(self) -> list[Row] | None:
        """Return states as :class:`GymnasiumEnv` does, see :meth:`BatchedEnv.get_state`."""
        groups = [unpack(data) for data in self._call("get_state")]
        return None if None in groups else [row for rows in groups if rows for row in rows]

    def set_state(self, states: list[Row]) -> None:
        """Restore the environments, see :meth:`BatchedEnv.set_state`."""
        groups = np.split(np.arange(self.num_envs), len(self._members))
        self._ask(self.envs.set_attr, "states", [pack([states[i] for i in rows]) for rows in groups])
        self._read(self._ask(self.envs.call, "set_state", loading=True))

    def _call(self, name: str, *args: Any) -> list[Any]:
        """Call a method of the groups and return the values, one per worker."""
        return self._read(self._ask(self.envs.call, name, *args))

    def _ask(self, request: Callable[..., Any], *args: Any, loading: bool = False, **kwargs: Any) -> Any:
        """Exchange messages with the workers.

        Args:
            request: Method of :class:`Workers`.
            *args: Passed to the method.
            loading: Whether the workers may load environments, which takes longer than a step.
            **kwargs: Passed to the method.

        Raises:
            RuntimeError: A worker ended, or did not answer in time.
        """
        self._waiting = True
        share = LOADING_SHARE if loading else TIMEOUT_SHARE
        self.envs.limit(share * (self.step_timeout or 0.0))
        try:
            answer = request(*args, **kwargs)
        except (EOFError, OSError):  # from the pipe of a dead worker, or of one that does not answer
            self._raise_death(share)
        self._waiting = False
        return answer

    def _read(self, reports: Any) -> list[Any]:
        """Raise the first error that workers report, or return the values."""
        read = [(None, None) if report is None else pickle.loads(report) for report in reports]
        for _, error in read:
            if error is not None:
                error.user_frames = None  # those of the worker are in a note
                raise error
        return [value for value, _ in read]

    def _raise_death(self, share: float) -> NoReturn:
        """Raise an error that names a worker that ended.

        Args:
            share: Share of ``step_timeout`` that the workers had.
        """
        processes = self.envs.processes
        sentinels = [process.sentinel for process in processes]
        timeout = self.step_timeout or 0.0
        limit = f"{share:g} * data.step_timeout = {share * timeout:g} s"
        late = self.envs.late()
        for index in late:
            os.kill(processes[index].pid, signal.SIGALRM)
        seconds = min(CLOSE_SECONDS, ALARM_SHARE * timeout) if late else CLOSE_SECONDS
        ended = multiprocessing.connection.wait(sentinels, seconds)
        dead = [index for index, sentinel in enumerate(sentinels) if sentinel in ended]
        if not (dead or late):
            raise RuntimeError("A worker closed its pipe: set data.num_workers to 0 to see the reason.")
        worker = (dead or late)[0]
        if dead:
            processes[worker].join()  # the exit code follows the sentinel
        code = processes[worker].exitcode
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
        numbers = ", ".join(map(str, self._members[worker]))
        raise RuntimeError(
            f"Worker {worker} of {len(processes)} (environments {numbers}) {end}: resume from the last"
            " checkpoint with --auto_resume or ckpt_path."
        ) from None

    def _close_envs(self) -> None:
        self.envs.close(terminate=self._waiting)


class WorkerPipe(multiprocessing.connection.Connection):
    """The main process's end of the pipe to a worker.

    ``send`` and ``recv`` raise ``BlockingIOError`` after a time limit. The kernel counts the time, and begins
    again when this process is stopped and continued (``man 7 signal``): that time does not count.
    """

    late = False  # whether the worker exceeded the limit

    def limit(self, seconds: float) -> None:
        """Set the time limit; 0: none."""
        interval = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        with socket.socket(fileno=os.dup(self.fileno())) as end:
            end.setblocking(True)  # whatever `socket.setdefaulttimeout` says
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                end.setsockopt(socket.SOL_SOCKET, option, interval)

    def send(self, obj: Any) -> None:
        """Send an object."""
        try:
            super().send(obj)
        except BlockingIOError:
            self.late = True
            raise

    def recv(self) -> Any:
        """Receive an object."""
        try:
            return super().recv()
        except BlockingIOError:
            self.late = True
            raise


class Workers(AsyncVectorEnv):
    """Gymnasium's ``AsyncVectorEnv`` with a time limit for every answer and an end that never hangs.

    Args:
        *args: As for ``AsyncVectorEnv``.
        limit: Longest wait for the first answer of a worker in seconds, see :meth:`limit`.
        **kwargs: As for ``AsyncVectorEnv``.

    Example:
        >>> workers = Workers([functools.partial(gymnasium.make, "CartPole-v1")] * 2, limit=60.0)
        >>> workers.close()
    """

    parent_pipes: list[Any]  # of WorkerPipe, except on Windows

    def __init__(self, *args: Any, limit: float = 0.0, **kwargs: Any) -> None:
        self._limit = 0.0
        self._first_limit = limit
        super().__init__(*args, **kwargs)

    def _check_spaces(self) -> None:
        """Exchange the first messages, at the end of the constructor."""
        if sys.platform != "win32":
            for index, pipe in enumerate(self.parent_pipes):
                self.parent_pipes[index] = WorkerPipe(os.dup(pipe.fileno()))
                pipe.close()
        # At exit, multiprocessing waits for its processes, which ignore its SIGTERM.
        multiprocessing.util.Finalize(self, _kill, [self.processes], exitpriority=100)
        self.limit(self._first_limit)
        super()._check_spaces()

    def limit(self, seconds: float) -> None:
        """Set the longest wait for a worker.

        Args:
            seconds: The time limit. 0: none.
        """
        if seconds != self._limit and sys.platform != "win32":
            self._limit = seconds
            for pipe in self.parent_pipes:
                pipe.limit(seconds)

    def late(self) -> list[int]:
        """Return the workers that exceeded the limit."""
        return [index for index, pipe in enumerate(self.parent_pipes) if getattr(pipe, "late", False)]

    def close_extras(self, timeout: float | None = CLOSE_SECONDS, terminate: bool = False) -> None:
        """Close the environments and end the workers.

        Args:
            timeout: Seconds for the ``close`` methods of the environments.
            terminate: End the workers without these methods.
        """
        if not terminate:
            for pipe in self.parent_pipes:
                with contextlib.suppress(OSError):
                    pipe.send(("close", None))
            deadline = time.monotonic() + (timeout or 0)
            for process in self.processes:
                process.join(max(0, deadline - time.monotonic()))
        _kill(self.processes)
        for pipe in self.parent_pipes:
            if pipe is not None:
                pipe.close()


def _kill(processes: list[Any]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
