"""The actor without the parts of the observation that only the critic reads."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torchrl.data import TensorSpec

from ppo_lightning.models import ActorCritic
from ppo_lightning.spaces.entries import describe, entry_columns, restricted_spec, take_columns
from ppo_lightning.spaces.specs import spec_from_plain


class DeployedActor(NamedTuple):
    """An agent for deployment, which takes the entries of the actor only.

    Attributes:
        agent: The agent. Without ``has_value``, all values are 0.
        observation_spec: Spec of the observations that the agent takes.
        columns: Columns of the full row of observations that the agent takes. None: the full row.
        has_value: Whether the agent has a value function.

    Example:
        >>> from ppo_lightning import MLPAgent, make_env
        >>> env = make_env("Go1JoystickFlatTerrain-v1", backend="envpool")
        >>> actor = deployed_actor(MLPAgent(*env.agent_specs), env.agent_specs[0])
        >>> actor.observation_spec.shape, actor.columns, actor.has_value
        (torch.Size([48]), [slice(123, 171, None)], False)
    """

    agent: ActorCritic
    observation_spec: TensorSpec
    columns: Sequence[slice] | None
    has_value: bool

    @property
    def inputs(self) -> str:
        """Names of the entries that the agent takes, with their sizes."""
        entries = self.agent.entries
        return "" if entries is None else describe(entries.actor)


def deployed_actor(agent: ActorCritic, observation_spec: TensorSpec) -> DeployedActor:
    """Return an agent that takes only the entries that the actor reads, and the action mask.

    The value function is dropped if it reads other entries, too.

    Args:
        agent: A trained agent. It is returned unchanged if its actor reads all entries.
        observation_spec: Spec of the full observations.
    """
    entries = agent.entries
    if entries is None or entries.actor.keys() == entry_columns(observation_spec).keys():
        return DeployedActor(agent, observation_spec, None, agent.has_value)
    has_value = agent.has_value and entries.critic.keys() <= entries.actor.keys()
    spec, columns = restricted_spec(observation_spec, entries.actor)
    arguments = dict(agent.hparams) | {"actor_keys": list(entries.actor)}
    if has_value:
        arguments["critic_keys"] = list(entries.critic)
    else:
        arguments |= {"critic_keys": list(entries.actor), "shared": True}
    with torch.random.fork_rng(devices=[]):
        actor = type(agent)(spec, spec_from_plain(agent.actions), **arguments)
    trained = agent.state_dict()
    state = {}
    for name, tensor in actor.state_dict().items():
        if name in ("normalizer.mean", "normalizer.m2"):
            state[name] = take_columns(trained[name], columns)
        elif name.startswith("critic.") and not has_value:
            state[name] = torch.zeros_like(tensor)
        else:
            state[name] = trained[name]
    actor.load_state_dict(state)
    return DeployedActor(actor.to(agent.device).train(agent.training), spec, columns, has_value)
