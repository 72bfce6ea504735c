"""The agent: what acts in the environment and what the losses differentiate."""

import functools
from collections.abc import Callable

import numpy as np
import torch
from lightning.pytorch.core.mixins import HyperparametersMixin
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torchrl.data import TensorSpec
from torchrl.envs.utils import ExplorationType, exploration_type

from ppo_lightning.models.heads import Float32Linear, HeadName, make_head
from ppo_lightning.models.init import orthogonal
from ppo_lightning.models.normalizers import ObservationNormalizer

# Normalised observation [N, ...] and noise [N, ...] to action [N, ...], log-probability [N] and value [N], or None and None
# where `evaluate` shall find those two for the whole rollout at once.
ArrayPolicy = Callable[[np.ndarray, np.ndarray | None], tuple[np.ndarray, np.ndarray | None, np.ndarray | None]]


class ActorCritic(TensorDictModuleBase, HyperparametersMixin):
    """A policy and a value function.

    Loops that run thousands of times a second call :meth:`act` and :meth:`evaluate` on tensors, with observations that
    :meth:`normalize` made: a rollout keeps them as they were when the agent acted, while the statistics go on. As a
    TensorDict module (``env.rollout(100, policy=agent)``) it reads raw observations under ``observation`` and writes
    ``action``, ``action_log_prob`` and ``state_value``.

    A subclass passes a body and calls ``self.save_hyperparameters(ignore=["observation_spec", "action_spec"])`` with
    plain arguments, which is how a checkpoint knows how to build it again.

    Args:
        action_spec: The environment's actions.
        body: Makes a module from observations [B, ...] to features [B, F] that has ``out_features`` = F, and may have
            ``rows_in_cache``.
        shared: One body for policy and value, instead of one each.
        head: The action distribution; None: categorical for discrete actions, Gaussian for continuous ones.
        normalizer: Of the observations; None: they are taken as they are.
    """

    in_keys = ("observation",)
    out_keys = ("action", "action_log_prob", "state_value")

    def __init__(
        self,
        action_spec: TensorSpec,
        body: Callable[[], nn.Module],
        shared: bool = False,
        head: HeadName | None = None,
        normalizer: ObservationNormalizer | None = None,
    ) -> None:
        super().__init__()
        self.normalizer = normalizer
        # detail 13
        # detail 26
        self.actor_body = body()
        self.critic_body = None if shared else body()
        features = self.actor_body.out_features
        assert isinstance(features, int)
        self.head = make_head(head, features, action_spec)
        self.critic = orthogonal(Float32Linear(features, 1), gain=1.0)

    @property
    def rows_in_cache(self) -> int:
        """How many rows a processor differentiates fastest: those whose activations its cache holds, or what the body says."""
        return getattr(self.actor_body, "rows_in_cache", 4096)

    def _features(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        for_actor = self.actor_body(observation)
        return for_actor, for_actor if self.critic_body is None else self.critic_body(observation)

    def normalize(self, observation: Tensor) -> Tensor:
        """Returns what the networks take for raw observations [B, ...], by the present statistics; floats as float32."""
        if self.normalizer is not None:
            return self.normalizer(observation)
        return observation.float() if observation.is_floating_point() else observation

    def mode(self, observation: Tensor) -> Tensor:
        """Returns the most probable actions [B, ...] for raw observations [B, ...], within the environment's bounds."""
        return self.head.for_environment(self.act(self.normalize(observation))[0])

    def noise(self, batch_shape: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """Draws what :meth:`act` needs to sample actions, [*batch_shape, ...], on the CPU."""
        return self.head.noise(batch_shape, generator)

    def act(self, observation: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Chooses actions.

        Args:
            observation: Normalised, [B, ...].
            noise: From :meth:`noise`, [B, ...]; None takes the distribution's mode.

        Returns:
            Action [B, ...] (before any clipping), its log-probability [B] and the value of the observation [B].
        """
        for_actor, for_critic = self._features(observation)
        action, log_prob = self.head.sample(for_actor, noise)
        return action, log_prob, self.critic(for_critic).squeeze(-1)

    def evaluate(self, observation: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Looks again at actions that were taken.

        Args:
            observation: Normalised, [B, ...].
            action: [B, ...].

        Returns:
            Log-probability, entropy of the distribution and value, each [B].
        """
        for_actor, for_critic = self._features(observation)
        log_prob, entropy = self.head.evaluate(for_actor, action)
        return log_prob, entropy, self.critic(for_critic).squeeze(-1)

    def explain(self, observation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the value of raw observations [B], and the policy as :meth:`Head.bars` shows it, twice [B, A]."""
        for_actor, for_critic = self._features(self.normalize(observation))
        return self.critic(for_critic).squeeze(-1), *self.head.bars(for_actor)

    def value(self, observation: Tensor) -> Tensor:
        """Returns the value of normalised observations [B, ...], [B]."""
        body = self.actor_body if self.critic_body is None else self.critic_body
        return self.critic(body(observation)).squeeze(-1)

    def array_policy(self) -> ArrayPolicy:
        """Returns what the collector calls at each step of a rollout: :meth:`act` from arrays to arrays.

        A subclass may return a faster function with the same actions to float tolerance. It is asked for anew for each
        rollout, and used under inference mode.
        """
        device = self.critic.weight.device

        def policy(observation: np.ndarray, noise: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            drawn = None if noise is None else torch.from_numpy(noise).to(device)
            action, log_prob, value = self.act(torch.from_numpy(observation).to(device), drawn)
            return action.numpy(force=True), log_prob.numpy(force=True), value.numpy(force=True)

        return policy

    def forward(self, tensordict: TensorDictBase, generator: torch.Generator | None = None) -> TensorDictBase:
        """Acts on a TensorDict of any batch size; deterministically under ``ExplorationType.DETERMINISTIC``."""
        draw = functools.partial(self.noise, (tensordict.numel(),), generator)
        return self.act_on(tensordict, self.normalize(tensordict["observation"]), draw)

    def act_on(self, tensordict: TensorDictBase, observation: Tensor, draw: Callable[[], Tensor]) -> TensorDictBase:
        """Acts on normalised observations [*batch, ...] and writes the result into a TensorDict of that batch size.

        Noise for all of the batch comes from ``draw``, if there is any.
        """
        observation = observation.reshape(-1, *observation.shape[tensordict.ndim :])
        deterministic = exploration_type() == ExplorationType.DETERMINISTIC
        noise = None if deterministic else draw().to(observation.device)
        action, log_prob, value = (out.reshape(tensordict.shape + out.shape[1:]) for out in self.act(observation, noise))
        tensordict["action"], tensordict["action_log_prob"] = action, log_prob
        tensordict["state_value"] = value.unsqueeze(-1)
        return tensordict
