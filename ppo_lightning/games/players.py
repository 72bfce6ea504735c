"""Players of games: agents, random play and minimax search."""

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ppo_lightning.checkpoints.agent import check_same_spaces, trained_agent
from ppo_lightning.checkpoints.file import read_checkpoint, user_path
from ppo_lightning.envs.conformance import random_policy
from ppo_lightning.errors import ConfigError
from ppo_lightning.games.env import GameEnv
from ppo_lightning.models import Actor
from ppo_lightning.models.actor import evaluating
from ppo_lightning.utils.bundled import MODEL, ZOO

# Function of raw observations [B, ...] and a random generator to actions [B, ...].
Player = Callable[[np.ndarray, np.random.Generator], np.ndarray]
DELAY = 0.99  # factor per move on the value of a result: prefer early wins and late losses


def make_player(name: str, env_id: str, env: GameEnv) -> Player:
    """Make a player by name.

    Args:
        name: ``random``, ``minimax:2`` (the depth), or an agent, which samples its actions: a checkpoint,
            ``.ckpt``, a bundled agent such as ``selfplay/tictactoe``, or a folder of ``save_pretrained``.
        env_id: Id of the game.
        env: An environment of the game.

    Raises:
        ConfigError: The name is none of these, or the player does not know the game.

    Example:
        >>> from ppo_lightning import make_env
        >>> env = make_env("TicTacToe-v1", 2, "envpool")
        >>> make_player("minimax:9", "TicTacToe-v1", env)(env.reset_arrays(), np.random.default_rng(1)).shape
        (2,)
    """
    kind, _, depth = name.partition(":")
    if name == "random":
        return random_policy(env)
    if kind == "minimax" and depth.isdecimal() and int(depth) > 0:
        return minimax_player(env_id, int(depth))
    agent = trained_agent(read_checkpoint(agent_file(name)))
    check_same_spaces(agent, env)
    return agent_player(agent)


def agent_file(name: str) -> Path:
    """Return the checkpoint of a player who is an agent. The name is that of ``make_player``."""
    if name.endswith(".ckpt"):
        return Path(name)
    for folder in (user_path(name), ZOO / name):
        if (folder / MODEL).is_file():
            return folder / MODEL
    names = "random, minimax:2, a .ckpt file, a bundled agent or a folder with one"
    raise ConfigError(f"The player {name!r} is unknown: give {names}.")


def agent_player(agent: Actor, deterministic: bool = False) -> Player:
    """Return a player who acts with an agent, whose weights may change between games."""
    if agent.memory is not None:
        raise ConfigError("An agent with a memory cannot play games: set model.agent.memory to null.")

    @torch.no_grad()
    def play(observation: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        noise = None
        if not deterministic:
            seeded = torch.Generator().manual_seed(int(generator.integers(2**31)))
            noise = agent.noise((len(observation),), seeded).to(agent.device)
        inputs = agent.normalize(torch.tensor(observation, device=agent.device))
        with evaluating(agent):
            return agent.head.for_environment(agent.act(inputs, noise)[0]).numpy(force=True)

    return play


def minimax_player(env_id: str, depth: int) -> Player:
    """Return a player who looks ahead by a number of moves and chooses at random among the best moves.

    The depth 1 sees wins, 2 also the opponent's wins. 9 plays TicTacToe perfectly.
    """
    if env_id not in BOARDS:
        raise ConfigError(f"minimax plays {' and '.join(BOARDS)}, not {env_id!r}: choose another opponent.")
    board = BOARDS[env_id]
    bits = np.array([board.bit(*cell) for cell in board.cells], dtype=object)

    def play(observation: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        stones = observation[:, -2 * len(bits) :].reshape(-1, len(bits), 2) > 0
        moves = []
        for own, other in stones.transpose(0, 2, 1).astype(object) @ bits:
            # A full board has no move; its next step resets it.
            options = values(board, own, other, depth) or {0: 0.0}
            best = max(options.values())
            moves.append(generator.choice([action for action, value in options.items() if value == best]))
        return np.array(moves)

    return play


class Board(NamedTuple):
    """Rules of a game of stones in a row. Sets of stones are the bits of an integer.

    Example:
        >>> Board(3, 3, 3, falls=False).wins(0b0111)
        True
    """

    rows: int  # from top to bottom
    columns: int
    length: int  # number of stones in a row that wins
    falls: bool  # whether a move names a column, in which the stone falls to the lowest free cell

    @property
    def cells(self) -> list[tuple[int, int]]:
        """Row and column of each cell."""
        return list(itertools.product(range(self.rows), range(self.columns)))

    def bit(self, row: int, column: int) -> int:
        """Return the bit of a cell. An empty column beside the board keeps rows from continuing in others."""
        return 1 << (row * (self.columns + 1) + column)

    def moves(self, occupied: int) -> dict[int, int]:
        """Return the bit of the cell of each legal action."""
        moves = {}
        for row, column in self.cells:
            if not occupied & self.bit(row, column):  # further down, a falling stone finds a lower cell
                moves[column if self.falls else row * self.columns + column] = self.bit(row, column)
        return moves

    def wins(self, stones: int) -> bool:
        """Return whether stones fill a row of the winning length."""
        for shift in (1, self.columns, self.columns + 1, self.columns + 2):
            line = stones
            for i in range(1, self.length):
                line &= stones >> i * shift
            if line:
                return True
        return False


BOARDS = {"TicTacToe-v1": Board(3, 3, 3, falls=False), "ConnectFour-v1": Board(6, 7, 4, falls=True)}


@functools.lru_cache(maxsize=100_000)  # about 70 MB
def values(board: Board, own: int, other: int, depth: int) -> dict[int, float]:
    """Return the value of each legal action for the player to move, from -1 (lost) to 1 (won).

    A position without result after ``depth`` moves has the value 0.
    """
    result = {}
    for action, cell in board.moves(own | other).items():
        stones = own | cell
        if board.wins(stones):
            result[action] = 1.0
        elif depth > 1:
            replies = values(board, other, stones, depth - 1)
            result[action] = -DELAY * max(replies.values(), default=0.0)
        else:
            result[action] = 0.0
    return result
