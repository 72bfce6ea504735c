"""Games of two players who act one after the other, of EnvPool and PettingZoo."""

from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
from gymnasium import spaces
from torch import Tensor

from ppo_lightning.envs.batched import Step, close_all, name_of, require_distinct
from ppo_lightning.envs.contract import require_action, reraise
from ppo_lightning.envs.envpool import envpool_maker
from ppo_lightning.errors import ConfigError
from ppo_lightning.games.env import GameEnv
from ppo_lightning.games.pettingzoo import common_spaces, players_of
from ppo_lightning.spaces.specs import MASK
from ppo_lightning.utils.arguments import Range, check_arguments

CELL = 40  # width of a cell in a picture of a board, pixels
COLORS = np.array([[230, 230, 230], [200, 60, 50], [50, 90, 200]], np.uint8)  # free cells, players 0 and 1


class TurnBasedEnv(GameEnv):
    """N games of two players who act one after the other, with random openings.

    Each row is a game, seen by the player to move. The observation has the entries ``action_mask``, the legal
    moves, and the view of the player, flattened. The reward is that of the player who moved.

    Each game starts with 0 to ``opening_moves`` random legal moves, whose steps do not count. Without them,
    both players settle on a few lines of play. ``view`` is the space of the flat view of a player.
    """

    num_players = 2
    turn_based = True

    def __init__(
        self,
        name: str,
        view: spaces.Space,
        num_actions: int,
        seeds: list[int],
        opening_moves: Annotated[int, Range(0)],
    ) -> None:
        check_arguments(TurnBasedEnv.__init__, locals(), "data.env_kwargs")
        space = spaces.Dict({MASK: spaces.MultiBinary(num_actions), name: view})  # in alphabetical order
        super().__init__(space, spaces.Discrete(num_actions), seeds)
        self.mover = np.zeros(self.num_envs, np.int64)
        if opening_moves:
            self.valid = np.ones(self.num_envs, bool)
        self._opening_left = np.zeros(self.num_envs, np.int64)  # random moves left in the openings
        # Random keys of the actions, of which the highest legal one moves.
        self._opening_keys = np.zeros((self.num_envs, opening_moves, num_actions))
        TurnBasedEnv.reseed(self, seeds)

    def reseed(self, seeds: list[int]) -> None:
        """Set the seeds of the openings and of the next reset."""
        super().reseed(seeds)
        self._generators = [np.random.default_rng(seed) for seed in seeds]

    def row_rewards(self, reward: np.ndarray, mover: np.ndarray) -> np.ndarray:
        """Return the rewards of player 0: those of player 1 are the negative ones."""
        return reward * (1 - 2 * mover)

    def by_player(self, episodes: Tensor) -> dict[str, Tensor]:
        """Return the episodes, whose returns are those of player 0, from the view of each player."""
        return {"-player0": episodes, "-player1": episodes * episodes.new_tensor([-1, 1, 1])}

    def start_openings(self, games: np.ndarray) -> None:
        """Draw the openings of games that start, by their indices."""
        most, num_actions = self._opening_keys.shape[1:]
        for g in games.tolist() if most else ():
            self._opening_left[g] = self._generators[g].integers(most + 1)
            self._opening_keys[g] = self._generators[g].random((most, num_actions))

    def step_arrays(self, action: np.ndarray) -> Step:
        """Step all games, with random moves in their openings."""
        if not self._opening_keys.shape[1]:
            return super().step_arrays(action)
        opening = self._opening_left > 0
        keys = self._opening_keys[np.arange(self.num_envs), self._opening_left - 1]
        legal = self._observation[:, : keys.shape[1]] > 0
        action = np.where(opening, np.where(legal, keys, -1).argmax(1), action)
        self.valid = np.ones(self.num_envs, bool)
        self._opening_left -= opening
        results = super().step_arrays(action)
        self.valid &= ~opening
        return results


