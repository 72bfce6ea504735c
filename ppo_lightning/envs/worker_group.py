"""The environments of one worker process."""

import contextlib
import faulthandler
import gc
import pickle
import random
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, cast

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from ppo_lightning.envs.gymnasium import GymnasiumEnv
from ppo_lightning.errors import ConfigError
from ppo_lightning.utils.watch import end_with_the_parent

# Share of `step_timeout` after which a worker ends. The watchdog of the run ends the whole process after 0.9
# to 1, but only the worker's traceback shows where the environment hangs.
TIMEOUT_SHARE = 0.8
# What a step writes to the shared memory: `broken` is true where an environment was restarted.
RESULTS = ("observation", "reward", "terminated", "truncated", "broken")


class Members(GymnasiumEnv):
    """The environments of a worker. Restarts are announced in the main process."""

    def __init__(
        self,
        env_id: str | Callable[..., gymnasium.Env],
        seeds: list[int],
        first_env: int,
        /,
        **env_kwargs: Any,
    ) -> None:
        # A forked process inherits the global generators: without seeds, all workers would draw the same.
        random.seed(seeds[0])
        np.random.seed(seeds[0])  # noqa: NPY002
        torch.manual_seed(seeds[0])
        super().__init__(env_id, seeds, first_env, **env_kwargs)
        self.faults: list[str] = []

    def _announce_restart(self, fault: str) -> None:
        self.faults.append(fault)


class Group(gymnasium.Env):
    """The environments of a worker as one environment, whose observation holds all their results.

    Gymnasium creates one more in the main process to see the spaces. Therefore the members are created by
    :meth:`start`. No error leaves a method: Gymnasium would print it and lose notes.

    Args:
        make: Creates the members.
        rows: Rows of the members among all environments.
        observation_space: Space of the results of the K members.
        action_space: Space of the actions of the K members.
    """

    members: Members
    states: bytes  # of the members, set before `set_state`

    def __init__(
        self,
        make: Callable[[], Members],
        rows: slice,
        observation_space: spaces.Dict,
        action_space: spaces.Box,
    ) -> None:
        self._make = make
        self._rows = rows
        self.observation_space = observation_space
        self.action_space = action_space
        self._results = {
            name: np.zeros_like(cast(spaces.Box, space).low) for name, space in observation_space.items()
        }
        self._timeout = 0.0  # seconds, 0 for no limit

    def start(self) -> bytes:
        """Set up the process and create the members."""
        if sys.platform == "linux":
            end_with_the_parent(signal.SIGKILL)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        if hasattr(signal, "SIGALRM"):
            # After the traceback, the default action of the signal ends the process, even inside C code.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            faulthandler.register(signal.SIGALRM, file=sys.__stderr__ or 2, all_threads=True, chain=True)
        gc.freeze()  # objects of the main process, whose finalizers would act on its pipes
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
        return pickle.dumps((value, None if error is None else portable(error), faults))


def portable(error: BaseException) -> BaseException:
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
