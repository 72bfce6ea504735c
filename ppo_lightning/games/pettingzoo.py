"""PettingZoo games in which all players act at once."""

import os
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
from gymnasium import spaces

from ppo_lightning.envs.batched import Step, metadata_of, name_of, require_distinct
from ppo_lightning.envs.contract import check_parts, check_step, reraise
from ppo_lightning.errors import ConfigError, import_extra
from ppo_lightning.games.env import GameEnv
from ppo_lightning.spaces.entries import PRIVILEGED
from ppo_lightning.spaces.specs import MASK
from ppo_lightning.utils.seeding import extend_seeds

STATE = f"{PRIVILEGED}state"  # entry of the game's state


class ParallelGamesEnv(GameEnv):
    """Copies of a PettingZoo game of P players who act at once, with one row per player.

    A player who dies before the game ends is flagged at this step. Until the game ends, the row of the dead
    player repeats the last observation, its reward is 0, its action is ignored, and its steps are
    not ``valid``. At the step that ends the game, this row returns the first observation of the next game.

    Args:
        make: Makes a new ``ParallelEnv`` at each call.
        seeds: One seed per row. A game uses that of its first row. Rows are added if the last game is
            incomplete.
        state: Add ``env.state()`` to the observations as the entry ``privileged_state``, which only the
            critic reads.

    Example:
        >>> from ppo_lightning.games.pettingzoo import import_pettingzoo
        >>> make = import_pettingzoo("mpe2.simple_spread_v3").parallel_env
        >>> env = ParallelGamesEnv(make, list(range(6)), state=True)
        >>> env.reset_arrays().shape, env.spaces[0].entry_sizes
        ((6, 72), {'observation': 18, 'privileged_state': 54})
    """

    def __init__(self, make: Callable[[], Any], seeds: list[int], /, *, state: bool = False) -> None:
        first = make()
        self._name = name_of(first)
        if not metadata_of(first).get("is_parallelizable", True):
            raise ConfigError(f"{self._name} is a turn-based game: let env_id make its AECEnv.")
        self._players = players_of(first)
        self.num_players = len(self._players)
        seeds = whole_games(seeds, self.num_players)
        num_games = len(seeds) // self.num_players
        space: Any
        space, actions = common_spaces(first, self._players, self._name)
        self._has_state = state
        self._in_dict = isinstance(space, spaces.Dict)
        if state:
            parts = space.spaces if self._in_dict else {"observation": space}
            try:
                space = spaces.Dict({**parts, STATE: first.state_space})
            except (NotImplementedError, AttributeError, TypeError) as error:
                raise ConfigError(f"{self._name} has no state_space: set state to false.") from error
        self.envs = [first, *(make() for _ in range(num_games - 1))]
        require_distinct(self.envs, self._name)
        super().__init__(space, actions, seeds)
        self._fresh = np.zeros_like(self._observation)  # first observations of games that were just reset
        # Rows whose player ended the game, and gets the first observation of the next one by a reset.
        self._waiting = np.zeros(self.num_envs, bool)
        self._alive = np.zeros(self.num_envs, bool)
        self.valid = self._alive.copy()
        self._checked = False  # whether the first step was validated

    def reset_arrays(self, mask: np.ndarray | None = None) -> np.ndarray:
        """Reset all games, or those that are over. Who died in a running one keeps the observation."""
        seeds = self._next_seeds.take()
        for g in range(len(self.envs)):
            rows = self._rows(g)
            waiting = self._waiting[rows]  # a view
            if mask is None:
                waiting[:] = True
            chosen = waiting.copy() if mask is None else mask[rows] & waiting
            if mask is None or (chosen.any() and not self._alive[rows].any()):
                self._reset_game(g, seeds[rows.start])
            self._observation[rows][chosen] = self._fresh[rows][chosen]
            waiting[chosen] = False
        return self._observation

    def _rows(self, g: int) -> slice:
        return slice(g * self.num_players, (g + 1) * self.num_players)

    def _reset_game(self, g: int, seed: int | None = None) -> None:
        """Start a game, and write the first observations to ``_fresh``."""
        env = self.envs[g]
        try:
            observations, infos = check_parts(env.reset(seed=seed), "reset", 2)
            state = env.state() if self._has_state else None
            for row, player in enumerate(self._players, start=g * self.num_players):
                self._alive[row] = player in observations and player in env.agents
                if self._alive[row]:
                    observation = self._with_state(observations[player], state)
                    self.format.write(self._fresh, row, observation, check=True)
                    if self.format.mask is None and MASK in infos.get(player, {}):
                        raise ConfigError(f"the {MASK} of its info must be an entry of the observations.")
        except (Exception, SystemExit) as error:
            reraise(error, f"{self._name}, game {g}", "reset")

    def _with_state(self, observation: Any, state: Any) -> Any:
        """Add the state of the game, if it is used."""
        if state is None:
            return observation
        parts = observation if self._in_dict else {"observation": observation}
        return {**parts, STATE: state}

    def _step_arrays(self, action: np.ndarray) -> Step:
        chosen = self.format.actions(action)
        self.valid = self._alive.copy()
        for values in self._results:
            values[:] = 0
        for g in range(len(self.envs)):
            try:
                self._step_game(g, chosen)
            except (Exception, SystemExit) as error:
                reraise(error, f"{self._name}, game {g}", "step")
            rows = self._rows(g)
            if not self._alive[rows].any():
                dead = ~self.valid[rows]
                self._waiting[rows] = ~dead
                if dead.any():
                    self._reset_game(g)
                    self._observation[rows][dead] = self._fresh[rows][dead]
        self._checked = True
        return Step(self._observation, *self._results)

    def _step_game(self, g: int, actions: Any) -> None:
        """Step one game with the actions [N] of all rows, and write its results to the rows."""
        env = self.envs[g]
        players = list(enumerate(self._players, start=g * self.num_players))
        chosen = {player: actions[row] for row, player in players if self._alive[row]}
        observations, rewards, terminated, truncated, _ = check_parts(env.step(chosen), "step", 5)
        state = env.state() if self._has_state else None
        for row, player in players:
            if self._alive[row]:
                if not all(player in part for part in (rewards, terminated, truncated)):
                    raise ConfigError(f"the player {player!r} left the game without a termination.")
                step = rewards[player], terminated[player], truncated[player]
                check_step((None, *step, {}))
                for values, value in zip(self._results, (*step, step[1] or step[2]), strict=True):
                    values[row] = value
            over = bool(terminated.get(player) or truncated.get(player))  # a dead player may be listed
            was_alive, self._alive[row] = self._alive[row], player in env.agents and not over
            if player in observations and (was_alive or self._alive[row]):
                observation = self._with_state(observations[player], state)
                over = not self._alive[row]
                self.format.write(self._observation, row, observation, over, check=not self._checked)


