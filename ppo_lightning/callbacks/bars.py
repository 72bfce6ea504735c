"""The progress bar of a run."""

import math
import sys
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from tqdm import tqdm


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
        data, epoch = pl_module.data, trainer.current_epoch
        rate = pl_module.progress.steps_per_second() / data.frames_per_rollout
        self._refresh_rate = max(1, round(rate / 2))
        super().on_train_epoch_start(trainer, pl_module)
        # Lightning does not know the number: `data.total_timesteps` ends a run.
        left = (data.num_rollouts - pl_module.rollouts_done) / max(int(trainer.num_training_batches), 1)
        last = epoch + math.ceil(left) - 1
        if (limit := trainer.max_epochs or -1) > 0:
            last = min(last, limit - 1)
        self.train_progress_bar.set_description(f"Epoch {epoch}/{last}")

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
