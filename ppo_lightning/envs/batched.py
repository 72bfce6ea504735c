"""The contract of environments that step together as arrays."""

import copy
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv, VectorWrapper
from torchrl.data import Composite
from torchrl.envs import ParallelEnv

from ppo_lightning.envs.row_format import RowFormat
from ppo_lightning.errors import ConfigError
from ppo_lightning.utils.seeding import Stream
from ppo_lightning.utils.watch import time_limit

CLOSE_SECONDS = 10.0


class Copies(NamedTuple):
    """What a ``make`` of an adapter is asked for."""

    seeds: list[int]  # one per environment
    first_env: int  # global index of the first environment
    stream: Stream
    render: bool  # whether the first environment must be able to render
    keeps_infos: bool  # whether the infos of all steps are kept, because transforms may end episodes
    singles: Callable[..., "BatchedEnv"]  # makes a batch of single environments, as `in_process` does


class Step(NamedTuple):
    """What a step of N environments returns, arrays [N, ...], valid until the next call.

    Attributes:
        observation: Next observations. At episode ends, the final ones: nothing resets itself.
        reward: Rewards, the environment's own.
        terminated: Where the flow of rewards ended.
        truncated: Where the episode was cut off, for example by a time limit.
        over: Where the episode ended. In an Atari game, the loss of a life terminates, and is not the end.
    """

    observation: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    over: np.ndarray


class Seeds:
    """Seeds of N environments for their next reset, and none after it."""

    def __init__(self, seeds: list[int]) -> None:
        self._seeds: Sequence[int | None] = list(seeds)

    def take(self) -> Sequence[int | None]:
        """Return the seeds [N], and N times None from the second call on."""
        seeds, self._seeds = self._seeds, [None] * len(self._seeds)
        return seeds


class BatchedEnv(ABC):
    """N environments that step together as arrays.

    There is no autoreset: a step returns the final observation of a finished episode, and the caller resets
    by mask. The only exception are environments with ``resets_late``. Who makes environments closes them.
    :class:`~ppo_lightning.envs.torchrl.TorchRLEnv` is their view for TorchRL.

    An adapter makes ``envs``, calls this constructor, and implements :meth:`reset_arrays` and
    :meth:`_step_arrays`. It may write its rows with ``format`` to ``_observation`` and ``_results``.

    Args:
        observation_space: Observation space of one environment. A dictionary or tuple becomes one row.
        action_space: Action space of one environment.
        seeds: One seed per environment, N in total.

    Example:
        >>> from ppo_lightning.envs import EnvFactory
        >>> env = EnvFactory("CartPole-v1").make(num_envs=2, seed=1)
        >>> env.reset_arrays().shape
        (2, 4)
        >>> env.step_arrays(np.array([0, 1])).reward.tolist()
        [1.0, 1.0]
    """

    is_closed = True  # before the constructor
    envs: Any = ()  # one vector environment, or a list of single environments
    action_names: Sequence[str] | None = None  # names of discrete actions
    render_fps: float | None = None  # frame rate of a video in real time; None: that of `envs`
    flags_time_limits = True  # whether a time limit sets `truncated`, not `terminated`
    untransformable = ""  # why TorchRL transforms do not work, as the end of a sentence; empty if they work
    # Whether an environment resets at the step after an episode end, ignoring the action, so that this step
    # does not count (`valid`). Until then `reset_arrays(mask)` returns the final observation.
    resets_late = False
    info_names: Sequence[str] | None = None  # numbers in `infos`. None: there are no infos
    # False where the last step does not count, [N]: the environment failed or only reset, or its agent is
    # dead. None: all steps of these environments count.
    valid: np.ndarray | None = None
    set_state: Callable[[list[dict[str, Any]]], None]  # of environments with a state, see `get_state`

    def __init__(self, observation_space: spaces.Space, action_space: spaces.Space, seeds: list[int]) -> None:
        self.format = RowFormat(observation_space, action_space)
        self.spaces, self.agent_specs = self.format.spaces, self.format.agent_specs
        # Specs of rows, under the names of TorchRL's environments.
        self.observation_spec_unbatched = Composite(observation=self.format.observation_spec)
        self.action_spec_unbatched = self.format.action_spec
        self.num_envs = len(seeds)
        self.batch_size = torch.Size([self.num_envs])
        self.is_closed = False
        self.infos: dict[Any, Any] = {}  # row -> numbers at an episode end, or "all" -> the last info
        self._next_seeds = Seeds(seeds)
        # What a step returns: observations, rewards and flags, for adapters that write row by row.
        self._observation = np.zeros((self.num_envs, *self.format.observation_spec.shape), self.format.dtype)
        self._flags = np.zeros((3, self.num_envs), bool)
        self._results = np.zeros(self.num_envs), *self._flags  # terminated, truncated and over

    @abstractmethod
    def reset_arrays(self, mask: np.ndarray | None = None) -> np.ndarray:
        """Start new episodes.

        Args:
            mask: Environments to reset, [N] bool. None resets all.

        Returns:
            Observations of all N environments, [N, ...], valid until the next call.
        """

    def step_arrays(self, action: np.ndarray) -> Step:
        """Step every environment once. A finished environment must be reset before the next step.

        Args:
            action: Actions, [N, ...]. Continuous actions are clipped to their bounds, in a copy.
        """
        if self.format.bounds is not None:
            low, high = self.format.bounds
            # detail 27
            action = np.minimum(np.maximum(action, low), high)
        return self._step_arrays(action)

    @abstractmethod
    def _step_arrays(self, action: np.ndarray) -> Step:
        """Step every environment once with actions inside their bounds, see :meth:`step_arrays`."""

    def learning_reward(self, reward: np.ndarray) -> np.ndarray:
        """Return the rewards for training, [N], of those of a step, whose unchanged sums are the returns."""
        return reward

    def reseed(self, seeds: list[int]) -> None:
        """Set the seeds for the next full reset, one per environment."""
        self._next_seeds = Seeds(seeds)

    def set_attr(self, name: str, value: Any) -> None:
        """Set an attribute of each environment, see :func:`set_attribute`."""
        for env in self.envs if isinstance(self.envs, list) else [self.envs]:
            set_attribute(env, name, value)

    def get_state(self) -> list[dict[str, Any]] | None:
        """Return N dictionaries of arrays and plain types, from which ``set_state`` restores the episodes.

        None: the state is not accessible.
        """
        return None

    def render(self) -> np.ndarray | None:
        """Return a picture of the first environment, [H, W, 3] uint8, or None without rendering.

        Environments of Gymnasium and PettingZoo need ``render_mode="rgb_array"``.
        """
        frame: Any = self.envs[0].render() if isinstance(self.envs, list) and self.envs else None
        return None if frame is None else np.asarray(frame)

    def close(self) -> None:
        """Close the environments and stop their threads. A second call has no effect."""
        if not self.is_closed:
            close_all(self.envs)
        self.is_closed = True


