"""Small test tasks, with ids such as ``ppo_lightning.envs.tasks:CartPoleMasked-v0``, which import them."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from ppo_lightning.errors import import_extra


class MaskedVelocity(gymnasium.ObservationWrapper):
    """CartPole without velocities, so that one observation is not enough to balance the pole.

    Example:
        >>> MaskedVelocity(gymnasium.make("CartPole-v1")).observation_space.shape
        (2,)
    """

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        space: Any = env.observation_space
        self.observation_space = spaces.Box(space.low[[0, 2]], space.high[[0, 2]])

    def observation(self, observation: np.ndarray) -> np.ndarray:
        """Return cart position (m) and pole angle (rad), [2]."""
        return observation[[0, 2]]


class Locks(gymnasium.Env):
    """A row of locks that open one after the other, each with one pair of keys.

    The observation is a row of 0 and 1: the open locks. An action (MultiDiscrete) chooses a key for the left
    hand and a key for the right hand. If both keys fit, the lock opens and the reward is 1. An episode has as
    many steps as there are locks. ``action_masks()`` forbids keys that fit no lock.

    Args:
        num_locks: Number of locks.
        num_keys: Number of keys per hand.
        masked: Whether the environment has a mask.

    Example:
        >>> Locks(num_locks=3).reset()[0].tolist()
        [0, 0, 0]
    """

    def __init__(self, num_locks: int = 8, num_keys: int = 32, masked: bool = True) -> None:
        self.num_locks = num_locks
        self.observation_space = spaces.MultiBinary(num_locks)
        self.action_space = spaces.MultiDiscrete([num_keys, num_keys])
        generator = np.random.default_rng(0)
        allowed = [generator.choice(num_keys, size=4, replace=False) for _ in range(2)]
        # Keys that open each lock, [num_locks, 2].
        self._solution = np.stack([generator.choice(keys, size=num_locks) for keys in allowed], axis=1)
        if masked:
            self._mask = np.zeros((2, num_keys), np.int8)
            for row, keys in zip(self._mask, allowed, strict=True):
                row[keys] = 1
            self.action_masks = self._mask.ravel

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        """Close all locks."""
        super().reset(seed=seed)
        self._open = self._steps = 0
        return self._observation(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Try a pair of keys."""
        is_open = bool((action == self._solution[self._open]).all())
        self._open += is_open
        self._steps += 1
        return self._observation(), float(is_open), self._steps == self.num_locks, False, {}

    def _observation(self) -> np.ndarray:
        return (np.arange(self.num_locks) < self._open).astype(np.int8)


class GoalReward(gymnasium.Wrapper):
    """Reward of 1 at the termination of an episode, and 0 at all other steps.

    Example:
        >>> env = GoalReward(gymnasium.make("MountainCar-v0"))
        >>> env.reset(seed=1)[1], env.step(0)[1]
        ({}, 0.0)
    """

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        """Step the environment."""
        observation, _, terminated, truncated, info = self.env.step(action)
        return observation, float(terminated), terminated, truncated, info


class FixedLevel(gymnasium.Env):
    """A task of MiniGrid from EnvPool whose episodes all have the same level.

    EnvPool draws a level at each reset, from a seed that it takes at construction only. A reset therefore
    makes a new environment, which takes half a millisecond for MiniGrid.

    Args:
        task: EnvPool's id.
        level: Seed of the level.
        **env_kwargs: Arguments of ``envpool.make``.

    Example:
        >>> env = FixedLevel("MiniGrid-MultiRoom-N4-S5-v0", level=1)
        >>> (env.reset()[0]["image"] == env.reset()[0]["image"]).all()
        True
    """

    def __init__(self, task: str, level: int = 1, **env_kwargs: Any) -> None:
        envpool = import_extra("envpool", extra="envpool")
        options = {"num_envs": 1, "num_threads": 1, "seed": [level]} | env_kwargs
        self._make = lambda: envpool.make(task, env_type="gymnasium", **options)
        self._env = self._make()
        self.observation_space = self._env.observation_space
        self.action_space = self._env.action_space

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        """Start the level again, for any seed."""
        super().reset(seed=seed)
        self._env.close()
        self._env = self._make()
        return self._first(self._env.reset()[0]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        """Step the environment."""
        observation, *results, _ = self._env.step(np.array([action], self.action_space.dtype))
        reward, terminated, truncated = (result[0] for result in results)
        return self._first(observation), float(reward), bool(terminated), bool(truncated), {}

    def close(self) -> None:
        """Stop the thread of the environment."""
        self._env.close()

    def _first(self, observation: Any) -> Any:
        return {name: part[0] for name, part in observation.items()}


gymnasium.register(
    "CartPoleMasked-v0",
    lambda **kwargs: MaskedVelocity(gymnasium.make("CartPole-v1", **kwargs).unwrapped),
    max_episode_steps=500,
)
gymnasium.register("Locks-v0", lambda **kwargs: Locks(**kwargs))
gymnasium.register("FixedLevel-v0", lambda **kwargs: FixedLevel(**kwargs))
gymnasium.register(
    "MountainCarSparse-v0",
    lambda **kwargs: GoalReward(gymnasium.make("MountainCar-v0", **kwargs).unwrapped),
    max_episode_steps=200,
)
