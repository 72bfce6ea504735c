"""Environments that a function of the user makes."""

import functools
import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium
import torch
from torchrl.envs import SerialEnv

from ppo_lightning.envs.batched import Copies, begin_with
from ppo_lightning.envs.torchrl import AnyEnv, TorchRLEnv, as_torchrl
from ppo_lightning.envs.vector import GymnasiumVectorEnv
from ppo_lightning.errors import ConfigError
from ppo_lightning.utils.arguments import copying, parameters_of


def make(function: Callable[..., Any], copies: Copies, /, **env_kwargs: Any) -> AnyEnv:
    """Make copies of an environment by the function of :class:`~ppo_lightning.envs.factory.EnvFactory`."""
    seeds, first_env = copies.seeds, copies.first_env
    known = {"num_envs": len(seeds), "seed": seeds[0], "seeds": seeds, "first_env": first_env}
    parameters = parameters_of(function)
    bound = getattr(function, "keywords", {})  # of a functools.partial
    wanted = {name: known[name] for name in known if name in parameters and name not in bound}
    if isinstance(function, functools.partial) and not function.args:
        function, env_kwargs = function.func, {**bound, **env_kwargs}  # each environment has its own
    max_restarts = 0 if "max_restarts" in parameters else env_kwargs.pop("max_restarts", 0)
    if copies.render and "render_mode" in parameters:
        env_kwargs["render_mode"] = "rgb_array"
    make_one = copying(functools.partial(_call, function), wanted | env_kwargs)
    env = make_one()
    if max_restarts and not isinstance(env, gymnasium.Env):
        raise ConfigError(f"data.env_kwargs.max_restarts does not work with a {type(env).__name__}.")
    if isinstance(env, gymnasium.vector.VectorEnv):
        return GymnasiumVectorEnv(env, seeds)
    if "pettingzoo" in sys.modules:
        from ppo_lightning.games.make import is_game
        from ppo_lightning.games.make import make as make_games

        if is_game(env):
            return make_games(begin_with(env, make_one), copies)
    if isinstance(env, TorchRLEnv):
        env = env.arrays
    if isinstance(env, AnyEnv):
        if env.batch_size == torch.Size([]):
            env.close()
            env = SerialEnv(len(seeds), make_one)
        if "seeds" not in wanted:  # otherwise each environment has its seed
            as_torchrl(env).set_seed(seeds[0])
        return env
    if len(seeds) > 1 and wanted.keys() & {"seed", "seeds"}:
        warnings.warn(
            "env_id gets the same seed each time: leave the parameter out, reset(seed=...) gets another.",
            stacklevel=2,
        )
    return copies.singles(begin_with(env, make_one), seeds, first_env, copies.keeps_infos, max_restarts)


def _call(function: Callable[..., Any], /, **env_kwargs: Any) -> Any:
    try:
        inspect.signature(function).bind(**env_kwargs)
    except TypeError as error:
        raise ConfigError(f"env_id must be callable with data.env_kwargs: {error}.") from error
    except ValueError:  # builtins have no signature
        pass
    try:
        return function(**env_kwargs)
    except Exception as error:
        error.add_note("env_id, which makes the environment, raised this.")
        raise
