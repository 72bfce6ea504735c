"""PPO with TorchRL rollouts and a PyTorch Lightning update."""

import importlib
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppo_lightning.collector import RolloutCollector
    from ppo_lightning.datamodule import RolloutDataModule
    from ppo_lightning.envs import make_env
    from ppo_lightning.errors import ConfigError
    from ppo_lightning.evaluation import evaluate
    from ppo_lightning.models import ActorCritic, CNNAgent, MLPAgent
    from ppo_lightning.module import PPO

# Lightning's own use of PyTorch, which its users cannot change.
warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\).*")

__version__ = "0.1.0"
__all__ = [
    "PPO",
    "ActorCritic",
    "CNNAgent",
    "ConfigError",
    "MLPAgent",
    "RolloutCollector",
    "RolloutDataModule",
    "evaluate",
    "make_env",
]
_MODULES = {
    "PPO": "module",
    "ActorCritic": "models",
    "CNNAgent": "models",
    "ConfigError": "errors",
    "MLPAgent": "models",
    "RolloutCollector": "collector",
    "RolloutDataModule": "datamodule",
    "evaluate": "evaluation",
    "make_env": "envs",
}


def __getattr__(name: str) -> Any:
    """Imports at first use: PyTorch, Lightning and TorchRL take some five seconds, which ``ppo-lightning --help`` has not."""
    if name not in _MODULES:
        raise AttributeError(f"module 'ppo_lightning' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ppo_lightning.{_MODULES[name]}"), name)
