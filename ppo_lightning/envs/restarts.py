"""Restart of environments that fail."""

import contextlib
import copy
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

from ppo_lightning.envs.contract import check_parts
from ppo_lightning.errors import first_line
from ppo_lightning.spaces.rows import to_row
from ppo_lightning.utils.seeding import derive_seed


class RestartOnFailure(gymnasium.Wrapper):
    """Wrapper that makes an environment anew if a step fails, which truncates the episode.

    A step fails if it raises an exception, or returns a non-finite observation or reward. It then returns the
    last observation, the reward 0 and ``truncated``. Errors in ``reset`` are raised.

    Args:
        make: Makes a new environment at each call.
        max_restarts: Number of failures after which the next one is raised or returned.
        name: Name of the environment in warnings.

    Example:
        >>> env = RestartOnFailure(lambda: gymnasium.make("CartPole-v1"), max_restarts=3)
        >>> env.reset(seed=1)[0].shape
        (4,)
    """

    def __init__(
        self, make: Callable[[], gymnasium.Env], max_restarts: int, name: str = "The environment"
    ) -> None:
        super().__init__(make())
        self.restarts = 0
        self.first_seed = 0
        self._make = make
        self._max_restarts = max_restarts
        self._name = name
        self._is_new = False  # whether the next reset is the first one of an environment that was made anew
        self._attributes: dict[str, Any] = {}
        self.last_observation: Any = None

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        """Reset the environment. Without a seed, a new environment gets one of its own."""
        if seed is not None:
            self.first_seed = seed
        elif self._is_new:
            # The count of this environment, so that its episodes do not depend on the failures of others.
            seed = derive_seed(self.first_seed, "train", self.restarts)
        self._is_new = False
        observation, info = check_parts(self.env.reset(seed=seed, options=options), "reset", 2)
        self.last_observation = copy.deepcopy(observation)
        return observation, info

    def step(self, action: Any) -> Any:
        """Step the environment, or make it anew."""
        if self.restarts >= self._max_restarts:
            return self.env.step(action)
        try:
            step: Any = self.env.step(action)
            row = to_row(self.env.observation_space, step[0])
            if np.isfinite(row).all() and np.isfinite(step[1]):
                self.last_observation = copy.deepcopy(step[0])
                return step
            fault = "returned a non-finite observation or reward"
        except (Exception, SystemExit) as error:
            fault = f"raised {type(error).__name__} ({first_line(error)})"
        self._restart(fault)
        return self.last_observation, 0.0, False, True, {}

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        """Set an attribute of the environment, also of those that are made later."""
        is_set = self.env.set_wrapper_attr(name, value, force=force)
        if is_set:
            self._attributes[name] = value
        return is_set

    def _restart(self, fault: str) -> None:
        self.restarts += 1
        warnings.warn(
            f"{self._name} {fault}: it is made anew (restart {self.restarts} of {self._max_restarts}), and"
            " its episode is truncated.",
            stacklevel=4,
        )
        with contextlib.suppress(Exception):
            self.env.close()
        self.env = self._make()
        for name, value in self._attributes.items():
            self.env.set_wrapper_attr(name, copy.deepcopy(value))
        self._is_new = True
