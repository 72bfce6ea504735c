"""CartPole as Gymnasium's vectorized environment, where one NumPy expression steps all copies."""

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.utils.seeding import np_random

from ppo_lightning.envs.batched import BatchedEnv
from ppo_lightning.envs.gymnasium import GymnasiumEnv
from ppo_lightning.errors import ConfigError

IDS = ("CartPole-v0", "CartPole-v1")


class CartPoleEnv(BatchedEnv):
    """N copies of CartPole with episodes bit-identical to those of N single environments.

    Gymnasium's class draws all initial states from one generator and resets at the step after an episode end.
    Here each copy has a generator of its own, seeded and used as in a single environment, and the caller
    decides when to reset.

    Select this class with ``data.backend: vectorized``. With eight or more copies it is faster than single
    environments.

    Args:
        env_id: One of ``IDS``.
        seeds: One seed per environment.
        **env_kwargs: Only ``max_episode_steps``.

    Raises:
        ConfigError: The id or an option is not supported.

    Example:
        >>> env = CartPoleEnv("CartPole-v1", [1, 2, 3])
        >>> env.reset_arrays().shape
        (3, 4)
    """

    def __init__(self, env_id: str, seeds: list[int], /, **env_kwargs: Any) -> None:
        if env_id not in IDS:
            raise ConfigError(
                f"data.backend 'vectorized' has {' and '.join(IDS)}, not {env_id!r}: set it to 'gymnasium'."
            )
        GymnasiumEnv(env_id, seeds[:1], **env_kwargs).close()  # validates the options
        mode = gymnasium.VectorizeMode.VECTOR_ENTRY_POINT
        self.envs: Any = gymnasium.make_vec(env_id, len(seeds), mode, **env_kwargs).unwrapped
        super().__init__(self.envs.single_observation_space, self.envs.single_action_space, seeds)
        self.envs.reset()
        self.reseed(seeds)

    def reseed(self, seeds: list[int]) -> None:
        """Create one generator per seed, see :meth:`BatchedEnv.reseed`."""
        self._generators = [np_random(seed)[0] for seed in seeds]

    def reset_arrays(self, mask: np.ndarray | None = None) -> np.ndarray:
        """Draw initial states, see :meth:`BatchedEnv.reset_arrays`."""
        for i in range(self.num_envs) if mask is None else np.flatnonzero(mask):
            self.envs.state[:, i] = self._generators[i].uniform(self.envs.low, self.envs.high, 4)
            self.envs.steps[i] = 0
        return self.envs.state.T.astype(np.float32)

    def _step_arrays(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Step all copies, see :meth:`BatchedEnv._step_arrays`."""
        self.envs.prev_done[:] = False  # disables the autoreset
        return self.envs.step(action)[:4]

    def get_state(self) -> list[dict[str, Any]]:
        """Return states, step counts and generators, see :meth:`BatchedEnv.get_state`."""
        return [
            {
                "state": torch.from_numpy(self.envs.state[:, i].copy()),
                "steps": int(self.envs.steps[i]),
                "random": generator.bit_generator.state,
            }
            for i, generator in enumerate(self._generators)
        ]

    def set_state(self, states: list[dict[str, Any]]) -> None:
        """Restore all copies, see :meth:`BatchedEnv.set_state`."""
        for i, saved in enumerate(states):
            self.envs.state[:, i] = saved["state"].numpy()
            self.envs.steps[i] = saved["steps"]
            self._generators[i].bit_generator.state = saved["random"]