def players_of(env: Any) -> list[Any]:
    """Return the players of a game. Without ``possible_agents``, they are those of a reset."""
    players = getattr(env, "possible_agents", None)
    if players is None:
        env.reset(seed=0)
        players = env.agents
    return list(players)


def common_spaces(env: Any, players: Sequence[Any], name: str) -> tuple[spaces.Space, spaces.Space]:
    """Return the observation and action space of all players, which must not differ."""
    first, *others = players
    for kind, space_of in (("observation", env.observation_space), ("action", env.action_space)):
        for other in others:
            if space_of(first) != space_of(other):
                raise ConfigError(
                    f"{name} has players with different spaces, which a wrapper can pad: the {kind} space of"
                    f" {first!r} is {space_of(first)} and that of {other!r} is {space_of(other)}."
                )
    return env.observation_space(first), env.action_space(first)


def import_pettingzoo(module: str = "pettingzoo") -> ModuleType:
    """Import a module of PettingZoo, or of another package of the extra ``selfplay``."""
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")  # pygame greets at import
    return import_extra(module, extra="selfplay")


def whole_games(seeds: list[int], num_players: int) -> list[int]:
    """Return the seeds of whole games, one per row. Rows are added to the last one."""
    return extend_seeds(seeds, len(seeds) + -len(seeds) % num_players)
