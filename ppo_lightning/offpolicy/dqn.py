"""Deep Q-networks."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torchrl.data import Bounded, Categorical, TensorSpec, Unbounded

from ppo_lightning.algorithms.minibatches import Minibatch
from ppo_lightning.envs.specs import Specs
from ppo_lightning.errors import ConfigError
from ppo_lightning.models.heads import ArraySampler
from ppo_lightning.offpolicy.agents import ExploringHead, OffPolicyAgent
from ppo_lightning.offpolicy.module import AgentMaker, Delayed, Metrics, OffPolicyModule, frozen, td_target
from ppo_lightning.utils.arguments import Range, check_arguments

DECISIVE = 1e15  # a factor of noise that decides alone: far above all values, far below `-INVALID`


class ChoiceHead(ExploringHead):
    """Base class of what chooses the best one of several actions, by their values plus noise."""

    def __init__(self, in_features: int, action_spec: TensorSpec) -> None:
        if type(action_spec) is not Categorical or action_spec.ndim:
            kind = type(action_spec).__name__
            others = "SAC, TD3 or DDPG, or " if isinstance(action_spec, Bounded | Unbounded) else ""
            raise ConfigError(f"env_id has {kind} actions, not one choice: use {others}PPO.")
        self.num_choices = int(action_spec.space.n)
        super().__init__(in_features, self.num_choices)
        self.noise_shape = torch.Size([self.num_choices])

    def choose(self, features: Tensor, noise: Tensor | None, mask: Tensor | None = None) -> Tensor:
        """Return the best actions [B]."""
        values = self.logits(features, mask)
        return (values if noise is None else values + noise).argmax(-1)

    def array_sampler(self) -> ArraySampler | None:
        """Return a sampler of arrays."""
        return lambda values, noise: (values if noise is None else values + noise).argmax(-1)


class QHead(ChoiceHead):
    """Values Q(s, a) of discrete actions. Noise explores: it is random with the probability epsilon."""

    exploration: float = 0.0  # epsilon

    def noise(self, batch_shape: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """Draw decisive noise with the probability epsilon, otherwise zeros, [*batch_shape, A].

        CleanRL: ``if random.random() < epsilon: action_space.sample()``. The best of A independent uniform
        numbers is a sample, too, and never a forbidden action.
        """
        uniform = torch.rand(*batch_shape, self.num_choices + 1, generator=generator, dtype=torch.float32)
        explores = uniform[..., :1] < self.exploration
        return DECISIVE * explores * uniform[..., 1:]

    def bars(self, features: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return Q(s, a), and bars that add up to 1."""
        q_values = self.logits(features, mask)
        return q_values, q_values.softmax(-1)


class ChoiceAgent(OffPolicyAgent):
    """Base class of agents that choose one of several actions."""

    def __init__(
        self,
        observation_spec: TensorSpec,
        action_spec: TensorSpec,
        hidden_sizes: Sequence[int] = (120, 84),
        norm_obs: bool = False,
    ) -> None:
        super().__init__(observation_spec, action_spec, hidden_sizes, norm_obs)

    def q_values(self, observation: Tensor) -> Tensor:
        """Return Q(s, a), or the logits of a policy, [B, A]; very low for forbidden actions."""
        return self.head.logits(self.actor_body(observation), self.allowed(observation))


class QAgent(ChoiceAgent):
    """Agent of DQN. The arguments are those of :class:`OffPolicyAgent`.

    Example:
        >>> from torchrl.data import Unbounded
        >>> QAgent(Unbounded((4,)), Categorical(2, shape=())).mode(torch.zeros(3, 4)).shape
        torch.Size([3])
    """

    default_head: Any = QHead

    def play(self, observation: Tensor, memory: Tensor | None = None) -> dict[str, Tensor]:
        """Return the best actions and their values as ``state_value`` [B], see :meth:`Actor.play`."""
        values = self.q_values(self.normalize(observation))
        return {"action": values.argmax(-1), "state_value": values.amax(-1)}


