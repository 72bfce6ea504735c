"""Environments: one adapter a family, all of arrays, or of tensors under TorchRL's interface."""

from typing import TYPE_CHECKING

from ppo_lightning.utils.lazy import lazy_exports

if TYPE_CHECKING:
    from ppo_lightning.envs.batched import BatchedEnv
    from ppo_lightning.envs.conformance import check_environment
    from ppo_lightning.envs.factory import EnvFactory, make_env
    from ppo_lightning.envs.torchrl import TorchRLEnv

__all__ = ["BatchedEnv", "EnvFactory", "TorchRLEnv", "check_environment", "make_env"]
__getattr__ = lazy_exports(__name__, __file__)
