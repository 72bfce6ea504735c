"""Base class of natively batched environments: arrays for the fast collector, TensorDicts for TorchRL."""

import copy
import functools
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase, ParallelEnv, SerialEnv, TransformedEnv

from ppo_lightning import private
from ppo_lightning.envs.contract import check_observation, require_action, store
from ppo_lightning.errors import ConfigError
from ppo_lightning.spaces.rows import EXACT, from_row, raw_dtype, to_row
from ppo_lightning.spaces.specs import (
    cells_as_choices,
    choice_counts,
    join_vectors,
    mask_columns,
    row_spec,
    spec_from_space,
    stored,
    unsupported,
    with_axis,
    without_text,
)
from ppo_lightning.utils.seeding import Stream, derive_seed
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


class BatchedEnv(EnvBase):
    """N environments that step together.

    This package's collector calls :meth:`reset_arrays` and :meth:`step_arrays`. TorchRL's collectors,
    rollouts and transforms use the same object as an ``EnvBase`` of batch size [N]. There is no autoreset:
    ``step`` returns the final observation of a finished episode, and the caller resets by mask. The only
    exception are environments with ``resets_late``.

    Args:
        observation_space: Observation space of one environment. A dictionary or tuple becomes one row.
        action_space: Action space of one environment.
        seeds: One seed per environment, N in total.

    Example:
        >>> from ppo_lightning.envs import make_env
        >>> env = make_env("CartPole-v1", num_envs=2, seed=1)
        >>> env.reset_arrays().shape
        (2, 4)
        >>> env.rollout(3)["next", "reward"].shape
        torch.Size([2, 3, 1])
    """

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
        super().__init__(device="cpu", batch_size=[len(seeds)])
        # Space of an observation as the environment returns it, and spaces of its row and of the actions.
        self.unjoined_space: Any = cells_as_choices(observation_space)
        self.spaces = join_vectors(self.unjoined_space), with_axis(action_space)
        # TorchRL sets this flag only at the first reset, and `close` skips a closed environment.
        self.is_closed = False
        self.num_envs = len(seeds)
        flag = Categorical(2, shape=(1,), dtype=torch.bool)
        # What agents are built from, part by part. Arrays hold all parts in one row, see `columns`.
        if not without_text(action_space):
            raise unsupported(action_space)
        self.agent_specs = spec_from_space(self.spaces[0]), spec_from_space(self.spaces[1])
        observation_spec, action_spec = self.agent_specs
        row = stored(observation_spec)
        raw: Any = torch.empty(0, dtype=row.dtype).numpy().dtype
        if isinstance(self.spaces[0], spaces.Box) or row.dtype.is_floating_point:
            raw = raw_dtype(self.spaces[0])  # statistics need its precision
        self._tensor_dtype = row.dtype
        if row.dtype.is_floating_point:
            # float32 would round large numbers, which the environment returns with more digits.
            bounds = (row.space.low, row.space.high) if isinstance(row, Bounded) else ()
            if raw.itemsize == 8 and any(bound.abs().max() > EXACT for bound in bounds):
                self._tensor_dtype = torch.float64
            row = Unbounded(row.shape, dtype=row.dtype)  # many environments declare rough bounds
        self.observation_spec_unbatched = Composite(observation=row.clone())
        self.action_spec_unbatched = (
            row_spec(action_spec) if isinstance(action_spec, Composite) else action_spec.clone()
        )
        self._bounds: tuple[np.ndarray, np.ndarray] | None = None
        space: Any = self.spaces[1]
        if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
            self._bounds = space.low, space.high
        self.reward_spec_unbatched = Unbounded(shape=(1,), dtype=torch.float32)
        self.done_spec_unbatched = Composite(done=flag, terminated=flag.clone(), truncated=flag.clone())
        self._seeds_to_use: Sequence[int | None] = list(seeds)
        self.infos: dict[Any, Any] = {}  # row -> numbers at an episode end, or "all" -> the last info
        # What a step returns: observations, rewards and flags, for adapters that write row by row.
        self._observation = np.zeros((self.num_envs, *row.shape), raw)
        self._flags = np.zeros((3, self.num_envs), bool)
        self._results = np.zeros(self.num_envs), *self._flags  # terminated, truncated and over
        # Conversions from observations and to actions of an environment. None: rows are used as they are.
        is_box = isinstance(self.unjoined_space, spaces.Box) and self.unjoined_space is self.spaces[0]
        self._to_row = None if is_box else functools.partial(to_row, self.unjoined_space)
        is_simple = isinstance(space, spaces.Box | spaces.Discrete) and space is action_space
        self._from_row = None if is_simple else functools.partial(from_row, action_space)
        # Columns of the masks in a row, and where the masks of the components of an action begin.
        self._mask = mask_columns(observation_spec)
        self._component_starts = np.cumsum([0, *choice_counts(action_spec)])[:-1]

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
        if self._bounds is not None:
            low, high = self._bounds
            # detail 27
            action = np.minimum(np.maximum(action, low), high)
        return self._step_arrays(action)

    def set_attr(self, name: str, value: Any) -> None:
        """Set an attribute of each environment, see :func:`set_attribute`."""
        for env in self.envs if isinstance(self.envs, list) else getattr(self.envs, "envs", [self.envs]):
            set_attribute(env, name, value)

    def render(self) -> np.ndarray | None:
        """Return a picture of the first environment, [H, W, 3] uint8, or None without rendering.

        Environments of Gymnasium and PettingZoo need ``render_mode="rgb_array"``.
        """
        frame: Any = self.envs[0].render() if isinstance(self.envs, list) and self.envs else None
        return None if frame is None else np.asarray(frame)

    def learning_reward(self, reward: np.ndarray) -> np.ndarray:
        """Return the rewards for training, [N], of those of a step, whose unchanged sums are the returns."""
        return reward

    @abstractmethod
    def _step_arrays(self, action: np.ndarray) -> Step:
        """Step every environment once with actions inside their bounds, see :meth:`step_arrays`."""

    def _take_seeds(self) -> Sequence[int | None]:
        """Return the seeds of this reset, [N]: those of :meth:`reseed` once, and then None."""
        seeds, self._seeds_to_use = self._seeds_to_use, [None] * self.num_envs
        return seeds

    def _single_actions(self, action: np.ndarray) -> Any:
        """Return actions [N, ...] as the single environments take them: of the type of their space."""
        if self._from_row is not None:
            return [self._from_row(row) for row in action]
        dtype = self.spaces[1].dtype
        return action if action.dtype is dtype else action.astype(dtype)

    def _write(
        self, target: np.ndarray, i: int, observation: Any, over: bool = False, check: bool = False
    ) -> None:
        """Write an observation of a single environment to row ``i`` of ``target`` [N, ...].

        It is validated against the space if ``check`` says so, or if its shape is another one. Unless the
        episode is ``over``, the mask must allow an action.
        """
        try:
            row = observation if self._to_row is None else self._to_row(observation)
            if check or np.shape(row) != target.shape[1:]:  # NumPy would broadcast some of them
                check_observation(observation, self.unjoined_space)
                row = np.reshape(row, target.shape[1:])
            store(target[i : i + 1], row)
        except Exception:
            check_observation(observation, self.unjoined_space)
            raise
        if self._mask is not None and self._forbids_all(target[i : i + 1])[0]:
            require_action(over)
            target[i, self._mask] = 1  # the value of a final observation may be that of its best action

    def _forbids_all(self, rows: np.ndarray) -> np.ndarray:
        """Return where a mask in observations [N, D] allows no action, [N] bool."""
        masks: np.ndarray = rows[:, self._mask] > 0
        allowed = np.logical_or.reduceat(masks, self._component_starts, axis=1)
        return np.logical_not(allowed.all(axis=1))

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: object) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        if mask is not None:
            mask = mask.reshape(self.num_envs).numpy()
        observation = torch.tensor(self.reset_arrays(mask), dtype=self._tensor_dtype)
        flags = self.full_done_spec.zero()
        return TensorDict({"observation": observation, **flags}, batch_size=self.batch_size)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        step = self.step_arrays(tensordict["action"].numpy(force=True))
        columns = {
            "reward": torch.tensor(step.reward, dtype=torch.float32),
            "terminated": torch.tensor(step.terminated),
            "truncated": torch.tensor(step.truncated),
            "done": torch.tensor(step.terminated | step.truncated),
        }
        following = {key: values.unsqueeze(-1) for key, values in columns.items()}
        following["observation"] = torch.tensor(step.observation, dtype=self._tensor_dtype)
        return TensorDict(following, batch_size=self.batch_size)

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            self.reseed([derive_seed(seed, "train", index) for index in range(self.num_envs)])

    def reseed(self, seeds: list[int]) -> None:
        """Set the seeds for the next full reset, one per environment."""
        self._seeds_to_use = list(seeds)

    def get_state(self) -> list[dict[str, Any]] | None:
        """Return N dictionaries of arrays and plain types, from which ``set_state`` restores the episodes.

        None: the state is not accessible.
        """
        return None

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close the environments and stop their threads."""
        if not self.is_closed:
            self._close_envs()
        super().close(raise_if_closed=raise_if_closed)

    def _close_envs(self) -> None:
        for env in self.envs if isinstance(self.envs, list | tuple) else [self.envs]:
            try:
                with time_limit(CLOSE_SECONDS):
                    env.close()
            except (Exception, SystemExit) as error:  # the run goes on, or ends with its own error
                warnings.warn(f"{name_of(env)}: close() raised {error!r}.", stacklevel=2)


def untransformed(env: Any) -> Any:
    """Return the environment below TorchRL's transforms."""
    return env.base_env if isinstance(env, TransformedEnv) else env


def set_attribute(env: Any, name: str, value: Any) -> None:
    """Set an attribute of an environment, or of the wrapper around it that has the attribute."""
    value = copy.deepcopy(value)
    if isinstance(env, SerialEnv):
        for one in private.copies_in(env):
            set_attribute(untransformed(one), name, value)
        return
    if isinstance(env, gymnasium.Env):
        is_set = env.set_wrapper_attr(name, value, force=False)
    elif is_set := hasattr(env, name) and not isinstance(env, ParallelEnv):  # which would keep it to itself
        setattr(env, name, value)
    if not is_set:
        raise ConfigError(f"{type(env).__name__} has no attribute {name!r}, which data.set_attr needs.")


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
    while isinstance(inner, gymnasium.Wrapper | gymnasium.vector.VectorWrapper):
        if type(inner).__name__ == "ClipAction":
            return getattr(inner.env, attribute, None)
        if getattr(inner, attribute) is not getattr(inner.env, attribute):
            break
        inner = inner.env
    if isinstance(inner, gymnasium.vector.SyncVectorEnv):
        return actions_of(inner.envs[0])
    return getattr(env, attribute, None)
