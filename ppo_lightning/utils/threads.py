"""When an update gains from several threads."""

from torch import nn

LARGE_LAYER = 250_000_000  # multiply-adds for the rows that are differentiated at once: several milliseconds


def has_large_layers(agent: nn.Module, rows: int) -> bool:
    """Tell whether several threads gain much for these rows, and lose little beside other processes.

    Threads meet after each layer. Where a layer takes less than a time slice of the operating system, a thread that waits
    for a core holds up the others: beside busy processes, two threads ran CartPole 64 x 128 at 1/11 (eager) and 1/46
    (compiled) of the speed of one. A convolution takes long enough, and so does a wide linear layer.
    """
    layers = [weight for weight in agent.parameters() if weight.ndim > 1]
    return any(weight.ndim > 2 or weight.numel() * rows >= LARGE_LAYER for weight in layers)
