"""Multilayer perceptrons for vector observations."""

import copy
import functools
import math
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import torch
from torch import nn
from torchrl.data import TensorSpec

from ppo_lightning.errors import ConfigError
from ppo_lightning.models.actor import Acted, Actor, ArrayPolicy
from ppo_lightning.models.agent import ActorCritic
from ppo_lightning.models.bodies import ACTIVATIONS, MLP, Activation, linear_function
from ppo_lightning.models.encoders import make_body, make_normalizer
from ppo_lightning.models.heads import INVALID, Float32Linear, HeadName
from ppo_lightning.models.memory import MemoryName
from ppo_lightning.spaces.entries import choose_entries, describe
from ppo_lightning.spaces.pictures import is_picture
from ppo_lightning.spaces.specs import mask_columns
from ppo_lightning.utils.arguments import Range, check_arguments

# Methods for NumPy of agent, body, head and memory
ARRAY_VERSIONS = ("array_policy", "array_forward", "array_sampler", "array_step")
LARGEST_COPY = 10_000_000  # rows times weights: above, a GPU acts faster than NumPy (H200, 16 cores)


class MLPAgent(ActorCritic):
    """Agent for vectors, with multilayer perceptrons for policy and value.

    Observations with several parts (dictionaries, discrete observations) are encoded part by part, see
    :class:`~ppo_lightning.models.encoders.Encoders`.

    Args:
        observation_spec: Spec of one environment: vectors, shape [D], or several parts.
        action_spec: Spec of the actions.
        hidden_sizes: Widths of the hidden layers.
        shared: Use one body, and one memory, for policy and value instead of one body each. With false, the
            value function has no memory. None: one body with a memory, unless policy and value read different
            entries or have other layers.
        head: Distribution of continuous actions: ``gaussian`` or ``tanh_gaussian`` (squashed into the
            bounds). None: Gaussian. Discrete actions always use ``categorical``.
        norm_obs: Normalize the observations by their running mean and standard deviation, except discrete
            parts and pictures.
        memory: ``lstm`` or ``min_gru`` after the body. None: no memory.
        memory_size: Width of the memory's output.
        actor_keys: Names of the entries of a dictionary of observations that the policy reads. Dots join the
            names of nested entries, and the name of a dictionary selects all of its entries. None: all
            entries except ``privileged_...``.
        critic_keys: The same for the value function. None: all entries.
        activation: ``tanh``, ``relu`` or ``elu``.
        critic_hidden_sizes: Widths of the value function's multilayer perceptron, if it differs from the
            policy's. None: the policy's layers.
        log_std_init: Initial natural logarithm of the standard deviation, for ``gaussian`` in units of the
            action, for ``tanh_gaussian`` before the tanh.

    Raises:
        ConfigError: The observations are a picture, the head does not support the actions, a key is unknown,
            or ``shared`` is true and policy and value read different entries.

    Example:
        >>> from torchrl.data import Categorical, Unbounded
        >>> agent = MLPAgent(Unbounded((4,)), Categorical(2, shape=()), hidden_sizes=(32,))
        >>> agent.mode(torch.zeros(3, 4)).shape
        torch.Size([3])
    """

    network: Any = MLP  # of policy and value; subclasses may have another

    def __init__(
        self,
        observation_spec: TensorSpec,
        action_spec: TensorSpec,
        hidden_sizes: Annotated[Sequence[int], Range(1)] = (64, 64),
        shared: bool | None = None,  # no False, which the command line would pass on to a CNNAgent
        head: HeadName | None = None,
        norm_obs: bool = False,
        memory: MemoryName | None = None,
        memory_size: Annotated[int, Range(1)] = 128,
        actor_keys: Sequence[str] | None = None,
        critic_keys: Sequence[str] | None = None,
        activation: Activation = "tanh",
        critic_hidden_sizes: Annotated[Sequence[int] | None, Range(1)] = None,
        log_std_init: Annotated[float, Range(-math.inf)] = 0.0,
    ) -> None:
        check_arguments(MLPAgent.__init__, locals(), "model.agent")
        if is_picture(observation_spec):
            raise ConfigError("env_id has pictures: set model.agent to ppo_lightning.CNNAgent.")
        entries = choose_entries(observation_spec, actor_keys, critic_keys)
        separate = entries is not None and entries.actor != entries.critic
        if entries is not None and separate and shared:
            read = f"The actor reads {describe(entries.actor)} and the critic {describe(entries.critic)}"
            raise ConfigError(f"{read}: set model.agent.shared to false.")
        if shared and critic_hidden_sizes is not None:
            raise ConfigError("model.agent.critic_hidden_sizes and shared are set: remove one of them.")
        policy = functools.partial(self.network, hidden_sizes=hidden_sizes, activation=activation)
        value = policy
        if critic_hidden_sizes is not None:
            value = functools.partial(MLP, hidden_sizes=critic_hidden_sizes, activation=activation)
        # By default, a memory is shared, unless policy and value differ.
        share_memory = memory is not None and not separate and value is policy
        super().__init__(
            action_spec,
            lambda: make_body(observation_spec, policy, entries and entries.actor, norm_obs),
            share_memory if shared is None else shared,
            critic_body=lambda: make_body(observation_spec, value, entries and entries.critic, norm_obs),
            head=head,
            normalizer=make_normalizer(observation_spec) if norm_obs else None,
            memory=memory,
            memory_size=memory_size,
            mask=mask_columns(observation_spec),
            entries=entries,
        )
        for name, parameter in self.head.named_parameters():
            if name.endswith("log_std"):
                nn.init.constant_(parameter, log_std_init)
        self.save_hyperparameters(ignore=["observation_spec", "action_spec"])

    def array_policy(self) -> ArrayPolicy:
        """Return :func:`numpy_policy`, or if there is none a policy on tensors."""
        return numpy_policy(self) or super().array_policy()


