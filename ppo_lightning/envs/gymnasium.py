"""Gymnasium environments, stepped one after the other in this process: the fastest way for a few cheap ones."""

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any, Literal

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from ppo_lightning.envs.answers import check_observation, check_step, explain
from ppo_lightning.envs.batched import BatchedEnv
from ppo_lightning.envs.single import made, registered
from ppo_lightning.envs.state import Row, restore, state_of
from ppo_lightning.errors import ConfigError, first_line
from ppo_lightning.spaces.rows import from_row, to_row
from ppo_lightning.spaces.specs import (
    MASK,
    cells_as_choices,
    choices,
    is_vector,
    mask_columns,
    spec_from_space,
    stored,
    without_text,
)
from ppo_lightning.utils.seeding import derive_seed


class GymnasiumEnv(BatchedEnv):
    """N copies of a Gymnasium environment.

    A plain loop over the environments: Gymnasium's ``SyncVectorEnv`` takes 30 microseconds more for a step of HalfCheetah,
    to gather the ``info`` dictionaries that nobody here reads.

    A dictionary or a tuple, of observations or of actions, becomes one row, in the order of its space (alphabetical, unless the
    environment built its space from an ``OrderedDict``). An environment with a method ``action_masks()``, or with an
    ``action_mask`` in its ``info``, gets an entry ``action_mask`` in its observations.

    What an environment returns is checked at every reset and at the first step. Later steps are not checked, but errors
    that they raise name the environment.

    Args:
        env_id: Gymnasium's id; ``"module:Id-v0"`` imports the module first, ``"dm_control/..."`` needs no module.
            Or a function that makes a new environment at each call.
        seeds: One seed an environment.
        first_env: Global index of the first environment, for messages.
        **env_kwargs: For ``gymnasium.make``, ``max_episode_steps`` included; or for the function.

    Raises:
        ConfigError: No such environment, a missing package, or a function that makes something else.
    """

    can_restart = True
    numbers_its_envs = True
    _answers: dict[int, tuple[Any, Any]]  # to resets that were made ahead

    def __init__(
        self,
        env_id: str | Callable[..., gymnasium.Env],
        seeds: list[int],
        first_env: int = 0,
        /,
        **env_kwargs: Any,
    ) -> None:
        make: Callable[..., gymnasium.Env] = registered if isinstance(env_id, str) else made
        self._make = functools.partial(make, env_id, **env_kwargs)
        self.envs = [self._make() for _ in seeds]
        if len({id(env.unwrapped) for env in self.envs}) < len(seeds):
            raise ConfigError(
                "env_id makes the same environment again and again: it must make a new one at each call."
            )
        first, self._first_env = self.envs[0], first_env
        name = type(first.unwrapped).__name__ if first.spec is None else first.spec.id
        self._env_id = env_id if isinstance(env_id, str) else name
        space, actions = cells_as_choices(first.observation_space), first.action_space
        count = sum(choices(spec_from_space(actions)))
        self._mask_source: Literal["method", "info"] | None = (
            None  # of masks that are not in the observations
        )
        first_answer: dict[int, tuple[Any, Any]] = {}
        if count and first.has_wrapper_attr("action_masks"):
            self._mask_source = "method"
        elif count and not (isinstance(space, spaces.Dict) and MASK in space.spaces):
            # Only a reset tells whether masks are in the info. Its answer is kept for the first reset of a run.
            try:
                observation, info = first.reset(seed=seeds[0])
            except (Exception, SystemExit) as error:
                explain(error, self._where(0), "reset")
            first_answer = {0: (observation, info)}
            self._mask_source = "info" if isinstance(info, dict) and MASK in info else None
        if self._mask_source is not None:
            self._in_dict = isinstance(space, spaces.Dict)
            parts = space.spaces if isinstance(space, spaces.Dict) else {"observation": space}
            space = spaces.Dict({**parts, MASK: spaces.MultiBinary(count)})
        self._space: Any = space
        if (
            isinstance(space, spaces.Dict | spaces.Tuple)
            and without_text(space)
            and is_vector(spec_from_space(space))
        ):
            space = spaces.flatten_space(space)
        super().__init__(space, actions, seeds)
        observation_spec, action_spec = self.agent_specs
        spec = stored(observation_spec)
        dtype = (
            space.dtype if isinstance(space, spaces.Box) else torch.empty(0, dtype=spec.dtype).numpy().dtype
        )
        self._observation = np.zeros((len(seeds), *spec.shape), dtype)
        self._results = np.zeros(len(seeds)), np.zeros(len(seeds), bool), np.zeros(len(seeds), bool)
        self._to_row = None if isinstance(self._space, spaces.Box) else functools.partial(to_row, self._space)
        self._from_row = (
            None
            if isinstance(actions, spaces.Box | spaces.Discrete)
            else functools.partial(from_row, actions)
        )
        self._mask, self._components = mask_columns(observation_spec), np.cumsum(choices(action_spec))[:-1]
        self._checked = False  # whether all environments have answered a step well
        self._quick = False  # whether steps need nothing but the arrays of their answers
        self.reseed(seeds)
        self._answers = first_answer
        step = getattr(
            first.unwrapped, "dt", None
        )  # seconds; the metadata of dm_control's environments is wrong
        self.render_fps = min(1 / step if step else first.metadata.get("render_fps", 30), 60)

    def reseed(self, seeds: list[int]) -> None:
        """See :meth:`BatchedEnv.reseed`."""
        self._seeds, self._restarts = list(seeds), 0
        self._seeds_to_use: list[int] | None = list(seeds)
        self._answers = {}

    def reset_arrays(self, mask: np.ndarray | None = None) -> np.ndarray:
        """See :meth:`BatchedEnv.reset_arrays`."""
        seeds, self._seeds_to_use = self._seeds_to_use, None
        for i in range(self.num_envs) if mask is None else np.flatnonzero(mask).tolist():
            try:
                seed = None if seeds is None else seeds[i]
                observation, info = self._answers.pop(i, None) or self.envs[i].reset(seed=seed)
                self._see(i, observation, info, check=True)
            except (Exception, SystemExit) as error:
                explain(error, self._where(i), "reset")
        return self._observation

    def _where(self, i: int) -> str:
        return f"{self._env_id}, environment {self._first_env + i}"

    def _see(self, i: int, observation: Any, info: Any, over: bool = False, check: bool = False) -> None:
        """Keeps an observation, where the episode goes on one with an action to take."""
        if self._mask_source is not None:
            observation = self._with_mask(i, observation, info, over)
        if check:
            check_observation(observation, self._space)
        row = observation if self._to_row is None else self._to_row(observation)
        self._observation[i] = row
        if self._mask is not None and not over:
            allowed = np.split(row[self._mask] > 0, self._components)
            if not all(component.any() for component in allowed):
                raise ConfigError("its action_mask allows no action before its episode has ended.")

    def _with_mask(self, i: int, observation: Any, info: Any, over: bool) -> dict[str, Any]:
        """Returns an observation with its mask as the entry ``action_mask``; at an episode's end any mask will do."""
        if self._mask_source == "method":
            masks = self.envs[i].get_wrapper_attr(
                "action_masks"
            )()  # of all components together, or one a component
        elif MASK in info:
            masks = info[MASK]
        elif over:
            masks = np.ones(self._space[MASK].shape, np.int8)
        else:
            raise ConfigError(f"the info has no {MASK!r}, which it had at the first reset.")
        parts = observation if self._in_dict else {"observation": observation}
        return {**parts, MASK: np.concatenate([np.ravel(component) for component in masks])}

    def _step_arrays(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """See :meth:`BatchedEnv._step_arrays`."""
        chosen = action.tolist() if action.ndim == 1 else action  # a Python number is understood sooner
        if self._from_row is not None:
            chosen = [self._from_row(row) for row in action]
        reward, terminated, truncated = self._results
        i = 0
        try:
            if self._quick and not self.max_restarts:
                observation = self._observation
                for i, env in enumerate(self.envs):
                    observation[i], reward[i], terminated[i], truncated[i], _ = env.step(chosen[i])
                return observation, reward, terminated, truncated
            if self.broken is not None:
                self.broken = None
            for i, env in enumerate(self.envs):
                step = self._careful_step(i, chosen[i]) if self.max_restarts else env.step(chosen[i])
                if not self._checked:
                    check_step(step)
                value, reward[i], terminated[i], truncated[i], info = step
                if self.broken is not None and self.broken[i]:
                    continue  # the observation stays the one before
                self._see(i, value, info, over=step[2] or step[3], check=not self._checked)
        except (Exception, SystemExit) as error:
            explain(error, self._where(i), "step")
        if not self._checked:
            self._checked, self._quick = True, self._to_row is None
        return self._observation, reward, terminated, truncated

    def _careful_step(self, i: int, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Steps one environment; one that raises, or gives what is not finite, is made anew, as long as the quota lasts."""
        if self._restarts >= self.max_restarts:
            return self.envs[i].step(action)  # the collector says what is not finite
        try:
            step = self.envs[i].step(action)
            masked = self._mask_source is not None
            observation: Any = self._with_mask(i, step[0], step[4], over=True) if masked else step[0]
            row: Any = observation if self._to_row is None else self._to_row(observation)
            if np.isfinite(row).all() and np.isfinite(step[1]):
                return step
            fault = "gave an observation or a reward that is not finite"
        except (Exception, SystemExit) as error:
            fault = f"raised {type(error).__name__} ({first_line(error)})"
        self._restarts += 1
        count = f"restart {self._restarts} of {self.max_restarts}"
        number = self._first_env + i
        warnings.warn(
            f"Environment {number} {fault}: it is made anew ({count}), its episode is left out.", stacklevel=2
        )
        with contextlib.suppress(Exception):
            self.envs[i].close()
        self.envs[i] = self._make()
        self.envs[i].reset(seed=derive_seed(self._seeds[i], "train", self._restarts))
        if self.broken is None:
            self.broken = np.zeros(self.num_envs, bool)
        self.broken[i] = True
        return None, 0.0, False, True, {}

    def get_state(self) -> list[Row] | None:
        """See :meth:`BatchedEnv.get_state`: of classic control and MuJoCo."""
        states = [state_of(env) for env in self.envs]
        return None if None in states else states  # type: ignore[return-value]

    def set_state(self, states: list[Row]) -> None:
        """See :meth:`BatchedEnv.set_state`."""
        self._seeds_to_use = None
        self._answers.clear()
        for env, state in zip(self.envs, states, strict=True):
            restore(env, state)

    def render(self) -> np.ndarray | None:
        """See :meth:`BatchedEnv.render`; it needs ``render_mode="rgb_array"``."""
        frame: Any = self.envs[0].render()
        return None if frame is None else np.asarray(frame)
