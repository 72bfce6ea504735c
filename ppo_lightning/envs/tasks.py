"""Small tasks for what no package on PyPI shows so shortly: hidden velocities, and actions that are not always allowed.

Import this module, or write ``ppo_lightning.envs.tasks:CartPoleMasked-v0``, and Gymnasium knows them.
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class MaskedVelocity(gymnasium.ObservationWrapper):
    """CartPole without its two velocities: what a single observation tells is not enough to balance the pole.

    Args:
        env: CartPole.
    """

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        space: Any = env.observation_space
        self.observation_space = spaces.Box(space.low[[0, 2]], space.high[[0, 2]])

    def observation(self, observation: np.ndarray) -> np.ndarray:
        """Returns position and angle, [2]."""
        return observation[[0, 2]]


def cart_pole(**kwargs: Any) -> gymnasium.Env:
    """Makes CartPole-v1 without velocities."""
    return MaskedVelocity(gymnasium.make("CartPole-v1", **kwargs).unwrapped)


class Locks(gymnasium.Env):
    """A row of locks, each to be opened by the one key, of many, that fits, by two hands at once.

    The observation is the number of open locks, as a row of 0 and 1. An action, MultiDiscrete, is a key for the left hand and
    one for the right; the lock opens, with reward 1, if both are the keys that belong to it. An episode has as many steps as
    there are locks. ``action_masks()`` forbids the keys that fit none of the locks at all.

    Args:
        num_locks: Length of the row.
        num_keys: For each hand.
        masked: Whether there is a mask.
    """

    def __init__(self, num_locks: int = 8, num_keys: int = 32, masked: bool = True) -> None:
        self.num_locks, self.num_keys = num_locks, num_keys
        self.observation_space, self.action_space = (
            spaces.MultiBinary(num_locks),
            spaces.MultiDiscrete([num_keys, num_keys]),
        )
        keys = np.random.default_rng(0)
        useful = [keys.choice(num_keys, size=4, replace=False) for _ in range(2)]
        self._fitting = np.stack(
            [keys.choice(its, size=num_locks) for its in useful], axis=1
        )  # [num_locks, 2]
        if masked:
            self._mask = np.zeros((2, num_keys), np.int8)
            for row, its in zip(self._mask, useful, strict=True):
                row[its] = 1
            self.action_masks = self._mask.ravel

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        """See ``gymnasium.Env``."""
        super().reset(seed=seed)
        self._open = self._steps = 0
        return self._observation(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        """See ``gymnasium.Env``."""
        right = bool((action == self._fitting[self._open]).all())
        self._open, self._steps = self._open + right, self._steps + 1
        return self._observation(), float(right), self._steps == self.num_locks, False, {}

    def _observation(self) -> np.ndarray:
        return (np.arange(self.num_locks) < self._open).astype(np.int8)


gymnasium.register("CartPoleMasked-v0", cart_pole, max_episode_steps=500)
gymnasium.register("Locks-v0", lambda **kwargs: Locks(**kwargs))
