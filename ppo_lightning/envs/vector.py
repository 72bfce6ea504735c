"""Vectorized environments of Gymnasium's interface."""

import weakref
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.utils.seeding import np_random
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space

from ppo_lightning.envs.batched import BatchedEnv, Copies, Step, actions_of, name_of
from ppo_lightning.envs.contract import (
    check_observation,
    check_parts,
    check_step,
    fitting,
    require_action,
    reraise,
    store,
)
from ppo_lightning.errors import ConfigError
from ppo_lightning.spaces.rows import to_row
from ppo_lightning.spaces.specs import MASK, choice_counts
from ppo_lightning.utils.seeding import extend_seeds

MODE = "autoreset_mode"  # key of the metadata
BATCH = "batch of observations"
_adapted: weakref.WeakSet[VectorEnv] = weakref.WeakSet()


class GymnasiumVectorEnv(BatchedEnv):
    """A ``gymnasium.vector.VectorEnv`` without autoreset.

    The class depends on the autoreset mode:

    - ``DISABLED``: environments are reset by Gymnasium's option ``reset_mask``.
    - ``NEXT_STEP``: Gymnasium's ``SyncVectorEnv`` and ``AsyncVectorEnv`` with shared memory are reset by
      ``reset_mask``, too. Any other environment resets at the step after an episode end and ignores the
      action. Then ``resets_late`` is True, and these steps are not ``valid``.

    Dictionaries and tuples become rows, and return values are validated, as in
    :class:`~ppo_lightning.envs.gymnasium.GymnasiumEnv`. Action masks must be an entry ``action_mask`` of the
    observations.

    Args:
        envs: A new vectorized environment.
        seeds: One seed per environment. An environment whose ``reset`` refuses a list gets the first one.
            If the number of environments is another one, seeds are left out or added.

    Example:
        >>> env = GymnasiumVectorEnv(gymnasium.make_vec("CartPole-v1", num_envs=2), [1, 2])
        >>> env.reset_arrays().shape, env.resets_late
        ((2, 4), True)
    """

    info_names: Sequence[str] | None = ()

    def __init__(self, envs: VectorEnv, seeds: list[int]) -> None:
        self._name = name_of(envs)
        num_envs = envs.num_envs
        seeds = extend_seeds(seeds, num_envs)
        if envs.unwrapped in _adapted or envs.closed:
            raise ConfigError(f"env_id makes the same {self._name} at each call: it must make a new one.")
        _adapted.add(envs.unwrapped)
        self.envs = envs
        self.resets_late = _resets_late(envs, self._name)
        if self.resets_late:
            self.untransformable = "a vectorized environment that resets late: use AutoresetMode.DISABLED."
        super().__init__(envs.single_observation_space, actions_of(envs, "single_action_space"), seeds)
        self._batched_space = batch_space(self.format.space, num_envs)
        self._done = np.zeros(num_envs, bool)  # where the last step ended an episode
        self.valid = ~self._done if self.resets_late else None
        self._steps = 0

    def reset_arrays(self, mask: np.ndarray | None = None) -> np.ndarray:
        """Reset and validate. With ``resets_late``, a mask has no effect: the next step resets."""
        if mask is None:
            try:
                observation, info = check_parts(self._reset_all(), "reset", 2)
                self._store(observation, check=True)
                if self.format.mask is None and choice_counts(self.agent_specs[1]) and self._has_masks(info):
                    remedy = "it must be an entry of the observations"
                    raise ConfigError(f"{MASK} is in the info or a method: {remedy}.")
            except (Exception, SystemExit) as error:
                reraise(error, self._name, "reset")
            self._done = np.zeros(self.num_envs, bool)
        elif not self.resets_late:
            self._reset_masked(mask)
        return self._observation

    def _reset_all(self) -> tuple[Any, Any]:
        seeds: Any = self._next_seeds.take()
        if seeds[0] is None:
            return self.envs.reset()
        try:
            return self.envs.reset(seed=seeds)
        except Exception:
            if isinstance(self.envs.unwrapped, SyncVectorEnv | AsyncVectorEnv):
                raise
            return self.envs.reset(seed=seeds[0])  # VectorEnv promises to accept an integer only

    def _has_masks(self, info: Any) -> bool:
        """Return whether there are masks beside the observations: in an info, or by a method."""
        envs = self.envs.unwrapped
        if isinstance(envs, SyncVectorEnv):
            return MASK in info or envs.envs[0].has_wrapper_attr("action_masks")
        return MASK in info or hasattr(envs, "action_masks")

    def _reset_masked(self, mask: np.ndarray) -> None:
        if not mask.any():
            return
        previous = self._observation[~mask]
        try:
            # Gymnasium removes the mask from the options.
            answer = self.envs.reset(options={"reset_mask": np.array(mask)})
            observation, _ = check_parts(answer, "reset", 2)
            self._store(observation, check=True)
        except (Exception, SystemExit) as error:
            reraise(error, self._name, "reset")
        # A wrapper may transform the other observations again, for example with new statistics.
        if self.envs.unwrapped is self.envs and not np.array_equal(self._observation[~mask], previous):
            raise ConfigError(
                f"{self._name}: reset with reset_mask changed observations outside of the mask."
            )
        self._observation[~mask] = previous

    def _step_arrays(self, action: np.ndarray) -> Step:
        convert = self.format.from_row or self.format.actions
        self._steps = number = self._steps + 1
        try:
            answer = self.envs.step(convert(action))
            check_step(answer, self.num_envs)
            observation, reward, terminated, truncated, info = answer
            self.infos["all"] = info
            reward = np.asarray(reward)
            terminated = np.asarray(terminated, bool)
            truncated = np.asarray(truncated, bool)
            done = terminated | truncated
            if self.resets_late:  # where an episode ended before this step, it only resets
                self.valid = ~self._done
                if (self._done & done).any():
                    raise ConfigError(f"an episode ended at the step that resets it: is {MODE!r} right?")
                reward = np.where(self.valid, reward, 0)
            self._store(observation, done, check=number == 1)
        except (Exception, SystemExit) as error:
            reraise(error, self._name, "step", number)
        self._done = done
        return Step(self._observation, reward, terminated, truncated, done)

    def _store(self, observation: Any, done: np.ndarray | None = None, check: bool = False) -> None:
        """Write observations to the rows. Where an episode is ``done`` [N], the mask may allow no action."""
        try:
            if self.format.to_row is None:
                rows = np.asarray(observation)
            else:
                rows = to_row(self.format.space, observation, (self.num_envs,))
            if check or rows.shape != self._observation.shape or rows.dtype.kind not in "biuf":
                check_observation(observation, self._batched_space, BATCH)
            store(self._observation, rows.reshape(self._observation.shape))
        except Exception:
            check_observation(observation, self._batched_space, BATCH)
            raise
        if self.format.mask is not None:
            useless = self.format.forbids_all(self._observation)
            require_action(not useless.any() or (done is not None and not (useless & ~done).any()))
            # A final observation has a value, and if resets are late, the policy acts once more.
            self._observation[:, self.format.mask][useless] = 1

    def render(self) -> np.ndarray | None:
        """Return a picture of the first environment."""
        frames: Any = self.envs.render() if self.envs.render_mode == "rgb_array" else None
        return None if frames is None or frames[0] is None else np.asarray(frames[0])

    def close(self) -> None:
        """Close the environments, and end processes that hang."""
        super().close()
        for process in getattr(self.envs.unwrapped, "processes", ()):
            if process.is_alive():  # it hangs, or another has died and Gymnasium waits for its answer
                process.kill()
                process.join()


