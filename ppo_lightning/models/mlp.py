"""Multi-layer perceptrons for vector observations."""

import math
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn
from torchrl.data import TensorSpec

from ppo_lightning.errors import ConfigError
from ppo_lightning.models.agent import Acted, ActorCritic, ArrayPolicy
from ppo_lightning.models.composite import CompositeHead
from ppo_lightning.models.encoders import Encoders
from ppo_lightning.models.heads import HeadName
from ppo_lightning.models.init import orthogonal
from ppo_lightning.models.memory import MemoryName
from ppo_lightning.models.normalizers import ObservationNormalizer
from ppo_lightning.spaces.specs import is_picture, is_vector, mask_columns, not_measured, stored
from ppo_lightning.utils.arguments import Range, check_arguments

NUMERATOR = (
    -2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08,
    1.48572235717979e-05, 6.37261928875436e-04, 4.89352455891786e-03,
)  # fmt: skip
DENOMINATOR = (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)


class FastTanh(torch.autograd.Function):
    """The hyperbolic tangent as a rational function, to 4e-7: ten times as fast in a compiled graph as the library's.

    The coefficients are those of Eigen's ``ptanh``, which XLA uses, too.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Returns tanh(x) for float32."""
        x = x.clamp(-7.90531110763549805, 7.90531110763549805)
        y = x * polynomial(NUMERATOR, x * x) / polynomial(DENOMINATOR, x * x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Returns the derivative times what comes from behind."""
        (y,) = ctx.saved_tensors
        return grads[0] * (1 - y * y)


def polynomial(coefficients: Sequence[float], x: Tensor) -> Tensor:
    """Returns the polynomial whose highest coefficient comes first."""
    y = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        y = y * x + coefficient
    return y


def tanh(x: Tensor) -> Tensor:
    """Does what ``torch.tanh`` does, on the CPU some five times as fast: by :class:`FastTanh` or, in inference, by NumPy."""
    if x.device.type == "cpu" and x.dtype == torch.float32:
        if torch.compiler.is_compiling():
            return x.tanh() if torch.compiler.is_exporting() else FastTanh.apply(x)
        if torch.is_inference_mode_enabled():
            return torch.from_numpy(np.tanh(x.numpy()))
    return x.tanh()


class MLP(nn.Module):
    """Linear layers, each followed by tanh.

    Args:
        in_features: Width of the observation.
        hidden_sizes: Widths of the layers.
    """

    def __init__(self, in_features: int, hidden_sizes: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for width in hidden_sizes:
            self.layers.append(orthogonal(nn.Linear(in_features, width), gain=math.sqrt(2)))
            in_features = width
        self.out_features = in_features

    def forward(self, observation: Tensor) -> Tensor:
        """Maps observations [B, D] to features [B, F]."""
        for layer in self.layers:
            observation = tanh(layer(observation))
        return observation


class MLPAgent(ActorCritic):
    """Policy and value as multi-layer perceptrons.

    Observations of several parts (a dictionary, a discrete one) are encoded part by part, see
    :class:`~ppo_lightning.models.encoders.Encoders`.

    Args:
        observation_spec: Of one environment: vectors, shape [D], or several parts.
        action_spec: The environment's actions.
        hidden_sizes: Widths of the hidden layers.
        shared: One trunk for policy and value, instead of one each.
        head: The action distribution of continuous actions: ``gaussian`` or ``tanh_gaussian`` (squashed into
            the bounds); None: Gaussian. Of discrete ones it is ``categorical``.
        norm_obs: Normalise the observations by their running mean and standard deviation; but discrete parts
            and pictures.
        clip_obs: Bound of the absolute value of a normalised observation.
        memory: ``lstm`` or ``gru`` behind the trunk; None: none.
        memory_size: Width of what it gives to the heads.

    Raises:
        ConfigError: The observations are a picture, or the head does not fit the actions.
    """

    def __init__(
        self,
        observation_spec: TensorSpec,
        action_spec: TensorSpec,
        hidden_sizes: Annotated[Sequence[int], Range(1, 16_384)] = (64, 64),
        shared: bool = False,
        head: HeadName | None = None,
        norm_obs: bool = False,
        clip_obs: Annotated[float, Range(1e-6)] = 10.0,
        memory: MemoryName | None = None,
        memory_size: Annotated[int, Range(1, 8192)] = 128,
    ) -> None:
        check_arguments(MLPAgent.__init__, locals(), "model.agent")
        if is_picture(observation_spec):
            raise ConfigError(
                f"env_id has observations of shape {tuple(observation_spec.shape)} and dtype {observation_spec.dtype}, and"
                " MLPAgent takes pictures beside other parts only: set model.agent to ppo_lightning.CNNAgent."
            )
        one_vector = observation_spec.ndim == 1 and is_vector(observation_spec)

        def body() -> nn.Module:
            if one_vector:
                return MLP(observation_spec.shape[0], hidden_sizes)
            return Encoders(observation_spec, lambda width: MLP(width, hidden_sizes))

        shape, leave = tuple(stored(observation_spec).shape), not_measured(observation_spec)
        normalizer = ObservationNormalizer(shape, clip_obs, leave) if norm_obs else None
        super().__init__(
            action_spec, body, shared, head, normalizer, memory, memory_size, mask_columns(observation_spec)
        )
        self.save_hyperparameters(ignore=["observation_spec", "action_spec"])

    def array_policy(self) -> ArrayPolicy:
        """See :meth:`ActorCritic.array_policy`: on views of the weights, NumPy acts in half of PyTorch's time.

        Values and log-probabilities are left to the end of the rollout: one large batch costs less than many
        small ones.
        """
        body, head = self.actor_body, self.head
        if not isinstance(body, MLP) or isinstance(head, CompositeHead):
            return super().array_policy()
        if self.critic.weight.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
            return super().array_policy()
        layers = [arrays_of(layer) for layer in body.layers]
        to_head, head_bias = arrays_of(head.linear)
        choose, remember = head.array_sampler(), None if self.memory is None else self.memory.array_step()

        def policy(observation: np.ndarray, noise: np.ndarray | None, memory: np.ndarray | None) -> Acted:
            for weight, bias in layers:
                observation = np.tanh(observation @ weight + bias)
            if remember is not None:
                assert memory is not None
                observation = remember(observation, memory)
            return choose(observation @ to_head + head_bias, noise), None, None

        return policy


def arrays_of(layer: nn.Module) -> tuple[np.ndarray, np.ndarray]:
    """Returns views of a linear layer's weight [in, out] and bias [out]."""
    assert isinstance(layer, nn.Linear)
    return layer.weight.detach().numpy().T, layer.bias.detach().numpy()
