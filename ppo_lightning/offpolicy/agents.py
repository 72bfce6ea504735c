"""Agents of the off-policy algorithms, and their critics."""

import functools
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torchrl.data import TensorSpec

from ppo_lightning.models.bodies import MLP
from ppo_lightning.models.cnn import NatureCNN
from ppo_lightning.models.encoders import Encoders
from ppo_lightning.models.mlp import MLPAgent
from ppo_lightning.models.normalizers import ObservationNormalizer
from ppo_lightning.offpolicy.heads import DeterministicHead, QHead, SquashedGaussianHead
from ppo_lightning.spaces.entries import row_columns
from ppo_lightning.spaces.specs import has_numbers_only, is_picture, mask_columns, not_measured, stored
from ppo_lightning.utils.arguments import Range, check_arguments


class OffPolicyAgent(MLPAgent):
    """Base class of agents that store neither log-probabilities nor values, for any observations.

    Pictures go through a :class:`~ppo_lightning.models.cnn.NatureCNN`. The weights are initialized as
    PyTorch and CleanRL's off-policy scripts do.

    Args:
        observation_spec: Spec of one environment.
        action_spec: Spec of the actions.
        hidden_sizes: Widths of the hidden layers.
        norm_obs: As for :class:`~ppo_lightning.models.MLPAgent`. The buffer keeps observations as they were
            normalized at their time.
    """

    head: Any
    has_value = False

    def __init__(
        self,
        observation_spec: TensorSpec,
        action_spec: TensorSpec,
        hidden_sizes: Annotated[Sequence[int], Range(1)] = (256, 256),
        norm_obs: bool = False,
    ) -> None:
        check_arguments(OffPolicyAgent.__init__, locals(), "model.agent")
        shape, excluded = tuple(stored(observation_spec).shape), not_measured(observation_spec)
        normalizer = ObservationNormalizer(shape, leave=excluded) if norm_obs else None
        mask = None if is_picture(observation_spec) else mask_columns(observation_spec)
        body = functools.partial(make_body, observation_spec, hidden_sizes)
        super(MLPAgent, self).__init__(action_spec, body, shared=True, normalizer=normalizer, mask=mask)
        del self.critic
        reset(self)
        self.save_hyperparameters(ignore=["observation_spec", "action_spec"])

    def critic(self, features: Tensor) -> Tensor:  # type: ignore[override]
        """Return the value of the best action, [B, 1]; 0 for continuous actions."""
        if isinstance(self.head, QHead):
            return self.head.logits(features).amax(-1, keepdim=True)
        return torch.zeros_like(features[:, :1])

    def rollout_keys(self, observation: TensorSpec, action: TensorSpec) -> dict[str, TensorSpec]:
        """Return what a step of a rollout stores: observation and action."""
        keys = super().rollout_keys(observation, action)
        return {key: keys[key] for key in ("observation", "action")}


class QAgent(OffPolicyAgent):
    """Agent of DQN and C51. Further arguments are those of :class:`OffPolicyAgent`.

    Args:
        atoms: Number of atoms of a distribution of returns, the first and the last atom. None: values.

    Example:
        >>> from torchrl.data import Unbounded
        >>> QAgent(Unbounded((4,)), Categorical(2, shape=())).mode(torch.zeros(3, 4)).shape
        torch.Size([3])
    """

    has_value = True

    def __init__(
        self,
        observation_spec: TensorSpec,
        action_spec: TensorSpec,
        hidden_sizes: Annotated[Sequence[int], Range(1)] = (120, 84),
        norm_obs: bool = False,
        atoms: list[float] | None = None,
    ) -> None:
        support = None if atoms is None else torch.linspace(atoms[1], atoms[2], int(atoms[0]))
        self.default_head = functools.partial(QHead, support=support)
        super().__init__(observation_spec, action_spec, hidden_sizes, norm_obs)

    def q_values(self, observation: Tensor) -> Tensor:
        """Return Q(s, a), [B, A]; very low for forbidden actions."""
        return self.head.logits(self.actor_body(observation), self._allowed(observation))

    def distributions(self, observation: Tensor) -> Tensor:
        """Return the probabilities of the atoms, [B, A, K]."""
        return self.head.distributions(self.actor_body(observation))


class DeterministicAgent(OffPolicyAgent):
    """Agent of DDPG and TD3. The arguments are those of :class:`OffPolicyAgent`."""

    default_head = DeterministicHead

    def policy(self, observation: Tensor) -> Tensor:
        """Return the actions without exploration, [B, A]."""
        return self.head.squashed(self.head.linear(self.actor_body(observation)))


class SACAgent(OffPolicyAgent):
    """Agent of SAC. The arguments are those of :class:`OffPolicyAgent`."""

    default_head = SquashedGaussianHead

    def policy(self, observation: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the actions [B, A] that noise selects, and their log-probabilities [B]."""
        return self.head.sample_with_log_prob(self.actor_body(observation), noise)


class Critic(nn.Module):
    """Value Q(s, a) of continuous actions with A components."""

    def __init__(self, observation_spec: TensorSpec, num_actions: int, hidden_sizes: Sequence[int]) -> None:
        super().__init__()
        self.encoder: Any = nn.Identity()
        width = stored(observation_spec).shape.numel()
        if not has_numbers_only(observation_spec):
            self.encoder = make_body(observation_spec, hidden_sizes[:1])
            width = self.encoder.out_features
        self.body = MLP(width + num_actions, hidden_sizes, activation="relu")
        self.linear = nn.Linear(hidden_sizes[-1], 1)
        reset(self)

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        """Return the values [B]."""
        rows = torch.cat([self.encoder(observation), action], -1)
        return self.linear(self.body(rows)).squeeze(-1)


class Critics(nn.ModuleList):
    """Critics of the same form with weights of their own."""

    def __init__(self, count: int, *args: Any) -> None:
        super().__init__(Critic(*args) for _ in range(count))

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        """Return the values, [number of critics, B]."""
        return torch.stack([critic(observation, action) for critic in self])


def make_body(observation_spec: TensorSpec, hidden_sizes: Sequence[int]) -> nn.Module:
    """Return the network from observations to features."""
    if is_picture(observation_spec):
        return NatureCNN(*observation_spec.shape)
    network = functools.partial(MLP, hidden_sizes=hidden_sizes, activation="relu")
    if has_numbers_only(observation_spec):
        return network(stored(observation_spec).shape[0], columns=row_columns(observation_spec, ()))
    return Encoders(observation_spec, network)


def reset(network: nn.Module) -> None:
    """Initialize all layers as PyTorch does."""
    for layer in network.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            layer.reset_parameters()
