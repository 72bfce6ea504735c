"""Callbacks: guards, diagnostics, progress, videos, preemption."""

from typing import TYPE_CHECKING

from ppo_lightning.utils.lazy import lazy_exports

if TYPE_CHECKING:
    from ppo_lightning.callbacks.doctor import Doctor
    from ppo_lightning.callbacks.live import LivePlot
    from ppo_lightning.callbacks.preemption import Preemption
    from ppo_lightning.callbacks.summary import RunSummary
    from ppo_lightning.callbacks.threads import Threads
    from ppo_lightning.callbacks.video import CaptureVideo

__all__ = [
    "CaptureVideo",
    "Doctor",
    "LivePlot",
    "Preemption",
    "RunSummary",
    "Threads",
]
__getattr__ = lazy_exports(__name__, __file__)