def _resets_late(envs: VectorEnv, name: str) -> bool:
    """Return whether finished environments reset at their next step, instead of by mask."""
    mode = envs.metadata.get(MODE)
    is_late = mode in (AutoresetMode.NEXT_STEP, AutoresetMode.NEXT_STEP.value)
    if not is_late and mode not in (AutoresetMode.DISABLED, AutoresetMode.DISABLED.value):
        remedy = "make it with AutoresetMode.DISABLED or NEXT_STEP, which keep the final observation"
        raise ConfigError(f"{name} has the metadata[{MODE!r}] {mode}: {remedy}.")
    # Wrappers and subclasses may keep a state of their own, which a reset by mask does not reach. Workers
    # without shared memory reset twice.
    is_sync = type(envs) is SyncVectorEnv
    is_async = type(envs) is AsyncVectorEnv and envs.shared_memory and envs.worker is None
    return is_late and not (is_sync or is_async)


class CartPoleEnv(GymnasiumVectorEnv):
    """N copies of CartPole with episodes bit-identical to those of N single environments.

    Gymnasium's class draws all initial states from one generator. Here each copy has a generator of its own.

    Example:
        >>> env = CartPoleEnv(gymnasium.make_vec("CartPole-v1", 3, "vector_entry_point"), [1, 2, 3])
        >>> env.reset_arrays().shape
        (3, 4)
    """

    envs: Any
    info_names = None

    def __init__(self, envs: VectorEnv, seeds: list[int]) -> None:
        super().__init__(envs, seeds)
        self.envs = envs.unwrapped
        self.resets_late, self.untransformable, self.valid = False, "", None
        self.envs.reset()
        self.reseed(seeds)

    def reseed(self, seeds: list[int]) -> None:
        """Create one generator per seed."""
        self._generators = [np_random(seed)[0] for seed in seeds]

    def reset_arrays(self, mask: np.ndarray | None = None) -> np.ndarray:
        """Draw initial states."""
        for i in range(self.num_envs) if mask is None else np.flatnonzero(mask):
            self.envs.state[:, i] = self._generators[i].uniform(self.envs.low, self.envs.high, 4)
            self.envs.steps[i] = 0
        return self.envs.state.T.astype(np.float32)

    def _step_arrays(self, action: np.ndarray) -> Step:
        self.envs.prev_done[:] = False  # disables the autoreset
        observation, reward, terminated, truncated, _ = self.envs.step(action)
        return Step(observation, reward, terminated, truncated, terminated | truncated)


def make(env_id: str, copies: Copies, /, **env_kwargs: Any) -> GymnasiumVectorEnv:
    """Make the environment that is registered as ``vector_entry_point``, for the backend ``vectorized``."""
    if copies.render:
        env_kwargs["render_mode"] = "rgb_array"
    errors = (TypeError, ValueError, AssertionError, ImportError, gymnasium.error.Error)
    with fitting(env_id, env_kwargs, *errors):
        envs = gymnasium.make_vec(env_id, len(copies.seeds), "vector_entry_point", **env_kwargs)
    is_cartpole = type(envs.unwrapped) is CartPoleVectorEnv
    return CartPoleEnv(envs, copies.seeds) if is_cartpole else GymnasiumVectorEnv(envs, copies.seeds)
