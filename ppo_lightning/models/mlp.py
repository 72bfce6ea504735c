"""Multilayer perceptrons for vector observations."""

import functools
import math
from collections.abc import Collection, Sequence
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn
from torchrl.data import TensorSpec

from ppo_lightning.errors import ConfigError
from ppo_lightning.models.agent import Acted, ActorCritic, ArrayPolicy
from ppo_lightning.models.composite import CompositeHead
from ppo_lightning.models.encoders import Encoders
from ppo_lightning.models.heads import INVALID, HeadName
from ppo_lightning.models.init import orthogonal
from ppo_lightning.models.memory import MemoryName
from ppo_lightning.models.normalizers import ObservationNormalizer
from ppo_lightning.spaces.entries import choose_entries, describe, entry_columns, row_columns, take_columns
from ppo_lightning.spaces.specs import (
    has_numbers_only,
    is_picture,
    is_vector,
    mask_columns,
    not_measured,
    stored,
)
from ppo_lightning.utils.arguments import Range, check_arguments

NUMERATOR = (
    -2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08,
    1.48572235717979e-05, 6.37261928875436e-04, 4.89352455891786e-03,
)  # fmt: skip
DENOMINATOR = (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)


class FastTanh(torch.autograd.Function):
    """The hyperbolic tangent as a rational function with an error below 4e-7.

    In a compiled graph it is ten times as fast as the library function.

    Source: the coefficients of Eigen's ``ptanh``, which XLA also uses.

    Example:
        >>> round(FastTanh.apply(torch.tensor(0.5)).item(), 4)
        0.4621
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return tanh(x) for float32."""
        x = x.clamp(-7.90531110763549805, 7.90531110763549805)
        y = x * polynomial(NUMERATOR, x * x) / polynomial(DENOMINATOR, x * x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Return the gradient with respect to the input."""
        (y,) = ctx.saved_tensors
        return grads[0] * (1 - y * y)


def polynomial(coefficients: Sequence[float], x: Tensor) -> Tensor:
    """Evaluate a polynomial with Horner's method.

    Args:
        coefficients: Coefficients, highest power first.
        x: Arguments, of any shape.
    """
    y = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        y = y * x + coefficient
    return y


def tanh(x: Tensor) -> Tensor:
    """Compute ``torch.tanh``, about five times as fast on the CPU.

    The fast version is :class:`FastTanh` in compiled graphs and NumPy in inference mode.
    """
    if x.device.type == "cpu" and x.dtype == torch.float32:
        if torch.compiler.is_compiling():
            return x.tanh() if torch.compiler.is_exporting() else FastTanh.apply(x)
        if torch.is_inference_mode_enabled():
            return torch.from_numpy(np.tanh(x.numpy()))
    return x.tanh()


class MLP(nn.Module):
    """Linear layers, each followed by tanh.

    Args:
        in_features: Width D of the observations.
        hidden_sizes: Widths of the layers.
        columns: Columns to read. None: all columns.

    Raises:
        RuntimeError: The observations have another width.

    Example:
        >>> MLP(4, [64, 32])(torch.zeros(2, 4)).shape
        torch.Size([2, 32])
    """

    def __init__(
        self, in_features: int, hidden_sizes: Sequence[int], columns: Sequence[slice] | None = None
    ) -> None:
        super().__init__()
        self.columns = columns
        self._width = in_features
        if columns is not None:
            in_features = sum(place.stop - place.start for place in columns)
        self.layers = nn.ModuleList()
        for width in hidden_sizes:
            self.layers.append(orthogonal(nn.Linear(in_features, width), gain=math.sqrt(2)))
            in_features = width
        self.out_features = in_features

    def forward(self, observation: Tensor) -> Tensor:
        """Map observations [B, D] to features [B, F]."""
        if self.columns is not None:
            if observation.shape[-1] != self._width:
                raise RuntimeError(f"observations have {observation.shape[-1]} columns, not {self._width}")
            observation = take_columns(observation, self.columns)
        for layer in self.layers:
            observation = tanh(layer(observation))
        return observation


class MLPAgent(ActorCritic):
    """Agent for vectors, with multilayer perceptrons for policy and value.

    Observations with several parts (dictionaries, discrete observations) are encoded part by part, see
    :class:`~ppo_lightning.models.encoders.Encoders`.

    Args:
        observation_spec: Spec of one environment: vectors, shape [D], or several parts.
        action_spec: Spec of the actions.
        hidden_sizes: Widths of the hidden layers.
        shared: Use one body, and one memory, for policy and value instead of one body each. None: one each.
            A memory needs true or false: with false, the value function has no memory.
        head: Distribution of continuous actions: ``gaussian`` or ``tanh_gaussian`` (squashed into the
            bounds). None: Gaussian. Discrete actions always use ``categorical``.
        norm_obs: Normalize the observations by their running mean and standard deviation, except discrete
            parts and pictures.
        clip_obs: Maximum absolute value of a normalized observation.
        memory: ``lstm``, ``gru`` or ``min_gru`` after the body. None: no memory.
        memory_size: Width of the memory's output.
        actor_keys: Names of the entries of a dictionary of observations that the policy reads. Dots join the
            names of nested entries, and the name of a dictionary selects all of its entries. None: all
            entries except ``privileged_...``.
        critic_keys: The same for the value function. None: all entries.

    Raises:
        ConfigError: The observations are a picture, the head does not support the actions, a key is unknown,
            or ``shared`` is true and policy and value read different entries.

    Example:
        >>> from torchrl.data import Categorical, Unbounded
        >>> agent = MLPAgent(Unbounded((4,)), Categorical(2, shape=()), hidden_sizes=(32,))
        >>> agent.mode(torch.zeros(3, 4)).shape
        torch.Size([3])
    """

    def __init__(
        self,
        observation_spec: TensorSpec,
        action_spec: TensorSpec,
        hidden_sizes: Annotated[Sequence[int], Range(1, 16_384)] = (64, 64),
        shared: bool | None = None,  # no False, which the command line would pass on to a CNNAgent
        head: HeadName | None = None,
        norm_obs: bool = False,
        clip_obs: Annotated[float, Range(1e-6)] = 10.0,
        memory: MemoryName | None = None,
        memory_size: Annotated[int, Range(1, 8192)] = 128,
        actor_keys: Sequence[str] | None = None,
        critic_keys: Sequence[str] | None = None,
    ) -> None:
        check_arguments(MLPAgent.__init__, locals(), "model.agent")
        if is_picture(observation_spec):
            raise ConfigError(
                f"env_id has observations of shape {tuple(observation_spec.shape)} and dtype"
                f" {observation_spec.dtype}, and MLPAgent takes pictures beside other parts only: set"
                " model.agent to ppo_lightning.CNNAgent."
            )
        one_vector = observation_spec.ndim == 1 and is_vector(observation_spec)
        entries = choose_entries(observation_spec, actor_keys, critic_keys)
        separate = entries is not None and entries.actor != entries.critic
        if entries is not None and separate and shared:
            raise ConfigError(
                f"model.agent.shared is true, but the actor reads {describe(entries.actor)} and the critic"
                f" {describe(entries.critic)}: set model.agent.shared to false, or model.agent.actor_keys and"
                " critic_keys to the same entries."
            )
        if memory is not None and shared is None and not separate:
            raise ConfigError(
                "model.agent.memory needs model.agent.shared: set shared to true for one body and memory of"
                " policy and value, or to false for a value function without memory."
            )

        def body(names: Collection[str] | None) -> nn.Module:
            if one_vector:
                columns = None if names is None else row_columns(observation_spec, names)
                return MLP(observation_spec.shape[0], hidden_sizes, columns)
            if has_numbers_only(observation_spec):
                columns = row_columns(observation_spec, names or entry_columns(observation_spec))
                return MLP(shape[0], hidden_sizes, columns)
            return Encoders(observation_spec, lambda width: MLP(width, hidden_sizes), names)

        shape = tuple(stored(observation_spec).shape)
        excluded = not_measured(observation_spec)
        normalizer = ObservationNormalizer(shape, clip_obs, excluded) if norm_obs else None
        shared = bool(shared)
        super().__init__(
            action_spec,
            functools.partial(body, entries and entries.actor),
            shared,
            head,
            normalizer,
            memory,
            memory_size,
            mask_columns(observation_spec),
            functools.partial(body, entries and entries.critic),
            entries,
        )
        self.save_hyperparameters(ignore=["observation_spec", "action_spec"])

    def array_policy(self) -> ArrayPolicy:
        """Return a NumPy policy on views of the weights, see :meth:`ActorCritic.array_policy`.

        NumPy needs half of PyTorch's time. Values and log-probabilities are left to the end of the rollout,
        because one large batch costs less than many small ones.
        """
        body = self.actor_body
        head = self.head
        if not isinstance(body, MLP) or isinstance(head, CompositeHead):
            return super().array_policy()
        if self.critic.weight.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
            return super().array_policy()
        columns = body.columns
        layers = [as_arrays(layer) for layer in body.layers]
        head_weight, head_bias = as_arrays(head.linear)
        sample = head.array_sampler()
        memory_step = None if self.memory is None else self.memory.array_step()
        mask = self.mask

        def policy(observation: np.ndarray, noise: np.ndarray | None, memory: np.ndarray | None) -> Acted:
            features = observation if columns is None else take_columns(observation, columns)
            for weight, bias in layers:
                features = np.tanh(features @ weight + bias)
            if memory_step is not None:
                assert memory is not None
                features = memory_step(features, memory)
            logits = features @ head_weight + head_bias
            if mask is not None:
                logits = np.where(observation[:, mask] > 0, logits, np.float32(INVALID))
            return sample(logits, noise), None, None

        return policy


def as_arrays(layer: nn.Module) -> tuple[np.ndarray, np.ndarray]:
    """Return views of a linear layer's weight [in, out] and bias [out]."""
    assert isinstance(layer, nn.Linear)
    return layer.weight.detach().numpy().T, layer.bias.detach().numpy()
