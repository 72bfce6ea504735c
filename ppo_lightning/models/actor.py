"""Base class of agents: from observations to actions."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

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
from ppo_lightning.models.heads import ActionHead, HeadChoice
from ppo_lightning.models.memory import LSTM, MEMORIES, MemoryName
from ppo_lightning.models.normalizers import ObservationNormalizer
from ppo_lightning.private import InferenceMode
from ppo_lightning.spaces.entries import ChosenEntries
from ppo_lightning.spaces.specs import spec_to_plain

# What a step stores of the agent's outputs, each [N, ...], in the order of `Actor.out_keys`. A faster policy
# may return the action alone. Then the rest is computed later, for the whole rollout at once.
Acted = tuple[np.ndarray, ...]
# Function of normalized observation [N, ...], noise [N, ...] and hidden state [N, M], updated in place.
ArrayPolicy = Callable[[np.ndarray, np.ndarray | None, np.ndarray | None], Acted]


class Actor(TensorDictModuleBase, HyperparametersMixin):
    """A policy: all that collectors, videos, exports, games and ``predict`` need of an agent.

    Fast loops call :meth:`act` on tensors, with observations from :meth:`normalize`. A rollout stores these
    normalized observations, because the running statistics change later. As a TensorDict module
    (``env.rollout(100, policy=agent)``), the agent reads raw observations and writes its ``out_keys``.

    With a memory, :meth:`act` takes and returns the hidden state [B, M], which is zero at episode starts.

    If the observations have an entry ``action_mask``, forbidden discrete actions have probability 0.

    A subclass passes a body and calls ``self.save_hyperparameters(ignore=["observation_spec",
    "action_spec"])`` with plain arguments, from which a checkpoint rebuilds the agent.

    Args:
        action_spec: Spec of the actions.
        body: Makes a module from observations [B, ...] to features [B, F]. The module has an attribute
            ``out_features`` = F and optionally ``microbatch_size``.
        head: Chooses the actions. None: categorical for discrete actions, Gaussian for continuous ones.
        normalizer: Normalizes the observations. None: no normalization.
        memory: ``lstm`` or ``min_gru`` after the body. None: no memory.
        memory_size: Width H of the memory's output.
        mask: Columns of the action mask in a row of observations. None: no mask.
        entries: Entries of the observation that policy and value read. None: they have no names.
        more_bodies: Makes further bodies, by the name of their attribute.

    Raises:
        ConfigError: The size of the mask does not match the actions.

    Example:
        >>> from torchrl.data import Categorical
        >>> from ppo_lightning.models import MLP
        >>> actor = Actor(Categorical(2, shape=()), lambda: MLP(4, [64]))
        >>> actor.mode(torch.zeros(3, 4)).shape
        torch.Size([3])
    """

    in_keys = ("observation",)
    out_keys: tuple[str, ...] = ("action",)
    default_head: HeadChoice = None  # of a subclass whose ``head`` is None
    reads = ""  # the observations in words, for the start line of a run
    head: ActionHead

    def __init__(
        self,
        action_spec: TensorSpec,
        body: Callable[[], nn.Module],
        head: HeadChoice = None,
        normalizer: ObservationNormalizer | None = None,
        memory: MemoryName | None = None,
        memory_size: int = 128,
        mask: slice | None = None,
        entries: ChosenEntries | None = None,
        more_bodies: Mapping[str, Callable[[], nn.Module | None]] | None = None,
    ) -> None:
        super().__init__()
        self.entries = entries
        self.normalizer = normalizer
        self.mask = mask
        self.actions = spec_to_plain(action_spec)
        self.actor_body = body()
        # Before memory and head: seeded weights and the state of an optimizer depend on the order.
        for name, make_body in (more_bodies or {}).items():
            setattr(self, name, make_body())
        features = getattr(self.actor_body, "out_features", None)
        if not isinstance(features, int):
            raise ConfigError(
                f"The body of {type(self).__name__} is a {type(self.actor_body).__name__} whose out_features"
                f" is {features!r}: it must be the number of features F that the body returns, [B, F]."
            )
        self.memory = None if memory is None else MEMORIES[memory](features, memory_size)
        self.head_width = features if memory is None else memory_size
        self.head = make_head(head or self.default_head, self.head_width, action_spec)
        if mask is not None and mask.stop - mask.start != self.head.num_choices:
            raise ConfigError(
                f"env_id has observations with an action_mask of {mask.stop - mask.start} entries, and"
                f" {self.head.num_choices} discrete actions: the mask needs one entry per action, with all"
                " components concatenated."
            )

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.parameters()).device

    @property
    def traceable(self) -> bool:
        """Whether a compiler can trace all networks: an LSTM splits sequences by their lengths."""
        return not isinstance(self.memory, LSTM)

    def rollout_keys(self, observation: TensorSpec, action: TensorSpec) -> dict[str, TensorSpec]:
        """Return what a step of a rollout stores: the specs of one environment by key.

        The keys are ``observation`` and those of ``out_keys``.

        Args:
            observation: Spec of the stored observations.
            action: Spec of the stored actions.
        """
        normalized = Unbounded(observation.shape, dtype=torch.float32)
        return {"observation": observation if self.normalizer is None else normalized, "action": action}

    def features(self, observation: Tensor, memory: Tensor | None = None) -> tuple[Any, Tensor | None]:
        """Return the input of the head [B, F] for normalized observations, and the next hidden state.

        Raises:
            ConfigError: The agent has a memory, and ``memory`` is None.
        """
        features = self.actor_body(observation)
        if self.memory is None:
            return features, memory
        if memory is None:
            raise ConfigError(
                "This agent has a memory: give act the hidden state [B, M], zero at episode starts."
            )
        return self.memory.step(features, memory)

    def allowed(self, observation: Tensor) -> Tensor | None:
        """Return which discrete actions rows of observations allow, [B, A]; None without a mask."""
        return None if self.mask is None else observation[..., self.mask] > 0

    def initial_memory(self, num_envs: int) -> Tensor | None:
        """Return the hidden state of N environments at episode starts, [N, M], or None without a memory."""
        if self.memory is None:
            return None
        # detail 33
        return torch.zeros(num_envs, self.memory.state_size, device=self.device, dtype=torch.float32)

    def normalize(self, observation: Tensor) -> Tensor:
        """Convert raw observations [B, ...] to the input of the networks, with the current statistics.

        Floats become float32.
        """
        if self.normalizer is not None:
            return self.normalizer(observation)
        return observation.float() if observation.is_floating_point() else observation

    def noise(self, batch_shape: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """Draw the noise [*batch_shape, ...] with which :meth:`act` explores, on the CPU."""
        return self.head.noise(batch_shape, generator)

    def act(self, observation: Tensor, noise: Tensor | None = None, memory: Tensor | None = None) -> Any:
        """Choose actions.

        Args:
            observation: Normalized observations, [B, ...].
            noise: Noise from :meth:`noise`, [B, ...]. None: the most probable or best actions.
            memory: Hidden state before the observations, [B, M], if the agent has a memory.

        Returns:
            A tuple: what a step stores, in the order of ``out_keys``, and the next hidden state. Here, these
            are the actions [B, ...] before any clipping.
        """
        features, memory = self.features(observation, memory)
        return self.head.choose(features, noise, self.allowed(observation)), memory

    def play(self, observation: Tensor, memory: Tensor | None = None) -> dict[str, Tensor]:
        """Return the outputs of a deployed agent, which does not explore, by name.

        Args:
            observation: Raw observations, [B, ...].
            memory: Hidden state before the observations, [B, M], if the agent has a memory.

        Returns:
            ``action`` [B, ...] within the bounds of the environment, ``state_value`` [B] of an agent with a
            value function, and ``next_memory`` [B, M] with a memory.
        """
        action, *_, memory = self.act(self.normalize(observation), memory=memory)
        return with_memory({"action": self.head.for_environment(action)}, memory)

    def mode(self, observation: Tensor) -> Tensor:
        """Return the most probable actions [B, ...] for raw observations, see :meth:`play`."""
        return self.play(observation)["action"]

    def explain(self, observation: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the numbers and bars of :meth:`ActionHead.bars`, each [B, A], for videos.

        The arguments are those of :meth:`play`.
        """
        observation = self.normalize(observation)
        features, _ = self.features(observation, memory)
        return self.head.bars(features, self.allowed(observation))

    def array_policy(self) -> ArrayPolicy:
        """Return the function from arrays to arrays that the collector calls at each step of a rollout.

        The default wraps :meth:`act`. A subclass may return a faster function whose actions agree to float
        tolerance. The collector requests a new function for each rollout. It enters inference mode itself,
        because environments, which the collector steps, may learn.
        """
        device = self.device

        def policy(observation: np.ndarray, noise: np.ndarray | None, memory: np.ndarray | None) -> Acted:
            noise_tensor, state = (
                None if array is None else torch.from_numpy(array).to(device) for array in (noise, memory)
            )
            # The copy may be asynchronous, because this row of the rollout does not change.
            inputs = torch.from_numpy(observation).to(device, non_blocking=True)
            with InferenceMode(True):
                *outputs, state = self.act(inputs, noise_tensor, state)
            if memory is not None and state is not None:
                memory[:] = state.numpy(force=True)
            return tuple(output.numpy(force=True) for output in outputs)

        return policy

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Act on a TensorDict of any batch size.

        Actions are sampled if the ``ExplorationType`` is ``RANDOM`` or None. An agent with a memory reads its
        hidden state under ``memory`` and writes it under ``("next", "memory")``.

        Args:
            tensordict: Has raw observations under ``observation``.

        Returns:
            The same TensorDict, with the ``out_keys``.
        """
        observation = self.normalize(tensordict["observation"])
        observation = observation.reshape(-1, *observation.shape[tensordict.ndim :])
        noise = None
        if exploration_type() in (ExplorationType.RANDOM, None):
            noise = self.noise((tensordict.numel(),)).to(observation.device)
        memory = tensordict.get("memory") if self.memory is not None else None
        flat = None if memory is None else memory.reshape(-1, memory.shape[-1])
        *outputs, next_memory = self.act(observation, noise, flat)
        for key, output in zip(self.out_keys, outputs, strict=True):
            tensordict[key] = output.reshape(tensordict.shape + output.shape[1:])
        if memory is not None and next_memory is not None:
            tensordict["next", "memory"] = next_memory.view_as(memory)
        return tensordict


def with_memory(outputs: dict[str, Tensor], memory: Tensor | None) -> dict[str, Tensor]:
    """Return outputs by name, with ``next_memory`` if the agent has a memory."""
    return outputs if memory is None else outputs | {"next_memory": memory}


@contextlib.contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Let a network act without dropout, and with the statistics of batch normalization as they are.

    Networks train in updates only. Afterwards, each layer is in its former mode, which may be frozen.
    """
    training = [layer for layer in network.modules() if layer.training]
    network.eval()
    try:
        yield
    finally:
        for layer in training:
            layer.training = True
