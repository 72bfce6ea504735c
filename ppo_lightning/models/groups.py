"""Separate networks for groups of players."""

from collections.abc import Callable, Sequence
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchrl.data import Categorical, TensorSpec

from ppo_lightning.errors import ConfigError
from ppo_lightning.models.agent import ActorCritic
from ppo_lightning.models.bodies import MLP
from ppo_lightning.models.encoders import Encoders
from ppo_lightning.spaces.entries import GROUP, choose_entries
from ppo_lightning.spaces.specs import columns, mask_columns
from ppo_lightning.utils.arguments import Range, check_arguments


class GroupBodies(nn.Module):
    """One body per group, of which each row uses that of its group.

    All bodies see all rows, so that shapes do not depend on the groups. The features of a group have columns
    of their own, which are 0 in the rows of other groups. The last column of a group is 1 in its rows, for
    the bias of the next layer.

    Args:
        bodies: One module per group, from observations [B, D] to features [B, F].
        column: Column of the index of the group.
        width: F.

    Example:
        >>> bodies = GroupBodies([nn.Identity(), nn.Identity()], column=0, width=2)
        >>> bodies(torch.tensor([[0.0, 5.0], [1.0, 7.0]])).tolist()
        [[0.0, 5.0, 1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0, 7.0, 1.0]]
    """

    def __init__(self, bodies: Sequence[nn.Module], column: int, width: int) -> None:
        super().__init__()
        self.bodies = nn.ModuleList(bodies)
        self.column = column
        self.out_features = len(bodies) * (width + 1)

    def forward(self, observation: Tensor) -> Tensor:
        """Map observations [B, D] to features [B, G * (F + 1)]."""
        group = observation[:, self.column, None]
        features = (F.pad(body(observation), (0, 1), value=1.0) for body in self.bodies)
        return torch.cat(
            [torch.where(group == index, values, 0.0) for index, values in enumerate(features)], dim=-1
        )


class GroupAgent(ActorCritic):
    """Agent with separate multilayer perceptrons for each group of players, without shared parameters.

    The observations have an entry ``group``, which ``data.env_kwargs.group_map`` adds to games of PettingZoo.
    The normalization of advantages and the limit of the gradient norm are common to all groups.

    Args:
        observation_spec: Spec of one environment, with an entry ``group``.
        action_spec: Spec of discrete actions.
        hidden_sizes: Widths of the hidden layers of each network.

    Raises:
        ConfigError: The observations have no entry ``group``, or the actions are not discrete.

    Example:
        >>> from torchrl.data import Composite, Unbounded
        >>> spec = Composite(group=Categorical(2, shape=()), observation=Unbounded((4,)))
        >>> agent = GroupAgent(spec, Categorical(5, shape=()), hidden_sizes=(32,))
        >>> agent.mode(torch.zeros(3, 5)).shape
        torch.Size([3])
    """

    def __init__(
        self,
        observation_spec: TensorSpec,
        action_spec: TensorSpec,
        hidden_sizes: Annotated[Sequence[int], Range(1, 16_384)] = (64, 64),
    ) -> None:
        check_arguments(GroupAgent.__init__, locals(), "model.agent")
        groups = {name: (part, place.start) for name, part, place in columns(observation_spec)}.get(GROUP)
        if groups is None or not isinstance(action_spec, Categorical):
            raise ConfigError(
                "model.agent is a GroupAgent, which needs discrete actions and observations with an entry"
                f" {GROUP!r}: set data.env_kwargs.group_map in a game of PettingZoo, or choose another agent."
            )
        spec, column = groups
        num_groups = int(spec.space.n)
        entries = choose_entries(observation_spec, None, None)
        assert entries is not None

        def bodies(names: dict[str, int]) -> Callable[[], nn.Module]:
            read = set(names) - {GROUP}

            def body() -> nn.Module:
                return Encoders(observation_spec, lambda width: MLP(width, hidden_sizes), read)

            return lambda: GroupBodies([body() for _ in range(num_groups)], column, hidden_sizes[-1])

        super().__init__(
            action_spec,
            bodies(entries.actor),
            mask=mask_columns(observation_spec),
            critic_body=bodies(entries.critic),
            entries=entries,
        )
        for linear, gain in ((self.head.linear, 0.01), (self.critic, 1.0)):
            separate(linear, num_groups, gain)
        self.save_hyperparameters(ignore=["observation_spec", "action_spec"])


def separate(linear: nn.Linear, num_groups: int, gain: float) -> None:
    """Initialize the columns of each group by themselves, with a weight of 0 in place of the shared bias.

    Args:
        linear: Layer after :class:`GroupBodies`.
        num_groups: G.
        gain: Gain of the orthogonal weights.
    """
    linear.register_parameter("bias", None)
    with torch.no_grad():
        for block in linear.weight.chunk(num_groups, dim=1):
            block[:] = 0
            block[:, :-1] = nn.init.orthogonal_(torch.empty_like(block[:, :-1]), gain)
