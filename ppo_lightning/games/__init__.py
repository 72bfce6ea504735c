"""Self-play and matches between players of games."""

from typing import TYPE_CHECKING

from ppo_lightning.utils.lazy import lazy_exports

if TYPE_CHECKING:
    from ppo_lightning.games.selfplay import SelfPlay

__all__ = ["SelfPlay"]
__getattr__ = lazy_exports(__name__, __file__)
