"""PPO with TorchRL rollouts and a PyTorch Lightning update."""

from ppo_lightning.collector import RolloutCollector
from ppo_lightning.datamodule import RolloutDataModule
from ppo_lightning.envs import make_env
from ppo_lightning.errors import ConfigError
from ppo_lightning.evaluation import evaluate
from ppo_lightning.models import ActorCritic, CNNAgent, MLPAgent
from ppo_lightning.module import PPO

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
