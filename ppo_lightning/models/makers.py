"""Check and call what makes an agent."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torchrl.data import TensorSpec

from ppo_lightning.errors import ConfigError
from ppo_lightning.models.actor import Actor, evaluating
from ppo_lightning.models.agent import ActorCritic
from ppo_lightning.spaces.specs import stored

CONTRACT = (
    "a subclass of ppo_lightning.{} whose __init__(self, observation_spec, action_spec, ...) passes"
    " a body to super().__init__ and calls self.save_hyperparameters(ignore=['observation_spec',"
    " 'action_spec']), see docs/environments.md, 'Your own network' (other networks: model.actor and"
    " model.critic, see docs/torchrl.md)"
)


def require_agent_maker(maker: Callable[..., Any], kind: type[Actor] = ActorCritic) -> None:
    """Check that ``model.agent`` makes an agent of a kind, as far as a class or an object shows."""
    made = getattr(maker, "func", maker)  # of functools.partial
    if isinstance(made, Actor):
        name = type(made).__name__
        raise ConfigError(f"model.agent is an agent: give its class, or functools.partial({name}, ...).")
    if isinstance(made, nn.Module) or (isinstance(made, type) and not issubclass(made, kind)):
        name = made.__name__ if isinstance(made, type) else f"an object of {type(made).__name__}"
        raise ConfigError(f"model.agent is {name}: it must be {CONTRACT.format(kind.__name__)}.")


def make_agent(
    maker: Callable[..., Any],
    observation_spec: TensorSpec,
    action_spec: TensorSpec,
    kind: type[Actor] = ActorCritic,
) -> Any:
    """Make an agent of a kind for the specs of one environment."""
    contract = CONTRACT.format(kind.__name__)
    try:
        agent = maker(observation_spec, action_spec)
    except TypeError as error:
        assert error.__traceback__ is not None
        if error.__traceback__.tb_next is not None:  # raised inside the maker
            raise
        raise ConfigError(f"model.agent cannot be called ({error}): it must be {contract}.") from error
    if not isinstance(agent, kind):
        raise ConfigError(f"model.agent makes a {type(agent).__name__}: it must be or make {contract}.")
    return sized(agent, observation_spec)


def sized(agent: Any, observation_spec: TensorSpec) -> Any:
    """Return an agent whose lazy layers have taken their sizes from one observation."""
    if any(map(is_lazy, agent.parameters())):
        spec = stored(observation_spec)
        rows = torch.zeros(1, *spec.shape, dtype=spec.dtype)
        with evaluating(agent), torch.no_grad():
            agent.act(agent.normalize(rows), memory=agent.initial_memory(1))
    return agent
