"""Soft actor-critic."""

import math
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from ppo_lightning.algorithms.minibatches import Minibatch
from ppo_lightning.envs.specs import Specs
from ppo_lightning.offpolicy.agents import Critic, Critics, OffPolicyAgent
from ppo_lightning.offpolicy.ddpg import ContinuousHead
from ppo_lightning.offpolicy.module import AgentMaker, Delayed, Metrics, OffPolicyModule, frozen
from ppo_lightning.utils.arguments import Range, check_arguments


class SquashedGaussianHead(ContinuousHead):
    """SAC's squashed normal distribution, whose standard deviation depends on the state."""

    outputs_per_action = 2
    exploration = 1.0

    def moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and logarithm of the standard deviation, which lies between -5 and 2, each [B, A]."""
        mean, log_std = outputs.chunk(2, dim=-1)
        return mean, -5 + 3.5 * (log_std.tanh() + 1)

    def action(self, outputs: Tensor, noise: Tensor | float) -> Tensor:
        """Return the actions that normal noise selects."""
        mean, log_std = self.moments(outputs)
        return self.squashed(mean + log_std.exp() * noise)

    def policy(self, features: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the actions [B, A] that normal noise [B, A] selects, and their log-probabilities [B]."""
        mean, log_std = self.moments(self.linear(features))
        raw = mean + log_std.exp() * noise
        # a = squashed(raw), da / draw = (high - low) / 2 (1 - tanh(raw)^2)
        # log p(a) = log N(raw; mean, std) - log(da / draw)
        slope = (self.high - self.low) / 2 * (1 - raw.tanh().square()) + 1e-6
        log_prob = -noise.square() / 2 - log_std - math.log(2 * math.pi) / 2 - slope.log()
        return self.squashed(raw), log_prob.sum(-1)


class SACAgent(OffPolicyAgent):
    """Agent of SAC. The arguments are those of :class:`OffPolicyAgent`."""

    default_head = SquashedGaussianHead