class DQN(OffPolicyModule):
    """Deep Q-network with a target network and epsilon-greedy exploration.

    Source: Mnih et al., "Human-level control through deep reinforcement learning" (2015), with the details of
    CleanRL's ``dqn.py``.

    Args:
        learning_rate: Learning rate of Adam.
        target_network_frequency: Environment steps between two updates of the target network.
        tau: Share of the online network in an update of the target network. 1: a copy.
        start_e: First epsilon.
        end_e: Last epsilon.
        exploration_fraction: Share of the run in which epsilon decreases linearly.
        double: Let the online network choose the action that the target network evaluates.
        buffer_size: As for :class:`OffPolicyModule`.
        batch_size: As for :class:`OffPolicyModule`.
        train_frequency: As for :class:`OffPolicyModule`. CleanRL has 10, which learns less in short runs.
        agent: As for :class:`OffPolicyModule`.
        **hyperparameters: Those of :class:`OffPolicyModule`.

    Example:
        >>> data = RolloutDataModule("CartPole-v1", num_envs=1)
        >>> L.Trainer(accelerator="cpu").fit(DQN(), data)
    """

    head: ClassVar[type] = QHead
    learning_rates: ClassVar = {"agent": "learning_rate"}
    longest_start = 10_000

    def __init__(
        self,
        learning_rate: Annotated[float, Range(1e-15)] = 2.5e-4,
        target_network_frequency: Annotated[int, Range(1)] = 500,
        tau: Annotated[float, Range(0, 1)] = 1.0,
        start_e: Annotated[float, Range(0, 1)] = 1.0,
        end_e: Annotated[float, Range(0, 1)] = 0.05,
        exploration_fraction: Annotated[float, Range(1e-6, 1)] = 0.5,
        double: bool = False,
        buffer_size: Annotated[int, Range(1)] = 10_000,
        batch_size: Annotated[int, Range(1)] = 128,
        train_frequency: Annotated[int, Range(1)] = 4,
        agent: AgentMaker = QAgent,
        **hyperparameters: Any,
    ) -> None:
        check_arguments(DQN.__init__, locals(), "model")
        super().__init__(
            buffer_size=buffer_size,
            batch_size=batch_size,
            train_frequency=train_frequency,
            agent=agent,
            **hyperparameters,
        )

    def add_networks(self, specs: Specs) -> None:
        """Build the target network."""
        self.target = frozen(self.agent)

    def delayed(self, step: int) -> Delayed:
        """Return whether the target network is due after the update at an environment step."""
        return Delayed(target=self.is_due(step, self.hparams.target_network_frequency))

    def exploration(self, step: int) -> float:
        """Return epsilon. In a longer resumed run, it waits until the schedule has come down to it."""
        share = min(1.0, step / (self.hparams.exploration_fraction * self.data.total_timesteps))
        epsilon = self.hparams.start_e + (self.hparams.end_e - self.hparams.start_e) * share
        reached = 1.0 if self.trainer.ckpt_path is None else self._reached
        return max(min(epsilon, reached), min(epsilon, self.hparams.end_e))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the run, and remember epsilon."""
        super().on_load_checkpoint(checkpoint)
        self._reached = checkpoint.get("exploration", 1.0)

    def log_batch(self, metrics: list[Metrics]) -> None:
        """Log the metrics of the updates and epsilon."""
        self.run_log.add({"charts/epsilon": self.agent.head.exploration})
        super().log_batch(metrics)

    def update(self, minibatch: Minibatch, due: Delayed) -> Metrics:
        """Update the Q-network and, if it is due, the target network."""
        loss, metrics = self.loss(minibatch)
        self.minimize("agent", loss)
        if due.target:
            self.move_target(self.agent, self.target)
        return metrics

    def loss(self, minibatch: Minibatch) -> tuple[Tensor, Metrics]:
        """Return the mean squared error of Q(s, a), and its metrics."""
        following = minibatch["next_observation"]
        with torch.no_grad():
            next_q = self.target.q_values(following)
            chooser = self.agent.q_values(following) if self.hparams.double else next_q
            next_value = next_q.gather(1, chooser.argmax(-1, keepdim=True)).squeeze(-1)
            reward, terminated = minibatch["reward"], minibatch["terminated"]
            target = td_target(reward, terminated, next_value, self.hparams.gamma)
        q_values = self.agent.q_values(minibatch["observation"])
        values = q_values.gather(1, minibatch["action"].unsqueeze(-1)).squeeze(-1)
        loss = F.mse_loss(values, target)  # neither the error nor the gradient is clipped
        return loss, {"losses/td_loss": loss.detach(), "losses/q_values": values.detach().mean()}
