"""Off-policy algorithms: replay, targets and exploration beside the environments and collectors of PPO."""

from typing import TYPE_CHECKING

from ppo_lightning.utils.lazy import lazy_exports

if TYPE_CHECKING:
    from ppo_lightning.offpolicy.agents import DeterministicAgent, QAgent, SACAgent
    from ppo_lightning.offpolicy.c51 import C51
    from ppo_lightning.offpolicy.ddpg import DDPG
    from ppo_lightning.offpolicy.dqn import DQN
    from ppo_lightning.offpolicy.module import OffPolicyModule
    from ppo_lightning.offpolicy.sac import SAC
    from ppo_lightning.offpolicy.td3 import TD3

__all__ = ["C51", "DDPG", "DQN", "SAC", "TD3", "DeterministicAgent", "OffPolicyModule", "QAgent", "SACAgent"]
__getattr__ = lazy_exports(__name__, __file__)
