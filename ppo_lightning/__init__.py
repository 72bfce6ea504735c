"""PPO and off-policy algorithms with TorchRL rollouts and PyTorch Lightning updates."""

import logging
import warnings
from typing import TYPE_CHECKING

from ppo_lightning.utils.lazy import lazy_exports

if TYPE_CHECKING:
    from ppo_lightning.algorithms.agent_module import AgentModule
    from ppo_lightning.algorithms.ppg import PPG
    from ppo_lightning.algorithms.ppo import PPO
    from ppo_lightning.algorithms.recurrent import RecurrentPPO
    from ppo_lightning.algorithms.rnd import RND
    from ppo_lightning.algorithms.rpo import RPO
    from ppo_lightning.checkpoints.resume import last_checkpoint
    from ppo_lightning.envs import make_env
    from ppo_lightning.errors import ConfigError
    from ppo_lightning.games.selfplay import SelfPlay
    from ppo_lightning.models import Actor, ActorCritic, CNNAgent, MLPAgent
    from ppo_lightning.offpolicy import C51, DDPG, DQN, SAC, TD3, DiscreteSAC
    from ppo_lightning.rollouts.collector import RolloutCollector
    from ppo_lightning.rollouts.datamodule import RolloutDataModule
    from ppo_lightning.rollouts.evaluation import evaluate

# Lightning itself triggers this deprecation warning of PyTorch.
warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\).*")
# `data.total_timesteps` ends a run.
warnings.filterwarnings("ignore", message=".*max_epochs. was not set")
# Advertisements for litlogger and litmodels.
logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
    lambda record: "Tip: For seamless cloud" not in record.getMessage()
)

__version__ = "0.2.0"
__all__ = [
    "C51",
    "DDPG",
    "DQN",
    "PPG",
    "PPO",
    "RND",
    "RPO",
    "SAC",
    "TD3",
    "Actor",
    "ActorCritic",
    "AgentModule",
    "CNNAgent",
    "ConfigError",
    "DiscreteSAC",
    "MLPAgent",
    "RecurrentPPO",
    "RolloutCollector",
    "RolloutDataModule",
    "SelfPlay",
    "evaluate",
    "last_checkpoint",
    "make_env",
]
# PyTorch, Lightning and TorchRL take about 5 s to import, too slow for `--help`.
__getattr__ = lazy_exports(__name__, __file__)
