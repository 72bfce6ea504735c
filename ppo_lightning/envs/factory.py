"""Factories that turn an id or a function into N environments that step together."""

import contextlib
import functools
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, Literal, NamedTuple

import gymnasium
import torch
from torch.nn.parameter import UninitializedBuffer, is_lazy
from torchrl.envs import Compose, EnvBase, SerialEnv, Transform, TransformedEnv

from ppo_lightning.envs.atari import ATARI_ID, full_id
from ppo_lightning.envs.batched import BatchedEnv, begin_with
from ppo_lightning.envs.gymnasium import GymnasiumEnv
from ppo_lightning.envs.specs import Specs, specs_of
from ppo_lightning.envs.vector import GymnasiumVectorEnv
from ppo_lightning.errors import ConfigError, first_line, nearest
from ppo_lightning.utils.seeding import Stream, derive_seed, isolated

SUCCESS = "is_success"  # in the info at the end of an episode
NO_LIMIT = 2**31 - 1  # EnvPool's time limit of board games
Backend = Literal["gymnasium", "vectorized", "torch", "envpool", "procgen", "pettingzoo"]


# Modules and classes, imported on first use, because EnvPool's import alone takes a second.
BACKENDS = {
    "gymnasium": "gymnasium:GymnasiumEnv",
    "vectorized": "vector:make_vectorized",
    "torch": "torch_env:TorchEnv",
    "envpool": "envpool:EnvPoolEnv",
    "procgen": "procgen:ProcgenEnv",
}
ATARI = {"gymnasium": "atari_backends:GymnasiumAtari", "envpool": "atari_backends:EnvPoolAtari"}
WORKERS = {"process": "workers:Worker", "ray": "ray_workers:RayWorker"}
RENDERED_BY: dict[str, Backend] = {"torch": "gymnasium", "envpool": "gymnasium"}  # with the same ids


class Batch(NamedTuple):
    """Environments that step together, see :meth:`EnvFactory.make`."""

    seeds: list[int]
    first_env: int
    render: bool
    num_workers: int


