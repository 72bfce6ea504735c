"""Vectorized environments of Gymnasium's registry."""

import importlib
from typing import Any

import gymnasium
from gymnasium.vector import VectorEnv

from ppo_lightning.errors import ConfigError, first_line


def is_vector_only(env_id: str) -> bool:
    """Return whether an id is registered with a ``vector_entry_point`` only.

    Args:
        env_id: Id of the environment, optionally with a module to import.
    """
    module, _, name = env_id.rpartition(":")
    if module:
        try:
            importlib.import_module(module)
        except ImportError:  # reported where the environment is made
            return False
    spec = gymnasium.registry.get(name)
    return spec is not None and spec.entry_point is None and spec.vector_entry_point is not None


def make_registered_vector(env_id: str, num_envs: int, **env_kwargs: Any) -> VectorEnv:
    """Make a vectorized environment from Gymnasium's registry.

    Args:
        env_id: Id of the environment.
        num_envs: Number of environments N.
        **env_kwargs: Arguments of ``gymnasium.make_vec``.

    Raises:
        ConfigError: The environment cannot be created.
    """
    try:
        return gymnasium.make_vec(env_id, num_envs, "vector_entry_point", **env_kwargs)
    except (TypeError, ValueError, AssertionError, gymnasium.error.Error) as error:
        raise ConfigError(f"data.env_kwargs does not fit env_id {env_id!r}: {first_line(error)}.") from error
