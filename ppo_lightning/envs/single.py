"""Single Gymnasium environments, from the registry or by a user's function."""

import copy
import re
from collections.abc import Callable
from typing import Any

import gymnasium
from gymnasium import spaces

from ppo_lightning.errors import ConfigError, first_line, import_extra, nearest


def registered(env_id: str, **env_kwargs: Any) -> gymnasium.Env:
    """Makes an environment from Gymnasium's registry.

    Raises:
        ConfigError: There is none of that id, or it cannot be made.
        RuntimeError: It raised ``SystemExit``, which would end the process with code 0, as after a whole run.
    """
    if env_id.startswith("dm_control/"):
        import_extra("dm_control", extra="dm-control")
        import_extra("shimmy", extra="dm-control")  # registers the ids
    try:
        return _with_quick_actions(gymnasium.make(env_id, disable_env_checker=True, **env_kwargs))
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        raise ConfigError(
            f"env_id {env_id!r} needs a package that is missing: {first_line(error)}"
        ) from error
    except (TypeError, ValueError, AssertionError, OSError) as error:
        raise ConfigError(f"data.env_kwargs does not fit env_id {env_id!r}: {first_line(error)}.") from error
    except SystemExit as error:
        raise RuntimeError(f"The environment {env_id!r} raised {error!r} while it was made.") from error
    except gymnasium.error.Error as error:
        spec = gymnasium.registry.get(env_id.rpartition(":")[2])
        if spec is not None and spec.entry_point is None:
            must = "register it with the entry_point of one environment, too"
            raise ConfigError(
                f"env_id {env_id!r} is registered with a vector_entry_point only: {must}."
            ) from error
        if re.fullmatch(r"\w+(\.[\w<>]+)+", env_id):
            raise ConfigError(
                f"env_id {env_id!r} is a function: give the id of a registered environment."
            ) from error
        hint = nearest(env_id, list(gymnasium.registry)) or f": {first_line(error)}"
        raise ConfigError(f"env_id {env_id!r} is not an environment of Gymnasium{hint}") from error


def made(function: Callable[..., Any], **env_kwargs: Any) -> gymnasium.Env:
    """Makes an environment by a user's function.

    Raises:
        ConfigError: The function makes something else.
    """
    env = function(**env_kwargs)
    if isinstance(env, gymnasium.Env):
        return _with_quick_actions(env)
    kind = type(env).__name__
    if isinstance(env, gymnasium.vector.VectorEnv):
        advice = "let it make one environment, of which data.num_envs are stepped together"
        raise ConfigError(f"env_id makes a vectorized environment ({kind}): {advice}.")
    raise ConfigError(
        f"env_id makes a {kind}: it must make a Gymnasium environment or a TorchRL environment."
    )


class QuickDiscrete(spaces.Discrete):
    """A discrete space that knows its integers at once.

    Gymnasium's own takes 3 microseconds to convert and to compare types, a third of a step of CartPole, which asserts at every
    step that it was given an action.
    """

    def contains(self, x: Any) -> bool:
        """Tells whether x is an element."""
        return bool(self.start <= x < self.start + self.n) if type(x) is int else super().contains(x)


def _with_quick_actions(env: gymnasium.Env) -> gymnasium.Env:
    """Lets an environment check its actions sooner."""
    actions = vars(env.unwrapped).get("action_space")  # not a property, nor its class's
    if type(actions) is spaces.Discrete:
        quick = copy.copy(
            actions
        )  # with its dtype and its generator; other environments may have the same object
        quick.__class__ = QuickDiscrete
        env.unwrapped.action_space = quick
    return env
