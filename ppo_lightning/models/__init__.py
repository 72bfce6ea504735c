"""Agents: a body for the features, a head for the action distribution and a critic."""

from typing import TYPE_CHECKING

from ppo_lightning.utils.lazy import lazy_exports

if TYPE_CHECKING:
    from ppo_lightning.models.actor import Actor
    from ppo_lightning.models.agent import ActorCritic, Evaluation
    from ppo_lightning.models.bodies import MLP
    from ppo_lightning.models.cnn import CNNAgent
    from ppo_lightning.models.mlp import MLPAgent

__all__ = ["MLP", "Actor", "ActorCritic", "CNNAgent", "Evaluation", "MLPAgent"]
__getattr__ = lazy_exports(__name__, __file__)
