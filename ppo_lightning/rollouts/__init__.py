"""Rollouts for training and whole episodes for evaluation."""

from ppo_lightning.rollouts.collector import RolloutCollector
from ppo_lightning.rollouts.datamodule import RolloutDataModule
from ppo_lightning.rollouts.evaluation import evaluate

__all__ = ["RolloutCollector", "RolloutDataModule", "evaluate"]
