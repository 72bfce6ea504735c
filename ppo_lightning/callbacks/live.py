"""Live plot of a run in a notebook."""

import time
from typing import Any

import lightning as L

from ppo_lightning.errors import import_extra
from ppo_lightning.utils.output import accessory

SHOWN = {
    "charts/episodic_return": "return",
    "losses/approx_kl": "approximate KL",
    "losses/clipfrac": "clip fraction",
    "losses/entropy": "entropy",
    "losses/explained_variance": "explained variance",
}


class LivePlot(L.Callback):
    """Notebook plot of return, KL, clip fraction, entropy and explained variance over environment steps.

    Args:
        every: Minimum time between two updates of the plot, in seconds.

    Example:
        >>> trainer = L.Trainer(callbacks=[LivePlot(every=5.0)])
    """

    def __init__(self, every: float = 2.0) -> None:
        self.every = every

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Clear the recorded metrics, and look for the packages that draw them."""
        import_extra("matplotlib.pyplot", extra="notebook")
        self.points: dict[str, list[tuple[int, float]]] = {name: [] for name in SHOWN}
        self._drawn = 0.0
        self._shown: Any = None

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        """Record the metrics of an iteration and update the plot."""
        for name, points in self.points.items():
            if name in trainer.callback_metrics:
                points.append((pl_module.env_steps, float(trainer.callback_metrics[name])))
        if time.monotonic() - self._drawn > self.every:
            self.on_train_end(trainer)
            self._drawn = time.monotonic()

    @accessory("The live plot")
    def on_train_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Replace the plot of the output cell, on rank 0."""
        if not trainer.is_global_zero:
            return
        plt = import_extra("matplotlib.pyplot", extra="notebook")
        display = import_extra("IPython.display", extra="notebook")
        # Without `rc_context`, after which a notebook shows no other figures.
        figure, axes = plt.subplots(1, len(SHOWN), figsize=(15, 2.4), layout="constrained")
        for axis, (name, title) in zip(axes, SHOWN.items(), strict=True):
            axis.plot(*zip(*self.points[name], strict=True))
            axis.set_title(title, fontsize=9)
            axis.tick_params(labelsize=7)
        axes[0].set_xlabel("environment steps", fontsize=8)
        if self._shown is None:  # None outside of a notebook
            self._shown = display.display(figure, display_id=True)
        else:  # a cleared output would lose the bar and messages
            self._shown.update(figure)
        plt.close(figure)
