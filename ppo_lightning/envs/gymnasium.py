"""Gymnasium environments stepped in a loop, the fastest way for a small number of cheap ones."""

import functools
import itertools
import os
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from ppo_lightning.envs.atari import full_id, is_atari
from ppo_lightning.envs.batched import BatchedEnv, Copies, Step, actions_of, name_of, require_distinct
from ppo_lightning.envs.contract import (
    NUMBERS,
    casting_to,
    check_parts,
    check_step,
    describe,
    fitting,
    numbers_in,
    require_known,
    reraise,
)
from ppo_lightning.envs.restarts import RestartOnFailure
from ppo_lightning.envs.state import Row, read_state, restore_state
from ppo_lightning.errors import ConfigError, first_line, import_extra
from ppo_lightning.spaces.specs import MASK, choice_counts, spec_from_space
from ppo_lightning.utils.arguments import Range, check_arguments, copying, require_options

FALSE = np.False_  # the one object, as True and False of Python are


class Rows(list[Any]):
    """Views of the rows of observations, for fast writing. A copy of the environment has none."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Rows":
        return Rows()


class GymnasiumEnv(BatchedEnv):
    """N copies of a Gymnasium environment.

    A dictionary or tuple of observations or actions becomes one row, in the order of its space. This order is
    alphabetical unless the environment built its space from an ``OrderedDict``. An environment with a method
    ``action_masks()``, or with an ``action_mask`` in its ``info``, gets an entry ``action_mask`` in its
    observations.

    Return values are validated. Later steps of the usual kind are only compared with the first one, in 0.1
    microseconds.

    Args:
        make: Creates a new environment at each call.
        seeds: One seed per environment.
        first_env: Global index of the first environment, for messages.
        keeps_infos: Keep the infos of all steps, because transforms may end episodes.

    Example:
        >>> env = GymnasiumEnv(lambda: gymnasium.make("CartPole-v1"), [1, 2])
        >>> observation = env.reset_arrays()
        >>> step = env.step_arrays(np.array([0, 1]))
        >>> step.observation.shape, step.reward.tolist()
        ((2, 4), [1.0, 1.0])
    """

    info_names = ()

    def __init__(
        self,
        make: Callable[[], gymnasium.Env],
        seeds: list[int],
        first_env: int = 0,
        keeps_infos: bool = False,
    ) -> None:
        self.envs = [make() for _ in seeds]
        for env in self.envs:
            if not isinstance(env, gymnasium.Env):
                raise ConfigError(
                    f"env_id makes a {type(env).__name__}: it must make a Gymnasium environment, VectorEnv or"
                    " a TorchRL environment. Wrap another one in a gymnasium.Env (package shimmy)."
                )
        self._first_env = first_env
        first = self.envs[0]
        self._name = name_of(first)
        require_distinct(self.envs, self._name)
        space: Any = getattr(first, "observation_space", None)
        actions: Any = actions_of(first)
        count = sum(choice_counts(spec_from_space(actions)))
        # Source of masks that are not part of the observations.
        self._mask_source: Literal["method", "info"] | None = None
        self._lacks_mask = False  # whether the info of a reset could have a mask, and has none
        self._pending_resets: dict[int, tuple[Any, Any]] = {}  # results of resets that were made early
        name = "action_masks"
        if count and first.has_wrapper_attr(name) and callable(first.get_wrapper_attr(name)):
            self._mask_source = "method"
        elif count and not (isinstance(space, spaces.Dict) and MASK in space.spaces):
            # Only a reset shows whether `info` has masks. Keep its result for the first reset of the run.
            try:
                self._pending_resets[0] = check_parts(first.reset(seed=seeds[0]), "reset", 2)
            except (Exception, SystemExit) as error:
                reraise(error, self._location(0), "reset")
            _, info = self._pending_resets[0]
            self._mask_source = "info" if isinstance(info, Mapping) and MASK in info else None
            self._lacks_mask = self._mask_source is None
        if self._mask_source is not None:
            self._in_dict = isinstance(space, spaces.Dict)
            parts = space.spaces if isinstance(space, spaces.Dict) else {"observation": space}
            space = spaces.Dict({**parts, MASK: spaces.MultiBinary(count)})
        super().__init__(space, actions, seeds)
        self._steps = 0
        self._dtype: np.dtype | None = None  # of observations that passed the checks
        # Unlike NumPy's, an assignment to a memoryview refuses another shape, and it takes half of the time.
        is_plain = self.format.to_row is None and self._observation.ndim == 2
        self._rows = Rows([memoryview(row) for row in self._observation] if is_plain else [])
        self._keeps_infos = keeps_infos

    def reseed(self, seeds: list[int]) -> None:
        """Set the seeds of the next reset."""
        super().reseed(seeds)
        self._pending_resets = {}

    def set_attr(self, name: str, value: Any) -> None:
        """See :meth:`BatchedEnv.set_attr`. A reset before it is repeated."""
        super().set_attr(name, value)
        self._pending_resets = {}

    def reset_arrays(self, mask: np.ndarray | None = None) -> np.ndarray:
        """Reset and validate."""
        seeds = self._next_seeds.take()
        for i in range(self.num_envs) if mask is None else np.flatnonzero(mask).tolist():
            try:
                pending = self._pending_resets.pop(i, None)
                observation, info = pending or check_parts(self.envs[i].reset(seed=seeds[i]), "reset", 2)
                if self._mask_source is not None:
                    observation = self._with_mask(i, observation, info)
                self.format.write(self._observation, i, observation, check=True)
            except (Exception, SystemExit) as error:
                reraise(error, self._location(i), "reset")
        return self._observation

    def _location(self, i: int) -> str:
        return f"{self._name}, environment {self._first_env + i}"

    def _with_mask(self, i: int, observation: Any, info: Any, over: bool = False) -> dict[str, Any]:
        """Add the mask to an observation as the entry ``action_mask``.

        At an episode end, ones replace a mask that is missing or cannot be made.
        """
        if self._in_dict and not isinstance(observation, Mapping):
            return observation  # which is refused later
        from_method = self._mask_source == "method"
        try:
            # One mask for all components, or one per component.
            masks = self.envs[i].get_wrapper_attr("action_masks")() if from_method else info.get(MASK)
        except Exception:
            if not over:
                raise
            masks = None
        if masks is None and over:
            masks = np.ones(self.format.space[MASK].shape, np.int8)
        try:
            mask = np.concatenate([np.ravel(component) for component in masks])
        except (TypeError, ValueError):
            raise ConfigError(f"its {MASK} is {describe(masks)} and must be an array of numbers.") from None
        parts = observation if self._in_dict else {"observation": observation}
        return {**parts, MASK: mask}

    def _step_arrays(self, action: np.ndarray) -> Step:
        """Step the environments in a loop."""
        actions = self.format.actions(action)
        observation, rows, rewards = self._observation, self._rows, self._results[0]
        if keeps_infos := self._keeps_infos:
            self.infos.clear()
        dtype, seen, shape = observation.dtype, self._dtype, observation.shape[1:]
        self._steps = number = self._steps + 1
        reads_info = keeps_infos or number == 1
        self._flags.fill(False)
        i, answer = 0, ...
        try:
            for i, env in enumerate(self.envs):
                answer = ...  # of this step, or none if it raises
                answer = env.step(actions[i])
                value, reward, terminated, truncated, info = answer
                goes_on = terminated is False or terminated is FALSE
                goes_on = goes_on and (truncated is False or truncated is FALSE)
                is_usual = goes_on and type(reward) in NUMBERS and type(info) is dict
                is_usual = is_usual and not (reads_info and info)
                if is_usual and rows and type(value) is np.ndarray:
                    if value.dtype is dtype:
                        try:
                            rows[i][:] = value
                            rewards[i] = reward
                            continue
                        except (NotImplementedError, ValueError):  # another shape
                            pass
                    elif value.dtype is seen and value.shape == shape:
                        observation[i] = value
                        rewards[i] = reward
                        continue
                self._store(i, answer, check=number == 1)
        except (Exception, SystemExit) as error:
            reraise(error, self._location(i), "step", number, answer)
        return Step(observation, *self._results)

    def _store(self, i: int, answer: Any, check: bool) -> None:
        """Check and write what a step returned, if it is the first one or differs from it."""
        check_step(answer)
        value, reward, terminated, truncated, info = answer
        over = bool(terminated or truncated)
        if info and (over or self._keeps_infos):
            self.infos[i] = numbers_in(info)
        if self._mask_source is not None:
            value = self._with_mask(i, value, info, over)
        elif check and self._lacks_mask and MASK in info:
            raise ConfigError(f"the info of step() has an {MASK}, and that of reset() lacks it.")
        dtype = value.dtype if isinstance(value, np.ndarray) else None
        differs = self.format.to_row is None and dtype is not self._dtype
        self.format.write(self._observation, i, value, over, check or differs)
        target = self._observation.dtype  # integers of another type may not fit, and are compared each time
        if differs and dtype is not None and np.can_cast(dtype, target, casting_to(target)):
            self._dtype = dtype
        for array, result in zip(self._results, (reward, terminated, truncated, over), strict=True):
            array[i] = result

    def get_state(self) -> list[Row] | None:
        """Return states of classic control and MuJoCo environments."""
        states = [read_state(env) for env in self.envs]
        return None if None in states else states  # type: ignore[return-value]

    def set_state(self, states: list[Row]) -> None:
        """Restore the environments."""
        self._next_seeds.take()
        self._pending_resets.clear()
        for env, state in zip(self.envs, states, strict=True):
            restore_state(env, state)


def in_process(
    make: Callable[[], gymnasium.Env],
    seeds: list[int],
    first_env: int,
    keeps_infos: bool,
    max_restarts: Annotated[int, Range(0)],
) -> GymnasiumEnv:
    """Make a :class:`GymnasiumEnv` whose environments are made anew if they fail."""
    check_arguments(in_process, locals(), "data.env_kwargs")
    if not max_restarts:
        return GymnasiumEnv(make, seeds, first_env, keeps_infos)
    names = (f"Environment {number}" for number in itertools.count(first_env))
    return GymnasiumEnv(
        lambda: RestartOnFailure(make, max_restarts, next(names)), seeds, first_env, keeps_infos
    )


def make(env_id: str, copies: Copies, /, **env_kwargs: Any) -> BatchedEnv:
    """Make copies of an environment or of an Atari game for the backend ``gymnasium``.

    ``env_kwargs`` are those of ``gymnasium.make`` and ``max_restarts``, or of
    :class:`~ppo_lightning.envs.atari.AtariEnv`.
    """
    env_id = full_id(env_id)
    if is_atari(env_id):
        from ppo_lightning.envs.atari_backends import GymnasiumAtari

        require_options(GymnasiumAtari, f"{env_id} with data.backend 'gymnasium'", env_kwargs)
        return GymnasiumAtari(env_id, copies.seeds, **env_kwargs)
    if copies.render:
        env_kwargs["render_mode"] = "rgb_array"
    max_restarts = env_kwargs.pop("max_restarts", 0)
    make_one = copying(functools.partial(make_registered, env_id), env_kwargs)
    return copies.singles(make_one, copies.seeds, copies.first_env, copies.keeps_infos, max_restarts)


def make_registered(env_id: str, /, **env_kwargs: Any) -> gymnasium.Env:
    """Make an environment from Gymnasium's registry."""
    if env_id.startswith("dm_control/"):
        if "quadruped-escape" in env_id and sys.platform == "linux" and "DISPLAY" not in os.environ:
            os.environ.setdefault("MUJOCO_GL", "egl")  # its reset loads the terrain into a renderer
        import_extra("dm_control", extra="dm-control")
        import_extra("shimmy", extra="dm-control")  # registers the ids at import
        vars(np).setdefault("in1d", np.isin)  # quadrupeds of dm_control 1.0 call it, and NumPy 2.4 lacks it
    try:
        with fitting(env_id, env_kwargs, TypeError, ValueError, AssertionError, OSError):
            return gymnasium.make(env_id, disable_env_checker=True, **env_kwargs)
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        raise ConfigError(
            f"env_id {env_id!r} needs a package that is missing: {first_line(error)}"
        ) from error
    except gymnasium.error.Error as error:
        known = [] if env_id in gymnasium.registry else list(gymnasium.registry)
        require_known(env_id, known, "an environment of Gymnasium", first_line(error).rstrip("."))
        raise
    except Exception as error:
        error.add_note(f"{env_id}: the constructor raised this.")
        raise