def numpy_policy(agent: Actor) -> ArrayPolicy | None:
    """Return a NumPy policy of an agent with an MLP, on views of the weights, or on copies of a GPU's.

    NumPy needs half of PyTorch's time, for a small network a thirtieth of that on a GPU. The policy returns
    actions only. Values and log-probabilities are left to the end of the rollout, because one large batch
    costs less than many small ones.

    There is none for a user's subclass of agent, body or head, which may override any method, and for a
    user's layers or activation.
    """
    device = agent.device.type
    parts: Any = agent.actor_body, agent.head, agent.memory
    if not isinstance(agent.actor_body, MLP) or torch.is_autocast_enabled(device):
        return None
    if not all(map(has_array_version, (agent, *parts), ARRAY_VERSIONS)):
        return None
    largest = math.inf  # number of rows
    if device != "cpu":
        weights = sum(weight.numel() for weight in agent.actor_body.parameters())
        largest = LARGEST_COPY / max(weights, 1)  # none in a linear policy
        parts = (None if part is None else copy.deepcopy(part).cpu() for part in parts)
    body, head, memory_cell = parts
    if (sample := head.array_sampler()) is None:
        return None
    layers = *body.layers, head.linear
    activations = body.activation, body.array_activation
    if {*map(type, layers)} - {nn.Linear, Float32Linear} or activations not in ACTIVATIONS.values():
        return None
    forward = body.array_forward()
    linear = linear_function(head.linear)
    memory_step = None if memory_cell is None else memory_cell.array_step()
    mask = agent.mask

    def policy(observation: np.ndarray, noise: np.ndarray | None, memory: np.ndarray | None) -> Acted:
        if len(observation) > largest:
            return Actor.array_policy(agent)(observation, noise, memory)
        features = forward(observation)
        if memory_step is not None:
            assert memory is not None
            features = memory_step(features, memory)
        logits = linear(features)
        if mask is not None:
            logits = np.where(observation[:, mask] > 0, logits, np.float32(INVALID))
        return (sample(logits, noise),)

    return policy


def has_array_version(part: nn.Module | None, name: str) -> bool:
    """Return whether a class is of this package, or defines its NumPy version itself.

    A user's subclass that inherits the NumPy version may override a method that the version copies.
    """
    kind = type(part)
    return part is None or kind.__module__.startswith("ppo_lightning.") or name in vars(kind)
