"""Deep deterministic policy gradient."""

from abc import abstractmethod
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from torchrl.data import Categorical, Composite, TensorSpec

from ppo_lightning.algorithms.minibatches import Minibatch
from ppo_lightning.envs.specs import Specs
from ppo_lightning.errors import ConfigError
from ppo_lightning.models.heads import ArraySampler, Float32Linear, SquashedHead
from ppo_lightning.offpolicy.agents import Critic, Critics, ExploringHead, OffPolicyAgent
from ppo_lightning.offpolicy.module import AgentMaker, Delayed, Metrics, OffPolicyModule, frozen
from ppo_lightning.utils.arguments import Range, check_arguments


class ContinuousHead(SquashedHead, ExploringHead):
    """Base class of what chooses vectors between bounds."""

    outputs_per_action = 1

    def __init__(self, in_features: int, action_spec: TensorSpec) -> None:
        if isinstance(action_spec, Composite) or not action_spec.dtype.is_floating_point:
            kind = type(action_spec).__name__
            others = "DQN, C51 or DiscreteSAC, or " if type(action_spec) is Categorical else ""
            raise ConfigError(f"env_id has {kind} actions, not vectors: use {others}PPO.")
        super().__init__(in_features, action_spec)
        self.linear = Float32Linear(in_features, self.outputs_per_action * len(self.low))

    @abstractmethod
    def action(self, outputs: Tensor, noise: Tensor | float) -> Tensor:
        """Return the actions [B, A] for outputs of the linear layer and scaled noise [B, A]; 0: the best."""

    def choose_by(self, outputs: Tensor, noise: Tensor | None) -> Tensor:
        """Return the actions for outputs of the linear layer and standard normal noise; None: the best."""
        if noise is None:
            return self.action(outputs, 0.0)
        if self.exploration is None:  # CleanRL: `if global_step < learning_starts: action_space.sample()`
            return self.low + (self.high - self.low) * torch.special.ndtr(noise)
        return self.action(outputs, self.exploration * noise)

    def choose(self, features: Tensor, noise: Tensor | None, mask: Tensor | None = None) -> Tensor:
        """Return actions [B, A] within the bounds."""
        return self.choose_by(self.linear(features), noise)

    def array_sampler(self) -> ArraySampler:
        """Return a sampler of arrays."""
        tensor = torch.from_numpy
        return lambda x, noise: self.choose_by(tensor(x), None if noise is None else tensor(noise)).numpy()


class DeterministicHead(ContinuousHead):
    """A deterministic policy, squashed into the bounds by tanh. Noise is in units of half their width."""

    def action(self, outputs: Tensor, noise: Tensor | float) -> Tensor:
        """Return the actions with noise, see :meth:`ContinuousHead.action`."""
        return self.for_environment(self.squashed(outputs) + noise * (self.high - self.low) / 2)

    def policy(self, features: Tensor, noise: Tensor | float = 0.0) -> Tensor:
        """Return the actions with noise, [B, A]."""
        return self.action(self.linear(features), noise)


class DeterministicAgent(OffPolicyAgent):
    """Agent of DDPG and TD3. The arguments are those of :class:`OffPolicyAgent`."""

    default_head = DeterministicHead


class DDPG(OffPolicyModule):
    """Deep deterministic policy gradient: a deterministic policy that follows the gradient of a critic.

    Source: Lillicrap et al., "Continuous control with deep reinforcement learning" (2016), with the
    details of CleanRL's ``ddpg_continuous_action.py``.

    Args:
        learning_rate: Learning rate of both Adams. TD3's authors have 1e-3, which learns more in 20 000 steps
            than CleanRL's 3e-4.
        tau: Share of the online networks in an update of the target networks.
        exploration_noise: Standard deviation of the noise on actions, in units of half the width of their
            bounds. Before ``learning_starts``, actions are uniformly random.
        policy_frequency: Updates of the critics for one of the policy and of all target networks.
        agent: As for :class:`OffPolicyModule`.
        **hyperparameters: Those of :class:`OffPolicyModule`.

    Example:
        >>> data = RolloutDataModule("HalfCheetah-v4", num_envs=1, total_timesteps=1_000_000)
        >>> L.Trainer(accelerator="cpu").fit(DDPG(), data)
    """

    head = DeterministicHead
    learning_rates: ClassVar = {"agent": "learning_rate", "critics": "learning_rate"}
    num_critics = 1

    def __init__(
        self,
        learning_rate: Annotated[float, Range(1e-15)] = 1e-3,
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
        self.critics = Critics(Critic(self.agent, specs.observation) for _ in range(self.num_critics))
        self.target_critics, self.target = frozen(self.critics), frozen(self.agent)

    def delayed(self, step: int) -> Delayed:
        """Return whether the policy and all target networks are due in the update at an environment step."""
        is_due = self.is_due(step, self.hparams.policy_frequency * self.hparams.train_frequency)
        return Delayed(policy=is_due, target=is_due)

    def update(self, minibatch: Minibatch, due: Delayed) -> Metrics:
        """Update the critics and, if they are due, the policy and the target networks."""
        metrics = self.update_critics(minibatch, self.next_value(minibatch))
        if due.policy:
            metrics |= self.update_actor(minibatch)
        if due.target:
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
        self.minimize("agent", loss)
        return {"losses/actor_loss": loss.detach()}