@dataclass(frozen=True)
class EnvFactory:
    """Factory of environments for training, evaluation, video and export.

    Args:
        env_id: Id of the environment as the backend spells it, or a function that creates a new environment
            of Gymnasium, TorchRL or PettingZoo, or a new ``gymnasium.vector.VectorEnv``, at each call. A
            function with the parameters ``num_envs``, ``seed``, ``seeds`` or ``first_env`` gets the number of
            environments that step together, the seed of the first one, one seed for each and the global index
            of the first one.
            These values are the same at each call of a function that creates single environments.
        backend: A key of ``BACKENDS``.
        env_kwargs: Arguments of the backend's own ``make``, including ``max_episode_steps``. For Atari games,
            options of :class:`~ppo_lightning.envs.atari.AtariEnv`. For a function, its arguments, which take
            precedence.
        transforms: TorchRL transforms, copied for each batch of environments.
        num_workers: Number of workers that step the environments, 0 for this process. There are at most as
            many as environments.
        step_timeout: Maximum duration of a step in these workers in seconds; None: no limit.
        log_info: Names of numbers in the infos at episode ends; the first one may be missing.
        worker_backend: A key of ``WORKERS``.

    Example:
        >>> env = EnvFactory("CartPole-v1").make(num_envs=4, seed=1)
        >>> env.batch_size
        torch.Size([4])
    """

    env_id: str | Callable[..., Any]
    backend: Backend = "gymnasium"
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    transforms: Sequence[Transform] = ()
    num_workers: int = 0
    step_timeout: float | None = None
    log_info: Sequence[str] = (SUCCESS,)
    worker_backend: str = "process"

    def make(
        self,
        num_envs: int = 1,
        seed: int = 1,
        first_env: int = 0,
        stream: Stream = "train",
        render: bool = False,
    ) -> EnvBase:
        """Make N environments as one TorchRL environment of batch size [N].

        Args:
            num_envs: Number of environments N. In PettingZoo's games of players who act at once, each player
                is a row, and the stream ``eval`` completes the last game.
            seed: Seed of the run, from which each environment gets its own seed, see
                :func:`~ppo_lightning.utils.seeding.derive_seed`.
            first_env: Global index of the first environment, for runs with several ranks.
            stream: ``train`` or ``eval``. The two streams have different episodes for the same seed.
            render: Make the first environment able to render, see :meth:`BatchedEnv.render`.

        Returns:
            The environments.

        Raises:
            ConfigError: The environment or an extra does not exist, the function returns another type or
                number of environments, or ``num_workers`` does not fit.
            RuntimeError: An environment raised ``SystemExit``.
        """
        num_workers = min(self.num_workers, num_envs)
        if render or (stream == "eval" and num_workers == 1):  # which is no faster
            num_workers = 0
        env_kwargs = dict(self.env_kwargs)
        if stream == "eval":  # matches begin at the first position
            env_kwargs.pop("opening_moves", None)
        seeds = [derive_seed(seed, stream, index) for index in range(first_env, first_env + num_envs)]
        batch = Batch(seeds, first_env, render, num_workers)
        try:
            if self.backend == "pettingzoo":
                env: EnvBase = games().make_games(self.env_id, seeds, render, **env_kwargs)
            elif isinstance(self.env_id, str):
                env = self._from_id(self.env_id, env_kwargs, batch)
            else:
                env = self._from_function(self.env_id, env_kwargs, batch)
        except SystemExit as error:  # would end the process with exit code 0, like a complete run
            raise RuntimeError(f"An environment of data.env_id raised {error!r} when it was made.") from error
        players = getattr(env, "rows_per_game", 1)
        must_fit = stream == "train" or (render and players == 1)
        if must_fit and env.batch_size != torch.Size([num_envs]):
            env.close()
            remedy = "the function should take num_envs"
            if players > 1:
                remedy = f"set data.num_envs to a multiple of the {players} players of a game"
            raise ConfigError(
                f"env_id makes environments of batch size {list(env.batch_size)}, and [{num_envs}] is needed"
                f" on each rank: {remedy}."
            )
        if self.num_workers and not isinstance(env, GymnasiumEnv | _import_class("workers:WorkerEnv")):
            env.close()
            raise ConfigError(
                f"data.num_workers is {self.num_workers} and must be 0 for {type(env).__name__}: workers step"
                " single environments of the backend 'gymnasium'."
            )
        if isinstance(env, BatchedEnv) and env.info_names is not None:
            env.info_names = self.log_info
        elif self.log_info[1:]:
            env.close()
            raise ConfigError(f"data.log_info: {type(env).__name__} has no infos, leave it out.")
        if self.transforms:
            transforms = [*_single(self.transforms)]
            if stream == "train" and isinstance(env, BatchedEnv) and not env.untransformable:
                self._try(transforms, 2 if self.num_workers or isinstance(env, GymnasiumEnv) else num_envs)
            env = TransformedEnv(env, Compose(*map(copy_of, transforms)))
        return env

    def _try(self, transforms: list[Transform], num_envs: int) -> None:
        """Step other environments with one transform more at a time.

        Raises:
            ConfigError: A transform does not work.
        """
        env = replace(self, transforms=(), num_workers=0).make(num_envs)
        with isolated(), contextlib.closing(env):
            specs_of(TransformedEnv(env, Compose()))  # refuses masks, which random actions would break
            rollout = env.rollout(2)
            for i, transform in enumerate(transforms, start=1):
                try:
                    transformed = TransformedEnv(env, Compose(*map(copy_of, transforms[:i])))
                    _ = transformed.observation_spec_unbatched
                    if -1 in transformed.action_spec.shape:  # MultiAction
                        raise ValueError("its actions have no fixed shape.")
                    rollout = transformed.rollout(2)
                except Exception as error:
                    raise ConfigError(
                        f"data.transforms: {type(transform).__name__} does not work with these environments:"
                        f" {first_line(error)}"
                    ) from error
        if ("next", "observation") not in rollout.keys(include_nested=True):
            raise ConfigError("data.transforms remove the observation from the results of a step.")

    def specs(self) -> Specs:
        """Return the specs of one environment, which is created and closed.

        Raises:
            ConfigError: As for :meth:`make`, or a part of the specs would be ignored.
        """
        env = self.make(stream="eval")
        try:
            return specs_of(env)
        finally:
            env.close()

    def time_limit(self, env: Any) -> int | None:
        """Return the known time limit of environments from :meth:`make`, steps, or None."""
        single = getattr(env, "samples", None) or getattr(env, "envs", env)
        if isinstance(single, list):  # a game has none
            single = next(iter(single), None)
        spec = getattr(single, "spec", None)
        limit = self.env_kwargs.get("max_episode_steps") or getattr(env, "max_episode_steps", None)
        limit = limit or getattr(getattr(spec, "config", spec), "max_episode_steps", None)
        return limit if isinstance(limit, int) and 0 < limit < NO_LIMIT else None

    def _from_id(self, env_id: str, env_kwargs: dict[str, Any], batch: Batch) -> EnvBase:
        env_id = full_id(env_id)
        backend = RENDERED_BY.get(self.backend, self.backend) if batch.render else self.backend
        if backend != self.backend:
            env_kwargs = {key: x for key, x in env_kwargs.items() if key not in ("device", "num_threads")}
        if ATARI_ID.fullmatch(env_id):
            if backend not in ATARI:
                raise ConfigError(
                    f"env_id {env_id!r} is an Atari game, which the backend {self.backend!r} lacks."
                )
            make = _import_class(ATARI[backend])
        elif self.backend == "envpool" and _import_class("envpool:is_board_game")(env_id):
            make = games().BoardGameEnv
        else:
            if batch.render:
                env_kwargs["render_mode"] = "rgb_array"
            if backend == "gymnasium":
                return self._of_singles(env_id, env_kwargs, batch)
            make = _import_class(BACKENDS[backend])
        _require_options(make, f"{env_id} with data.backend {backend!r}", env_kwargs)
        return make(env_id, batch.seeds, **env_kwargs)

    def _from_function(
        self, function: Callable[..., Any], env_kwargs: dict[str, Any], batch: Batch
    ) -> EnvBase:
        if isinstance(function, ModuleType):
            raise ConfigError(
                f"data.env_id is the module {function.__name__}: set data.backend to 'pettingzoo' for a game,"
                " or give the path of a function in the module."
            )
        if self.backend != "gymnasium":
            raise ConfigError(
                f"data.backend is {self.backend!r} and env_id is a function: set data.backend to 'gymnasium'."
            )
        seeds = batch.seeds
        num_envs = len(seeds)
        known = {"num_envs": num_envs, "seed": seeds[0], "seeds": seeds, "first_env": batch.first_env}
        parameters = _parameters(function)
        bound = getattr(function, "keywords", {})  # of a functools.partial
        wanted = {name: known[name] for name in known if name in parameters and name not in bound}
        env_kwargs = wanted | env_kwargs
        restarts = {} if "max_restarts" in parameters else {"max_restarts": env_kwargs.pop("max_restarts", 0)}
        if batch.render and "render_mode" in parameters:
            env_kwargs["render_mode"] = "rgb_array"
        make = functools.partial(_call, function, env_kwargs)
        env = make()
        if restarts.get("max_restarts") and not isinstance(env, gymnasium.Env):
            raise ConfigError(
                f"data.env_kwargs.max_restarts does not work with a {type(env).__name__}: it is for Gymnasium"
                " environments that are stepped one by one."
            )
        if isinstance(env, gymnasium.vector.VectorEnv):
            return GymnasiumVectorEnv(env, seeds)
        if "pettingzoo" in sys.modules and games().is_game(env):
            return games().make_games(begin_with(env, make), seeds)
        if not isinstance(env, EnvBase):
            if num_envs > 1 and wanted.keys() & {"seed", "seeds"}:
                warnings.warn(
                    "env_id makes one environment at each call, and gets the same seed each time: leave the"
                    " parameter out, reset(seed=...) gets a seed of its own.",
                    stacklevel=2,
                )
            return self._of_singles(begin_with(env, make), restarts, batch)
        if env.batch_size == torch.Size([]):
            env.close()
            env = SerialEnv(num_envs, make)
        if "seeds" not in wanted:  # otherwise each environment has its seed
            env.set_seed(seeds[0])
        return env

    def _of_singles(self, env_id: Any, env_kwargs: dict[str, Any], batch: Batch) -> BatchedEnv:
        rows = env_id, batch.seeds, batch.first_env
        if batch.num_workers:
            kind = _import_class(WORKERS[self.worker_backend])
            make = _import_class("workers:WorkerEnv")
            options = self.step_timeout, kind, bool(self.transforms)
            return make(batch.num_workers, *rows, *options, **env_kwargs)
        env = GymnasiumEnv(*rows, **env_kwargs)
        env.keeps_infos = bool(self.transforms)
        return env


