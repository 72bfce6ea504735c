"""The agent: what acts in the environment and what the losses differentiate."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from lightning.pytorch.core.mixins import HyperparametersMixin
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torchrl.data import TensorSpec, Unbounded
from torchrl.envs.utils import ExplorationType, exploration_type

from ppo_lightning.errors import ConfigError
from ppo_lightning.models.composite import make_head
from ppo_lightning.models.heads import Float32Linear, HeadName, Parameters
from ppo_lightning.models.init import orthogonal
from ppo_lightning.models.memory import Memory, MemoryName
from ppo_lightning.models.normalizers import ObservationNormalizer
from ppo_lightning.spaces.specs import spec_to_plain

# Normalised observation [N, ...], noise [N, ...] and memory [N, M], which is brought up to date in place, to action [N, ...],
# log-probability [N] and value [N], or None and None where `evaluate` shall find those two for the whole rollout at once.
Acted = tuple[np.ndarray, np.ndarray | None, np.ndarray | None]
ArrayPolicy = Callable[[np.ndarray, np.ndarray | None, np.ndarray | None], Acted]


class Evaluation(NamedTuple):
    """What an agent says of actions that were taken, by the present weights.

    Attributes:
        log_prob: Log-probability of the action, [B].
        entropy: Entropy of the distribution, [B], in nats.
        value: Value of the observation, [B].
        features: What the head sees, [B, F].
        parameters: Parameters of the distribution, each [B, ...], as the head's ``kl`` takes them.
    """

    log_prob: Tensor
    entropy: Tensor
    value: Tensor
    features: Tensor
    parameters: Parameters


class ActorCritic(TensorDictModuleBase, HyperparametersMixin):
    """A policy and a value function.

    Loops that run thousands of times a second call :meth:`act` and :meth:`evaluate` on tensors, with observations that
    :meth:`normalize` made: a rollout keeps them as they were when the agent acted, while the statistics go on. As a
    TensorDict module (``env.rollout(100, policy=agent)``) it reads raw observations under ``observation`` and writes
    ``action``, ``action_log_prob`` and ``state_value``.

    With a memory, :meth:`act` takes and returns its state [B, M], zero where an episode begins, and :meth:`evaluate` takes
    whole sequences; policy and value share the body and the memory.

    Where the observations have an entry ``action_mask``, discrete actions that it forbids have probability 0.

    A subclass passes a body and calls ``self.save_hyperparameters(ignore=["observation_spec", "action_spec"])`` with
    plain arguments, which is how a checkpoint knows how to build it again.

    Args:
        action_spec: The environment's actions.
        body: Makes a module from observations [B, ...] to features [B, F] that has ``out_features`` = F, and may have
            ``rows_in_cache``.
        shared: One body for policy and value, instead of one each.
        head: The action distribution; None: categorical for discrete actions, Gaussian for continuous ones.
        normalizer: Of the observations; None: they are taken as they are.
        memory: ``lstm`` or ``gru`` behind the body; None: none.
        memory_size: H, the width of what the memory gives to the heads.
        mask: Where in a row of an observation the mask of the actions lies; None: there is none.

    Raises:
        ConfigError: A memory without ``shared``, or a mask of another size than the actions.
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
        memory: MemoryName | None = None,
        memory_size: int = 128,
        mask: slice | None = None,
    ) -> None:
        super().__init__()
        if memory is not None and not shared:
            raise ConfigError(
                "model.agent.memory is one for policy and value, and so is the body before it: set shared to true."
            )
        self.normalizer, self._mask, self.actions = normalizer, mask, spec_to_plain(action_spec)
        # detail 13
        # detail 26
        self.actor_body = body()
        self.critic_body = None if shared else body()
        features = self.actor_body.out_features
        assert isinstance(features, int)
        self.memory = None if memory is None else Memory(memory, features, memory_size)
        width = features if memory is None else memory_size
        self.head = make_head(head, width, action_spec)
        if mask is not None and mask.stop - mask.start != self.head.num_choices:
            raise ConfigError(
                f"env_id has observations with an action_mask of {mask.stop - mask.start} entries, and {self.head.num_choices}"
                " discrete actions: one entry an action is needed, those of all components one after the other."
            )
        self.critic = orthogonal(Float32Linear(width, 1), gain=1.0)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.critic.weight.device

    def rollout_keys(self, observation: TensorSpec, action: TensorSpec) -> dict[str, TensorSpec]:
        """Return what a rollout keeps of each step for the update: key -> spec of one environment.

        Storage and collectors read the keys here.

        Args:
            observation: What the environment gives, in the form that is stored.
            action: What the environment takes, in the form that is stored.
        """
        normalized = Unbounded(observation.shape, dtype=torch.float32)
        return {
            "observation": observation if self.normalizer is None else normalized,
            "action": action,
            "action_log_prob": Unbounded((), dtype=torch.float32),
            "state_value": Unbounded((1,), dtype=torch.float32),
        }

    @property
    def rows_in_cache(self) -> int:
        """How many rows a processor differentiates fastest: those whose activations its cache holds, or what the body says."""
        return getattr(self.actor_body, "rows_in_cache", 4096)

    def _features(self, observation: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns what policy and value see of observations [B, ...], and the memory after them."""
        for_actor = self.actor_body(observation)
        if self.memory is not None:
            if memory is None:
                raise ConfigError(
                    "This agent has a memory: give act its state [B, M], zero where an episode begins."
                )
            for_actor, memory = self.memory.step(for_actor, memory)
        return for_actor, for_actor if self.critic_body is None else self.critic_body(observation), memory

    def _sequences(self, observation: Tensor, memory: Tensor, is_init: Tensor) -> Tensor:
        """Returns what policy and value see of sequences [n, T, ...]: [n, T, H]."""
        assert self.memory is not None
        return self.memory(
            self.actor_body(observation.flatten(0, 1)).unflatten(0, is_init.shape), memory, is_init
        )

    def _allowed(self, observation: Tensor) -> Tensor | None:
        return None if self._mask is None else observation[..., self._mask] > 0

    def initial_memory(self, num_envs: int) -> Tensor | None:
        """Returns the memory at the start of episodes, [N, M]; None where the agent has none."""
        return (
            None if self.memory is None else torch.zeros(num_envs, self.memory.state_size, device=self.device)
        )

    def normalize(self, observation: Tensor) -> Tensor:
        """Returns what the networks take for raw observations [B, ...], by the present statistics; floats as float32."""
        if self.normalizer is not None:
            return self.normalizer(observation)
        return observation.float() if observation.is_floating_point() else observation

    def mode(self, observation: Tensor) -> Tensor:
        """Returns the most probable actions [B, ...] for raw observations [B, ...], within the environment's bounds.

        Raises:
            ConfigError: The agent has a memory, which :meth:`act` takes.
        """
        return self.play(observation)[0]

    def play(self, observation: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns what :meth:`mode` does, the values [B], and the memory after raw observations [B, ...]."""
        action, _, value, memory = self.act(self.normalize(observation), memory=memory)
        return self.head.for_environment(action), value, memory

    def noise(self, batch_shape: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """Draws what :meth:`act` needs to sample actions, [*batch_shape, ...], on the CPU."""
        return self.head.noise(batch_shape, generator)

    def act(
        self, observation: Tensor, noise: Tensor | None = None, memory: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Chooses actions.

        Args:
            observation: Normalised, [B, ...].
            noise: From :meth:`noise`, [B, ...]; None takes the distribution's mode.
            memory: Before the observation, [B, M], of an agent that has one.

        Returns:
            Action [B, ...] (before any clipping), its log-probability [B], the value of the observation [B] and the memory
            after it.

        Raises:
            ConfigError: The agent has a memory, and none is given.
        """
        for_actor, for_critic, memory = self._features(observation, memory)
        action, log_prob = self.head.sample(for_actor, noise, self._allowed(observation))
        return action, log_prob, self.critic(for_critic).squeeze(-1), memory

    def evaluate(
        self, observation: Tensor, action: Tensor, memory: Tensor | None = None, is_init: Tensor | None = None
    ) -> Evaluation:
        """Evaluate actions that were taken, by the present weights.

        Args:
            observation: Normalised, [B, ...]; of an agent with a memory whole sequences, [n, T, ...].
            action: [B, ...], or [n, T, ...].
            memory: Before the first step of the sequences, [n, M].
            is_init: Where in them an episode begins, [n, T] bool.

        Returns:
            What the losses need; tensors [B, ...], or [n, T, ...].
        """
        if self.memory is None:
            for_actor, for_critic, _ = self._features(observation, None)
        else:
            assert memory is not None
            assert is_init is not None
            for_actor = for_critic = self._sequences(observation, memory, is_init)
        log_prob, entropy, parameters = self.head.evaluate(for_actor, action, self._allowed(observation))
        return Evaluation(log_prob, entropy, self.critic(for_critic).squeeze(-1), for_actor, parameters)

    def explain(self, observation: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the value of raw observations [B], and the policy as :meth:`Head.bars` shows it, twice [B, A]."""
        observation = self.normalize(observation)
        for_actor, for_critic, _ = self._features(observation, memory)
        return self.critic(for_critic).squeeze(-1), *self.head.bars(for_actor, self._allowed(observation))

    def value(self, observation: Tensor, memory: Tensor | None = None) -> Tensor:
        """Returns the value of normalised observations [B, ...], [B]; ``memory`` as for :meth:`act`."""
        if self.memory is not None:
            return self.critic(self._features(observation, memory)[1]).squeeze(-1)
        body = self.actor_body if self.critic_body is None else self.critic_body
        return self.critic(body(observation)).squeeze(-1)

    def array_policy(self) -> ArrayPolicy:
        """Returns what the collector calls at each step of a rollout: :meth:`act` from arrays to arrays.

        A subclass may return a faster function with the same actions to float tolerance. It is asked for anew for each
        rollout, and used under inference mode.
        """
        device = self.device

        def policy(observation: np.ndarray, noise: np.ndarray | None, memory: np.ndarray | None) -> Acted:
            drawn, state = (
                None if each is None else torch.from_numpy(each).to(device) for each in (noise, memory)
            )
            seen = torch.from_numpy(observation).to(
                device, non_blocking=True
            )  # a row of the rollout, which stays as it is
            action, log_prob, value, state = self.act(seen, drawn, state)
            if memory is not None and state is not None:
                memory[:] = state.numpy(force=True)
            return action.numpy(force=True), log_prob.numpy(force=True), value.numpy(force=True)

        return policy

    def forward(self, tensordict: TensorDictBase, generator: torch.Generator | None = None) -> TensorDictBase:
        """Acts on a TensorDict of any batch size; deterministically under ``ExplorationType.DETERMINISTIC``.

        An agent with a memory reads it under ``memory`` and writes it under ``("next", "memory")``.
        """
        draw = functools.partial(self.noise, (tensordict.numel(),), generator)
        return self.act_on(tensordict, self.normalize(tensordict["observation"]), draw)

    def act_on(
        self, tensordict: TensorDictBase, observation: Tensor, draw: Callable[[], Tensor]
    ) -> TensorDictBase:
        """Acts on normalised observations [*batch, ...] and writes the result into a TensorDict of that batch size.

        Noise for all of the batch comes from ``draw``, if there is any.
        """
        observation = observation.reshape(-1, *observation.shape[tensordict.ndim :])
        deterministic = exploration_type() == ExplorationType.DETERMINISTIC
        noise = None if deterministic else draw().to(observation.device)
        memory = tensordict.get("memory") if self.memory is not None else None
        flat = None if memory is None else memory.reshape(-1, memory.shape[-1])
        *acted, after = self.act(observation, noise, flat)
        action, log_prob, value = (out.reshape(tensordict.shape + out.shape[1:]) for out in acted)
        tensordict["action"], tensordict["action_log_prob"] = action, log_prob
        tensordict["state_value"] = value.unsqueeze(-1)
        if memory is not None and after is not None:
            tensordict["next", "memory"] = after.view_as(memory)
        return tensordict
