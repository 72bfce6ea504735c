"""Bodies for vectors: from observations to features."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ppo_lightning.models.init import orthogonal
from ppo_lightning.spaces.entries import take_columns

Activation = Literal["tanh", "relu", "elu"]
ArrayFunction = Callable[[np.ndarray], np.ndarray]
NUMERATOR = (
    -2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08,
    1.48572235717979e-05, 6.37261928875436e-04, 4.89352455891786e-03,
)  # fmt: skip
DENOMINATOR = (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)


class FastTanh(torch.autograd.Function):
    """The hyperbolic tangent as a rational function with an error below 4e-7.

    In a compiled graph it is ten times as fast as the library function.

    Source: the coefficients of Eigen's ``ptanh``, which XLA also uses.
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
    """Evaluate a polynomial of the given coefficients, highest power first, with Horner's method."""
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


def array_relu(x: np.ndarray) -> np.ndarray:
    """Return the positive part of an array."""
    return np.maximum(x, 0)


def array_elu(x: np.ndarray) -> np.ndarray:
    """Return x where it is positive, and exp(x) - 1 elsewhere."""
    return np.maximum(x, 0) + np.expm1(np.minimum(x, 0))


# Functions of tensors and of arrays, without lambdas, which cannot be pickled.
ACTIVATIONS: dict[Activation, tuple[Callable[[Tensor], Tensor], ArrayFunction]] = {
    "tanh": (tanh, np.tanh),
    "relu": (torch.relu, array_relu),
    "elu": (functional.elu, array_elu),
}


class MLP(nn.Module):
    """Linear layers, each followed by a nonlinear function.

    Args:
        in_features: Width D of the observations.
        hidden_sizes: Widths of the layers.
        columns: Columns of the observations to read. None: all columns.
        activation: ``tanh``, ``relu`` or ``elu``.

    Example:
        >>> MLP(4, [64, 32])(torch.zeros(2, 4)).shape
        torch.Size([2, 32])
    """

    def __init__(
        self,
        in_features: int,
        hidden_sizes: Sequence[int],
        columns: Sequence[slice] | None = None,
        activation: Activation = "tanh",
    ) -> None:
        super().__init__()
        self.columns = columns
        self.in_features = in_features
        self.activation, self.array_activation = ACTIVATIONS[activation]
        self.layers = nn.ModuleList()
        width = in_features if columns is None else sum(place.stop - place.start for place in columns)
        for next_width in hidden_sizes:
            self.layers.append(orthogonal(nn.Linear(width, next_width), gain=math.sqrt(2)))
            width = next_width
        self.out_features = width

    def forward(self, observation: Tensor) -> Tensor:
        """Map observations [B, D] to features [B, F]."""
        features = observation
        if self.columns is not None:
            if observation.shape[-1] != self.in_features:
                raise RuntimeError(f"{observation.shape[-1]} columns, not {self.in_features}")
            features = take_columns(observation, self.columns)
        for layer in self.layers:
            features = self.activation(layer(features))
        return features

    def array_forward(self) -> ArrayFunction:
        """Return a NumPy version of :meth:`forward`, on views of the weights."""
        layers = [linear_function(layer, self.array_activation) for layer in self.layers]
        columns = self.columns

        def forward(observation: np.ndarray) -> np.ndarray:
            features = observation if columns is None else take_columns(observation, columns)
            for layer in layers:
                features = layer(features)
            return features

        return forward


def linear_function(layer: nn.Module, activation: ArrayFunction | None = None) -> ArrayFunction:
    """Return a linear layer, followed by a nonlinear function, as a function of arrays."""
    assert isinstance(layer, nn.Linear)
    weight, bias = layer.weight.detach().numpy().T, layer.bias.detach().numpy()
    if activation is None:
        return lambda features: features @ weight + bias
    return lambda features: activation(features @ weight + bias)