class SAC(OffPolicyModule):
    """Soft actor-critic: a stochastic policy that maximizes return and entropy, with two critics.

    Source: Haarnoja et al., "Soft Actor-Critic Algorithms and Applications" (2018), with the details of
    CleanRL's ``sac_continuous_action.py``.

    Args:
        policy_lr: Learning rate of the policy's Adam.
        q_lr: Learning rate of the Adams of the critics and of the temperature.
        tau: Share of the critics in an update of the target critics.
        policy_frequency: Updates of the critics after which the policy makes as many.
        target_network_frequency: Environment steps between two updates of the target critics.
        autotune: Learn the temperature, so that the entropy is -A for A components of an action.
        alpha: Temperature, if it is not learned.
        agent: As for :class:`OffPolicyModule`.
        **hyperparameters: Those of :class:`OffPolicyModule`.

    Example:
        >>> data = RolloutDataModule("HalfCheetah-v4", num_envs=1, total_timesteps=1_000_000)
        >>> L.Trainer(accelerator="cpu").fit(SAC(), data)
    """

    head: ClassVar[type] = SquashedGaussianHead
    learning_rates: ClassVar = {"agent": "policy_lr", "critics": "q_lr", "log_alpha": "q_lr"}
    longest_start = 5_000

    def __init__(
        self,
        policy_lr: Annotated[float, Range(1e-15)] = 3e-4,
        q_lr: Annotated[float, Range(1e-15)] = 1e-3,
        tau: Annotated[float, Range(0, 1)] = 0.005,
        policy_frequency: Annotated[int, Range(1)] = 2,
        target_network_frequency: Annotated[int, Range(1)] = 1,
        autotune: bool = True,
        alpha: Annotated[float, Range(1e-12)] = 0.2,
        agent: AgentMaker = SACAgent,
        **hyperparameters: Any,
    ) -> None:
        check_arguments(SAC.__init__, locals(), "model")
        super().__init__(agent=agent, **hyperparameters)

    def add_networks(self, specs: Specs) -> None:
        """Build the critics, the target critics and the temperature."""
        self.critics = self.make_critics(specs)
        self.target_critics = frozen(self.critics)
        self.log_alpha = nn.Parameter(torch.tensor(0.0), requires_grad=self.hparams.autotune)

    def on_train_start(self) -> None:
        """Set the temperature of this run, if it is not learned, also in a resumed one."""
        super().on_train_start()
        if not self.hparams.autotune:
            self.log_alpha.data.fill_(math.log(self.hparams.alpha))

    def configure_optimizers(self) -> list[torch.optim.Adam]:
        """Return an Adam for each part, for the temperature only if this run learns it."""
        self.log_alpha.requires_grad_(self.hparams.autotune)
        return super().configure_optimizers()

    def make_critics(self, specs: Specs) -> Any:
        """Build two critics."""
        return Critics(Critic(self.agent, specs.observation) for _ in range(2))

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """Noise of the next action, and before and after each update of the policy."""
        return 1 + 2 * self.hparams.policy_frequency, len(self.agent.head.low)

    def delayed(self, step: int) -> Delayed:
        """Return what is due in the update at an environment step."""
        every = self.hparams.policy_frequency * self.hparams.train_frequency  # it counts updates
        return Delayed(self.is_due(step, every), self.is_due(step, self.hparams.target_network_frequency))

    def update(self, minibatch: Minibatch, due: Delayed) -> Metrics:
        """Update the critics and, if they are due, the policy, the temperature and the target critics."""
        next_noise, *noises = minibatch["noise"].unbind(1)
        metrics = self.update_critics(minibatch, self.next_value(minibatch, next_noise))
        if due.policy:
            for noise, fresh_noise in zip(noises[::2], noises[1::2], strict=True):
                metrics |= self.update_actor(minibatch["observation"], noise, fresh_noise)
        if due.target:
            self.move_target(self.critics, self.target_critics)
        return metrics

    @torch.no_grad()
    def next_value(self, minibatch: Minibatch, noise: Tensor) -> Tensor:
        """Return the expected smallest target value plus the weighted entropy of the policy, [B]."""
        value, log_prob, weight = self.evaluate(minibatch["next_observation"], noise, self.target_critics)
        return (weight * (value - self.log_alpha.exp() * log_prob)).sum(-1)

    def evaluate(
        self, observation: Tensor, noise: Tensor, critics: Any
    ) -> tuple[Tensor, Tensor, Tensor | float]:
        """Return smallest value, log-probability and weight of K of the policy's actions, each [B, K].

        Here, K is 1: a sample stands for the expectation over all actions.
        """
        action, log_prob = self.agent.policy(observation, noise)
        return critics(observation, action).amin(0)[:, None], log_prob[:, None], 1.0

    def desired_entropy(self, observation: Tensor) -> Tensor | float:
        """Return the entropy to which the temperature leads, a number or [B, 1]."""
        return -float(len(self.agent.head.low))

    def update_actor(self, observation: Tensor, noise: Tensor, fresh_noise: Tensor) -> Metrics:
        """Update the policy and then the temperature, for which the actions are drawn again."""
        value, log_prob, weight = self.evaluate(observation, noise, self.critics)
        loss = (weight * (self.log_alpha.detach().exp() * log_prob - value)).mean()
        self.minimize("agent", loss)
        metrics = {"losses/actor_loss": loss.detach()}
        if self.hparams.autotune:
            with torch.no_grad():
                _, log_prob, weight = self.evaluate(observation, fresh_noise, self.critics)
            target = self.desired_entropy(observation)
            alpha_loss = temperature_loss(self.log_alpha, log_prob, weight, target)
            self.minimize("log_alpha", alpha_loss)
            metrics["losses/alpha_loss"] = alpha_loss.detach()
        return metrics | {"losses/alpha": self.log_alpha.detach().exp()}


def temperature_loss(
    log_alpha: Tensor, log_prob: Tensor, weight: Tensor | float, target_entropy: Tensor | float
) -> Tensor:
    """Return the loss of the temperature alpha = exp(log_alpha), for weighted actions [B, K].

    Its gradient is alpha times that of TorchRL and Stable-Baselines3, whose loss is linear in ``log_alpha``.
    """
    return -(weight * log_alpha.exp() * (log_prob + target_entropy)).mean()