def close_all(envs: Any) -> None:
    """Close a vector environment, or a list of environments, and warn of errors."""
    for env in envs if isinstance(envs, list | tuple) else [envs]:
        try:
            with time_limit(CLOSE_SECONDS):
                env.close()
        except (Exception, SystemExit) as error:  # the run goes on, or ends with its own error
            warnings.warn(f"{name_of(env)}: close() raised {error!r}.", stacklevel=2)


def set_attribute(env: Any, name: str, value: Any) -> None:
    """Set an attribute of an environment, or of the wrapper around it that has the attribute.

    The environments of one vector environment get copies of the value.
    """
    inner = [env.env] if isinstance(env, VectorWrapper) else getattr(env, "envs", ())
    if inner and isinstance(env, VectorEnv) and not has_itself(env, name):
        for one in inner:
            set_attribute(one, name, value)
        return
    value = copy.deepcopy(value)
    if isinstance(env, gymnasium.Env):
        is_set = env.set_wrapper_attr(name, value, force=False)
    elif isinstance(env, AsyncVectorEnv):
        if is_set := all(env.call("has_wrapper_attr", name)):
            env.set_attr(name, value)
    elif is_set := hasattr(env, name) and not isinstance(env, ParallelEnv):  # which would keep it to itself
        setattr(env, name, value)
    if not is_set:
        raise ConfigError(f"{type(env).__name__} has no attribute {name!r}, which data.set_attr needs.")


def has_itself(env: Any, name: str) -> bool:
    """Return whether a wrapper has an attribute of its own, and not that of the environment in it."""
    return name in vars(env) or hasattr(type(env), name)


def metadata_of(env: Any) -> Mapping[str, Any]:
    """Return the metadata of an environment, which may have none."""
    return getattr(env, "metadata", None) or {}


def name_of(env: Any) -> str:
    """Return the id or name of an environment of Gymnasium or PettingZoo, or the name of its class."""
    name = getattr(getattr(env, "spec", None), "id", None) or metadata_of(env).get("name")
    return name if isinstance(name, str) else type(getattr(env, "unwrapped", env)).__name__


def require_distinct(envs: Iterable[Any], name: str) -> None:
    """Raise a ConfigError if two environments are the same object, or have other spaces."""
    bases = [env.unwrapped for env in envs]
    problem = ""
    if len({id(base) for base in bases}) < len(bases):
        problem = f"the same {name} at each call: it must make a new one"
    for field in ("action_space", "observation_space"):
        spaces_of = [x if isinstance(x := getattr(env, field, None), spaces.Space) else None for env in envs]
        # Bounds of observations may be rough.
        kinds = [x if field == "action_space" else (type(x), getattr(x, "shape", None)) for x in spaces_of]
        if number := next((i for i, kind in enumerate(kinds) if kind != kinds[0]), 0):
            problem = f"environments with the {field} {spaces_of[0]} and {spaces_of[number]}: it must be one"
    if problem:
        raise ConfigError(f"env_id makes {problem}.")


def begin_with(first: Any, make: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that returns the first object at its first call, and later ones from ``make``."""
    created = [first]
    return lambda: created.pop() if created else make()


def actions_of(env: Any, attribute: str = "action_space") -> Any:
    """Return the action space of an environment, with the bounds that a ``ClipAction`` around it hides.

    Gymnasium's ``ClipAction`` declares infinite bounds. This package clips actions itself, and needs them.
    """
    inner = env
    while isinstance(inner, gymnasium.Wrapper | VectorWrapper):
        if type(inner).__name__ == "ClipAction":
            return getattr(inner.env, attribute, None)
        if getattr(inner, attribute) is not getattr(inner.env, attribute):
            break
        inner = inner.env
    if isinstance(inner, SyncVectorEnv):
        return actions_of(inner.envs[0])
    return getattr(env, attribute, None)
