"""Rollouts for training and whole episodes for evaluation."""

from typing import TYPE_CHECKING

from ppo_lightning.utils.lazy import lazy_exports

if TYPE_CHECKING:
    from ppo_lightning.rollouts.collector import RolloutCollector
    from ppo_lightning.rollouts.datamodule import RolloutDataModule
    from ppo_lightning.rollouts.evaluation import evaluate

__all__ = ["RolloutCollector", "RolloutDataModule", "evaluate"]
__getattr__ = lazy_exports(__name__, __file__)
