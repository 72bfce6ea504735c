"""EnvPool's board and card games of two players, who act one after the other."""

from typing import Any

import numpy as np
from gymnasium import spaces

from ppo_lightning.envs.batched import BatchedEnv
from ppo_lightning.errors import ConfigError, first_line, import_extra
from ppo_lightning.spaces.specs import MASK


class BoardGameEnv(BatchedEnv):
    """N copies of an EnvPool board or card game (TicTacToe, ConnectFour, KuhnPoker, Backgammon, ...).

    Each row is a game, seen by the player to move. The observation has the entries ``action_mask``, the legal
    moves, and ``board``, flattened. The reward is that of the player who moved. The game chooses the first
    player at random.

    EnvPool cannot reset some of several games of two players (version 1.2.5 hangs), so that a finished game
    resets at its next step, which is not ``valid``.

    Args:
        env_id: EnvPool's id.
        seeds: One seed per game.
        num_threads: Number of C++ threads.
        **env_kwargs: Arguments of ``envpool.make``.

    Raises:
        ConfigError: The game does not have two players, or an argument does not fit.

    Example:
        >>> env = BoardGameEnv("TicTacToe-v1", [1, 2])
        >>> env.reset_arrays().shape
        (2, 27)
    """

    num_players = 2
    resets_late = True

    def __init__(self, env_id: str, seeds: list[int], /, num_threads: int = 1, **env_kwargs: Any) -> None:
        envpool = import_extra("envpool", extra="envpool")
        self._make = lambda seeds: envpool.make(
            env_id,
            env_type="gymnasium",
            num_envs=len(seeds),
            seed=seeds,
            num_threads=num_threads,
            **env_kwargs,
        )
        try:
            self.envs = self._make(list(seeds))
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError(
                f"data.env_kwargs does not fit env_id {env_id!r}: {first_line(error)}."
            ) from error
        num_players = self.envs.spec.config.max_num_players
        if num_players != 2:
            self.envs.close()
            raise ConfigError(
                f"env_id {env_id!r} is a game of {num_players} players: turn-based games need two."
            )
        board = self.envs.observation_space
        size = int(np.prod(board.shape))
        is_box = isinstance(board, spaces.Box)
        flat = spaces.Box(-np.inf, np.inf, (size,), np.float32) if is_box else spaces.MultiBinary(size)
        num_actions = int(self.envs.action_space.n)
        super().__init__(
            spaces.Dict({MASK: spaces.MultiBinary(num_actions), "board": flat}),  # in alphabetical order
            spaces.Discrete(num_actions),
            seeds,
        )
        self.mover = np.zeros(self.num_envs, np.int64)
        self._ended = np.zeros(self.num_envs, bool)  # games that the next step resets
        self.valid = ~self._ended

    def reseed(self, seeds: list[int]) -> None:
        """Recreate the games, see :meth:`BatchedEnv.reseed`."""
        self._close_envs()
        self.envs = self._make(list(seeds))  # EnvPool accepts seeds only at construction

    def reset_arrays(self, mask: np.ndarray | None = None) -> np.ndarray:
        """Reset all games, or return the final observations, see :meth:`BatchedEnv.reset_arrays`."""
        if mask is None:
            self._ended[:] = False
            self._observation = self._seen_by_mover(*self.envs.reset())
        return self._observation

    def _step_arrays(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Step all games, see :meth:`BatchedEnv._step_arrays`."""
        assert self.mover is not None
        mover = self.mover
        observation, reward, terminated, truncated, info = self.envs.step(action.astype(np.int32))
        self._observation = self._seen_by_mover(observation, info)
        reward = reward.reshape(self.num_envs, 2)[np.arange(self.num_envs), mover]
        self.valid = ~self._ended
        self._ended = terminated | truncated
        return self._observation, reward, terminated, truncated

    def _seen_by_mover(self, observation: np.ndarray, info: dict[str, Any]) -> np.ndarray:
        """Return the rows [N, D] of the players to move, and set ``mover``."""
        self.mover = info["current_player"].astype(np.int64)
        views = observation.reshape(self.num_envs, 2, -1)
        row = views[np.arange(self.num_envs), self.mover]
        return np.concatenate([info["legal_action_mask"], row], axis=1, dtype=np.float32)
