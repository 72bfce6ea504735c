"""What is shown while a run goes on and when it ends, and how it ends early."""

from ppo_lightning.callbacks.predictions import ActionWriter
from ppo_lightning.callbacks.preemption import Preemption
from ppo_lightning.callbacks.progress import RolloutProgressBar
from ppo_lightning.callbacks.summary import RunSummary

__all__ = ["ActionWriter", "Preemption", "RolloutProgressBar", "RunSummary"]
