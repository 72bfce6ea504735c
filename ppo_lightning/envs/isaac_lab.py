"""Environments of Isaac Lab."""

from typing import Any

import numpy as np
from gymnasium import spaces
from torch import Tensor

from ppo_lightning.envs.tensor_env import TensorEnv, TensorStep


class IsaacLabEnv(TensorEnv):
    """The environments of a ``ManagerBasedRLEnv`` or a ``DirectRLEnv``, which have autoreset.

    The observation group ``policy`` is the entry ``policy``. The group ``critic``, if there is one, is the
    entry ``privileged_critic``, which the actor does not read by default. Other groups are left out.

    With ``compute_final_obs=True`` in the environment's configuration, time limits are bootstrapped with the
    value of the final observation, otherwise with that of the last observation before the end. Time limits
    of tasks with ``is_finite_horizon`` are terminal.

    Args:
        env: The environment that ``gymnasium.make`` returned.
        clip_actions: Bound of actions whose space has no finite bounds, as in most tasks.

    Example:
        >>> env = IsaacLabEnv(gymnasium.make("Isaac-Ant-v0", cfg=config))  # doctest: +SKIP
    """

    autoresets = True

    def __init__(self, env: Any, clip_actions: float = 10.0) -> None:
        base = env.unwrapped
        groups = base.single_observation_space
        self._has_critic = "critic" in groups.spaces
        observations = groups["policy"]
        if self._has_critic:
            observations = spaces.Dict(policy=groups["policy"], privileged_critic=groups["critic"])
        actions = base.single_action_space
        if isinstance(actions, spaces.Box):
            low, high = (np.where(np.isfinite(x), x, clip_actions) for x in (-actions.low, actions.high))
            actions = spaces.Box(-low, high, dtype=actions.dtype)
        super().__init__(observations, actions, base.num_envs, base.device)
        self.env = env
        self.is_closed = False
        self._is_finite = getattr(base.cfg, "is_finite_horizon", False)

    def reset_tensors(self, mask: Tensor | None) -> Any:
        """Reset all environments."""
        assert mask is None, "the simulator resets finished environments"
        observation, _ = self.env.reset()
        return self._groups(observation)

    def step_tensors(self, action: Tensor) -> TensorStep:
        """Step all environments."""
        observation, reward, terminated, truncated, extras = self.env.step(action)
        if self._is_finite:
            terminated, truncated = terminated | truncated, truncated & False
        final = extras.get("final_obs")
        final = None if final is None else self._groups(final)
        return TensorStep(self._groups(observation), reward, terminated, truncated, final)

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close the simulator."""
        if not self.is_closed:
            self.env.close()
        super().close(raise_if_closed=raise_if_closed)

    def _groups(self, observation: Any) -> Any:
        if not self._has_critic:
            return observation["policy"]
        return {"policy": observation["policy"], "privileged_critic": observation["critic"]}

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            self.env.unwrapped.seed(seed)
