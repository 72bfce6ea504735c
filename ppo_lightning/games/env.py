"""Base class of the environments of games with several players."""

import numpy as np
from gymnasium import spaces
from torch import Tensor

from ppo_lightning.envs.batched import BatchedEnv
from ppo_lightning.games.collector import GameCollector


class GameEnv(BatchedEnv):
    """N rows of games of P players.

    If all players act at once, each player is a row: ``row = game * num_players + player``. In a turn-based
    game, each row is a game, seen by the player to move.

    The arguments are those of :class:`BatchedEnv`. A subclass sets ``num_players`` before.
    """

    collector_class = GameCollector
    untransformable = "games of several players: remove them."
    turn_based = False  # see `checks.of_turns`
    num_players: int
    mover: np.ndarray  # the player who acts next in each row, [N]

    def __init__(self, observation_space: spaces.Space, action_space: spaces.Space, seeds: list[int]) -> None:
        super().__init__(observation_space, action_space, seeds)
        self.mover = np.arange(self.num_envs) % self.num_players

    @property
    def rows_per_game(self) -> int:
        """Adjacent rows that are the players of one game, 1 if a row is that of the player to move."""
        return 1 if self.turn_based else self.num_players

    def row_rewards(self, reward: np.ndarray, mover: np.ndarray) -> np.ndarray:
        """Return the rewards whose sum is the return of a row, of those of the players who acted, [T, N]."""
        return reward

    def by_player(self, episodes: Tensor) -> dict[str, Tensor]:
        """Return the episodes (return, length and row) [E, 3] of each player by the suffix of the metrics."""
        player = episodes[:, 2] % self.num_players
        return {f"-player{i:.0f}": episodes[player == i] for i in player.unique().tolist()}
