"""``make_env``: from an id to N environments that step together."""

from typing import Any, Literal

from ppo_lightning.envs.atari import ATARI_ID, check_options
from ppo_lightning.envs.batched import BatchedEnv
from ppo_lightning.errors import ConfigError
from ppo_lightning.seeding import Stream, derive_seed

Backend = Literal["gymnasium", "envpool", "ale", "procgen"]


def make_env(
    env_id: str,
    num_envs: int = 1,
    backend: Backend = "gymnasium",
    seed: int = 1,
    first_env: int = 0,
    stream: Stream = "train",
    **env_kwargs: Any,
) -> BatchedEnv:
    """Creates N copies of an environment as one TorchRL environment of batch size [N].

    Args:
        env_id: The id, as the backend spells it.
        num_envs: N, the number of copies.
        backend: ``"gymnasium"`` (best for a few cheap environments), ``"envpool"`` (C++ threads); ``"ale"`` for Atari and
            ``"procgen"`` for Procgen only.
        seed: The run's seed; each copy gets its own, see :func:`~ppo_lightning.seeding.derive_seed`.
        first_env: Global index of the first copy, for several ranks.
        stream: ``train`` or ``eval``: other episodes for the same seed.
        **env_kwargs: For the backend's own ``make``; ``max_episode_steps`` works with both. For Atari, the options of
            :class:`~ppo_lightning.envs.atari.AtariEnv`.

    Returns:
        An environment with the keys ``observation``, ``action``, ``reward``, ``done``, ``terminated`` and ``truncated``.

    Raises:
        ConfigError: No such environment, or a missing extra.
    """
    seeds = [derive_seed(seed, stream, index) for index in range(first_env, first_env + num_envs)]
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
    return GymnasiumEnv(env_id, seeds, **env_kwargs)
