"""PPO and the algorithms that override its seams."""

from typing import TYPE_CHECKING

from ppo_lightning.utils.lazy import lazy_exports

if TYPE_CHECKING:
    from ppo_lightning.algorithms.agent_module import AgentModule
    from ppo_lightning.algorithms.ppg import PPG
    from ppo_lightning.algorithms.ppo import PPO
    from ppo_lightning.algorithms.recurrent import RecurrentPPO
    from ppo_lightning.algorithms.rnd import RND
    from ppo_lightning.algorithms.rpo import RPO

__all__ = ["PPG", "PPO", "RND", "RPO", "AgentModule", "RecurrentPPO"]
__getattr__ = lazy_exports(__name__, __file__)
