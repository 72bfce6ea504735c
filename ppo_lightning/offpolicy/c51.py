"""Categorical deep Q-networks."""

import functools
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch import Tensor
from torchrl.data import TensorSpec

from ppo_lightning.algorithms.minibatches import Minibatch
from ppo_lightning.errors import ConfigError
from ppo_lightning.models.heads import INVALID, Float32Linear
from ppo_lightning.offpolicy.dqn import DQN, QAgent, QHead
from ppo_lightning.offpolicy.module import AgentMaker, Metrics, td_target
from ppo_lightning.utils.arguments import Range, check_arguments


class DistributionHead(QHead):
    """Distributions of the returns of discrete actions, with the probabilities of K atoms ``support``."""

    support: Tensor

    def __init__(self, in_features: int, action_spec: TensorSpec, support: Tensor) -> None:
        super().__init__(in_features, action_spec)
        self.linear = Float32Linear(in_features, self.num_choices * len(support))
        self.register_buffer("support", support, persistent=False)

    def policy(self, features: Tensor) -> Tensor:
        """Return the probabilities of the atoms, [B, A, K]."""
        return self.linear(features).unflatten(-1, (self.num_choices, -1)).softmax(-1)

    def logits(self, features: Tensor, mask: Tensor | None) -> Tensor:
        """Return Q(s, a) of all actions, [B, A]: the means of the distributions."""
        q_values = self.policy(features) @ self.support
        return q_values if mask is None else q_values.masked_fill(~mask, INVALID)

    def array_sampler(self) -> None:
        """Return None: the collector acts on tensors."""


class C51Agent(QAgent):
    """Agent of C51. Further arguments are those of :class:`QAgent`.

    Args:
        atoms: Number of atoms, the first and the last one.
    """

    def __init__(
        self,
        observation_spec: TensorSpec,
        action_spec: TensorSpec,
        hidden_sizes: Sequence[int] = (120, 84),
        norm_obs: bool = False,
        atoms: Sequence[float] = (101, -100.0, 100.0),
    ) -> None:
        support = torch.linspace(atoms[1], atoms[2], int(atoms[0]))
        self.default_head = functools.partial(DistributionHead, support=support)
        super().__init__(observation_spec, action_spec, hidden_sizes, norm_obs)


class C51(DQN):
    """DQN with a categorical distribution of returns for each action.

    The target network selects and evaluates the next action, unless ``double``. Adam's epsilon is 0.01 /
    ``batch_size``.

    Source: Bellemare et al., "A Distributional Perspective on Reinforcement Learning" (2017), with the
    details of CleanRL's ``c51.py``.

    Args:
        n_atoms: Number of atoms of a distribution.
        v_min: Return of the first atom.
        v_max: Return of the last atom.
        agent: As for :class:`DQN`.
        **hyperparameters: Those of :class:`DQN`.

    Example:
        >>> data = RolloutDataModule("CartPole-v1", num_envs=1, num_steps=10)
        >>> L.Trainer(accelerator="cpu").fit(C51(), data)
    """

    head = DistributionHead

    def __init__(
        self,
        n_atoms: Annotated[int, Range(2)] = 101,
        v_min: Annotated[float, Range(-1e30)] = -100.0,
        v_max: Annotated[float, Range(-1e30)] = 100.0,
        agent: AgentMaker = C51Agent,
        **hyperparameters: Any,
    ) -> None:
        check_arguments(C51.__init__, locals(), "model")
        if v_min >= v_max:
            raise ConfigError(f"model.v_min ({v_min:g}) must be below model.v_max ({v_max:g}).")
        agent = functools.partial(agent, atoms=[n_atoms, v_min, v_max])  # type: ignore[call-arg]
        super().__init__(agent=agent, **hyperparameters)

    def configure_optimizers(self) -> list[torch.optim.Adam]:
        """Return the Adam, with the epsilon for ``batch_size``."""
        self.adam_eps = 0.01 / self.hparams.batch_size
        return super().configure_optimizers()

    def loss(self, minibatch: Minibatch) -> tuple[Tensor, Metrics]:
        """Return the cross-entropy of the distributions, and its metrics."""
        following = minibatch["next_observation"]
        support = self.agent.head.support
        rows = torch.arange(len(following), device=following.device)
        with torch.no_grad():
            chooser = self.agent if self.hparams.double else self.target
            next_action = chooser.q_values(following).argmax(-1)
            next_pmf = self.target.policy(following)[rows, next_action]
            reward, terminated = minibatch["reward"], minibatch["terminated"]
            target = categorical_target(reward, terminated, next_pmf, support, self.hparams.gamma)
        pmf = self.agent.policy(minibatch["observation"])[rows, minibatch["action"]]
        loss = categorical_loss(pmf, target)
        return loss, {"losses/loss": loss.detach(), "losses/q_values": (pmf.detach() @ support).mean()}


def categorical_target(
    reward: Tensor, terminated: Tensor, next_pmf: Tensor, support: Tensor, gamma: float
) -> Tensor:
    """Return the distribution of r + gamma Z(s'), projected onto the support, [B, K].

    Each shifted atom is split between its two neighbours in proportion to their distances. An atom on a
    neighbour keeps its whole mass.

    Source: Bellemare et al., "A Distributional Perspective on Reinforcement Learning" (2017).

    Args:
        reward: Rewards, [B].
        terminated: 1 where the episode terminated, 0 elsewhere, [B].
        next_pmf: Probabilities of the atoms at the next observation, for its best action, [B, K].
        support: The atoms in equal distances, [K].
        gamma: Discount.
    """
    # The atoms z_j move to T z_j = r + gamma (1 - terminated) z_j, clamped to [z_1, z_K].
    shifted = td_target(reward[:, None], terminated[:, None], support, gamma)
    clamped = shifted.clamp(support[0], support[-1])
    # b_j = (T z_j - z_1) / (z_2 - z_1): the place of a moved atom on the support.
    spacing = support[1] - support[0]
    position = (clamped - support[0]) / spacing
    position = position.clamp(0, len(support) - 1)  # rounding may exceed the last atom
    lower = position.floor()
    upper = position.ceil()
    # p_j (u - b_j) goes to the lower neighbour l, and p_j (b_j - l) to the upper neighbour u. Where u = l,
    # both are 0, and the whole p_j goes to l.
    to_lower = (upper + (lower == upper).float() - position) * next_pmf
    to_upper = (position - lower) * next_pmf
    empty = next_pmf.new_zeros(next_pmf.shape)
    return empty.scatter_add(1, lower.long(), to_lower).scatter_add(1, upper.long(), to_upper)


def categorical_loss(pmf: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy of distributions [B, K]. Probabilities are clamped by 1e-5."""
    return -(target * pmf.clamp(1e-5, 1 - 1e-5).log()).sum(-1).mean()
