"""Deep deterministic policy gradient."""

import math
from typing import Annotated, Any

import torch
from torch import Tensor

from ppo_lightning.algorithms.minibatches import Minibatch
from ppo_lightning.envs.specs import Specs
from ppo_lightning.offpolicy.agents import Critics, DeterministicAgent
from ppo_lightning.offpolicy.heads import DeterministicHead
from ppo_lightning.offpolicy.module import AgentMaker, Metrics, OffPolicyModule, adam_of, frozen
from ppo_lightning.utils.arguments import Range, check_arguments


class DDPG(OffPolicyModule):
    """Deep deterministic policy gradient: a deterministic policy that follows the gradient of a critic.

    Source: Lillicrap et al., "Continuous control with deep reinforcement learning" (2016), with the
    details of CleanRL's ``ddpg_continuous_action.py``.

    Args:
        learning_rate: Learning rate of both Adams.
        tau: Share of the online networks in an update of the target networks.
        exploration_noise: Standard deviation of the noise on actions, in units of half their width. Before
            ``learning_starts``, actions are uniformly random.
        policy_frequency: Environment steps between two updates of the policy and of all target networks.
        agent: As for :class:`OffPolicyModule`.
        **hyperparameters: Those of :class:`OffPolicyModule`.

    Example:
        >>> data = RolloutDataModule("HalfCheetah-v4", num_envs=1, num_steps=10, total_timesteps=1_000_000)
        >>> L.Trainer(accelerator="cpu").fit(DDPG(), data)
    """

    head = DeterministicHead
    frequencies = ("policy_frequency",)
    num_critics = 1

    def __init__(
        self,
        learning_rate: Annotated[float, Range(1e-15)] = 3e-4,
        tau: Annotated[float, Range(0, 1)] = 0.005,
        exploration_noise: Annotated[float, Range(0)] = 0.1,
        policy_frequency: Annotated[int, Range(1)] = 2,
        agent: AgentMaker = DeterministicAgent,
        **hyperparameters: Any,
    ) -> None:
        check_arguments(DDPG.__init__, locals(), "model")
        super().__init__(agent=agent, **hyperparameters)

    def add_networks(self, specs: Specs) -> None:
        """Build the critics and all target networks."""
        size = len(self.agent.head.low), self.agent.hparams.hidden_sizes
        self.critics = Critics(self.num_critics, specs.observation, *size)
        self.target_critics, self.target = frozen(self.critics), frozen(self.agent)

    def adams(self) -> dict[str, torch.optim.Adam]:
        """Return the optimizers of the policy and of the critics."""
        networks = {"actor": self.agent, "q": self.critics}
        return {name: adam_of(net.parameters(), self.hparams.learning_rate) for name, net in networks.items()}

    def exploration(self, step: int) -> float:
        """Return the standard deviation of the noise, infinity before ``learning_starts``."""
        return math.inf if step < self.hparams.learning_starts else self.hparams.exploration_noise

    def update(self, minibatch: Minibatch, *is_due: bool) -> Metrics:
        """Update the critics and, if they are due, the policy and the target networks."""
        metrics = self.update_critics(minibatch, self.next_value(minibatch))
        if is_due[0]:
            metrics |= self.update_actor(minibatch)
            self.move_target(self.agent, self.target)
            self.move_target(self.critics, self.target_critics)
        return metrics

    @torch.no_grad()
    def next_value(self, minibatch: Minibatch) -> Tensor:
        """Return the smallest target value of the target policy's actions, [B]."""
        return self.target_critics(minibatch["next_observation"], self.next_action(minibatch)).amin(0)

    def next_action(self, minibatch: Minibatch) -> Tensor:
        """Return the actions of the target policy at the next observations, [B, A]."""
        return self.target.policy(minibatch["next_observation"])

    def update_actor(self, minibatch: Minibatch) -> Metrics:
        """Update the policy by the first critic."""
        observation = minibatch["observation"]
        loss = -self.critics[0](observation, self.agent.policy(observation)).mean()
        self.minimize("actor", loss)
        return {"losses/actor_loss": loss.detach()}
