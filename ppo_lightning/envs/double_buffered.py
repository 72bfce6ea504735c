"""Two halves of the environments: one steps in the background while actions are chosen for the other."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ppo_lightning.envs.batched import BatchedEnv
from ppo_lightning.errors import ConfigError


class DoubleBufferedEnv(BatchedEnv):
    """N environments as two times N / 2, which a collector steps in turn.

    Both halves are acted for by the same agent and make the same number of steps in a rollout: the actions are those that
    one environment of all would get, except that running statistics of the observations see one half after the other.

    Args:
        make: Makes the environments of the global indices ``first_env`` to ``first_env + num_envs``, from
            ``(num_envs, first_env)``; they must step in threads of their own.
        num_envs: N.
        first_env: Global index of the first one.

    Raises:
        ConfigError: N is odd.
    """

    def __init__(self, make: Callable[[int, int], BatchedEnv], num_envs: int, first_env: int = 0) -> None:
        if num_envs % 2:
            raise ConfigError(f"data.double_buffer needs an even number of environments a rank, and there are {num_envs}.")
        half = num_envs // 2
        halves = [make(half, first_env), make(half, first_env + half)]
        super().__init__(*halves[0].spaces, seeds=[0] * num_envs)
        self.parts = halves
        self._observations: list[Any] = [None, None]
        self.envs = halves
        self.action_names, self.render_fps = halves[0].action_names, halves[0].render_fps

    def reseed(self, seeds: list[int]) -> None:
        """See :meth:`BatchedEnv.reseed`."""
        half = self.num_envs // 2
        for part, its in zip(self.parts, (seeds[:half], seeds[half:]), strict=True):
            part.reseed(its)

    def reset_arrays(self, mask: np.ndarray | None = None) -> np.ndarray:
        """See :meth:`BatchedEnv.reset_arrays`."""
        for i, part in enumerate(self.parts):
            its = None if mask is None else np.split(mask, 2)[i]
            if its is None or its.any():
                self._observations[i] = part.reset_arrays(its)
        return np.concatenate(self._observations)

    def _begin(self, action: np.ndarray) -> None:
        """See :meth:`BatchedEnv._begin`."""
        for part, its in zip(self.parts, np.split(action, 2), strict=True):
            part.send_arrays(its)

    def _step_arrays(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """See :meth:`BatchedEnv._step_arrays`."""
        first, second = (part.recv_arrays() for part in self.parts)
        self._observations = [first[0], second[0]]
        over = [part.episode_done for part in self.parts if part.episode_done is not None]
        self.episode_done = np.concatenate(over) if over else None
        observation, reward, terminated, truncated = (np.concatenate(pair) for pair in zip(first, second, strict=True))
        return observation, reward, terminated, truncated

    def learning_reward(self, reward: np.ndarray) -> np.ndarray:
        """See :meth:`BatchedEnv.learning_reward`."""
        return self.parts[0].learning_reward(reward)
