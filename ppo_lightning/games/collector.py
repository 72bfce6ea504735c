"""The rollout collector for games of several players."""

from typing import Any

import numpy as np
import torch
from torchrl.data import TensorSpec, Unbounded

from ppo_lightning.envs.batched import Step
from ppo_lightning.rollouts.weighted_collector import WeightedCollector, differ


class GameCollector(WeightedCollector):
    """Collector of rollouts [N, T] from a :class:`~ppo_lightning.games.env.GameEnv`.

    A rollout has two more keys:

    - ``player`` [N, T, 1] is the player who acts. ``reward`` is that of this player.
    - ``discount`` [N, T] is -1 where the next observation is that of another player, whose value counts
      negatively in a zero-sum game, 1 elsewhere.

    In turn-based games, ``episode_reward`` is the return of player 0.
    """

    env: Any  # a GameEnv, whose class names this one

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        shares_rows = self.env.rows_per_game < self.env.num_players
        assert not (shares_rows and self._memory is not None), "the players would share a memory"
        self._player = self._store["player"][..., 0]  # views [T, N]
        self._discount = self._store["discount"]

    def rollout_keys(self) -> dict[str, TensorSpec]:
        """Return the specs of a step that the rollout stores, by key."""
        own = {"player": Unbounded((1,), dtype=torch.int64), "discount": Unbounded(())}
        return super().rollout_keys() | own

    def step(self, t: int, action: np.ndarray) -> Step:
        """Step the games, and store who acted and who acts next."""
        self._player[t] = self.env.mover
        results = super().step(t, action)
        self._discount[t] = np.where(self._player[t] == self.env.mover, 1, -1)
        return results

    def begins(self, fresh: np.ndarray, final: np.ndarray) -> np.ndarray:
        """Return where a reset begins a game: a player who died in a running one keeps the observation."""
        return differ(fresh, final)

    def row_rewards(self) -> np.ndarray:
        """Return the rewards whose sum is the return of a row, [T, N]."""
        return self.env.row_rewards(super().row_rewards(), self._player)
