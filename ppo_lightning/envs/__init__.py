"""Environments: one adapter a family, all TorchRL environments."""

from ppo_lightning.envs.batched import BatchedEnv
from ppo_lightning.envs.factory import EnvFactory, make_env

__all__ = ["BatchedEnv", "EnvFactory", "make_env"]
