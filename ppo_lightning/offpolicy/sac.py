"""Soft actor-critic."""

import math
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from ppo_lightning.algorithms.minibatches import Minibatch
from ppo_lightning.envs.specs import Specs
from ppo_lightning.offpolicy import losses
from ppo_lightning.offpolicy.agents import Critics, SACAgent
from ppo_lightning.offpolicy.heads import SquashedGaussianHead
from ppo_lightning.offpolicy.module import AgentMaker, Metrics, OffPolicyModule, adam_of, frozen
from ppo_lightning.utils.arguments import Range, check_arguments


class SAC(OffPolicyModule):
    """Soft actor-critic: a stochastic policy that maximizes return and entropy, with two critics.

    Source: Haarnoja et al., "Soft Actor-Critic Algorithms and Applications" (2018), with the details of
    CleanRL's ``sac_continuous_action.py``.

    Args:
        policy_lr: Learning rate of the policy's Adam.
        q_lr: Learning rate of the Adams of the critics and of the temperature.
        tau: Share of the critics in an update of the target critics.
        policy_frequency: Environment steps between two updates of the policy, which then makes as many.
        target_network_frequency: Environment steps between two updates of the target critics.
        autotune: Learn the temperature, so that the entropy is -A for A components of an action.
        alpha: Temperature, if it is not learned.
        learning_starts: As for :class:`OffPolicyModule`. Before it, actions are uniformly random.
        agent: As for :class:`OffPolicyModule`.
        **hyperparameters: Those of :class:`OffPolicyModule`.

    Example:
        >>> data = RolloutDataModule("HalfCheetah-v4", num_envs=1, num_steps=10, total_timesteps=1_000_000)
        >>> L.Trainer(accelerator="cpu").fit(SAC(), data)
    """

    head = SquashedGaussianHead
    frequencies = ("policy_frequency", "target_network_frequency")

    def __init__(
        self,
        policy_lr: Annotated[float, Range(1e-15)] = 3e-4,
        q_lr: Annotated[float, Range(1e-15)] = 1e-3,
        tau: Annotated[float, Range(0, 1)] = 0.005,
        policy_frequency: Annotated[int, Range(1)] = 2,
        target_network_frequency: Annotated[int, Range(1)] = 1,
        autotune: bool = True,
        alpha: Annotated[float, Range(1e-12)] = 0.2,
        learning_starts: Annotated[int, Range(0)] = 5_000,
        agent: AgentMaker = SACAgent,
        **hyperparameters: Any,
    ) -> None:
        check_arguments(SAC.__init__, locals(), "model")
        super().__init__(learning_starts=learning_starts, agent=agent, **hyperparameters)

    def add_networks(self, specs: Specs) -> None:
        """Build the critics, the target critics and the temperature."""
        num_actions = len(self.agent.head.low)
        self.critics = Critics(2, specs.observation, num_actions, self.agent.hparams.hidden_sizes)
        self.target_critics = frozen(self.critics)
        autotune = self.hparams.autotune
        log_alpha = 0.0 if autotune else math.log(self.hparams.alpha)
        self.log_alpha = nn.Parameter(torch.tensor(log_alpha), requires_grad=autotune)
        self.target_entropy = -float(num_actions)
        # Of the next action and, for each update of the policy, of its action and of the temperature's.
        self.noise_shape = (1 + 2 * self.hparams.policy_frequency, num_actions)

    def adams(self) -> dict[str, torch.optim.Adam]:
        """Return the optimizers of the policy, of the critics and of the temperature."""
        q_lr = self.hparams.q_lr
        actor = adam_of(self.agent.parameters(), self.hparams.policy_lr)
        adams = {"actor": actor, "q": adam_of(self.critics.parameters(), q_lr)}
        return adams | ({"alpha": adam_of([self.log_alpha], q_lr)} if self.hparams.autotune else {})

    def exploration(self, step: int) -> float:
        """Return 1, the policy's own noise, and infinity before ``learning_starts``."""
        return math.inf if step < self.hparams.learning_starts else 1.0

    def update(self, minibatch: Minibatch, *is_due: bool) -> Metrics:
        """Update the critics and, if they are due, the policy, the temperature and the target critics."""
        next_noise, *noises = minibatch["noise"].unbind(1)
        metrics = self.update_critics(minibatch, self.next_value(minibatch, next_noise))
        if is_due[0]:
            for noise, fresh_noise in zip(noises[::2], noises[1::2], strict=True):
                metrics |= self.update_actor(minibatch["observation"], noise, fresh_noise)
        if is_due[1]:
            self.move_target(self.critics, self.target_critics)
        return metrics

    @torch.no_grad()
    def next_value(self, minibatch: Minibatch, noise: Tensor) -> Tensor:
        """Return the smallest target value of the policy's actions plus the weighted entropy, [B]."""
        following = minibatch["next_observation"]
        action, log_prob = self.agent.policy(following, noise)
        return self.target_critics(following, action).amin(0) - self.log_alpha.exp() * log_prob

    def update_actor(self, observation: Tensor, noise: Tensor, fresh_noise: Tensor) -> Metrics:
        """Update the policy and then the temperature, for which the actions are drawn again."""
        action, log_prob = self.agent.policy(observation, noise)
        q_value = self.critics(observation, action).amin(0)
        loss = (self.log_alpha.detach().exp() * log_prob - q_value).mean()
        self.minimize("actor", loss)
        metrics = {"losses/actor_loss": loss.detach()}
        if self.hparams.autotune:
            with torch.no_grad():
                _, log_prob = self.agent.policy(observation, fresh_noise)
            alpha_loss = losses.temperature_loss(self.log_alpha, log_prob, self.target_entropy)
            self.minimize("alpha", alpha_loss)
            metrics["losses/alpha_loss"] = alpha_loss.detach()
        return metrics | {"losses/alpha": self.log_alpha.detach().exp()}
