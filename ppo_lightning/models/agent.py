"""Agents of policy-gradient algorithms: an actor and a value function."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch import distributions as D
from torchrl.data import TensorSpec, Unbounded

from ppo_lightning.models.actor import Actor, with_memory
from ppo_lightning.models.heads import Float32Linear, Head, HeadDistribution, Parameters
from ppo_lightning.models.init import orthogonal


class Evaluation(NamedTuple):
    """Evaluation of given actions by the current weights.

    Attributes:
        log_prob: Log-probability of the action, [B].
        entropy: Entropy of the distribution, [B], in nats.
        value: Value of the observation, [B].
        features: Input of the head, [B, F].
        critic_features: Input of the last layer of the value function, [B, F]. The same tensor if policy and
            value share a body.
        parameters: Parameters of the distribution, each [B, ...], as the head's ``kl`` expects them.

    Example:
        >>> from torchrl.data import Categorical
        >>> from ppo_lightning.models import MLPAgent
        >>> agent = MLPAgent(Unbounded((4,)), Categorical(2, shape=()))
        >>> agent.evaluate(torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64)).entropy.shape
        torch.Size([3])
    """

    log_prob: Tensor
    entropy: Tensor
    value: Tensor
    features: Tensor
    critic_features: Tensor
    parameters: Parameters


class ActorCritic(Actor):
    """An actor with a distribution over actions, and a value function.

    :meth:`act` also returns log-probabilities and values, which a rollout stores. With a memory,
    :meth:`evaluate` takes whole sequences. The value function shares body and memory of the policy, or
    (``shared=False``) reads each observation without memory.

    Args:
        action_spec: Spec of the actions.
        body: As for :class:`~ppo_lightning.models.actor.Actor`.
        shared: Use one body, and one memory, for policy and value instead of one body each.
        critic_body: Makes the body of the value function, if it differs. None: ``body`` makes it.
        **options: Those of :class:`~ppo_lightning.models.actor.Actor`.

    Example:
        >>> from torchrl.data import Categorical
        >>> from ppo_lightning.models import MLP
        >>> agent = ActorCritic(Categorical(2, shape=()), lambda: MLP(4, [64]))
        >>> agent.mode(torch.zeros(3, 4)).shape
        torch.Size([3])
    """

    out_keys = ("action", "action_log_prob", "state_value")
    head: Head
    critic_body: nn.Module | None

    def __init__(
        self,
        action_spec: TensorSpec,
        body: Callable[[], nn.Module],
        shared: bool = False,
        *,
        critic_body: Callable[[], nn.Module] | None = None,
        **options: Any,
    ) -> None:
        # detail 13
        # detail 26
        make_critic_body = (lambda: None) if shared else critic_body or body
        super().__init__(action_spec, body, more_bodies={"critic_body": make_critic_body}, **options)
        width = self.head_width if self.critic_body is None else self.critic_body.out_features
        assert isinstance(width, int)
        self.critic = orthogonal(Float32Linear(width, 1), gain=1.0)

    def rollout_keys(self, observation: TensorSpec, action: TensorSpec) -> dict[str, TensorSpec]:
        """Return what a step of a rollout stores, see :meth:`Actor.rollout_keys`."""
        return super().rollout_keys(observation, action) | {
            "action_log_prob": Unbounded((), dtype=torch.float32),
            "state_value": Unbounded((1,), dtype=torch.float32),
        }

    @property
    def microbatch_size(self) -> int:
        """Number of rows for the fastest backpropagation on a CPU, whose cache holds their activations.

        The body may override the default.
        """
        return getattr(self.actor_body, "microbatch_size", 4096)

    def both_features(self, observation: Tensor, memory: Tensor | None) -> tuple[Any, Tensor, Tensor | None]:
        """Return the features of policy and value for observations [B, ...], and the next hidden state."""
        actor_features, memory = self.features(observation, memory)
        critic_features = actor_features if self.critic_body is None else self.critic_body(observation)
        return actor_features, critic_features, memory

    def act(self, observation: Tensor, noise: Tensor | None = None, memory: Tensor | None = None) -> Any:
        """Choose actions, with the arguments of :meth:`Actor.act`.

        Returns:
            Actions [B, ...] before any clipping, log-probabilities [B], values [B, 1] as TorchRL stores them,
            and the next hidden state.
        """
        actor_features, critic_features, memory = self.both_features(observation, memory)
        action, log_prob = self.head.sample(actor_features, noise, self.allowed(observation))
        return action, log_prob, self.critic(critic_features), memory

    def play(self, observation: Tensor, memory: Tensor | None = None) -> dict[str, Tensor]:
        """Return the outputs of a deployed agent, with ``state_value`` [B], see :meth:`Actor.play`."""
        action, _, value, memory = self.act(self.normalize(observation), memory=memory)
        outputs = {"action": self.head.for_environment(action), "state_value": value.squeeze(-1)}
        return with_memory(outputs, memory)

    def value(self, observation: Tensor, memory: Tensor | None = None) -> Tensor:
        """Return the values [B] of normalized observations [B, ...].

        ``memory`` is as in :meth:`act`. A value function with a body of its own does not use it.
        """
        if self.critic_body is None:
            return self.critic(self.features(observation, memory)[0]).squeeze(-1)
        return self.critic(self.critic_body(observation)).squeeze(-1)

    def evaluate(
        self, observation: Tensor, action: Tensor, memory: Tensor | None = None, is_init: Tensor | None = None
    ) -> Evaluation:
        """Evaluate given actions with the current weights.

        Args:
            observation: Normalized observations, [B, ...]. With a memory: whole sequences, [n, T, ...].
            action: Actions, [B, ...] or [n, T, ...].
            memory: Hidden state before the first step of the sequences, [n, M].
            is_init: True at the first step of an episode, [n, T] bool.

        Returns:
            Inputs of the losses, with tensors [B, ...] or [n, T, ...].
        """
        if self.memory is None:
            actor_features, critic_features, _ = self.both_features(observation, None)
        else:
            assert memory is not None and is_init is not None
            flat = observation.flatten(0, 1)
            features = self.actor_body(flat).unflatten(0, is_init.shape)
            actor_features = critic_features = self.memory(features, memory, is_init)
            if self.critic_body is not None:
                critic_features = self.critic_body(flat).unflatten(0, is_init.shape)
        log_prob, entropy, parameters = self.head.evaluate(actor_features, action, self.allowed(observation))
        value = self.critic(critic_features).squeeze(-1)
        return Evaluation(log_prob, entropy, value, actor_features, critic_features, parameters)

    def get_dist(self, tensordict: TensorDictBase) -> D.Distribution:
        """Return the distribution of the actions for raw observations, as TorchRL's losses ask for it."""
        observation = self.normalize(tensordict["observation"])
        features, _ = self.features(observation)
        return HeadDistribution(self.head, features, self.allowed(observation))
