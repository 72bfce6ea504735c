"""Weight initialisation."""

from typing import TypeVar

from torch import nn

Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)


def orthogonal(layer: Layer, gain: float) -> Layer:
    """Initialises a layer with orthogonal weights of the given gain and zero bias, in place, and returns it.

    Hidden layers take sqrt(2), the policy's last layer 0.01 (nearly uniform first actions), the value's last
    layer 1.
    """
    # detail 2
    nn.init.orthogonal_(layer.weight, gain)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer
