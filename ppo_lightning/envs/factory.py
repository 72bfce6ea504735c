"""``make_env``: from an id, or a function, to N environments that step together."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import gymnasium
import torch
from torchrl.envs import EnvBase, SerialEnv

from ppo_lightning.envs.atari import ATARI_ID, check_options
from ppo_lightning.envs.batched import BatchedEnv
from ppo_lightning.errors import ConfigError
from ppo_lightning.utils.seeding import Stream, derive_seed

Backend = Literal["gymnasium", "envpool", "ale", "procgen"]


def make_env(
    env_id: str | Callable[..., gymnasium.Env],
    num_envs: int = 1,
    backend: Backend = "gymnasium",
    seed: int = 1,
    first_env: int = 0,
    stream: Stream = "train",
    **env_kwargs: Any,
) -> BatchedEnv:
    """Creates N copies of an environment as one TorchRL environment of batch size [N].

    Args:
        env_id: The id, as the backend spells it, or a function that makes a new Gymnasium environment at each call.
        num_envs: N, the number of copies.
        backend: ``"gymnasium"`` (best for a few cheap environments), ``"envpool"`` (C++ threads); ``"ale"`` for Atari and
            ``"procgen"`` for Procgen only.
        seed: The run's seed; each copy gets its own, see :func:`~ppo_lightning.utils.seeding.derive_seed`.
        first_env: Global index of the first copy, for several ranks.
        stream: ``train`` or ``eval``: other episodes for the same seed.
        **env_kwargs: For the backend's own ``make``; ``max_episode_steps`` works with both. For Atari, the options of
            :class:`~ppo_lightning.envs.atari.AtariEnv`; for a function, its arguments.

    Returns:
        An environment with the keys ``observation``, ``action``, ``reward``, ``done``, ``terminated`` and ``truncated``.

    Raises:
        ConfigError: No such environment, or a missing extra.
    """
    seeds = [derive_seed(seed, stream, index) for index in range(first_env, first_env + num_envs)]
    if not isinstance(env_id, str):
        from ppo_lightning.envs.gymnasium import GymnasiumEnv

        if backend != "gymnasium":
            raise ConfigError(f"data.backend is {backend!r}, and env_id is a function: set data.backend to 'gymnasium'.")
        return GymnasiumEnv(env_id, seeds, first_env, **env_kwargs)
    # Imported here: a backend is loaded only when it is used (EnvPool's import alone takes a second).
    if backend == "ale" or ATARI_ID.fullmatch(env_id):
        from ppo_lightning.envs.atari_backends import ATARI

        if backend not in ATARI:
            raise ConfigError(f"env_id {env_id!r} is an Atari game, which the backend {backend!r} does not have.")
        check_options(env_kwargs)
        return ATARI[backend](env_id, seeds, **env_kwargs)
    if backend == "procgen":
        from ppo_lightning.envs.procgen import ProcgenEnv

        return ProcgenEnv(env_id, seeds, **env_kwargs)
    if backend == "envpool":
        from ppo_lightning.envs.envpool import EnvPoolEnv

        return EnvPoolEnv(env_id, seeds, **env_kwargs)
    from ppo_lightning.envs import cartpole
    from ppo_lightning.envs.gymnasium import GymnasiumEnv

    if env_id in cartpole.IDS and num_envs >= cartpole.FEWEST and set(env_kwargs) <= {"max_episode_steps"}:
        return cartpole.CartPoleEnv(env_id, seeds, **env_kwargs)
    return GymnasiumEnv(env_id, seeds, first_env, **env_kwargs)


def make_by_function(
    function: Callable[..., Any],
    num_envs: int,
    backend: Backend,
    seed: int,
    first_env: int,
    stream: Stream,
    **env_kwargs: Any,
) -> EnvBase:
    """Creates environments by a user's function, whose environments may be Gymnasium's or TorchRL's.

    Args:
        function: Makes one environment at each call. One of TorchRL may be a batch of ``num_envs``.
        num_envs: As for :func:`make_env`.
        backend: As for :func:`make_env`.
        seed: As for :func:`make_env`.
        first_env: As for :func:`make_env`.
        stream: As for :func:`make_env`.
        **env_kwargs: Arguments of the function.

    Raises:
        ConfigError: The function takes other arguments, makes something else, or a batch of another size.
    """
    make = functools.partial(_call, function, **env_kwargs)
    env = make()
    if not isinstance(env, EnvBase):
        made = [env]  # only a call tells what the function makes
        return make_env(lambda: made.pop() if made else make(), num_envs, backend, seed, first_env, stream)
    if env.batch_size == torch.Size([]):
        env.close()
        env = SerialEnv(num_envs, make)
    if stream == "train" and env.batch_size != torch.Size([num_envs]):
        sizes = f"{list(env.batch_size)}: it must be [] or [{num_envs}]"
        raise ConfigError(f"env_id makes an environment of batch size {sizes}.")
    env.set_seed(derive_seed(seed, stream, first_env))
    return env


def _call(function: Callable[..., Any], **env_kwargs: Any) -> Any:
    try:
        return function(**env_kwargs)
    except TypeError as error:
        assert error.__traceback__ is not None
        if error.__traceback__.tb_next is not None:  # the function's own
            raise
        raise ConfigError(f"env_id must be callable with data.env_kwargs as its arguments: {error}.") from error
    except SystemExit as error:
        raise RuntimeError(f"env_id, which makes the environment, raised {error!r}.") from error


def require_maker(env_id: Any) -> None:
    """Demands an id or a function.

    Raises:
        ConfigError: It is an environment, or something else.
    """
    if isinstance(env_id, gymnasium.Env | gymnasium.vector.VectorEnv | EnvBase):
        give = "give a function that makes a new one at each call, as in env_id=lambda: gymnasium.make('CartPole-v1')"
        raise ConfigError(f"data.env_id is an environment ({type(env_id).__name__}): {give}.")
    if not (isinstance(env_id, str) or callable(env_id)):
        raise ConfigError(f"data.env_id is {env_id!r}: give an environment's id, or a function that makes an environment.")
