"""EnvPool environments, stepped by C++ threads.

TorchRL's own wrapper is not used. It inserts a dummy transition into the batch at every reset or overwrites
the final observation with the reset observation, and it needs the packages ``gym`` and ``treevalue``.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces

from ppo_lightning.envs.atari import full_id, is_atari
from ppo_lightning.envs.batched import BatchedEnv, Copies, Step, close_all
from ppo_lightning.envs.contract import fitting, require_known
from ppo_lightning.envs.gymnasium import make as make_for_gymnasium
from ppo_lightning.errors import ConfigError, import_extra
from ppo_lightning.spaces.rows import to_row
from ppo_lightning.utils.arguments import require_options
from ppo_lightning.utils.threads import threads_of


class EnvPoolEnv(BatchedEnv):
    """N copies of an EnvPool environment.

    EnvPool resets a finished environment at its *next* step and ignores the action of that step. This class
    resets it explicitly after the last step of the episode, which keeps the dummy transition out of the
    batch. A dictionary of observations (dm_control, MiniGrid, MuJoCo Playground) becomes one row with its
    entries in alphabetical order.

    If an episode terminates on the last step of its time limit, EnvPool sets ``truncated`` only. Gymnasium
    sets both flags.

    Args:
        env_id: EnvPool's id.
        seeds: One seed per environment.
        num_threads: Number of C++ threads. 0: as many as environments, at most the cores of this rank.
        **env_kwargs: Arguments of ``envpool.make``, including ``max_episode_steps``.

    Example:
        >>> env = EnvPoolEnv("Pendulum-v1", [1, 2], num_threads=1)
        >>> env.reset_arrays().shape
        (2, 3)
    """

    info_names = ()

    def __init__(self, env_id: str, seeds: list[int], /, num_threads: int = 0, **env_kwargs: Any) -> None:
        envpool = import_extra("envpool", extra="envpool")
        require_known(
            env_id, envpool.list_all_envs(), "an environment of EnvPool", "envpool.list_all_envs() lists them"
        )
        if env_id.startswith("MiniGrid-") and env_kwargs.get("agent_view_size", 7) < 7:
            # EnvPool 1.2.5 writes out of bounds and aborts.
            raise ConfigError("agent_view_size must be at least 7 in EnvPool: use the package minigrid.")
        self._make = envpool_maker(env_id, num_threads, env_kwargs)
        self.envs = self._make(seeds)
        space = self.envs.observation_space
        if isinstance(space, spaces.Dict):
            space = spaces.Dict({key: space[key] for key in sorted(space)})
        super().__init__(space, self.envs.action_space, seeds)
        self._limit = env_kwargs.get("max_episode_steps")
        self._action_dtype = self.envs.action_space.dtype

    def reseed(self, seeds: list[int]) -> None:
        """Recreate the environments: EnvPool accepts seeds only at construction."""
        close_all(self.envs)
        self.envs = self._make(seeds)

    def reset_arrays(self, mask: np.ndarray | None = None) -> np.ndarray:
        """Reset explicitly."""
        if mask is None:
            self._observation = self._rows(*self.envs.reset())
            return self._observation
        observation, info = self.envs.reset(np.flatnonzero(mask))
        self._observation[info["env_id"]] = self._rows(observation, info)
        return self._observation

    def _step_arrays(self, action: np.ndarray) -> Step:
        action = action.astype(self._action_dtype, copy=False)
        observation, reward, terminated, truncated, info = self.envs.step(action)
        self._observation = self._rows(observation, info)
        self.infos["all"] = info
        if self._limit is not None:  # some environments (Catch) ignore their time limit
            truncated = truncated | (info["elapsed_step"] >= self._limit)
        return Step(self._observation, reward, terminated, truncated, terminated | truncated)

    def _rows(self, observation: Any, info: dict[str, Any]) -> np.ndarray:
        if self.format.to_row is None:
            return observation
        return to_row(self.format.space, observation, (len(info["env_id"]),))


def make(env_id: str, copies: Copies, /, **env_kwargs: Any) -> BatchedEnv:
    """Make copies of an environment or of an Atari game for the backend ``envpool``.

    EnvPool does not render: environments that must render are those of Gymnasium with the same ids.
    """
    env_id = full_id(env_id)
    if copies.render:
        env_kwargs.pop("num_threads", None)
        return make_for_gymnasium(env_id, copies, **env_kwargs)
    if is_atari(env_id):
        from ppo_lightning.envs.atari_backends import EnvPoolAtari

        require_options(EnvPoolAtari, f"{env_id} with data.backend 'envpool'", env_kwargs)
        return EnvPoolAtari(env_id, copies.seeds, **env_kwargs)
    return EnvPoolEnv(env_id, copies.seeds, **env_kwargs)


def envpool_maker(env_id: str, num_threads: int, env_kwargs: dict[str, Any]) -> Callable[[list[int]], Any]:
    """Return a function of seeds that makes one environment of EnvPool for each."""
    make = import_extra("envpool", extra="envpool").make

    def make_all(seeds: list[int]) -> Any:
        options = {"num_envs": len(seeds), "num_threads": threads_of(num_threads, len(seeds))}
        options["batch_size"] = len(seeds)  # a rollout needs all environments, not the fastest ones
        with fitting(env_id, env_kwargs, TypeError, ValueError, AssertionError):
            return make(env_id, env_type="gymnasium", seed=list(seeds), **options, **env_kwargs)

    return make_all


def is_board_game(env_id: str) -> bool:
    """Return whether EnvPool's id is a game of several players."""
    known = import_extra("envpool", extra="envpool").registration.registry.specs
    return env_id in known and known[env_id][0] == "envpool.pgx" and env_id != "Play2048-v1"
