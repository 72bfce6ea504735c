"""Weight initialization."""

from typing import TypeVar

import torch
from torch import nn

Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)


def orthogonal(layer: Layer, gain: float) -> Layer:
    """Initialize a layer in place with orthogonal weights and zero bias, and return it.

    The gain is sqrt(2) for hidden layers, 1 for the last layer of the value function, and 0.01 for the last
    layer of the policy, so that the first actions are nearly uniform.
    """
    # detail 2
    nn.init.orthogonal_(layer.weight, gain)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer


def normed(layer: Layer, norm: float) -> Layer:
    """Scale a layer's initial weights in place to one norm per output, with zero bias, and return it.

    Source: the program of Cobbe et al., "Phasic Policy Gradient" (2020).
    """
    with torch.no_grad():
        norms = layer.weight.flatten(1).norm(dim=1)  # a copy for weights in the layout channels last
        layer.weight *= (norm / norms).view(-1, *[1] * (layer.weight.ndim - 1))
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer
