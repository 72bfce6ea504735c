"""PPO with TorchRL rollouts and PyTorch Lightning updates."""

import importlib
import logging
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppo_lightning.algorithms import PPG, PPO, RND, RPO, AgentModule, RecurrentPPO, SelfPlay
    from ppo_lightning.checkpoints.resume import last_checkpoint
    from ppo_lightning.envs import make_env
    from ppo_lightning.errors import ConfigError
    from ppo_lightning.models import ActorCritic, CNNAgent, MLPAgent
    from ppo_lightning.rollouts import RolloutCollector, RolloutDataModule, evaluate

# Lightning itself triggers this deprecation warning of PyTorch.
warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\).*")
# `data.total_timesteps` ends a run.
warnings.filterwarnings("ignore", message=".*max_epochs. was not set")
# Advertisements for litlogger and litmodels.
logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
    lambda record: "Tip: For seamless cloud" not in record.getMessage()
)

__version__ = "0.1.0"
_ROOMS = {
    "algorithms": ("PPG", "PPO", "RND", "RPO", "AgentModule", "RecurrentPPO", "SelfPlay"),
    "checkpoints.resume": ("last_checkpoint",),
    "envs": ("make_env",),
    "errors": ("ConfigError",),
    "models": ("ActorCritic", "CNNAgent", "MLPAgent"),
    "rollouts": ("RolloutCollector", "RolloutDataModule", "evaluate"),
}
_MODULES = {name: room for room, names in _ROOMS.items() for name in names}
__all__ = [
    "PPG",
    "PPO",
    "RND",
    "RPO",
    "ActorCritic",
    "AgentModule",
    "CNNAgent",
    "ConfigError",
    "MLPAgent",
    "RecurrentPPO",
    "RolloutCollector",
    "RolloutDataModule",
    "SelfPlay",
    "evaluate",
    "last_checkpoint",
    "make_env",
]


def __getattr__(name: str) -> Any:
    """Import at first use: PyTorch, Lightning and TorchRL take about 5 s, too slow for ``--help``."""
    if name not in _MODULES:
        raise AttributeError(f"module 'ppo_lightning' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ppo_lightning.{_MODULES[name]}"), name)
