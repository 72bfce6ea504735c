"""Past selves of the agent as opponents in training games, and random openings."""

import copy
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ppo_lightning.models import ActorCritic
from ppo_lightning.models.agent import ArrayPolicy
from ppo_lightning.utils.seeding import derive_seed


class Snapshot(NamedTuple):
    """Frozen weights of the agent.

    Attributes:
        step: Environment steps of all ranks at the snapshot.
        weights: State of the agent, on the CPU.
    """

    step: int
    weights: dict[str, Tensor]


class Opponents:
    """Snapshots of the agent that play one side of a share of the games, and random openings of all games.

    The games against snapshots are evenly spread over all ranks. A game keeps its snapshot and its sides
    until it ends. In half of the draws the opponent is the latest snapshot, otherwise any snapshot of the
    pool with equal probability. Every rank draws the opponents, the sides, the openings and the noise of all
    games and uses its own, so that N ranks play as one rank with all games.

    Args:
        agent: The agent, whose structure the snapshots share.
        pool: Snapshots, oldest first. The caller appends to this list during the run.
        share: Share of the games against snapshots.
        opening_moves: Largest number of random legal moves at the start of a game. The number is drawn from 0
            to this one. Needs discrete actions.
        num_envs: Rows of the environments of this rank.
        num_players: Number of players of a game.
        turn_based: Whether a row is a game, instead of a player.
        seed: The run's seed.
        first_env: Global index of the first row.
        total_envs: Rows of all ranks.
    """

    def __init__(
        self,
        agent: ActorCritic,
        pool: list[Snapshot],
        share: float,
        opening_moves: int,
        num_envs: int,
        num_players: int,
        turn_based: bool,
        seed: int = 0,
        first_env: int = 0,
        total_envs: int | None = None,
    ) -> None:
        total_envs = total_envs or num_envs
        self._template = agent
        self._pool = pool
        self._opening_moves = opening_moves
        self._turn_based = turn_based
        self._rows_per_game = 1 if turn_based else num_players
        self._num_players = num_players
        self._total_rows = total_envs
        self._own_rows = slice(first_env, first_env + num_envs)
        self._total_games = total_envs // self._rows_per_game
        first_game = first_env // self._rows_per_game
        self._own_games = slice(first_game, first_game + num_envs // self._rows_per_game)
        games = np.arange(self._total_games + 1) * share + 1e-9
        self._plays_past = (np.diff(np.floor(games)) > 0)[self._own_games]
        num_games = len(self._plays_past)
        self._generator = torch.Generator().manual_seed(derive_seed(seed, "opponents"))
        self._opponent = np.full(num_games, -1)  # environment steps of the snapshot; -1: none
        self._side = np.zeros(num_games, np.int64)  # player whose actions the agent chooses
        self._random_moves = np.zeros(num_games, np.int64)  # left in the opening
        self._next_opponent = -1
        self._next_side = np.zeros(num_games, np.int64)
        self._next_opening: np.ndarray | None = None
        self._over = np.zeros((num_games, self._rows_per_game), bool)
        self._returns = np.zeros((num_games, num_players))
        self._agents: dict[int, ActorCritic] = {}
        self._policies: dict[int, ArrayPolicy] = {}
        self._noise: np.ndarray | None = None  # [T, N, ...]
        self._step = 0
        self.results: Counter[tuple[int, str]] = Counter()  # (step of the snapshot, win, draw or loss): games

    def draw(self, num_steps: int) -> None:
        """Draw the opponent of the games that start in the next rollout.

        Args:
            num_steps: Steps of the rollout.
        """
        latest, choice = torch.rand(2, generator=self._generator).tolist()
        sides = torch.randint(self._num_players, (self._total_games,), generator=self._generator)
        openings = torch.randint(self._opening_moves + 1, (self._total_games,), generator=self._generator)
        noise = self._template.noise((num_steps, self._total_rows), self._generator)
        starts = self._next_opening is None
        gets_pool = self._next_opponent < 0 and bool(self._pool)
        if self._pool:
            self._next_opponent = self._pool[-1 if latest < 0.5 else int(choice * len(self._pool))].step
        self._next_side = sides[self._own_games].numpy()
        self._next_opening = openings[self._own_games].numpy()
        self._noise = noise[:, self._own_rows].numpy()
        self._step = 0
        if starts:
            self._random_moves = self._next_opening.copy()
        if gets_pool:
            self._assign(self._plays_past)
        self._policies = {step: self._agent(step).array_policy() for step in self._in_use()}

    def rows(self, player: np.ndarray) -> np.ndarray:
        """Return the rows in which a snapshot acts, or the opening is random, [N] bool.

        Args:
            player: Player who acts in each row, [N].
        """
        against = np.repeat(self._opponent >= 0, self._rows_per_game)
        theirs = against & (player != np.repeat(self._side, self._rows_per_game))
        return theirs | self._in_opening()

    def replace(self, action: np.ndarray, observation: np.ndarray, foreign: np.ndarray) -> np.ndarray:
        """Return the actions with those of the opponents in their rows.

        Args:
            action: Actions of the agent, [N, ...].
            observation: Normalized observations, [N, ...].
            foreign: Rows from :meth:`rows`, [N] bool.
        """
        step, self._step = self._step, self._step + 1
        if not foreign.any():
            return action
        assert self._noise is not None
        action = action.copy()
        noise = self._noise[step]
        in_opening = self._in_opening()
        action[in_opening] = self._random_action(observation[in_opening], noise[in_opening])
        opponent = np.repeat(self._opponent, self._rows_per_game)
        foreign = foreign & ~in_opening
        for name in np.unique(opponent[foreign]):
            rows = np.flatnonzero(foreign & (opponent == name))
            action[rows] = self._policies[int(name)](observation[rows], noise[rows], None)[0]
        return action

    def observe(
        self, reward: np.ndarray, done: np.ndarray, player: np.ndarray, valid: np.ndarray | None
    ) -> None:
        """Count rewards and finished games.

        Args:
            reward: Rewards of a step, [N].
            done: Whether the episode of each row ended, [N] bool.
            player: Player who acted in each row, [N].
            valid: Rows in which someone acted, [N] bool. None: all.
        """
        acted = np.ones(len(done), bool) if valid is None else valid
        self._random_moves -= (self._random_moves > 0) & acted.reshape(self._over.shape).any(axis=1)
        games = np.repeat(np.arange(len(self._over)), self._rows_per_game)
        self._returns[games, player] += reward
        if self._turn_based:
            self._returns[games, 1 - player] -= reward
        if not done.any():
            return
        self._over |= done.reshape(self._over.shape)
        over = self._over.all(axis=1)
        for game in np.flatnonzero(over & (self._opponent >= 0)):
            own = self._returns[game, self._side[game]]
            others = np.delete(self._returns[game], self._side[game]).max()
            outcome = "win" if own > others else "draw" if own == others else "loss"
            self.results[int(self._opponent[game]), outcome] += 1
        self._over[over] = False
        self._returns[over] = 0
        self._assign(over & self._plays_past)
        if self._next_opening is not None:
            self._random_moves[over] = self._next_opening[over]

    def take_results(self) -> Counter[tuple[int, str]]:
        """Return the results since the last call, from the agent's view."""
        results, self.results = self.results, Counter()
        return results

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the draws."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of the draws. Games start afresh."""
        self._generator.set_state(state["generator"].cpu())

    def _assign(self, games: np.ndarray) -> None:
        """Give games [G] bool the opponent that was drawn."""
        if self._next_opponent < 0:
            return
        self._opponent[games] = self._next_opponent
        self._side[games] = self._next_side[games]

    def _in_opening(self) -> np.ndarray:
        return np.repeat(self._random_moves > 0, self._rows_per_game)

    def _random_action(self, observation: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """Return uniformly random legal actions: the argmax of Gumbel noise."""
        mask = self._template.mask
        return (noise if mask is None else np.where(observation[:, mask] > 0, noise, -np.inf)).argmax(-1)

    def _in_use(self) -> set[int]:
        return {step for step in (self._next_opponent, *self._opponent.tolist()) if step >= 0}

    def _agent(self, step: int) -> ActorCritic:
        """Return the agent with the weights of a snapshot, and forget those that no game uses."""
        used = self._in_use()
        self._agents = {name: agent for name, agent in self._agents.items() if name in used}
        if step not in self._agents:
            weights = next(snapshot.weights for snapshot in self._pool if snapshot.step == step)
            self._agents[step] = frozen_copy(self._template, weights)
        return self._agents[step]


def frozen_copy(agent: ActorCritic, weights: dict[str, Tensor]) -> ActorCritic:
    """Return a copy of an agent with the weights of a snapshot, without gradients."""
    frozen = copy.deepcopy(agent).requires_grad_(False).eval()
    frozen.load_state_dict(weights)
    return frozen
