"""Single Gymnasium environments, from the registry or a user's function."""

import re
from collections.abc import Callable
from typing import Any

import gymnasium

from ppo_lightning.errors import ConfigError, first_line, import_extra, nearest


def make_registered(env_id: str, **env_kwargs: Any) -> gymnasium.Env:
    """Make an environment from Gymnasium's registry.

    Args:
        env_id: Id of the environment.
        **env_kwargs: Arguments of ``gymnasium.make``.

    Raises:
        ConfigError: The id is not registered, or the environment cannot be created.
        RuntimeError: The environment raised ``SystemExit``, which would end the process with exit code 0,
            like a complete run.
    """
    if env_id.startswith("dm_control/"):
        import_extra("dm_control", extra="dm-control")
        import_extra("shimmy", extra="dm-control")  # registers the ids at import
    try:
        return gymnasium.make(env_id, disable_env_checker=True, **env_kwargs)
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        raise ConfigError(
            f"env_id {env_id!r} needs a package that is missing: {first_line(error)}"
        ) from error
    except (TypeError, ValueError, AssertionError, OSError) as error:
        raise ConfigError(f"data.env_kwargs does not fit env_id {env_id!r}: {first_line(error)}.") from error
    except SystemExit as error:
        raise RuntimeError(f"The environment {env_id!r} raised {error!r} while it was made.") from error
    except gymnasium.error.Error as error:
        if re.fullmatch(r"\w+(\.[\w<>]+)+", env_id):
            raise ConfigError(
                f"env_id {env_id!r} is a function: give the id of a registered environment."
            ) from error
        hint = nearest(env_id, list(gymnasium.registry)) or f": {first_line(error)}"
        raise ConfigError(f"env_id {env_id!r} is not an environment of Gymnasium{hint}") from error
    except Exception as error:
        error.add_note(f"{env_id}: the constructor raised this.")
        raise


def make_from_function(function: Callable[..., Any], **env_kwargs: Any) -> gymnasium.Env:
    """Make an environment with a user's function.

    Args:
        function: Returns a new environment.
        **env_kwargs: Arguments of the function.

    Raises:
        ConfigError: The function returns another type.
    """
    env = function(**env_kwargs)
    if isinstance(env, gymnasium.Env):
        return env
    raise ConfigError(
        f"env_id makes a {type(env).__name__}: it must make a Gymnasium environment, a vectorized environment"
        " of Gymnasium or a TorchRL environment."
    )