class BoardGameEnv(TurnBasedEnv):
    """N copies of an EnvPool board or card game (TicTacToe, ConnectFour, KuhnPoker, Backgammon, ...).

    The view is the entry ``board``. The game chooses the first player at random.

    EnvPool cannot reset some of several games of two players (version 1.2.5 hangs), so that a finished game
    resets at its next step, which is not ``valid``.

    Args:
        env_id: EnvPool's id.
        seeds: One seed per game.
        opening_moves: As for :class:`TurnBasedEnv`.
        num_threads: Number of C++ threads.
        **env_kwargs: Arguments of ``envpool.make``.

    Example:
        >>> env = BoardGameEnv("TicTacToe-v1", [1, 2])
        >>> env.reset_arrays().shape
        (2, 27)
    """

    resets_late = True

    def __init__(
        self,
        env_id: str,
        seeds: list[int],
        /,
        opening_moves: int = 0,
        num_threads: int = 1,
        **env_kwargs: Any,
    ) -> None:
        self._make = envpool_maker(env_id, num_threads, env_kwargs)
        self.envs = self._make(seeds)
        require_two(self.envs.spec.config.max_num_players, env_id)
        self._board = self.envs.observation_space
        size = int(np.prod(self._board.shape))
        is_box = isinstance(self._board, spaces.Box)
        view = spaces.Box(-np.inf, np.inf, (size,), np.float32) if is_box else spaces.MultiBinary(size)
        super().__init__("board", view, int(self.envs.action_space.n), seeds, opening_moves)
        self._ended = np.zeros(self.num_envs, bool)  # games that the next step resets
        self.valid = ~self._ended

    def reseed(self, seeds: list[int]) -> None:
        """Recreate the games: EnvPool accepts seeds only at construction."""
        super().reseed(seeds)
        close_all(self.envs)
        self.envs = self._make(seeds)

    def reset_arrays(self, mask: np.ndarray | None = None) -> np.ndarray:
        """Reset all games, or return the final observations."""
        if mask is None:
            self._ended[:] = False
            self._observation = self._seen_by_mover(*self.envs.reset())
            self.start_openings(np.arange(self.num_envs))
        return self._observation

    def _step_arrays(self, action: np.ndarray) -> Step:
        mover = self.mover
        observation, reward, terminated, truncated, info = self.envs.step(action.astype(np.int32))
        self._observation = self._seen_by_mover(observation, info)
        reward = reward.reshape(self.num_envs, 2)[np.arange(self.num_envs), mover]
        self.valid = ~self._ended
        self.start_openings(np.flatnonzero(self._ended))
        self._ended = terminated | truncated
        return Step(self._observation, reward, terminated, truncated, self._ended)

    def _seen_by_mover(self, observation: np.ndarray, info: dict[str, Any]) -> np.ndarray:
        """Return the rows [N, D] of the players to move, and set ``mover``."""
        self.mover = info["current_player"].astype(np.int64)
        views = observation.reshape(self.num_envs, 2, -1)
        row = views[np.arange(self.num_envs), self.mover]
        return np.concatenate([info["legal_action_mask"], row], axis=1, dtype=np.float32)

    def render(self) -> np.ndarray | None:
        """Return a picture of the stones of the first game, None if the game has no board of stones.

        The first two planes of a board are the stones of the player to move and of the opponent.
        """
        shape = self._board.shape
        if len(shape) != 3:
            return None
        own, other = self._observation[0, -np.prod(shape) :].reshape(shape)[..., :2].transpose(2, 0, 1) > 0
        stones = (own, other) if self.mover[0] == 0 else (other, own)
        picture = COLORS[stones[0] + 2 * stones[1]].repeat(CELL, 0).repeat(CELL, 1)
        picture[::CELL] = picture[:, ::CELL] = 0
        return picture


