"""Agents of the off-policy algorithms, and critics of continuous actions."""

import functools
import inspect
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torchrl.data import Composite, TensorSpec

from ppo_lightning.errors import ConfigError
from ppo_lightning.models.actor import Actor, ArrayPolicy
from ppo_lightning.models.bodies import MLP
from ppo_lightning.models.encoders import Encoders, Numbers, make_body, make_encoder, make_normalizer
from ppo_lightning.models.heads import ActionHead, Float32Linear
from ppo_lightning.models.init import orthogonal
from ppo_lightning.models.mlp import numpy_policy
from ppo_lightning.spaces.entries import choose_entries
from ppo_lightning.spaces.pictures import is_picture
from ppo_lightning.spaces.specs import mask_columns
from ppo_lightning.utils.arguments import Range, check_arguments


class ExploringHead(ActionHead):
    """Base class of heads whose noise the algorithm scales. A checkpoint keeps the scale."""

    # Epsilon of DQN, a factor of the noise of others. None, before `learning_starts`: random actions
    exploration: float | None = 0.0


class OffPolicyAgent(Actor):
    """Base class of the actors of off-policy algorithms, for any observations.

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

    def __init__(
        self,
        observation_spec: TensorSpec,
        action_spec: TensorSpec,
        hidden_sizes: Annotated[Sequence[int], Range(1)] = (256, 256),
        norm_obs: bool = False,
    ) -> None:
        check_arguments(OffPolicyAgent.__init__, locals(), "model.agent")
        if isinstance(action_spec, Composite):  # the head refuses it, and not one of its parts
            self.default_head(1, action_spec)
        if is_picture(observation_spec):
            parameter = inspect.signature(type(self)).parameters.get("hidden_sizes")
            default = getattr(parameter, "default", hidden_sizes)
            for name, is_set in ("norm_obs", norm_obs), ("hidden_sizes", [*hidden_sizes] != [*default]):
                if is_set:
                    raise ConfigError(f"model.agent.{name} is for vectors: leave it out for pictures.")
            super().__init__(action_spec, lambda: make_encoder(observation_spec))
        else:
            entries = choose_entries(observation_spec, None, None)
            names = (None, None) if entries is None else (entries.actor, entries.critic)
            mlp = functools.partial(MLP, hidden_sizes=hidden_sizes, activation="relu")

            def body() -> nn.Module:
                actor_body, _ = (make_body(observation_spec, mlp, read, norm_obs) for read in names)
                return actor_body

            super().__init__(
                action_spec,
                body,
                normalizer=make_normalizer(observation_spec) if norm_obs else None,
                mask=mask_columns(observation_spec),
                entries=entries,
            )
        # Earlier versions also drew a value function: this layer, and the second body above. So seeded
        # weights stay the same.
        orthogonal(Float32Linear(self.head_width, 1), gain=1.0)
        self.initialize(self)
        self.save_hyperparameters(ignore=["observation_spec", "action_spec"])

    def initialize(self, network: nn.Module) -> None:
        """Draw the initial weights of a network, the agent or a critic like it: here, as PyTorch does."""
        reset(network)

    def policy(self, observation: Tensor, *noise: Tensor) -> Any:
        """Return what ``policy`` of the head returns for normalized observations [B, ...]."""
        return self.head.policy(self.actor_body(observation), *noise)

    def array_policy(self) -> ArrayPolicy:
        """Return a NumPy policy, or if there is none a policy on tensors."""
        return numpy_policy(self) or super().array_policy()


class Critics(nn.ModuleList):
    """Critics Q(s, a) with weights of their own."""

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        """Return the values, [C, B]."""
        return torch.stack([critic(observation, action) for critic in self])


class Critic(nn.Module):
    """Critic Q(s, a) of continuous actions, with the hidden layers and the normalization of an agent."""

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


def reset(network: nn.Module) -> None:
    """Initialize all layers as PyTorch does."""
    for layer in network.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            layer.reset_parameters()
