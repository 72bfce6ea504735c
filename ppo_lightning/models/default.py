"""The agent of a run whose settings name none."""

import inspect
from collections.abc import Mapping
from typing import Any

from torchrl.data import TensorSpec

from ppo_lightning.errors import ConfigError
from ppo_lightning.models.agent import ActorCritic
from ppo_lightning.models.cnn import CNNAgent
from ppo_lightning.models.mlp import MLPAgent
from ppo_lightning.spaces.pictures import is_picture


class DefaultAgent(MLPAgent):
    """The agent that fits the observations: a :class:`CNNAgent` for a picture, otherwise an MLPAgent.

    The arguments are those of :class:`MLPAgent`. Without ``norm_obs``, the algorithm chooses.
    """

    # A class and no function, because the command line reads the arguments of `model.agent` from a class. As
    # this returns no DefaultAgent, Python does not call `__init__`.
    def __new__(
        cls,
        observation_spec: TensorSpec,
        action_spec: TensorSpec,
        norm_obs: bool | None = None,
        **arguments: Any,
    ) -> ActorCritic:
        """Make a CNNAgent or an MLPAgent."""
        if norm_obs is not None:
            arguments["norm_obs"] = norm_obs
        if not is_picture(observation_spec):
            return MLPAgent(observation_spec, action_spec, **arguments)
        known = inspect.signature(CNNAgent).parameters
        given = changed(arguments)
        if unknown := given.keys() - known.keys():
            raise ConfigError(f"model.agent.{min(unknown)} is not for pictures, which env_id has: remove it.")
        return CNNAgent(observation_spec, action_spec, **given)


def changed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an agent that are not the defaults of :class:`MLPAgent`.

    The command line gives all arguments, and lists for tuples.
    """
    defaults = inspect.signature(MLPAgent).parameters
    values = {name: tuple(x) if isinstance(x, list) else x for name, x in arguments.items()}
    return {
        name: x
        for name, x in values.items()
        if name not in defaults or x not in (None, defaults[name].default)
    }
