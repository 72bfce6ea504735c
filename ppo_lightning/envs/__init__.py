"""Environments: one adapter a family, all TorchRL environments."""

from ppo_lightning.envs.batched import BatchedEnv
from ppo_lightning.envs.examination import check_environment
from ppo_lightning.envs.factory import EnvFactory, make_env

__all__ = ["BatchedEnv", "EnvFactory", "check_environment", "make_env"]
