"""Number of PyTorch threads during training."""

import lightning as L
import torch

from ppo_lightning.callbacks.guards import Guard
from ppo_lightning.rollouts.learner import Agent, Learner

LARGE_LAYER = 250_000_000  # multiply-adds for the rows differentiated at once: several milliseconds


class Threads(Guard):
    """Callback that sets the number of PyTorch threads for training and restores it afterwards.

    Every fit has this callback, unless the Trainer has one already.
    PyTorch uses all cores by default. For a small update beside other processes, two threads run at
    1/40 of the speed of one.

    Args:
        num_threads: Number of threads. None selects PyTorch's default if the agent has large layers,
            otherwise 1.

    Example:
        >>> trainer = L.Trainer(callbacks=[Threads()])
    """

    def __init__(self, num_threads: int | None = None) -> None:
        self.num_threads = num_threads
        self._previous: int | None = None

    def on_fit_start(self, trainer: L.Trainer, pl_module: Learner) -> None:
        """Set the number of threads."""
        self._previous = torch.get_num_threads()
        rows = min(pl_module.minibatch_size, pl_module.microbatch_size)
        torch.set_num_threads(
            self.num_threads or (self._previous if has_large_layers(pl_module.agent, rows) else 1)
        )

    def on_fit_end(self, trainer: L.Trainer, pl_module: Learner) -> None:
        """Restore the number of threads."""
        if self._previous is not None:
            torch.set_num_threads(self._previous)
        self._previous = None

    def on_exception(self, trainer: L.Trainer, pl_module: Learner, exception: BaseException) -> None:
        """Restore the number of threads."""
        self.on_fit_end(trainer, pl_module)


def has_large_layers(agent: Agent, rows: int) -> bool:
    """Return whether several threads are faster for a number of rows, even beside other processes.

    Threads synchronize after each layer. If a layer takes less than a time slice of the operating
    system, a thread without a core delays the others. Convolutions and wide linear layers take longer.
    """
    layers = [weight for weight in agent.parameters() if weight.ndim > 1]
    return any(weight.ndim > 2 or weight.numel() * rows >= LARGE_LAYER for weight in layers)
