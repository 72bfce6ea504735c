"""Agents of the off-policy algorithms, and critics of continuous actions."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchrl.data import TensorSpec

from ppo_lightning.errors import ConfigError
from ppo_lightning.models.bodies import MLP
from ppo_lightning.models.encoders import Encoders, Numbers, make_encoder
from ppo_lightning.models.mlp import MLPAgent
from ppo_lightning.spaces.pictures import is_picture


class OffPolicyAgent(MLPAgent):
    """Base class of agents that store neither log-probabilities nor values, for any observations.

    A picture goes through a :class:`~ppo_lightning.models.cnn.NatureCNN` without further hidden layers. The
    weights are initialized as PyTorch and CleanRL's off-policy scripts do.

    Args:
        observation_spec: Spec of one environment.
        action_spec: Spec of the actions.
        hidden_sizes: Widths of the hidden layers.
        norm_obs: As for :class:`~ppo_lightning.models.MLPAgent`. The buffer keeps observations as they were
            normalized at their time.
    """

    head: Any
    default_head: Any
    has_value = False
    he_init = False  # normal weights by He's rule and no biases instead of PyTorch's

    def __init__(
        self,
        observation_spec: TensorSpec,
        action_spec: TensorSpec,
        hidden_sizes: Sequence[int] = (256, 256),
        norm_obs: bool = False,
    ) -> None:
        if is_picture(observation_spec):
            parameter = inspect.signature(type(self)).parameters.get("hidden_sizes")
            default = getattr(parameter, "default", hidden_sizes)
            for name, is_set in ("norm_obs", norm_obs), ("hidden_sizes", [*hidden_sizes] != [*default]):
                if is_set:
                    raise ConfigError(f"model.agent.{name} is for vectors: leave it out for pictures.")
            super(MLPAgent, self).__init__(action_spec, lambda: make_encoder(observation_spec), shared=True)
        else:
            arguments: Any = {"norm_obs": norm_obs, "activation": "relu"}
            super().__init__(observation_spec, action_spec, hidden_sizes, **arguments)
        self.critic_body = None
        del self.critic
        reset(self, self.he_init)
        self.save_hyperparameters(ignore=["observation_spec", "action_spec"])

    def critic(self, features: Tensor) -> Tensor:  # type: ignore[override]
        """Return the value of the best action, [B, 1]; 0 for a policy, whose critics are not the agent's."""
        return torch.zeros_like(features[:, :1])

    def policy(self, observation: Tensor, *noise: Tensor) -> Any:
        """Return what ``policy`` of the head returns for normalized observations [B, ...]."""
        return self.head.policy(self.actor_body(observation), *noise)

    def rollout_keys(self, observation: TensorSpec, action: TensorSpec) -> dict[str, TensorSpec]:
        """Return what a step of a rollout stores: observation and action."""
        keys = super().rollout_keys(observation, action)
        return {key: keys[key] for key in ("observation", "action")}


class Critics(nn.ModuleList):
    """Critics Q(s, a) with weights of their own."""

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        """Return the values, [C, B]."""
        return torch.stack([critic(observation, action) for critic in self])


class Critic(nn.Module):
    """Critic Q(s, a) of continuous actions.

    Args:
        agent: The agent, whose actions, hidden layers and normalization are those of the critic.
        observation_spec: Spec of one environment.
    """

    def __init__(self, agent: OffPolicyAgent, observation_spec: TensorSpec) -> None:
        super().__init__()
        self.encoder = Encoders(observation_spec, Numbers, normalized=agent.normalizer is not None)
        width = self.encoder.out_features + len(agent.head.low)
        self.body = MLP(width, agent.hparams["hidden_sizes"], activation="relu")
        self.linear = nn.Linear(self.body.out_features, 1)
        reset(self)

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        """Return the values [B]."""
        rows = torch.cat([self.encoder(observation), action], -1)
        return self.linear(self.body(rows)).squeeze(-1)


def reset(network: nn.Module, he_init: bool = False) -> None:
    """Initialize all layers as PyTorch does, or by He's rule."""
    for layer in network.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            layer.reset_parameters()
            if he_init:
                nn.init.kaiming_normal_(layer.weight)
                layer.bias.data.zero_()  # type: ignore[union-attr]
