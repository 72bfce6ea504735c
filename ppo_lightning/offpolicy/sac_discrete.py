"""Soft actor-critic for discrete actions."""

import copy
import math
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from ppo_lightning.envs.specs import Specs
from ppo_lightning.models.heads import gumbel
from ppo_lightning.offpolicy.dqn import DECISIVE, ChoiceAgent, ChoiceHead
from ppo_lightning.offpolicy.module import AgentMaker
from ppo_lightning.offpolicy.sac import SAC
from ppo_lightning.utils.arguments import Range, check_arguments


class SoftmaxHead(ChoiceHead):
    """A categorical distribution over discrete actions."""

    exploration = 1.0

    def noise(self, batch_shape: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """Draw Gumbel noise: the argmax of logits plus Gumbel noise is a sample of the softmax.

        While actions are uniformly random, the noise decides alone.
        """
        noise = gumbel(*batch_shape, self.num_choices, generator=generator)
        return DECISIVE * noise if self.exploration is None else self.exploration * noise

    def bars(self, features: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the probabilities."""
        probabilities = self.logits(features, mask).softmax(-1)
        return probabilities, probabilities


class DiscreteSACAgent(ChoiceAgent):
    """Agent of :class:`DiscreteSAC`, with He's initialization. The arguments are as for :class:`QAgent`."""

    default_head = SoftmaxHead

    def initialize(self, network: nn.Module) -> None:
        """Draw normal weights by He's rule, without biases."""
        for layer in network.modules():
            if isinstance(layer, nn.Linear | nn.Conv2d):
                layer.reset_parameters()  # keeps seeded weights, whose random numbers follow PyTorch's
                nn.init.kaiming_normal_(layer.weight)
                nn.init.zeros_(layer.bias)  # type: ignore[arg-type]


class DiscreteCritics(nn.ModuleList):
    """Critics Q(s, a) of discrete actions, each a :class:`DiscreteSACAgent`."""

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        """Return the values of actions [B], [C, B]."""
        return torch.stack([values[range(len(action)), action] for values in self.all_values(observation)])

    def all_values(self, observation: Tensor) -> Tensor:
        """Return the values of all actions, [C, B, A]."""
        return torch.stack([critic.q_values(observation) for critic in self])  # type: ignore[operator]


class DiscreteSAC(SAC):
    """SAC for discrete actions, whose losses are expectations over all actions.

    The temperature is updated with the probabilities after the policy's update, in CleanRL with those before.

    Source: Christodoulou, "Soft Actor-Critic for Discrete Action Settings" (2019), with the details of
    CleanRL's ``sac_atari.py``. Only the recipe ``sac/pong`` has all of the script's values.

    Args:
        target_entropy_scale: Desired entropy as a share of that of uniformly random actions.
        agent: As for :class:`OffPolicyModule`.
        **hyperparameters: Those of :class:`SAC`.

    Example:
        >>> data = RolloutDataModule("CartPole-v1", num_envs=1, num_steps=10)
        >>> L.Trainer(accelerator="cpu").fit(DiscreteSAC(), data)
    """

    head = SoftmaxHead
    adam_eps = 1e-4

    def __init__(
        self,
        target_entropy_scale: Annotated[float, Range(0, 1)] = 0.89,
        agent: AgentMaker = DiscreteSACAgent,
        **hyperparameters: Any,
    ) -> None:
        check_arguments(DiscreteSAC.__init__, locals(), "model")
        super().__init__(agent=agent, **hyperparameters)

    def make_critics(self, specs: Specs) -> Any:
        """Build two critics like the agent."""
        critics = DiscreteCritics(copy.deepcopy(self.agent) for _ in range(2))
        self.agent.initialize(critics)
        return critics

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """As many rows as SAC's, which has a noise: values of all actions need none."""
        return 1 + 2 * self.hparams.policy_frequency, 0

    def desired_entropy(self, observation: Tensor) -> Tensor | float:
        """Return a share of the entropy of uniformly random actions: with a mask, allowed ones, [B, 1]."""
        allowed = self.agent.allowed(observation)
        largest = math.log(self.agent.head.num_choices)
        if allowed is not None:
            largest = allowed.sum(-1, keepdim=True).log()
        return self.hparams.target_entropy_scale * largest

    def evaluate(self, observation: Tensor, noise: Tensor, critics: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return smallest value, log-probability and probability of all actions, each [B, A]."""
        log_probs = self.agent.q_values(observation).log_softmax(-1)
        return critics.all_values(observation).amin(0).detach(), log_probs, log_probs.exp()
