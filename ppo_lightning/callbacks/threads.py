"""PyTorch's threads during training."""

from typing import Any

import lightning as L
import torch
from torch import nn

LARGE_LAYER = 250_000_000  # multiply-adds of the rows that are differentiated at once: several milliseconds


class Threads(L.Callback):
    """Set PyTorch's number of threads for training, and restore it afterwards.

    The command line adds this callback. From Python, pass it to the Trainer: PyTorch's own default takes all cores, and two
    threads that share cores with other processes run a small update at 1/40 of the speed of one thread.

    Args:
        num_threads: Number of threads; None: PyTorch's own number if the agent has large layers, otherwise 1.

    Example:
        >>> trainer = L.Trainer(max_epochs=-1, callbacks=[Threads()])
    """

    def __init__(self, num_threads: int | None = None) -> None:
        self.num_threads = num_threads
        self._before: int | None = None

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Set the number of threads."""
        self._before = torch.get_num_threads()
        rows = pl_module.rows_differentiated_at_once()
        torch.set_num_threads(
            self.num_threads or (self._before if has_large_layers(pl_module.agent, rows) else 1)
        )

    def on_fit_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Restore the number of threads."""
        if self._before is not None:
            torch.set_num_threads(self._before)
        self._before = None

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Restore the number of threads."""
        self.on_fit_end(trainer, pl_module)


def has_large_layers(agent: nn.Module, rows: int) -> bool:
    """Return whether several threads gain much for a number of rows, and lose little beside other processes.

    Threads synchronize after each layer. If a layer takes less than a time slice of the operating system, a thread that
    waits for a core delays the others. A convolution takes longer, and so does a wide linear layer.
    """
    layers = [weight for weight in agent.parameters() if weight.ndim > 1]
    return any(weight.ndim > 2 or weight.numel() * rows >= LARGE_LAYER for weight in layers)
