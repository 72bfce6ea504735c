"""Weight initialisation."""

from torch import nn


def orthogonal(layer: nn.Linear, gain: float) -> nn.Linear:
    """Initialises a layer with orthogonal weights of the given gain and zero bias, in place, and returns it.

    Hidden layers take sqrt(2), the policy's last layer 0.01 (nearly uniform first actions), the value's last layer 1.
    """
    # detail 2
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer
