"""CartPole in Gymnasium's own vectorised form: one NumPy expression steps all copies."""

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
    """N copies of CartPole, with the episodes of N single ones, to the bit.

    Gymnasium's class draws all first states from one generator and resets at the step after an end. Here each copy has its
    own generator, seeded and used as a single environment uses it, and is reset when the caller says so.

    Choose it by ``data.backend: vectorized``. From eight copies on it is faster than stepping single environments.

    Args:
        env_id: One of ``IDS``.
        seeds: One seed an environment.
        **env_kwargs: ``max_episode_steps``, if anything.

    Raises:
        ConfigError: The options do not fit.
    """

    can_restart = True  # if it ever had to

    def __init__(self, env_id: str, seeds: list[int], /, **env_kwargs: Any) -> None:
        if env_id not in IDS:
            raise ConfigError(
                f"data.backend 'vectorized' has {' and '.join(IDS)}, not {env_id!r}: set it to 'gymnasium'."
            )
        GymnasiumEnv(env_id, seeds[:1], **env_kwargs).close()  # which checks the options
        mode = gymnasium.VectorizeMode.VECTOR_ENTRY_POINT
        self.envs: Any = gymnasium.make_vec(env_id, len(seeds), mode, **env_kwargs).unwrapped
        super().__init__(self.envs.single_observation_space, self.envs.single_action_space, seeds)
        self.envs.reset()
        self.reseed(seeds)

    def reseed(self, seeds: list[int]) -> None:
        """See :meth:`BatchedEnv.reseed`."""
        self._generators = [np_random(seed)[0] for seed in seeds]

    def reset_arrays(self, mask: np.ndarray | None = None) -> np.ndarray:
        """See :meth:`BatchedEnv.reset_arrays`."""
        for i in range(self.num_envs) if mask is None else np.flatnonzero(mask):
            self.envs.state[:, i] = self._generators[i].uniform(self.envs.low, self.envs.high, 4)
            self.envs.steps[i] = 0
        return self.envs.state.T.astype(np.float32)

    def _step_arrays(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """See :meth:`BatchedEnv._step_arrays`."""
        self.envs.prev_done[:] = False  # what it would reset
        return self.envs.step(action)[:4]

    def get_state(self) -> list[dict[str, Any]]:
        """See :meth:`BatchedEnv.get_state`."""
        return [
            {
                "state": torch.from_numpy(self.envs.state[:, i].copy()),
                "steps": int(self.envs.steps[i]),
                "random": its,
            }
            for i, its in enumerate(generator.bit_generator.state for generator in self._generators)
        ]

    def set_state(self, states: list[dict[str, Any]]) -> None:
        """See :meth:`BatchedEnv.set_state`."""
        for i, saved in enumerate(states):
            self.envs.state[:, i], self.envs.steps[i] = saved["state"].numpy(), saved["steps"]
            self._generators[i].bit_generator.state = saved["random"]
