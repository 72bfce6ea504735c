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
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from ppo_lightning.envs.gymnasium import GymnasiumEnv
from ppo_lightning.envs.state import pack, unpack
from ppo_lightning.errors import ConfigError, cut_traceback
from ppo_lightning.utils.watch import end_with_the_parent


def record_type(num_envs: int, row: np.ndarray) -> np.dtype:
    """Return the layout of the results of a worker. Gymnasium copies one array faster than five.

    Args:
        num_envs: Number of environments of the worker, K.
        row: Observation of one environment.
    """
    flags = [(name, bool, num_envs) for name in ("terminated", "truncated", "valid")]
    fields = [("reward", np.float64, num_envs), ("observation", row.dtype, (num_envs, *row.shape)), *flags]
    return np.dtype(fields, align=True)


class Members(GymnasiumEnv):
    """The environments of a worker, which write their results to a record."""

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
        self.record = np.zeros((), record_type(len(seeds), self._observation[0]))
        self._observation = self.record["observation"]
        self._results = self.record["reward"], self.record["terminated"], self.record["truncated"]
        if self.valid is not None:
            self.valid = self.record["valid"]


class Group(gymnasium.Env):
    """The environments of a worker as one environment, whose observation is their record.

    Gymnasium creates one more in the main process to see the spaces. Therefore the members are created by
    :meth:`start`. No error leaves a method: Gymnasium would print it and lose notes.

    Args:
        make: Creates the members.
        rows: Rows of the members among all environments.
        observation_space: Space of the bytes of the record of the K members.
        action_space: Space of the actions of the K members.
    """

    members: Members
    states: bytes  # of the members, set before `set_state`

    def __init__(
        self,
        make: Callable[[], Members],
        rows: slice,
        observation_space: spaces.Box,
        action_space: spaces.Box,
    ) -> None:
        self._make = make
        self._rows = rows
        self.observation_space = observation_space
        self.action_space = action_space
        self._bytes = np.zeros_like(observation_space.low)

    def start(self) -> bytes:
        """Set up the process and create the members."""
        if sys.platform == "linux":
            end_with_the_parent(signal.SIGKILL)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        if hasattr(signal, "SIGALRM"):
            # The main process sends it to a worker that hangs. After the traceback, the default action of the
            # signal ends the process, even inside C code.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            faulthandler.register(signal.SIGALRM, file=sys.__stderr__ or 2, all_threads=True, chain=True)
        gc.freeze()  # objects of the main process, whose finalizers would act on its pipes
        torch.set_num_threads(1)
        return self._report(self._create)

    def _create(self) -> None:
        self.members = self._make()
        self._bytes = self.members.record.reshape(1).view(np.uint8)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict]:
        """Reset members, see :meth:`BatchedEnv.reset_arrays`."""
        assert options is not None
        if options["mask"] is None:
            return self._bytes, self._info(self.members.reset_arrays)
        return self._bytes, self._info(self.members.reset_arrays, options["mask"][self._rows])

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Step the members. The flags of their episodes are in the record."""
        return self._bytes, 0.0, False, False, self._info(self.members.step_arrays, action)

    def reseed(self, seeds: list[int]) -> bytes:
        """Set the seeds of the next reset.

        Args:
            seeds: One seed per environment of all workers.
        """
        return self._report(self.members.reseed, seeds[self._rows])

    def get_state(self) -> bytes:
        """Return the states of the members, packed."""
        return self._report(lambda: pack(self.members.get_state()))

    def set_state(self) -> bytes:
        """Restore the members to ``states``."""
        return self._report(lambda: self.members.set_state(unpack(self.states) or []))

    def close(self) -> None:
        """Close the members, if they exist."""
        if hasattr(self, "members"):
            self.members.close()

    def _info(self, function: Callable[..., Any], *args: Any) -> dict[str, bytes]:
        """Call a function, and report only an error."""
        try:
            function(*args)
        except (Exception, SystemExit) as error:
            return {"report": self._pack(None, error)}
        return {}

    def _report(self, function: Callable[..., Any], *args: Any) -> bytes:
        try:
            return self._pack(function(*args), None)
        except (Exception, SystemExit) as error:
            return self._pack(None, error)

    def _pack(self, value: Any, error: BaseException | None) -> bytes:
        return pickle.dumps((value, None if error is None else portable(error)))


def portable(error: BaseException) -> BaseException:
    """Return an error that can be pickled, with the traceback of this process as a note.

    A ``ConfigError`` gets no note: it is one sentence.
    """
    if isinstance(error, ConfigError):
        return error
    cut_traceback(error)
    error.__dict__.pop("user_frames", None)  # a traceback cannot be pickled
    report = "".join(traceback.format_exception(error)).rstrip()  # with the notes
    error.__notes__ = [f"In the worker process:\n{report}"]
    with contextlib.suppress(Exception):
        copy = pickle.loads(pickle.dumps(error))
        if type(copy) is type(error) and str(copy) == str(error):
            return error
    stand_in = RuntimeError(f"{type(error).__name__}: {error}")
    stand_in.__notes__ = error.__notes__
    return stand_in
