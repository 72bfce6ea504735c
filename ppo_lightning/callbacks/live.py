"""Live metrics of a run: curves in a notebook or a panel in a terminal."""

import math
import time
from abc import abstractmethod
from typing import Any

import lightning as L

from ppo_lightning.errors import import_extra

SHOWN = {
    "charts/episodic_return": "return",
    "losses/approx_kl": "approximate KL",
    "losses/clipfrac": "clip fraction",
    "losses/entropy": "entropy",
    "losses/explained_variance": "explained variance",
}


class Recorder(L.Callback):
    """Base callback that records the displayed metrics, on rank 0.

    Args:
        every: Minimum time between two updates of the display, in seconds.
    """

    def __init__(self, every: float = 2.0) -> None:
        self.every = every
        self.points: dict[str, list[tuple[int, float]]] = {}
        self._drawn = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Clear the recorded metrics."""
        self.points = {name: [] for name in SHOWN}
        self._drawn = 0.0

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the metrics of an iteration and update the display."""
        if not trainer.is_global_zero:
            return
        for name, points in self.points.items():
            value = float(trainer.callback_metrics.get(name, math.nan))
            if math.isfinite(value):
                points.append((pl_module.env_steps, value))
        if time.monotonic() - self._drawn > self.every:
            self.draw(trainer, pl_module)
            self._drawn = time.monotonic()

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Update the display a last time."""
        if trainer.is_global_zero:
            self.draw(trainer, pl_module)

    @abstractmethod
    def draw(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Display the metrics recorded so far."""


class LivePlot(Recorder):
    """Notebook plot of return, KL, clip fraction, entropy and explained variance over environment steps.

    Args:
        every: Minimum time between two updates of the plot, in seconds.

    Example:
        >>> trainer = L.Trainer(callbacks=[LivePlot(every=5.0)])
    """

    def draw(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Replace the plot of the output cell."""
        plt = import_extra("matplotlib.pyplot", extra="notebook")
        display = import_extra("IPython.display", extra="notebook")
        figure, axes = plt.subplots(1, len(SHOWN), figsize=(3 * len(SHOWN), 2.4))
        for axis, (name, title) in zip(axes, SHOWN.items(), strict=True):
            axis.plot(*zip(*self.points[name], strict=True)) if self.points[name] else None
            axis.set_title(title, fontsize=9)
            axis.tick_params(labelsize=7)
            axis.spines[["top", "right"]].set_visible(False)
        axes[0].set_xlabel("environment steps", fontsize=8)
        figure.tight_layout()
        display.clear_output(wait=True)
        display.display(figure)
        plt.close(figure)


class TerminalPanel(Recorder):
    """Terminal panel with the metrics of :class:`LivePlot` as numbers and sparklines.

    The panel replaces a progress bar.

    Args:
        every: Minimum time between two updates of the panel, in seconds.

    Example:
        >>> trainer = L.Trainer(callbacks=[TerminalPanel()], enable_progress_bar=False)
    """

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Open the panel."""
        super().on_train_start(trainer, pl_module)
        if trainer.is_global_zero:
            self._live = import_extra("rich.live", extra="notebook").Live(auto_refresh=False)
            self._live.start()

    def draw(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Update the panel."""
        panel, table = (import_extra(f"rich.{name}", extra="notebook") for name in ("panel", "table"))
        total = pl_module.data.num_rollouts * pl_module.data.frames_per_rollout
        sps = pl_module.run_log.steps_per_second()
        grid = table.Table.grid(padding=(0, 2))
        for name, title in SHOWN.items():
            values = [value for _, value in self.points[name]]
            grid.add_row(title, f"{values[-1]:.4g}" if values else "-", sparkline(values))
        seconds_left = (total - pl_module.env_steps) / sps
        done, goal, speed = (
            f"{number:,.0f}".replace(",", " ") for number in (pl_module.env_steps, total, sps)
        )
        title = f"{done} of {goal} steps, {speed} per second, {seconds_left / 60:.0f} min left"
        self._live.update(panel.Panel(grid, title=title, expand=False), refresh=True)

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Stop updating the panel and leave it on the screen."""
        super().on_train_end(trainer, pl_module)
        if trainer.is_global_zero:
            self._live.stop()

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Restore the terminal."""
        if hasattr(self, "_live"):
            self._live.stop()


def sparkline(values: list[float], width: int = 40) -> str:
    """Return a curve of block characters, oldest value first, at most ``width`` characters long."""
    if not values:
        return ""
    sampled = (
        [values[round(i * (len(values) - 1) / (width - 1))] for i in range(width)]
        if len(values) > width
        else values
    )
    low, high = min(sampled), max(sampled)
    return "".join(
        "▁▂▃▄▅▆▇█"[int(7 * (value - low) / (high - low)) if high > low else 0] for value in sampled
    )
