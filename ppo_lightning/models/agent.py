"""The agent: what acts in the environment and what the losses differentiate."""

from collections.abc import Callable

import numpy as np
import torch
from lightning.pytorch.core.mixins import HyperparametersMixin
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torchrl.data import TensorSpec
from torchrl.envs.utils import ExplorationType, exploration_type

from ppo_lightning.models.heads import CategoricalHead
from ppo_lightning.models.init import orthogonal

# Observation [N, ...] and noise [N, ...] to action [N, ...], log-probability [N] and value [N].
ArrayPolicy = Callable[[np.ndarray, Tensor | None], tuple[np.ndarray, np.ndarray, np.ndarray]]


class ActorCritic(TensorDictModuleBase, HyperparametersMixin):
    """A policy and a value function.

    Loops that run thousands of times a second call :meth:`act` and :meth:`evaluate` on tensors; as a TensorDict module
    (``env.rollout(100, policy=agent)``, TorchRL's collectors) it reads ``observation`` and writes ``action``,
    ``action_log_prob`` and ``state_value``.

    A subclass passes a body and calls ``self.save_hyperparameters(ignore=["observation_spec", "action_spec"])`` with
    plain arguments, which is how a checkpoint knows how to build it again.

    Args:
        action_spec: The environment's actions; they decide the head.
        body: Makes a module from observations [B, ...] to features [B, F] that has ``out_features`` = F.
        shared: One body for policy and value, instead of one each.
    """

    in_keys = ("observation",)
    out_keys = ("action", "action_log_prob", "state_value")

    def __init__(self, action_spec: TensorSpec, body: Callable[[], nn.Module], shared: bool = False) -> None:
        super().__init__()
        # detail 13
        self.actor_body = body()
        self.critic_body = None if shared else body()
        features = self.actor_body.out_features
        assert isinstance(features, int)
        self.head = CategoricalHead(features, action_spec)
        self.critic = orthogonal(nn.Linear(features, 1), gain=1.0)

    def _features(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        for_actor = self.actor_body(observation)
        return for_actor, for_actor if self.critic_body is None else self.critic_body(observation)

    def noise(self, batch_shape: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """Draws what :meth:`act` needs to sample actions, [*batch_shape, ...], on the CPU."""
        return self.head.noise(batch_shape, generator)

    def act(self, observation: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Chooses actions.

        Args:
            observation: [B, ...].
            noise: From :meth:`noise`, [B, ...]; None takes the distribution's mode.

        Returns:
            Action [B, ...], its log-probability [B] and the value of the observation [B].
        """
        for_actor, for_critic = self._features(observation)
        action, log_prob = self.head.sample(for_actor, noise)
        return action, log_prob, self.critic(for_critic).squeeze(-1)

    def evaluate(self, observation: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Looks again at actions that were taken.

        Args:
            observation: [B, ...].
            action: [B, ...].

        Returns:
            Log-probability, entropy of the distribution and value, each [B].
        """
        for_actor, for_critic = self._features(observation)
        log_prob, entropy = self.head.evaluate(for_actor, action)
        return log_prob, entropy, self.critic(for_critic).squeeze(-1)

    def value(self, observation: Tensor) -> Tensor:
        """Returns the value of observations [B, ...], [B]."""
        body = self.actor_body if self.critic_body is None else self.critic_body
        return self.critic(body(observation)).squeeze(-1)

    def array_policy(self) -> ArrayPolicy:
        """Returns what the collector calls at each step of a rollout: :meth:`act` from arrays to arrays.

        A subclass may return a faster function with the same results to float tolerance. It is asked for anew for each
        rollout, and used under inference mode.
        """
        device = self.critic.weight.device

        def policy(observation: np.ndarray, noise: Tensor | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            action, log_prob, value = self.act(
                torch.from_numpy(observation).to(device), None if noise is None else noise.to(device)
            )
            return action.numpy(force=True), log_prob.numpy(force=True), value.numpy(force=True)

        return policy

    def forward(self, tensordict: TensorDictBase, generator: torch.Generator | None = None) -> TensorDictBase:
        """Acts on a TensorDict of any batch size; deterministically under ``ExplorationType.DETERMINISTIC``."""
        observation = tensordict["observation"]
        observation = observation.reshape(-1, *observation.shape[tensordict.ndim :])
        deterministic = exploration_type() == ExplorationType.DETERMINISTIC
        noise = None if deterministic else self.noise((len(observation),), generator).to(observation.device)
        action, log_prob, value = (out.reshape(tensordict.shape + out.shape[1:]) for out in self.act(observation, noise))
        tensordict["action"], tensordict["action_log_prob"] = action, log_prob
        tensordict["state_value"] = value.unsqueeze(-1)
        return tensordict
