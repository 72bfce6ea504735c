"""PettingZoo games of two players, who act one after the other."""

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces

from ppo_lightning.envs.answers import reraise
from ppo_lightning.envs.batched import BatchedEnv
from ppo_lightning.errors import ConfigError
from ppo_lightning.spaces.specs import MASK


class TurnBasedGamesEnv(BatchedEnv):
    """N copies of a two-player zero-sum game of PettingZoo, an ``AECEnv`` with action masks.

    Each row is a game, seen by the player to move. The observation has the entries ``action_mask``, the legal
    moves, and ``observation``, flattened. The reward is that of the player who moved. The reward of the other
    player at this step is its negative value.

    Args:
        make: Makes a new ``AECEnv`` at each call.
        seeds: One seed per game.

    Raises:
        ConfigError: The game does not have two players or has no action mask, its players act at once, or
            they have different spaces. While playing: the rewards do not sum to 0, or one player ends before
            the other.

    Example:
        >>> from ppo_lightning.envs.pettingzoo import import_pettingzoo
        >>> env = TurnBasedGamesEnv(import_pettingzoo("pettingzoo.classic.connect_four_v3").env, [1, 2])
        >>> env.reset_arrays().shape, env.mover.tolist()
        ((2, 91), [0, 0])
    """

    num_players = 2

    def __init__(self, make: Callable[[], Any], seeds: list[int], /) -> None:
        first = make()
        self._name = first.metadata.get("name", type(first.unwrapped).__name__)
        if not hasattr(first, "agent_selection") and not hasattr(first, "agent_iter"):
            raise ConfigError(
                f"{self._name} is no AECEnv: games of players who act at once need ParallelGamesEnv."
            )
        players = list(first.possible_agents)
        if first.metadata.get("is_parallelizable", False):
            raise ConfigError(
                f"{self._name} is an AECEnv whose players act at once: let env_id make a ParallelEnv, with"
                " pettingzoo.utils.aec_to_parallel for example."
            )
        if len(players) != 2:
            raise ConfigError(f"{self._name} is a game of {len(players)} players: turn-based games need two.")
        actions = first.action_space(players[0])
        views = first.observation_space(players[0])
        if (actions, views) != (first.action_space(players[1]), first.observation_space(players[1])):
            raise ConfigError(f"{self._name} has players with different spaces, and they share parameters.")
        has_mask = isinstance(views, spaces.Dict) and set(views) == {MASK, "observation"}
        if not has_mask or not isinstance(actions, spaces.Discrete):
            raise ConfigError(
                f"{self._name} needs discrete actions and observations with the entries {MASK!r} and"
                f" 'observation': its spaces are {actions} and {views}."
            )
        self._players = players
        self.envs = [first, *(make() for _ in seeds[1:])]
        if len({id(env.unwrapped) for env in self.envs}) < len(seeds):
            raise ConfigError(
                f"{self._name}: env_id makes the same game at each call: it must make a new one."
            )
        board: Any = spaces.flatten_space(views["observation"])
        board = spaces.Box(board.low, board.high, dtype=np.float32)
        mask = spaces.MultiBinary(int(actions.n))
        super().__init__(spaces.Dict({MASK: mask, "observation": board}), actions, seeds)
        self._view = views["observation"]
        self._observation = self.empty_rows()
        self._reward = np.zeros(self.num_envs)
        self._terminated, self._truncated = np.zeros((2, self.num_envs), bool)
        self.mover = np.zeros(self.num_envs, np.int64)
        self.render_fps = min(first.metadata.get("render_fps", 30), 60)
        self.reseed(seeds)

    def reseed(self, seeds: list[int]) -> None:
        """Set the seeds of the next reset, see :meth:`BatchedEnv.reseed`."""
        self._seeds_to_use: list[int] | None = list(seeds)

    def reset_arrays(self, mask: np.ndarray | None = None) -> np.ndarray:
        """Reset games, see :meth:`BatchedEnv.reset_arrays`."""
        seeds, self._seeds_to_use = self._seeds_to_use, None
        for g in range(self.num_envs) if mask is None else np.flatnonzero(mask).tolist():
            try:
                self.envs[g].reset(seed=None if seeds is None else seeds[g])
                self._observe(g)
            except (Exception, SystemExit) as error:
                reraise(error, f"{self._name}, game {g}", "reset")
        return self._observation

    def _step_arrays(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Step all games, see :meth:`BatchedEnv._step_arrays`."""
        assert self.mover is not None
        self.mover = self.mover.copy()  # the caller may hold the players of the last step
        for g, move in enumerate(action.tolist()):
            try:
                self._step_game(g, move)
            except (Exception, SystemExit) as error:
                reraise(error, f"{self._name}, game {g}", "step")
        return self._observation, self._reward, self._terminated, self._truncated

    def _step_game(self, g: int, move: int) -> None:
        assert self.mover is not None
        env = self.envs[g]
        env.step(move)
        # PettingZoo gives the rewards of both players at the step of the one who moved. Those that `last()`
        # returns would come too late: the loser has no step left.
        rewards = [env.rewards.get(player, 0) for player in self._players]
        if sum(rewards) != 0:
            raise ConfigError(
                f"the rewards {rewards} of the two players do not sum to 0, and turn-based games must be"
                " zero-sum."
            )
        self._reward[g] = rewards[self.mover[g]]
        terminated = [env.terminations.get(player, True) for player in self._players]
        truncated = [env.truncations.get(player, True) for player in self._players]
        over = [one or other for one, other in zip(terminated, truncated, strict=True)]
        if any(over) and not all(over):
            raise ConfigError(
                f"the player {self._players[over.index(True)]!r} ended in the middle of the game: the players"
                " of a turn-based game must end at the same step."
            )
        self._terminated[g] = any(terminated)
        self._truncated[g] = any(truncated)
        self._observe(g, over=any(over))

    def _observe(self, g: int, over: bool = False) -> None:
        """Write the observation of the player to move, and set ``mover``."""
        assert self.mover is not None
        env = self.envs[g]
        player = env.agent_selection
        self.mover[g] = self._players.index(player)
        view = env.observe(player)
        mask = np.asarray(view[MASK])
        if not mask.any():
            if not over:
                raise ConfigError(f"its {MASK} allows no action before the game has ended.")
            mask = np.ones_like(mask)  # a truncated game needs a value of its final observation
        self._observation[g] = np.concatenate([mask, spaces.flatten(self._view, view["observation"])])

    def render(self) -> np.ndarray | None:
        """Return a picture, see :meth:`BatchedEnv.render`. This needs ``render_mode="rgb_array"``."""
        frame: Any = self.envs[0].render()
        return None if frame is None else np.asarray(frame)