def make_env(
    env_id: str | Callable[..., Any],
    num_envs: int = 1,
    backend: Backend = "gymnasium",
    seed: int = 1,
    first_env: int = 0,
    stream: Stream = "train",
    env_kwargs: Mapping[str, Any] | None = None,
) -> BatchedEnv:
    """Make N copies of an environment. The arguments are those of :class:`EnvFactory` and its ``make``.

    Returns:
        An environment with the keys ``observation``, ``action``, ``reward``, ``done``, ``terminated`` and
        ``truncated``.

    Raises:
        ConfigError: As for :meth:`EnvFactory.make`, or the environments take tensors.

    Example:
        >>> env = make_env("Pendulum-v1", num_envs=2, env_kwargs={"max_episode_steps": 100})
        >>> env.batch_size
        torch.Size([2])
    """
    env = EnvFactory(env_id, backend, env_kwargs or {}).make(num_envs, seed, first_env, stream)
    if not isinstance(env, BatchedEnv):
        env.close()
        raise ConfigError(
            f"make_env makes environments that take arrays, and env_id makes a {type(env).__name__}: call"
            " EnvFactory(env_id, backend).make(num_envs, seed)."
        )
    return env


def require_maker(env_id: Any) -> None:
    """Raise a ConfigError unless ``data.env_id`` is an id or a function."""
    is_env = isinstance(env_id, gymnasium.Env | gymnasium.vector.VectorEnv | EnvBase)
    if is_env or not (isinstance(env_id, str) or callable(env_id)):
        what = f"an environment ({type(env_id).__name__})" if is_env else repr(env_id)
        raise ConfigError(
            f"data.env_id is {what}: give an environment's id, or a function that makes a new environment at"
            " each call, as in env_id=lambda: gymnasium.make('CartPole-v1')."
        )


