"""Simulators written in JAX: Brax and MuJoCo Playground, whose arrays become tensors without a copy."""

from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from ppo_lightning.envs.tensor_env import TensorEnv, TensorStep
from ppo_lightning.errors import ConfigError, first_line, import_extra


class JaxEnv(TensorEnv):
    """N copies of an environment of Brax or MuJoCo Playground, on JAX's default device.

    Arrays and tensors share memory (DLPack). An episode's initial state depends on the seed of its
    environment and on the number of the episode, and on nothing else.

    Args:
        env: An environment without wrappers, with the functions ``reset(key)`` and ``step(state, action)``.
        seeds: One seed per environment.
        max_episode_steps: Time limit.

    Example:
        >>> env = make_brax("ant", seeds=[1, 2, 3])  # doctest: +SKIP
        >>> env.rollout(4)["next", "reward"].shape  # doctest: +SKIP
        torch.Size([3, 4, 1])
    """

    def __init__(self, env: Any, seeds: list[int], max_episode_steps: int) -> None:
        import jax

        device = torch.from_dlpack(jax.numpy.zeros(1)).device
        actions = spaces.Box(-1, 1, (env.action_size,))
        super().__init__(_space(env.observation_size), actions, len(seeds), device)
        self.max_episode_steps = max_episode_steps

        def begin(keys: Any, episodes: Any) -> Any:
            return jax.vmap(lambda key, episode: env.reset(jax.random.fold_in(key, episode)))(keys, episodes)

        def restart(state: Any, mask: Any, keys: Any, episodes: Any) -> Any:
            def choose(new: Any, old: Any) -> Any:
                return jax.numpy.where(mask.reshape(-1, *[1] * (new.ndim - 1)), new, old)

            return jax.tree.map(choose, begin(keys, episodes), state)

        self._begin = jax.jit(begin)
        self._restart = jax.jit(restart)
        self._step_all = jax.jit(jax.vmap(env.step))
        self._state: Any = None
        self.reseed(seeds)

    def reseed(self, seeds: list[int]) -> None:
        """Set the seeds from which the episodes after the next full reset are drawn, N in total."""
        import jax

        self._keys = jax.vmap(jax.random.key)(jax.numpy.array(seeds, dtype=jax.numpy.uint32))
        self._episodes = torch.zeros(self.num_envs, dtype=torch.int32, device=self.device)
        self._steps = torch.zeros_like(self._episodes)

    def reset_tensors(self, mask: Tensor | None) -> Any:
        """Draw initial states."""
        from jax import numpy as jnp

        if mask is None:
            mask = torch.ones_like(self._steps, dtype=torch.bool)
            self._state = self._begin(self._keys, jnp.from_dlpack(self._episodes))
        else:
            drawn = self._keys, jnp.from_dlpack(self._episodes)
            self._state = self._restart(self._state, jnp.from_dlpack(mask), *drawn)
        # New tensors: JAX may still read the old ones.
        self._episodes = self._episodes + mask
        self._steps = self._steps.masked_fill(mask, 0)
        return self._observe()

    def step_tensors(self, action: Tensor) -> TensorStep:
        """Step all copies."""
        from jax import numpy as jnp

        self._state = self._step_all(self._state, jnp.from_dlpack(action.contiguous()))
        self._steps = self._steps + 1
        terminated = torch.from_dlpack(self._state.done) > 0.5
        reward = torch.from_dlpack(self._state.reward)
        return TensorStep(self._observe(), reward, terminated, self._steps >= self.max_episode_steps)

    def _observe(self) -> Any:
        observation = self._state.obs
        if isinstance(observation, dict):
            return {name: torch.from_dlpack(values) for name, values in observation.items()}
        return torch.from_dlpack(observation)


def make_brax(
    task: str,
    seeds: list[int],
    backend: str = "generalized",
    max_episode_steps: int = 1000,
    **env_kwargs: Any,
) -> JaxEnv:
    """Make copies of a Brax environment.

    Args:
        task: Name of the environment, for example ``ant``.
        seeds: One seed per environment.
        backend: Brax's physics: ``generalized``, ``positional``, ``spring`` or ``mjx``.
        max_episode_steps: Time limit.
        **env_kwargs: Passed to the environment.
    """
    env = import_extra("brax.envs", extra="brax").get_environment(task, backend=backend, **env_kwargs)
    return JaxEnv(env, seeds, max_episode_steps)


def make_playground(
    task: str, seeds: list[int], max_episode_steps: int | None = None, **config: Any
) -> JaxEnv:
    """Make copies of an environment of MuJoCo Playground.

    Args:
        task: Name of the environment, for example ``CheetahRun``.
        seeds: One seed per environment.
        max_episode_steps: Time limit. None: the task's own.
        **config: Settings of the task's configuration to override.
    """
    try:
        from mujoco_playground import registry
    except ImportError as error:
        raise ConfigError(f"Playground is missing ({first_line(error)}): pip install playground.") from error
    env = registry.load(task, config_overrides=config or None)
    limit = registry.get_default_config(task).episode_length
    return JaxEnv(env, seeds, max_episode_steps or limit)


def _space(size: Any) -> spaces.Space:
    """Return the space of observations of some size: a number, a shape, or one of them by name."""
    if isinstance(size, dict):
        return spaces.Dict({name: _space(part) for name, part in size.items()})
    shape = (size,) if isinstance(size, int) else tuple(size)
    return spaces.Box(-float("inf"), float("inf"), shape)
