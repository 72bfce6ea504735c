"""Off-policy algorithms: replay, targets and exploration beside the environments and collectors of PPO."""

from typing import TYPE_CHECKING

from ppo_lightning.utils.lazy import lazy_exports

if TYPE_CHECKING:
    from ppo_lightning.offpolicy.c51 import C51, C51Agent
    from ppo_lightning.offpolicy.ddpg import DDPG, DeterministicAgent
    from ppo_lightning.offpolicy.dqn import DQN, QAgent
    from ppo_lightning.offpolicy.module import OffPolicyModule
    from ppo_lightning.offpolicy.sac import SAC, SACAgent
    from ppo_lightning.offpolicy.sac_discrete import DiscreteSAC, DiscreteSACAgent
    from ppo_lightning.offpolicy.td3 import TD3

__all__ = ["C51", "DDPG", "DQN", "SAC", "TD3", "C51Agent", "DeterministicAgent", "DiscreteSAC"]
__all__ += ["DiscreteSACAgent", "OffPolicyModule", "QAgent", "SACAgent"]
__getattr__ = lazy_exports(__name__, __file__)