def _single(transforms: Iterable[Transform]) -> Iterator[Transform]:
    for transform in transforms:
        yield from _single(transform.transforms) if type(transform) is Compose else [transform]


def copy_of(transform: Transform) -> Transform:
    """Return a copy of a transform with own buffers, which the method ``clone`` shares."""
    copied = transform.clone()
    make: Any = UninitializedBuffer
    for name, buffer in transform.named_buffers(recurse=False):
        setattr(copied, name, make(dtype=buffer.dtype) if is_lazy(buffer) else buffer.clone())
    return copied


def games() -> Any:
    """Return the makers of games, which are above this room: the only door to them, opened on first use."""
    return importlib.import_module("ppo_lightning.games.make")


def _import_class(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(f"{__package__}.{module}"), name)


def _parameters(function: Callable[..., Any]) -> Mapping[str, Any]:
    # The metaclass of TorchRL's environments hides the parameters of a class, also in a `partial`.
    made = getattr(function, "func", function)
    is_hidden = isinstance(made, type) and type(made).__call__ is not type.__call__
    shown: Any = inspect.getattr_static(made, "__init__") if is_hidden else function
    try:
        return inspect.signature(shown).parameters
    except (TypeError, ValueError):  # builtins have no signature
        return {}


def _require_options(make: Callable[..., Any], what: str, env_kwargs: Mapping[str, Any]) -> None:
    parameters = _parameters(make).values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):  # the backend refuses what it does not know
        return
    options = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    for name in sorted(env_kwargs.keys() - set(options)):
        hint = nearest(name, options) or f": they are {', '.join(options)}."
        raise ConfigError(f"data.env_kwargs.{name} is not an option of {what}{hint}")


def _call(function: Callable[..., Any], env_kwargs: dict[str, Any]) -> Any:
    try:
        inspect.signature(function).bind(**env_kwargs)
    except TypeError as error:
        raise ConfigError(
            f"env_id must be callable with data.env_kwargs as its arguments: {error}."
        ) from error
    except ValueError:  # builtins have no signature
        pass
    try:
        return function(**env_kwargs)
    except Exception as error:
        error.add_note("env_id, which makes the environment, raised this.")
        raise
