"""Factories that turn an id or a function into N environments that step together."""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import gymnasium
import torch
from torchrl.envs import Transform

from ppo_lightning.envs.batched import BatchedEnv, Copies
from ppo_lightning.envs.contract import SUCCESS
from ppo_lightning.envs.functions import make as make_by_function
from ppo_lightning.envs.gymnasium import GymnasiumEnv, in_process
from ppo_lightning.envs.gymnasium import make as make_singles
from ppo_lightning.envs.specs import Specs, specs_of
from ppo_lightning.envs.torchrl import AnyEnv, TorchRLEnv
from ppo_lightning.envs.vector import make as make_vectorized
from ppo_lightning.errors import ConfigError
from ppo_lightning.utils.arguments import copied
from ppo_lightning.utils.seeding import Stream, derive_seed, user_modes

NO_LIMIT = 2**31 - 1  # EnvPool's time limit of board games
Backend = Literal["gymnasium", "vectorized", "torch", "envpool", "procgen", "pettingzoo"]
Make = Callable[..., AnyEnv]  # of an id and the wanted copies


def _adapter(backend: Backend, env_id: Any) -> Make:
    """Return what makes environments, imported at its first use."""
    if backend == "torch":
        from ppo_lightning.envs.torch_env import make as of_tensors

        return of_tensors
    if backend == "envpool":
        from ppo_lightning.envs import envpool

        if not envpool.is_board_game(env_id):
            return envpool.make
        from ppo_lightning.games.make import make_board_game

        return make_board_game
    if backend == "procgen":
        from ppo_lightning.envs.procgen import make as of_procgen

        return of_procgen
    if backend == "pettingzoo":
        from ppo_lightning.games.make import make as of_games

        return of_games
    return make_vectorized if backend == "vectorized" else make_singles


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
        backend: What makes the environments of an id.
        env_kwargs: Arguments of the backend's own ``make``, including ``max_episode_steps``. For Atari games,
            options of :class:`~ppo_lightning.envs.atari.AtariEnv`. For a function, its arguments, which take
            precedence.
        transforms: TorchRL transforms, copied for each batch of environments.
        num_workers: Number of workers that step the environments, 0 for this process. There are at most as
            many as environments.
        step_timeout: Maximum duration of a step in these workers in seconds; None: no limit.
        log_info: Names of numbers in the infos at episode ends; the first one may be missing.
        worker_backend: Kind of the workers: processes, or actors of Ray.

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
    worker_backend: Literal["process", "ray"] = "process"

    def make(
        self,
        num_envs: int = 1,
        seed: int = 1,
        first_env: int = 0,
        stream: Stream = "train",
        render: bool = False,
    ) -> AnyEnv:
        """Make N environments that step together, batch size [N].

        Args:
            num_envs: Number of environments N. In PettingZoo's games of players who act at once, each player
                is a row, and the stream ``eval`` completes the last game.
            seed: Seed of the run, from which each environment gets its own seed, see
                :func:`~ppo_lightning.utils.seeding.derive_seed`.
            first_env: Global index of the first environment, for runs with several ranks.
            stream: ``train`` or ``eval``. The two streams have different episodes for the same seed.
            render: Make the first environment able to render, see :meth:`BatchedEnv.render`.

        Returns:
            The environments: of arrays, or of TorchRL if a function makes such, if they step tensors, or if
            there are transforms.

        Raises:
            ConfigError: The environment or an extra does not exist, the function returns another type or
                number of environments, or ``num_workers`` does not fit.
            RuntimeError: An environment raised ``SystemExit``.
        """
        is_maker = not isinstance(self.env_id, str)
        if is_maker and self.backend not in ("gymnasium", "pettingzoo"):
            raise ConfigError(f"env_id is a function: data.backend {self.backend!r} must be 'gymnasium'.")
        by_function = is_maker and self.backend == "gymnasium"
        make: Make = make_by_function if by_function else _adapter(self.backend, self.env_id)
        num_workers = min(self.num_workers, num_envs)
        if render or (stream == "eval" and num_workers == 1):  # which is no faster
            num_workers = 0
        singles: Callable[..., BatchedEnv] = in_process
        if num_workers:
            from ppo_lightning.envs.workers import Worker, WorkerEnv

            worker: type[Worker] = Worker
            if self.worker_backend == "ray":
                from ppo_lightning.envs.workers.ray import RayWorker

                worker = RayWorker
            singles = functools.partial(WorkerEnv, num_workers, worker, self.step_timeout)
        seeds = [derive_seed(seed, stream, index) for index in range(first_env, first_env + num_envs)]
        copies = Copies(seeds, first_env, stream, render, bool(self.transforms), singles)
        try:
            with user_modes():
                env = make(self.env_id, copies, **copied(dict(self.env_kwargs)))
        except SystemExit as error:  # would end the process with exit code 0, like a complete run
            raise RuntimeError(f"An environment of data.env_id raised {error!r} when it was made.") from error
        try:
            self._check(env, num_envs, must_fit=stream == "train", render=render)
            if isinstance(env, BatchedEnv) and env.info_names is not None:
                env.info_names = self.log_info
            if not self.transforms:
                return env
            from ppo_lightning.envs.transforms import transform, try_transforms

            if stream == "train" and isinstance(env, BatchedEnv) and not env.untransformable:
                # On other environments than these.
                count = 2 if self.num_workers or isinstance(env, GymnasiumEnv) else env.num_envs
                try_transforms(self.transforms, replace(self, transforms=(), num_workers=0).make(count))
            return transform(env, self.transforms)
        except BaseException:
            env.close()
            raise

    def specs(self) -> Specs:
        """Return the specs of one environment, which is created and closed.

        Raises:
            ConfigError: As for :meth:`make`, or a part of the specs would be ignored.
        """
        with contextlib.closing(self.make(stream="eval")) as env:
            return specs_of(env)

    def time_limit(self, env: Any) -> int | None:
        """Return the known time limit of environments from :meth:`make`, steps, or None."""
        single = getattr(env, "samples", None) or getattr(env, "envs", env)
        if isinstance(single, list):  # a game has none
            single = next(iter(single), None)
        spec = getattr(single, "spec", None)
        limit = self.env_kwargs.get("max_episode_steps") or getattr(env, "max_episode_steps", None)
        limit = limit or getattr(getattr(spec, "config", spec), "max_episode_steps", None)
        return limit if isinstance(limit, int) and 0 < limit < NO_LIMIT else None

    def _check(self, env: AnyEnv, num_envs: int, must_fit: bool, render: bool) -> None:
        """Check that environments have the wanted number, and that workers step them."""
        players = getattr(env, "rows_per_game", 1)
        must_fit = must_fit or (render and players == 1)
        if must_fit and env.batch_size != torch.Size([num_envs]):
            remedy = "the function should take num_envs"
            if players > 1:
                remedy = f"set data.num_envs to a multiple of the {players} players of a game"
            sizes = f"batch size {list(env.batch_size)}, and [{num_envs}] is needed on each rank"
            raise ConfigError(f"env_id makes environments of {sizes}: {remedy}.")
        if self.num_workers:
            from ppo_lightning.envs.workers import WorkerEnv

            if not isinstance(env, GymnasiumEnv | WorkerEnv):
                raise ConfigError(
                    f"data.num_workers must be 0 for {type(env).__name__}: workers step single environments."
                )


def make_env(
    env_id: str | Callable[..., Any],
    num_envs: int = 1,
    backend: Backend = "gymnasium",
    seed: int = 1,
    first_env: int = 0,
    stream: Stream = "train",
    env_kwargs: Mapping[str, Any] | None = None,
) -> TorchRLEnv:
    """Make N copies of an environment. The arguments are those of :class:`EnvFactory` and its ``make``.

    Returns:
        An environment of TorchRL, whose arrays can also be stepped.

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
        raise ConfigError(f"env_id makes a {type(env).__name__}: call EnvFactory(env_id, backend).make().")
    return TorchRLEnv(env)


def require_maker(env_id: Any) -> None:
    """Raise a ConfigError unless ``data.env_id`` is an id or a function."""
    is_env = isinstance(env_id, gymnasium.Env | gymnasium.vector.VectorEnv | AnyEnv)
    if is_env or not (isinstance(env_id, str) or callable(env_id)):
        what = f"an environment ({type(env_id).__name__})" if is_env else repr(env_id)
        remedy = "give an id, or a function that makes a new environment, as in lambda: gymnasium.make(id)"
        raise ConfigError(f"data.env_id is {what}: {remedy}.")
