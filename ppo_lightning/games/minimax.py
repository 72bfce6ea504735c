"""Minimax search for small board games, as an opponent of known strength."""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ppo_lightning.errors import ConfigError

DELAY = 0.99  # factor per move on the value of a result: prefer early wins and late losses


class Board(NamedTuple):
    """Rules of a game of stones in a row.

    Attributes:
        rows: Number of rows, from top to bottom.
        columns: Number of columns.
        length: Number of stones in a row that wins.
        falls: Whether a move names a column, in which the stone falls to the lowest free cell.

    Example:
        >>> Board(3, 3, 3, falls=False).wins(0b0111)
        True
    """

    rows: int
    columns: int
    length: int
    falls: bool

    def bit(self, row: int, column: int) -> int:
        """Return the bit of a cell. An empty column beside the board keeps rows from continuing in others."""
        return 1 << (row * (self.columns + 1) + column)

    def moves(self, occupied: int) -> dict[int, int]:
        """Return the bit of the cell of each legal action.

        Args:
            occupied: Bits of the cells with a stone.
        """
        moves = {}
        for row, column in itertools.product(range(self.rows), range(self.columns)):
            if not occupied & self.bit(row, column):  # further down, a falling stone finds a lower cell
                moves[column if self.falls else row * self.columns + column] = self.bit(row, column)
        return moves

    def wins(self, stones: int) -> bool:
        """Return whether stones, as bits, fill a row of the winning length."""
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

    Args:
        board: Rules.
        own: Stones of the player to move, as bits.
        other: Stones of the opponent, as bits.
        depth: Number of moves to look ahead. A position without result at this depth has value 0.
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


def minimax_player(env_id: str, depth: int) -> Callable[[np.ndarray, np.random.Generator], np.ndarray]:
    """Return a player who looks ahead and moves at random among the best moves.

    Args:
        env_id: ``TicTacToe-v1`` or ``ConnectFour-v1`` of EnvPool.
        depth: Number of moves to look ahead: 1 sees wins, 2 also the opponent's wins. 9 plays TicTacToe
            perfectly.

    Raises:
        ConfigError: The game is another one, or the depth is not positive.

    Example:
        >>> row = np.array([[0, 1, 1, 1, 1, 1, 1, 1, 1, *[0, 1], *[0, 0] * 8]], np.float32)
        >>> minimax_player("TicTacToe-v1", 9)(row, np.random.default_rng(1))  # only the center draws
        array([4])
    """
    if env_id not in BOARDS:
        raise ConfigError(f"minimax plays {' and '.join(BOARDS)}, not {env_id!r}: choose another opponent.")
    if depth < 1:
        raise ConfigError(f"The depth of minimax is {depth}: it must be at least 1.")
    board = BOARDS[env_id]

    def play(observation: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        cells = list(itertools.product(range(board.rows), range(board.columns)))
        bits = np.array([board.bit(*cell) for cell in cells], dtype=object)
        stones = observation[:, -2 * len(cells) :].reshape(len(observation), len(cells), 2) > 0
        moves = []
        for own, other in stones.transpose(0, 2, 1).astype(object) @ bits:
            # A full board has no move; its next step resets it.
            options = values(board, own, other, depth) or {0: 0.0}
            best = max(options.values())
            moves.append(generator.choice([action for action, value in options.items() if value == best]))
        return np.array(moves)

    return play
