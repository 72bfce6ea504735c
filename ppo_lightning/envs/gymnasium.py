"""Gymnasium environments, stepped one after the other in this process: the fastest way for a few cheap ones."""

import contextlib
import copy
import functools
import warnings
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.wrappers import FlattenObservation

from ppo_lightning.envs.batched import BatchedEnv
from ppo_lightning.envs.rows import from_row, to_row
from ppo_lightning.envs.specs import (
    MASK,
    cells_as_choices,
    choices,
    is_vector,
    mask_columns,
    spec_from_space,
    stored,
    without_text,
)
from ppo_lightning.envs.state import Row, restore, state_of
from ppo_lightning.errors import ConfigError, first_line, import_extra, nearest
from ppo_lightning.seeding import derive_seed


class GymnasiumEnv(BatchedEnv):
    """N copies of a registered Gymnasium environment.

    A plain loop over the environments: Gymnasium's ``SyncVectorEnv`` takes 30 microseconds more for a step of HalfCheetah,
    to gather the ``info`` dictionaries that nobody here reads.

    A dictionary or a tuple, of observations or of actions, becomes one row, in the order of its space (alphabetical, unless the
    environment built its space from an ``OrderedDict``). An environment with a method ``action_masks()`` gets an entry
    ``action_mask`` in its observations.

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
        self._make = lambda: _prepared(gymnasium.make(env_id, disable_env_checker=True, **env_kwargs))
        try:
            self.envs = [self._make() for _ in seeds]
        except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
            raise ConfigError(f"env_id {env_id!r} needs a package that is missing: {first_line(error)}") from error
        except (TypeError, ValueError, AssertionError, OSError) as error:
            raise ConfigError(f"data.env_kwargs does not fit env_id {env_id!r}: {first_line(error)}.") from error
        except gymnasium.error.Error as error:
            hint = nearest(env_id, list(gymnasium.registry)) or f": {first_line(error)}"
            raise ConfigError(f"env_id {env_id!r} is not an environment of Gymnasium{hint}") from error
        space, actions = cells_as_choices(self.envs[0].observation_space), self.envs[0].action_space
        super().__init__(space, actions, seeds)
        self._env_id, (observation_spec, action_spec) = env_id, self.agent_specs
        spec, in_rows = stored(observation_spec), not isinstance(space, spaces.Box)
        dtype = torch.empty(0, dtype=spec.dtype).numpy().dtype if in_rows else space.dtype
        self._observation = np.zeros((len(seeds), *spec.shape), dtype)
        self._results = np.zeros(len(seeds)), np.zeros(len(seeds), bool), np.zeros(len(seeds), bool)
        self._to_row = functools.partial(to_row, space) if in_rows else None
        self._from_row = None if isinstance(actions, spaces.Box | spaces.Discrete) else functools.partial(from_row, actions)
        self._mask, self._components = mask_columns(observation_spec), np.cumsum(choices(action_spec))[:-1]
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
            self._see(int(i), self.envs[i].reset(seed=None if seeds is None else seeds[i])[0])
        return self._observation

    def _see(self, i: int, observation: Any, over: bool = False) -> None:
        """Keeps an observation, where the episode goes on one with an action to take."""
        row = observation if self._to_row is None else self._to_row(observation)
        self._observation[i] = row
        if self._mask is not None and not over:
            allowed = np.split(row[self._mask] > 0, self._components)
            if not all(component.any() for component in allowed):
                raise ConfigError(
                    f"{self._env_id}, environment {i}: its action_mask allows no action, and its episode goes on."
                )

    def _step_arrays(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """See :meth:`BatchedEnv._step_arrays`."""
        chosen = action.tolist() if action.ndim == 1 else action  # a Python number is understood sooner
        if self._from_row is not None:
            chosen = [self._from_row(row) for row in action]
        reward, terminated, truncated = self._results
        if self._to_row is None and not self.max_restarts:
            observation = self._observation
            for i, env in enumerate(self.envs):
                observation[i], reward[i], terminated[i], truncated[i], _ = env.step(chosen[i])
            return observation, reward, terminated, truncated
        if self.broken is not None:
            self.broken = None
        for i, env in enumerate(self.envs):
            step = self._careful_step(i, chosen[i]) if self.max_restarts else env.step(chosen[i])
            value, reward[i], terminated[i], truncated[i], _ = step
            if value is not None:
                self._see(i, value, over=step[2] or step[3])
        return self._observation, reward, terminated, truncated

    def _careful_step(self, i: int, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Steps one environment; one that raises, or gives what is not finite, is made anew, as long as the quota lasts."""
        if self._restarts >= self.max_restarts:
            return self.envs[i].step(action)  # the collector says what is not finite
        try:
            step = self.envs[i].step(action)
            row = step[0] if self._to_row is None else self._to_row(step[0])
            if np.isfinite(row).all() and np.isfinite(step[1]):
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
        return None, 0.0, False, True, {}  # the observation stays the one before

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


class MaskInObservation(gymnasium.ObservationWrapper):
    """Puts what ``action_masks()`` of an environment returns into its observation, as the entry ``action_mask``.

    Args:
        env: Its observations get into the entry ``observation``, unless they are a dictionary.
    """

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self._in_dict = isinstance(env.observation_space, spaces.Dict)
        count = sum(choices(spec_from_space(env.action_space)))
        parts = env.observation_space.spaces if self._in_dict else {"observation": env.observation_space}  # type: ignore[attr-defined]
        self.observation_space = spaces.Dict({**parts, MASK: spaces.MultiBinary(count)})

    def observation(self, observation: Any) -> Any:
        """Adds the mask."""
        parts = observation if self._in_dict else {"observation": observation}
        masks = self.env.get_wrapper_attr("action_masks")()  # of all components together, or one a component
        return {**parts, MASK: np.concatenate([np.ravel(its) for its in masks])}


class QuickDiscrete(spaces.Discrete):
    """A discrete space that knows its integers at once.

    Gymnasium's own takes 3 microseconds to convert and to compare types, a third of a step of CartPole, which asserts at every
    step that it was given an action.
    """

    def contains(self, x: Any) -> bool:
        """Tells whether x is an element."""
        return bool(self.start <= x < self.start + self.n) if type(x) is int else super().contains(x)


def _prepared(env: gymnasium.Env) -> gymnasium.Env:
    """Puts masks into the observations, makes dictionaries of floats vectors, and lets actions be checked sooner."""
    actions = vars(env.unwrapped).get("action_space")  # not a property, nor its class's
    if type(actions) is spaces.Discrete:
        quick = copy.copy(actions)  # with its dtype and its generator; other environments may have the same object
        quick.__class__ = QuickDiscrete
        env.unwrapped.action_space = quick
    if env.has_wrapper_attr("action_masks") and choices(spec_from_space(env.action_space)):
        env = MaskInObservation(env)
    space = env.observation_space
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        return env
    return FlattenObservation(env) if without_text(space) and is_vector(spec_from_space(space)) else env
