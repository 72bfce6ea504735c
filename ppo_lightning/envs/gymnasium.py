"""Gymnasium environments stepped in a loop, the fastest way for a small number of cheap ones."""

import contextlib
import functools
import os
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from ppo_lightning.envs.answers import check_parts, check_step, reraise
from ppo_lightning.envs.batched import BatchedEnv, actions_of, frame_rate, name_of, require_distinct
from ppo_lightning.envs.state import Row, read_state, restore_state
from ppo_lightning.errors import ConfigError, first_line, import_extra, nearest
from ppo_lightning.spaces.specs import MASK, choice_counts, spec_from_space
from ppo_lightning.utils.seeding import derive_seed


class GymnasiumEnv(BatchedEnv):
    """N copies of a Gymnasium environment.

    The class loops over the environments. Gymnasium's ``SyncVectorEnv`` needs 30 microseconds more per step
    of HalfCheetah, because it gathers ``info`` dictionaries that this package does not read.

    A dictionary or tuple of observations or actions becomes one row, in the order of its space. This order is
    alphabetical unless the environment built its space from an ``OrderedDict``. An environment with a method
    ``action_masks()``, or with an ``action_mask`` in its ``info``, gets an entry ``action_mask`` in its
    observations.

    The return values of every reset and of the first step are validated. Later steps are not validated, but
    their errors name the environment.

    Args:
        env_id: Gymnasium's id, or a function that creates a new environment at each call. ``"module:Id-v0"``
            imports the module first. ``"dm_control/..."`` needs no module.
        seeds: One seed per environment.
        first_env: Global index of the first environment, for messages.
        max_restarts: How often each environment may fail: if a step raises an exception, or returns a
            non-finite observation or reward, the environment is made anew. The failed step is truncated with
            the observation before it and the reward 0, and is not ``valid``.
        **env_kwargs: Arguments of ``gymnasium.make``, including ``max_episode_steps``, or of the function.

    Raises:
        ConfigError: The environment does not exist, a package is missing, or the function returns another
            type.

    Example:
        >>> env = GymnasiumEnv("CartPole-v1", [1, 2])
        >>> observation = env.reset_arrays()
        >>> observation, reward, terminated, truncated = env.step_arrays(np.array([0, 1]))
        >>> observation.shape, reward.tolist()
        ((2, 4), [1.0, 1.0])
    """

    _pending_resets: dict[int, tuple[Any, Any]]  # results of resets that were made early

    def __init__(
        self,
        env_id: str | Callable[..., gymnasium.Env],
        seeds: list[int],
        first_env: int = 0,
        /,
        *,
        max_restarts: int = 0,
        **env_kwargs: Any,
    ) -> None:
        make = functools.partial(make_registered, env_id) if isinstance(env_id, str) else env_id
        self._make = functools.partial(make, **env_kwargs)
        self.envs = [self._make() for _ in seeds]
        for env in self.envs:
            if not isinstance(env, gymnasium.Env):
                raise ConfigError(
                    f"env_id makes a {type(env).__name__}: it must make a Gymnasium environment, a vectorized"
                    " environment of Gymnasium or a TorchRL environment."
                )
        self._first_env = first_env
        first = self.envs[0]
        self._env_id = env_id if isinstance(env_id, str) else name_of(first)
        require_distinct(self.envs, self._env_id)
        space = first.observation_space
        actions = actions_of(first)
        count = sum(choice_counts(spec_from_space(actions)))
        # Source of masks that are not part of the observations.
        self._mask_source: Literal["method", "info"] | None = None
        pending_resets: dict[int, tuple[Any, Any]] = {}
        if count and first.has_wrapper_attr("action_masks"):
            self._mask_source = "method"
        elif count and not (isinstance(space, spaces.Dict) and MASK in space.spaces):
            # Only a reset shows whether `info` has masks. Keep its result for the first reset of the run.
            try:
                pending_resets[0] = check_parts(first.reset(seed=seeds[0]), "reset", 2)
            except (Exception, SystemExit) as error:
                reraise(error, self._location(0), "reset")
            _, info = pending_resets[0]
            self._mask_source = "info" if isinstance(info, dict) and MASK in info else None
        if self._mask_source is not None:
            self._in_dict = isinstance(space, spaces.Dict)
            parts = space.spaces if isinstance(space, spaces.Dict) else {"observation": space}
            space = spaces.Dict({**parts, MASK: spaces.MultiBinary(count)})
        super().__init__(space, actions, seeds)
        self._checked = False  # whether the first step of all environments was validated
        self._fast_path = False  # whether steps write plain arrays without conversion
        if not isinstance(max_restarts, int) or max_restarts < 0:
            raise ConfigError(
                f"data.env_kwargs.max_restarts is {max_restarts!r}: it must be a whole number, at least 0."
            )
        self._max_restarts = max_restarts
        if max_restarts:
            self.valid = np.ones(len(seeds), bool)
        self.reseed(seeds)
        self._pending_resets = pending_resets
        self.render_fps = frame_rate(first)

    def reseed(self, seeds: list[int]) -> None:
        """Set the seeds of the next reset, and forget earlier restarts."""
        super().reseed(seeds)
        self._seeds = list(seeds)
        self._restarts = [0] * len(seeds)  # of each environment
        self._pending_resets = {}

    def reset_arrays(self, mask: np.ndarray | None = None) -> np.ndarray:
        """Reset and validate."""
        seeds = self._take_seeds()
        for i in range(self.num_envs) if mask is None else np.flatnonzero(mask).tolist():
            try:
                pending = self._pending_resets.pop(i, None)
                observation, info = pending or check_parts(self.envs[i].reset(seed=seeds[i]), "reset", 2)
                if self._mask_source is not None:
                    observation = self._with_mask(i, observation, info)
                self._write(self._observation, i, observation, check=True)
            except (Exception, SystemExit) as error:
                reraise(error, self._location(i), "reset")
        return self._observation

    def _location(self, i: int) -> str:
        return f"{self._env_id}, environment {self._first_env + i}"

    def _with_mask(self, i: int, observation: Any, info: Any, over: bool = False) -> dict[str, Any]:
        """Add the mask to an observation as the entry ``action_mask``.

        At an episode end, the mask is not used, so that a missing one is replaced by ones.
        """
        if self._mask_source == "method":
            # One mask for all components, or one per component.
            masks = self.envs[i].get_wrapper_attr("action_masks")()
        elif MASK in info:
            masks = info[MASK]
        elif over:
            masks = np.ones(self.unjoined_space[MASK].shape, np.int8)
        else:
            raise ConfigError(f"the info has no {MASK!r}, which it had at the first reset.")
        parts = observation if self._in_dict else {"observation": observation}
        return {**parts, MASK: np.concatenate([np.ravel(component) for component in masks])}

    def _step_arrays(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Step the environments in a loop."""
        chosen = self._single_actions(action)
        reward, terminated, truncated = self._results
        i = 0
        try:
            if self._fast_path and self.valid is None:
                observation = self._observation
                for i, env in enumerate(self.envs):
                    observation[i], reward[i], terminated[i], truncated[i], _ = env.step(chosen[i])
                return observation, reward, terminated, truncated
            for i, env in enumerate(self.envs):
                restarts = self.valid is not None
                step: Any = self._step_or_restart(i, chosen[i]) if restarts else env.step(chosen[i])
                if self.valid is not None:
                    self.valid[i] = step is not None
                    if step is None:  # the row keeps its observation
                        reward[i], terminated[i], truncated[i] = 0.0, False, True
                        continue
                if not self._checked:
                    check_step(step)
                value, reward[i], terminated[i], truncated[i], info = step
                over = step[2] or step[3]
                if self._mask_source is not None:
                    value = self._with_mask(i, value, info, over)
                self._write(self._observation, i, value, over, check=not self._checked)
        except (Exception, SystemExit) as error:
            reraise(error, self._location(i), "step")
        if not self._checked:
            self._checked = True
            self._fast_path = self._to_row is None
        return self._observation, reward, terminated, truncated

    def _step_or_restart(self, i: int, action: Any) -> tuple[Any, Any, Any, Any, Any] | None:
        """Step one environment, and make it anew if it fails; return the step, or None if it failed.

        After ``max_restarts`` failures the error is raised, and the collector reports non-finite values.
        """
        if self._restarts[i] >= self._max_restarts:
            return self.envs[i].step(action)
        try:
            step = self.envs[i].step(action)
            if _is_finite(step[0]) and _is_finite(step[1]):
                return step
            fault = "returned a non-finite observation or reward"
        except (Exception, SystemExit) as error:
            fault = f"raised {type(error).__name__} ({first_line(error)})"
        self._restarts[i] += 1
        warnings.warn(
            f"Environment {self._first_env + i} {fault}: it is made anew (restart {self._restarts[i]} of"
            f" {self._max_restarts}), and the return of its episode does not count.",
            stacklevel=2,
        )
        with contextlib.suppress(Exception):
            self.envs[i].close()
        self.envs[i] = self._make()
        # The count of this environment, so that its episodes do not depend on the failures of others.
        seed = derive_seed(self._seeds[i], "train", self._restarts[i])
        self._pending_resets[i] = self.envs[i].reset(seed=seed)
        return None

    def get_state(self) -> list[Row] | None:
        """Return states of classic control and MuJoCo environments."""
        states = [read_state(env) for env in self.envs]
        return None if None in states else states  # type: ignore[return-value]

    def set_state(self, states: list[Row]) -> None:
        """Restore the environments."""
        self._take_seeds()
        self._pending_resets.clear()
        for env, state in zip(self.envs, states, strict=True):
            restore_state(env, state)


def _is_finite(value: Any) -> bool:
    """Return whether all numbers of an observation or a reward are finite."""
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, tuple | list):
        return all(map(_is_finite, value))
    array = np.asarray(value)
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())


def make_registered(env_id: str, **env_kwargs: Any) -> gymnasium.Env:
    """Make an environment from Gymnasium's registry.

    Args:
        env_id: Id of the environment.
        **env_kwargs: Arguments of ``gymnasium.make``.

    Raises:
        ConfigError: The id is not registered, or the environment cannot be created.
        RuntimeError: The environment raised ``SystemExit``, which would end the process with exit code 0,
            like a complete run.
    """
    if env_id.startswith("dm_control/"):
        if "quadruped-escape" in env_id and sys.platform == "linux" and "DISPLAY" not in os.environ:
            os.environ.setdefault("MUJOCO_GL", "egl")  # its reset loads the terrain into a renderer
        import_extra("dm_control", extra="dm-control")
        import_extra("shimmy", extra="dm-control")  # registers the ids at import
        vars(np).setdefault("in1d", np.isin)  # quadrupeds of dm_control 1.0 call it, and NumPy 2.4 lacks it
    try:
        return gymnasium.make(env_id, disable_env_checker=True, **env_kwargs)
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        raise ConfigError(
            f"env_id {env_id!r} needs a package that is missing: {first_line(error)}"
        ) from error
    except (TypeError, ValueError, AssertionError, OSError) as error:
        raise ConfigError(f"data.env_kwargs does not fit env_id {env_id!r}: {first_line(error)}.") from error
    except SystemExit as error:
        raise RuntimeError(f"The environment {env_id!r} raised {error!r} while it was made.") from error
    except gymnasium.error.Error as error:
        if re.fullmatch(r"\w+(\.[\w<>]+)+", env_id):
            raise ConfigError(
                f"env_id {env_id!r} is a function: give the id of a registered environment."
            ) from error
        if "entry_point is not specified" in str(error):
            raise ConfigError(
                f"env_id {env_id!r} has a vectorized environment only: set data.backend to 'vectorized'."
            ) from error
        hint = nearest(env_id, list(gymnasium.registry)) or f": {first_line(error)}"
        raise ConfigError(f"env_id {env_id!r} is not an environment of Gymnasium{hint}") from error
    except Exception as error:
        error.add_note(f"{env_id}: the constructor raised this.")
        raise
