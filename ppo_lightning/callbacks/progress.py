"""A progress bar that counts environment steps."""

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm

from ppo_lightning.rollouts.learner import Learner
from ppo_lightning.utils.rounding import decimals


class RolloutProgressBar(ProgressBar):
    """Progress bar with environment steps, throughput, time left and mean return of the last 100 episodes.

    Example:
        >>> trainer = L.Trainer(callbacks=[RolloutProgressBar()])
    """

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True
        self._bar: tqdm | None = None

    def disable(self) -> None:
        """Hide the bar."""
        self._enabled = False

    def enable(self) -> None:
        """Show the bar again."""
        self._enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print above the bar."""
        tqdm.write(" ".join(str(arg) for arg in args), **kwargs)

    def on_train_start(self, trainer: L.Trainer, pl_module: Learner) -> None:
        """Open the bar."""
        data = pl_module.data
        self._bar = tqdm(
            total=data.num_rollouts * data.frames_per_rollout,
            initial=pl_module.rollouts_done * data.frames_per_rollout,
            disable=not self._enabled,
            unit_scale=True,
            mininterval=0.5,
            bar_format="{percentage:3.0f}%|{bar:30}| {n_fmt}/{total_fmt} steps"
            " [{elapsed}<{remaining}{postfix}]",
        )

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Learner, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Advance the bar by one rollout."""
        assert self._bar is not None
        postfix = [f"{pl_module.run_log.steps_per_second():.0f} SPS"]
        if (mean := pl_module.mean_return) is not None:
            postfix.append(f"return {mean:{decimals(mean)}}")
        self._bar.set_postfix_str(", ".join(postfix), refresh=False)
        self._bar.update(pl_module.data.frames_per_rollout)

    def on_train_end(self, *args: Any) -> None:
        """Close the bar and leave it on the screen."""
        if self._bar is not None:
            self._bar.close()

    # An error message starts on a new line.
    on_exception = on_train_end  # type: ignore[assignment]
