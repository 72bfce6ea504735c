"""Gymnasium environments stepped in worker processes, for slow environments."""

import contextlib
import faulthandler
import functools
import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import pickle
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode

from ppo_lightning.envs.batched import BatchedEnv
from ppo_lightning.envs.gymnasium import GymnasiumEnv, warn_of_restart
from ppo_lightning.envs.state import Row
from ppo_lightning.errors import ConfigError
from ppo_lightning.utils.watch import end_with_the_parent

CLOSE_SECONDS = 5.0  # for the `close` methods of the environments, before the workers are killed
# Share of `step_timeout` after which a worker ends. The watchdog of the run ends the whole process after 0.9
# to 1, but only the worker's traceback shows where the environment hangs.
TIMEOUT_SHARE = 0.8
# Forked workers start in milliseconds, even from a script without `if __name__ == "__main__"`, as those of
# PyTorch's DataLoader do. Spawned ones import PyTorch first. TorchRL sets Python's default to `spawn`.
START_METHOD = "fork" if sys.platform == "linux" else "spawn"
# What a step writes to the shared memory: `broken` is true where an environment was restarted.
RESULTS = ("observation", "reward", "terminated", "truncated", "broken")


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
        **env_kwargs: As for ``GymnasiumEnv``.

    Raises:
        ConfigError: As for ``GymnasiumEnv``, or this process is daemonic.
        RuntimeError: A worker ended.

    Example:
        >>> env = WorkerEnv(2, "CartPole-v1", [1, 2, 3, 4])
        >>> env.reset_arrays().shape
        (4, 4)
        >>> env.close()
    """

    can_restart = True

    def __init__(
        self,
        num_workers: int,
        env_id: str | Callable[..., gymnasium.Env],
        seeds: list[int],
        first_env: int = 0,
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
        self.render_fps = sample.render_fps
        self._bounds = None  # the workers clip actions
        groups = [slice(start, start + size) for start in range(0, num_envs, size)]
        self._labels = [
            f"environments {first_env + rows.start} to {first_env + rows.stop - 1}" for rows in groups
        ]
        shapes = row.shape, (), (), (), ()
        dtypes = row.dtype, np.float64, np.uint8, np.uint8, np.uint8
        results = spaces.Dict(
            {
                name: spaces.Box(0, 1, (size, *shape), dtype)
                for name, shape, dtype in zip(RESULTS, shapes, dtypes, strict=True)
            }
        )
        actions = spaces.Box(0, 1, (size, *self.action_spec_unbatched.shape))
        self._action_shape = num_workers, *actions.shape
        makers = [
            functools.partial(
                _Group,
                functools.partial(_Members, env_id, seeds[rows], first_env + rows.start, **env_kwargs),
                rows,
                results,
                actions,
            )
            for rows in groups
        ]
        try:
            self.envs = Workers(
                makers, context=START_METHOD, autoreset_mode=AutoresetMode.DISABLED, copy=False
            )
        except (EOFError, OSError) as error:
            raise RuntimeError(
                f"A worker process ended at its start ({error or type(error).__name__}). Where Python does not"
                " fork processes, start the run under `if __name__ == '__main__':`, or set data.num_workers"
                " to 0."
            ) from error
        # Views of the shared memory, which every step and reset overwrites.
        arrays: dict[str, np.ndarray] = {
            name: array.reshape(num_envs, *array.shape[2:]) for name, array in self.envs.observations.items()
        }
        self._observation = arrays["observation"]
        self._outcome = arrays["reward"], arrays["terminated"].view(bool), arrays["truncated"].view(bool)
        self._broken = arrays["broken"].view(bool)
        self._restarts = 0
        self._waiting = False  # whether an exchange with the workers was interrupted
        try:
            self._call("start")
        except BaseException:
            self.close()
            raise

    def reset_arrays(self, mask: np.ndarray | None = None) -> np.ndarray:
        """Reset in the workers, see :meth:`BatchedEnv.reset_arrays`."""
        options: dict[str, Any] = {"mask": mask, "settings": (self.max_restarts, self.step_timeout)}
        if mask is not None:
            # Workers without a finished episode get no message.
            options["reset_mask"] = mask.reshape(len(self._labels), -1).any(axis=1)
            if not options["reset_mask"].any():
                return self._observation
        _, info = self._ask(self.envs.reset, options=options)
        if info:
            self._read(info["report"])
        return self._observation

    def _step_arrays(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Step in the workers, see :meth:`BatchedEnv._step_arrays`."""
        info = self._ask(self.envs.step, action.reshape(self._action_shape))[-1]
        self.broken = None
        if info:
            self._read(info["report"])
            self.broken = self._broken.copy()
        return self._observation, *self._outcome

    def reseed(self, seeds: list[int]) -> None:
        """Set the seeds of the next reset, see :meth:`BatchedEnv.reseed`."""
        self._restarts = 0
        self._call("reseed", seeds)

    def get_state(self) -> list[Row] | None:
        """Return states as :class:`GymnasiumEnv` does, see :meth:`BatchedEnv.get_state`."""
        states = self._call("get_state")
        return None if None in states else [row for rows in states for row in rows]

    def set_state(self, states: list[Row]) -> None:
        """Restore the environments, see :meth:`BatchedEnv.set_state`."""
        groups = np.split(np.arange(self.num_envs), len(self._labels))
        # Plain pickles: multiprocessing would send each tensor through a file of its own.
        self._ask(self.envs.set_attr, "states", [pickle.dumps([states[i] for i in rows]) for rows in groups])
        self._call("set_state", (self.max_restarts, self.step_timeout))

    def _call(self, name: str, *args: Any) -> list[Any]:
        """Call a method of the groups and return the values, one per worker."""
        return self._read(self._ask(self.envs.call, name, *args))

    def _ask(self, request: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Exchange messages with the workers.

        Raises:
            RuntimeError: A worker ended.
        """
        self._waiting = True
        try:
            answer = request(*args, **kwargs)
        except (EOFError, OSError):  # from the pipe of a dead worker
            self._raise_death()
        self._waiting = False
        return answer

    def _read(self, reports: Any) -> list[Any]:
        """Raise the first error that workers report, warn of restarts, and return the values.

        Raises:
            RuntimeError: More environments failed in one step than ``max_restarts`` allows.
        """
        read = [(None, None, []) if report is None else pickle.loads(report) for report in reports]
        faults = [fault for _, _, group in read for fault in group]
        for fault in faults:
            self._restarts += 1
            if self._restarts > self.max_restarts:
                raise RuntimeError(f"{fault}, and data.max_restarts is {self.max_restarts}.")
            warn_of_restart(fault, self._restarts, self.max_restarts)
        for _, error, _ in read:
            if error is not None:
                raise error
        if faults:
            self._call("set_restarts", self._restarts)
        return [value for value, _, _ in read]

    def _raise_death(self) -> NoReturn:
        processes = self.envs.processes
        multiprocessing.connection.wait([process.sentinel for process in processes], timeout=CLOSE_SECONDS)
        dead = [index for index, process in enumerate(processes) if process.exitcode is not None]
        if not dead:
            raise RuntimeError("A worker closed its connection: set data.num_workers to 0 to find the reason.")
        code = processes[dead[0]].exitcode
        end = f"ended with exit code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"
        if hasattr(signal, "SIGALRM") and code == -signal.SIGALRM:
            end = f"hung for {TIMEOUT_SHARE * self.step_timeout:g} s (data.step_timeout), see its traceback above"
        if hasattr(signal, "SIGKILL") and code == -signal.SIGKILL:
            end += ", as Linux does when memory runs out"
        raise RuntimeError(f"Worker {dead[0]} of {len(processes)} ({self._labels[dead[0]]}) {end}.") from None

    def _close_envs(self) -> None:
        self.envs.close(terminate=self._waiting)


class Workers(AsyncVectorEnv):
    """Gymnasium's ``AsyncVectorEnv`` with an end that never hangs.

    Args:
        *args: As for ``AsyncVectorEnv``.
        **kwargs: As for ``AsyncVectorEnv``.

    Example:
        >>> workers = Workers([functools.partial(gymnasium.make, "CartPole-v1")] * 2)
        >>> workers.close()
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # At exit, multiprocessing waits for its processes, which ignore its SIGTERM.
        multiprocessing.util.Finalize(self, _kill, [self.processes], exitpriority=100)

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


class _Members(GymnasiumEnv):
    """The environments of a worker. Restarts are announced in the main process."""

    def __init__(
        self, env_id: str | Callable[..., gymnasium.Env], seeds: list[int], first_env: int, /, **env_kwargs: Any
    ) -> None:
        # A forked process inherits the global generators: without seeds, all workers would draw the same.
        random.seed(seeds[0])
        np.random.seed(seeds[0])  # noqa: NPY002
        torch.manual_seed(seeds[0])
        super().__init__(env_id, seeds, first_env, **env_kwargs)
        self.faults: list[str] = []

    def _announce_restart(self, fault: str) -> None:
        self.faults.append(fault)


class _Group(gymnasium.Env):
    """The environments of a worker as one environment, whose observation holds all their results.

    Gymnasium creates one more in the main process to see the spaces. Therefore the members are created by
    :meth:`start`. No error leaves a method: Gymnasium would print it and lose notes.

    Args:
        make: Creates the members.
        rows: Rows of the members among all environments.
        observation_space: Space of the results of the K members.
        action_space: Space of the actions of the K members.
    """

    members: _Members
    states: bytes  # of the members, set before `set_state`

    def __init__(
        self, make: Callable[[], _Members], rows: slice, observation_space: spaces.Dict, action_space: spaces.Box
    ) -> None:
        self._make = make
        self._rows = rows
        self.observation_space = observation_space
        self.action_space = action_space
        self._results = {name: np.zeros(space.shape, space.dtype) for name, space in observation_space.items()}
        self._timeout = 0.0  # seconds, 0 for no limit

    def start(self) -> bytes:
        """Set up the process and create the members."""
        end_with_the_parent(signal.SIGKILL)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        if hasattr(signal, "SIGALRM"):
            # After the traceback, the default action of the signal ends the process, even inside C code.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            faulthandler.register(signal.SIGALRM, file=sys.__stderr__ or 2, all_threads=True, chain=True)
        torch.set_num_threads(1)
        return self._report(self._create)

    def _create(self) -> None:
        self.members = self._make()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict]:
        """Reset members, see :meth:`BatchedEnv.reset_arrays`."""
        assert options is not None
        if options["mask"] is None:  # the first reset may load a simulator, and has no time limit
            self._apply(options["settings"])
            info = self._info(self._reset)
        else:
            info = self._timed(self._reset, options["mask"][self._rows])
        return self._results, info

    def step(self, action: np.ndarray) -> tuple[dict, float, bool, bool, dict]:
        """Step the members. The flags of their episodes are among the results."""
        info = self._timed(self._step, action)
        return self._results, 0.0, False, False, info

    def _reset(self, mask: np.ndarray | None = None) -> None:
        self._results["observation"] = self.members.reset_arrays(mask)

    def _step(self, action: np.ndarray) -> None:
        outcome = self.members.step_arrays(action)
        broken = self.members.broken
        failed = np.zeros(len(action), bool) if broken is None else broken
        self._results = dict(zip(RESULTS, (*outcome, failed), strict=True))

    def reseed(self, seeds: list[int]) -> bytes:
        """Set the seeds of the next reset.

        Args:
            seeds: One seed per environment of all workers.
        """
        return self._report(self.members.reseed, seeds[self._rows])

    def get_state(self) -> bytes:
        """Return the states of the members."""
        return self._report(self.members.get_state)

    def set_state(self, settings: tuple[int, float | None]) -> bytes:
        """Restore the members to ``states``.

        Args:
            settings: As for :meth:`_apply`.
        """
        self._apply(settings)
        return self._report(lambda: self.members.set_state(pickle.loads(self.states)))

    def set_restarts(self, restarts: int) -> bytes:
        """Set the number of restarts of all environments so far."""
        self.members.restarts = restarts
        return self._report(lambda: None)

    def close(self) -> None:
        """Close the members, if they exist."""
        if hasattr(self, "members"):
            self.members.close()

    def _apply(self, settings: tuple[int, float | None]) -> None:
        self.members.max_restarts, step_timeout = settings
        self._timeout = TIMEOUT_SHARE * (step_timeout or 0.0)

    def _timed(self, function: Callable[..., Any], *args: Any) -> dict[str, bytes]:
        """Call a function with a limit on the time, after which the process ends with a traceback."""
        if not (self._timeout and hasattr(signal, "setitimer")):
            return self._info(function, *args)
        signal.setitimer(signal.ITIMER_REAL, self._timeout)
        try:
            return self._info(function, *args)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _info(self, function: Callable[..., Any], *args: Any) -> dict[str, bytes]:
        """Call a function, and report only an error or a restart."""
        try:
            function(*args)
        except (Exception, SystemExit) as error:
            return {"report": self._pack(None, error)}
        return {"report": self._pack(None, None)} if self.members.faults else {}

    def _report(self, function: Callable[..., Any], *args: Any) -> bytes:
        try:
            return self._pack(function(*args), None)
        except (Exception, SystemExit) as error:
            return self._pack(None, error)

    def _pack(self, value: Any, error: BaseException | None) -> bytes:
        faults: list[str] = []
        if hasattr(self, "members"):
            faults, self.members.faults = self.members.faults, []
        return pickle.dumps((value, None if error is None else _portable(error), faults))


def _portable(error: BaseException) -> BaseException:
    """Return an error that can be pickled, with the traceback of this process as a note.

    A ``ConfigError`` gets no note: it is one sentence.
    """
    if isinstance(error, ConfigError):
        return error
    error.add_note("In the worker process:\n" + "".join(traceback.format_exception(error)).rstrip())
    with contextlib.suppress(Exception):
        copy = pickle.loads(pickle.dumps(error))
        if type(copy) is type(error) and str(copy) == str(error):
            return error
    stand_in = RuntimeError(f"{type(error).__name__}: {error}")
    stand_in.__notes__ = error.__notes__
    return stand_in
