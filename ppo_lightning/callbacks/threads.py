"""Number of PyTorch threads during training, and the smallest numbers of its updates."""

from typing import Annotated, Any

import lightning as L
import torch

from ppo_lightning.callbacks.guards import QuietCallback
from ppo_lightning.rollouts.learner import MinibatchLearner
from ppo_lightning.utils.arguments import Range, check_arguments

LARGE_LAYER = 250_000_000  # multiply-adds for the rows differentiated at once: several milliseconds


class Threads(QuietCallback):
    """Callback that sets the number of PyTorch threads for training and restores it afterwards.

    Every fit has this callback, unless the Trainer has one already.
    PyTorch uses all cores by default. For a small update beside other processes, two threads run at
    1/40 of the speed of one.
    During the updates, numbers below 1e-38 (float64: 1e-308) are 0. A CPU computes up to four times as long
    with them, and the sensors of some environments have many.

    Args:
        num_threads: Number of threads. None selects PyTorch's default if the agent has large layers,
            otherwise 1.

    Example:
        >>> trainer = L.Trainer(callbacks=[Threads()])
    """

    def __init__(self, num_threads: Annotated[int | None, Range(1, 1024)] = None) -> None:
        check_arguments(Threads.__init__, locals(), "Threads")
        self.num_threads = num_threads
        self._previous: int | None = None
        self._flushes = False  # whether the smallest numbers were rounded before the fit

    def on_fit_start(self, trainer: L.Trainer, pl_module: MinibatchLearner) -> None:
        """Set the number of threads."""
        self._previous = torch.get_num_threads()
        small = torch.tensor(1e-30, dtype=torch.float32, device="cpu")
        self._flushes = bool(small * 1e-10 == 0)
        rows = min(pl_module.minibatch_size, pl_module.microbatch_size)
        # Threads synchronize after each layer. If a layer takes less than a time slice of the operating
        # system, a thread without a core delays the others. Convolutions and wide linear layers take longer.
        has_large_layers = any(
            weight.ndim > 2 or (weight.ndim == 2 and weight.numel() * rows >= LARGE_LAYER)
            for weight in pl_module.agent.parameters()
        )
        torch.set_num_threads(self.num_threads or (self._previous if has_large_layers else 1))

    def on_fit_end(self, *args: Any) -> None:
        """Restore both, also after an error."""
        if self._previous is not None:
            torch.set_num_threads(self._previous)
            self.on_train_batch_end()
        self._previous = None

    on_exception = on_fit_end  # type: ignore[assignment]

    def on_train_batch_start(self, *args: Any) -> None:
        """Round the smallest numbers to 0."""
        torch.set_flush_denormal(True)

    def on_train_batch_end(self, *args: Any) -> None:
        """Keep them again, as the environments do outside of a fit."""
        torch.set_flush_denormal(self._flushes)
