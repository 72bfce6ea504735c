"""Facts that Lightning's progress bars do not know."""

import math
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import TQDMProgressBar

from ppo_lightning import private
from ppo_lightning.callbacks.guards import QuietCallback
from ppo_lightning.rollouts.learner import Learner


class BarFacts(QuietCallback):
    """Callback that tells progress bars the number of epochs, and how often to refresh.

    Every fit has this callback, unless the Trainer has one already. ``data.total_timesteps`` ends a run, and
    ``trainer.max_epochs`` is -1, so that a bar would show no end.

    Example:
        >>> trainer = L.Trainer(callbacks=[BarFacts()])
    """

    _limits_epochs = False

    def on_train_start(self, trainer: L.Trainer, pl_module: Learner) -> None:
        """Set the number of epochs, which Lightning does not know."""
        bar = trainer.progress_bar_callback
        self._own_rate = isinstance(bar, TQDMProgressBar) and bar.refresh_rate != 1
        self._limits_epochs = trainer.max_epochs == -1
        if self._limits_epochs:
            length = max(int(trainer.num_training_batches), 1)
            left = pl_module.data.num_rollouts - pl_module.rollouts_done
            # A resumed epoch may have any length; with `max_steps`, Lightning repeats the last one as empty.
            begun = (1 if trainer.max_steps == -1 else 2) if trainer.ckpt_path else 0
            trainer.fit_loop.max_epochs = trainer.current_epoch + math.ceil(left / length) + begun

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Learner) -> None:
        """Let bars refresh twice a second: with Rich, a refresh delays a rollout of CartPole by a tenth."""
        if not self._own_rate:
            rate = pl_module.progress.steps_per_second() / pl_module.data.frames_per_rollout
            private.limit_refreshes(trainer.progress_bar_callback, max(1, round(rate / 2)))

    def on_train_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Restore the limit, so that the same Trainer can fit again."""
        if self._limits_epochs:
            trainer.fit_loop.max_epochs = -1
        self._limits_epochs = False

    on_exception = on_train_end  # type: ignore[assignment]