class TurnBasedGamesEnv(TurnBasedEnv):
    """N copies of a two-player zero-sum game of PettingZoo, an ``AECEnv`` with action masks.

    The view is the entry ``observation``. The reward of the player who did not move is the negative reward.

    Args:
        make: Makes a new ``AECEnv`` at each call.
        seeds: One seed per game.
        opening_moves: As for :class:`TurnBasedEnv`.

    Example:
        >>> from ppo_lightning.games.pettingzoo import import_pettingzoo
        >>> env = TurnBasedGamesEnv(import_pettingzoo("pettingzoo.classic.connect_four_v3").env, [1, 2])
        >>> env.reset_arrays().shape, env.mover.tolist()
        ((2, 91), [0, 0])
    """

    def __init__(self, make: Callable[[], Any], seeds: list[int], /, *, opening_moves: int = 0) -> None:
        first = make()
        self._name = name_of(first)
        self._players = players_of(first)
        require_two(len(self._players), self._name)
        views: Any
        views, actions = common_spaces(first, self._players, self._name)
        has_mask = isinstance(views, spaces.Dict) and set(views) == {MASK, "observation"}
        if not has_mask or not isinstance(actions, spaces.Discrete):
            needed = f"discrete actions and the observations {MASK!r} and 'observation'"
            raise ConfigError(f"{self._name} needs {needed}: its spaces are {actions} and {views}.")
        self.envs = [first, *(make() for _ in seeds[1:])]
        require_distinct(self.envs, self._name)
        self._view = views["observation"]
        flat: Any = spaces.flatten_space(self._view)
        view = spaces.Box(flat.low, flat.high, dtype=np.float32)
        super().__init__("observation", view, int(actions.n), seeds, opening_moves)

    def reset_arrays(self, mask: np.ndarray | None = None) -> np.ndarray:
        """Reset games."""
        seeds = self._next_seeds.take()
        games = np.arange(self.num_envs) if mask is None else np.flatnonzero(mask)
        for g in games.tolist():
            try:
                self.envs[g].reset(seed=seeds[g])
                self._observe(g)
            except (Exception, SystemExit) as error:
                reraise(error, f"{self._name}, game {g}", "reset")
        self.start_openings(games)
        return self._observation

    def _step_arrays(self, action: np.ndarray) -> Step:
        for g, move in enumerate(action.tolist()):
            try:
                self._step_game(g, move)
            except (Exception, SystemExit) as error:
                reraise(error, f"{self._name}, game {g}", "step")
        return Step(self._observation, *self._results)

    def _step_game(self, g: int, move: int) -> None:
        env = self.envs[g]
        env.step(move)
        # PettingZoo gives the rewards of both players at the step of the one who moved. Those that `last()`
        # returns would come too late: the loser has no step left.
        rewards, terminated, truncated = (
            [values.get(player, missing) for player in self._players]
            for values, missing in ((env.rewards, 0), (env.terminations, True), (env.truncations, True))
        )
        is_zero_sum = abs(sum(rewards)) <= 1e-6 * max(map(abs, rewards))  # floats may not sum to 0 exactly
        if not is_zero_sum or len(set(zip(terminated, truncated, strict=True))) > 1:
            flags = f"terminated {terminated}, truncated {truncated}"
            raise ConfigError(f"the rewards {rewards} must sum to 0, and both players end at once: {flags}.")
        over = terminated[0] or truncated[0]
        step = rewards[self.mover[g]], terminated[0], truncated[0], over
        for values, value in zip(self._results, step, strict=True):
            values[g] = value
        self._observe(g, over)

    def _observe(self, g: int, over: bool = False) -> None:
        """Write the observation of the player to move, and set ``mover``."""
        env = self.envs[g]
        self.mover[g] = self._players.index(env.agent_selection)
        view = env.observe(env.agent_selection)
        mask = np.asarray(view[MASK])
        if not mask.any():
            require_action(over)
            mask = np.ones_like(mask)  # a truncated game needs a value of its final observation
        self._observation[g] = np.concatenate([mask, spaces.flatten(self._view, view["observation"])])


def require_two(num_players: int, name: str) -> None:
    """Raise a ConfigError unless a game has two players."""
    if num_players != 2:
        raise ConfigError(f"{name} is a game of {num_players} players: turn-based games need two.")
