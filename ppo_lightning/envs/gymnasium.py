"""Gymnasium environments, stepped one after the other in this process: the fastest way for a few cheap ones."""

import contextlib
import warnings
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import FlattenObservation

from ppo_lightning.envs.batched import BatchedEnv
from ppo_lightning.envs.state import Row, restore, state_of
from ppo_lightning.errors import ConfigError, first_line, import_extra, nearest
from ppo_lightning.seeding import derive_seed


class GymnasiumEnv(BatchedEnv):
    """N copies of a registered Gymnasium environment.

    A plain loop over the environments: Gymnasium's ``SyncVectorEnv`` takes 30 microseconds more for a step of HalfCheetah,
    to gather the ``info`` dictionaries that nobody here reads.

    A dictionary of observations becomes one vector, in the order of its space (alphabetical, unless the environment built
    its space from an ``OrderedDict``).

    Args:
        env_id: Gymnasium's id; ``"module:Id-v0"`` imports the module first, ``"dm_control/..."`` needs no module.
        seeds: One seed an environment.
        **env_kwargs: For ``gymnasium.make``, ``max_episode_steps`` included.

    Raises:
        ConfigError: No such environment, or a package that it needs is missing.
    """

    can_restart = True

    def __init__(self, env_id: str, seeds: list[int], **env_kwargs: Any) -> None:
        if env_id.startswith("dm_control/"):
            import_extra("dm_control", extra="dm-control")
            import_extra("shimmy", extra="dm-control")  # registers the ids
        self._make = lambda: _flat(gymnasium.make(env_id, disable_env_checker=True, **env_kwargs))
        try:
            self.envs = [self._make() for _ in seeds]
        except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
            raise ConfigError(f"env_id {env_id!r} needs a package that is missing: {first_line(error)}") from error
        except (TypeError, ValueError, AssertionError, OSError) as error:
            raise ConfigError(f"data.env_kwargs does not fit env_id {env_id!r}: {first_line(error)}.") from error
        except gymnasium.error.Error as error:
            hint = nearest(env_id, list(gymnasium.registry)) or f": {first_line(error)}"
            raise ConfigError(f"env_id {env_id!r} is not an environment of Gymnasium{hint}") from error
        space = self.envs[0].observation_space
        self._observation = np.zeros((len(seeds), *(space.shape or ())), space.dtype)
        super().__init__(space, self.envs[0].action_space, seeds)
        self.reseed(seeds)
        step = getattr(self.envs[0].unwrapped, "dt", None)  # seconds; the metadata of dm_control's environments is wrong
        self.render_fps = min(1 / step if step else self.envs[0].metadata.get("render_fps", 30), 60)

    def reseed(self, seeds: list[int]) -> None:
        """See :meth:`BatchedEnv.reseed`."""
        self._seeds, self._restarts = list(seeds), 0
        self._seeds_to_use: list[int] | None = list(seeds)

    def reset_arrays(self, mask: np.ndarray | None = None) -> np.ndarray:
        """See :meth:`BatchedEnv.reset_arrays`."""
        seeds, self._seeds_to_use = self._seeds_to_use, None
        for i in range(self.num_envs) if mask is None else np.flatnonzero(mask):
            self._observation[i] = self.envs[i].reset(seed=None if seeds is None else seeds[i])[0]
        return self._observation

    def _step_arrays(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """See :meth:`BatchedEnv._step_arrays`."""
        chosen = action.tolist() if action.ndim == 1 else action  # a Python number is understood sooner
        if self.max_restarts:
            self.broken = None
            steps = [self._careful_step(i, its) for i, its in enumerate(chosen)]
        else:
            steps = [env.step(its) for env, its in zip(self.envs, chosen, strict=True)]
        observation, reward, terminated, truncated, _ = zip(*steps, strict=True)
        for i, row in enumerate(observation):
            self._observation[i] = row
        return self._observation, np.array(reward, np.float64), np.array(terminated, bool), np.array(truncated, bool)

    def _careful_step(self, i: int, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Steps one environment; one that raises, or gives what is not finite, is made anew, as long as the quota lasts."""
        if self._restarts >= self.max_restarts:
            return self.envs[i].step(action)  # the collector says what is not finite
        try:
            step = self.envs[i].step(action)
            if np.isfinite(step[0]).all() and np.isfinite(step[1]):
                return step
            fault = "gave an observation or a reward that is not finite"
        except Exception as error:
            fault = f"raised {type(error).__name__} ({first_line(error)})"
        self._restarts += 1
        count = f"restart {self._restarts} of {self.max_restarts}"
        warnings.warn(f"Environment {i} {fault}: it is made anew ({count}), its episode is left out.", stacklevel=2)
        with contextlib.suppress(Exception):
            self.envs[i].close()
        self.envs[i] = self._make()
        self.envs[i].reset(seed=derive_seed(self._seeds[i], "train", self._restarts))
        if self.broken is None:
            self.broken = np.zeros(self.num_envs, bool)
        self.broken[i] = True
        return self._observation[i].copy(), 0.0, False, True, {}

    def get_state(self) -> list[Row] | None:
        """See :meth:`BatchedEnv.get_state`: of classic control and MuJoCo."""
        states = [state_of(env) for env in self.envs]
        return None if None in states else states  # type: ignore[return-value]

    def set_state(self, states: list[Row]) -> None:
        """See :meth:`BatchedEnv.set_state`."""
        self._seeds_to_use = None
        for env, state in zip(self.envs, states, strict=True):
            restore(env, state)

    def render(self) -> np.ndarray | None:
        """See :meth:`BatchedEnv.render`; it needs ``render_mode="rgb_array"``."""
        frame: Any = self.envs[0].render()
        return None if frame is None else np.asarray(frame)


def _flat(env: gymnasium.Env) -> gymnasium.Env:
    return FlattenObservation(env) if isinstance(env.observation_space, spaces.Dict | spaces.Tuple) else env
