"""Algorithms beside the core: each overrides a seam of PPO."""

from ppo_lightning.variants.recurrent import RecurrentPPO
from ppo_lightning.variants.rpo import RPO

__all__ = ["RPO", "RecurrentPPO"]
