"""Weight initialization."""

from typing import TypeVar

from torch import nn

Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)


def orthogonal(layer: Layer, gain: float) -> Layer:
    """Initialize a layer in place with orthogonal weights and zero bias, and return it.

    Args:
        layer: A linear or convolutional layer.
        gain: sqrt(2) for hidden layers, 1 for the last layer of the value function, and 0.01 for the last
            layer of the policy, so that the first actions are nearly uniform.
    """
    # detail 2
    nn.init.orthogonal_(layer.weight, gain)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer
