"""The progress bar of a run."""

import math
import sys
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from tqdm import tqdm

from ppo_lightning.callbacks.guards import QuietCallback
from ppo_lightning.rollouts.learner import Learner


class OneLineBar(TQDMProgressBar):
    """Progress bar of one line, in place of the Trainer's default bar. An evaluation has no bar."""

    bar: Any = None

    def init_train_tqdm(self) -> Any:
        """Return a bar of text: a widget needs ipywidgets and a front end that shows it."""
        self.bar = tqdm(
            disable=self.is_disabled,
            file=sys.stdout,
            dynamic_ncols=True,
            smoothing=0,
            bar_format="{desc}|{bar}| {n_fmt}/{total_fmt}{postfix}",
        )
        return self.bar

    def init_validation_tqdm(self) -> Any:
        """Return a bar that shows nothing."""
        return tqdm(disable=True)

    init_test_tqdm = init_sanity_tqdm = init_validation_tqdm

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Show the number of epochs, and refresh twice a second."""
        rate = pl_module.progress.steps_per_second() / pl_module.data.frames_per_rollout
        self._refresh_rate = max(1, round(rate / 2))
        super().on_train_epoch_start(trainer, pl_module)
        self.train_progress_bar.set_description(
            f"Epoch {trainer.current_epoch}/{(trainer.max_epochs or 0) - 1}"
        )

    def get_metrics(self, *args: Any) -> Any:
        """Return what the bar shows, without the version of the logger."""
        return {name: value for name, value in super().get_metrics(*args).items() if name != "v_num"}

    def on_exception(self, *args: Any) -> None:
        """Close the bar, below which messages follow."""
        if self.bar is not None:
            self.bar.close()


def use_one_line(callbacks: list[L.Callback]) -> None:
    """Replace the Trainer's default bar: Rich's takes four lines, and fails in a notebook beside prints."""
    for index, bar in enumerate(callbacks):
        if type(bar) in (RichProgressBar, TQDMProgressBar) and vars(bar) == vars(type(bar)()):
            callbacks[index] = OneLineBar()


class BarFacts(QuietCallback):
    """Callback that tells progress bars the number of epochs: ``data.total_timesteps`` ends a run."""

    _limits_epochs = False

    def on_train_start(self, trainer: L.Trainer, pl_module: Learner) -> None:
        """Set the number of epochs, which Lightning does not know."""
        self._limits_epochs = trainer.max_epochs == -1
        if self._limits_epochs:
            length = max(int(trainer.num_training_batches), 1)
            left = pl_module.data.num_rollouts - pl_module.rollouts_done
            # A resumed epoch may have any length; with `max_steps`, Lightning repeats the last one as empty.
            begun = (1 if trainer.max_steps == -1 else 2) if trainer.ckpt_path else 0
            trainer.fit_loop.max_epochs = trainer.current_epoch + math.ceil(left / length) + begun

    def on_train_epoch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Lift the limit when the run is complete: Lightning would name it as the reason of the end."""
        if self._limits_epochs and trainer.should_stop:
            trainer.fit_loop.max_epochs = -1

    def on_train_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Restore the limit, so that the same Trainer can fit again."""
        if self._limits_epochs:
            trainer.fit_loop.max_epochs = -1
        self._limits_epochs = False

    on_exception = on_train_end  # type: ignore[assignment]
